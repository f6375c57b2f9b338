"""What can happen to a Slurm, and to a job in it. Each strikes a Slurm of its own."""

import time

from tests.chaos.cases import STAGES, Event, Kind, Lab, Moment, Then, moments
from tests.chaos.scene import Scene
from tests.slurm_lab import faults
from tests.slurm_lab.faults import QueuedJob

ANY = moments(Event.SUBMITTING, Event.RUNNING, Event.SAVED, Event.ENDED)
RUNNING = moments(Event.RUNNING, stages=("convert", "compile", "train")) + moments(Event.SAVED)
TRAINING = (Moment(Event.RUNNING, "train"), Moment(Event.SAVED, "train"))
BEFORE_TRAINING = moments(Event.RUNNING, stages=("convert", "compile"))
SAVED = moments(Event.SAVED)  # before that a further attempt would get no further
BEFORE = tuple(Moment(Event.RUNNING, stage) for stage in STAGES[:-1])  # of a job that another one follows


def controller_down(scene: Scene) -> None:
    _outage(scene, "slurmctld", scene.lab.stop)


def controller_killed(scene: Scene) -> None:
    """It forgets what it had not saved: a job just submitted may be unknown, its id given again, or be run again."""
    _outage(scene, "slurmctld", scene.lab.kill)


def controller_frozen(scene: Scene) -> None:
    scene.lab.freeze("slurmctld")
    time.sleep(scene.outage())
    scene.lab.thaw("slurmctld")


def accounting_down(scene: Scene) -> None:
    _outage(scene, "slurmdbd", scene.lab.kill)


def munge_down(scene: Scene) -> None:
    _outage(scene, "munged", scene.lab.kill)


def node_daemon_restarted(scene: Scene) -> None:
    """Its job goes on meanwhile."""
    job = _running(scene)
    if job:
        _outage(scene, f"slurmd.{job.node}", scene.lab.kill)


def node_killed(scene: Scene) -> None:
    job = _running(scene)
    if job is None:
        return
    faults.kill_node(scene.lab, job.node)
    time.sleep(scene.outage())
    faults.revive_node(scene.lab, job.node)


def never_boots(scene: Scene) -> None:
    """No instance for the first wish; later there is one."""
    lab = scene.lab
    faults.wait_for(lambda: scene.flow.ended or bool(faults.asked_to_boot(lab)), "a node is wanted", 120)
    node = faults.asked_to_boot(lab)[0]
    faults.wait_for(lambda: "DOWN" in _node_state(scene, node), f"{node} is given up", 60)
    lab.run("scontrol", "update", f"nodename={node}", "state=power_down_force", check=False)
    for other in lab.cloud:
        lab.run("scontrol", "update", f"nodename={other}", "state=resume", check=False)
    known = len(faults.asked_to_boot(lab))
    up: set[str] = set()

    def boot_what_is_wanted() -> bool:
        for wanted in faults.asked_to_boot(lab)[known:]:
            if wanted not in up:
                up.add(wanted)
                faults.boot(lab, wanted)
        return scene.flow.ended

    scene.until(boot_what_is_wanted, scene.settings.patience, 0.3)


def preempted(scene: Scene) -> None:
    if _running(scene):
        faults.preempt(scene.lab, scene.case.random.uniform(1, 4))


def requeued(scene: Scene) -> None:
    job = _running(scene)
    if job:
        faults.requeue(scene.lab, job.job_id)


def time_limit(scene: Scene) -> None:
    """The job's time is up in a second; Slurm looks at limits once in half a minute."""
    job = _running(scene)
    if job:
        scene.lab.run("scontrol", "update", f"jobid={job.job_id}", "endtime=now+1", check=True)


def cancelled_from_outside(scene: Scene) -> None:
    """A user's decision."""
    job = scene.live_job("RUNNING", "PENDING")
    if job is None:
        return
    faults.scancel(scene.lab, job.job_id)
    if scene.flow.wait(scene.settings.patience) in (None, 0):
        scene.wrong.append(f"job {job.job_id} was cancelled from outside, and the flow went on")
    scene.expect_no_jobs("scancel from outside")


def held(scene: Scene) -> None:
    """The next job is held before it starts, and released after a while."""
    faults.close(scene.lab)
    job = scene.live_job("PENDING")
    if job is None:
        faults.reopen(scene.lab)
        return
    faults.hold(scene.lab, job.job_id)
    faults.reopen(scene.lab)
    time.sleep(scene.outage())
    faults.release(scene.lab, job.job_id)


def log_folder_unwritable(scene: Scene) -> None:
    """For the nodes: the next job cannot even open its log."""
    with faults.read_only_on_nodes(scene.lab, scene.run.path.parent):
        scene.flow.wait(scene.outage())


def disk_full(scene: Scene) -> None:
    with faults.full_disk(scene.run.path.parent):
        scene.flow.wait(scene.outage())


def nothing(scene: Scene) -> None:
    """The lab itself is what is wrong."""


def _running(scene: Scene) -> QueuedJob | None:
    job = scene.live_job("RUNNING")
    if job is None:
        scene.notes.append("no job was running any more")
    return job


def _outage(scene: Scene, daemon: str, end: object) -> None:
    assert callable(end)
    end(daemon)
    time.sleep(scene.outage())
    scene.lab.start(daemon)


def _node_state(scene: Scene, node: str) -> str:
    return scene.lab.run("sinfo", "-h", "-N", "-n", node, "-O", "StateComplete:40").stdout.upper()


OWN = Lab()
REQUEUE = ("resources.requeue=true",)
KINDS = (
    Kind("slurmctld down", controller_down, Then.GOES_ON, ANY, OWN, weight=2),
    Kind("slurmctld killed", controller_killed, Then.FAILS, ANY, OWN),
    Kind("slurmctld frozen", controller_frozen, Then.GOES_ON, ANY, OWN, weight=2),
    Kind("slurmdbd down", accounting_down, Then.GOES_ON, ANY, Lab(accounting=True)),
    Kind("munge down", munge_down, Then.GOES_ON, ANY, OWN),
    Kind("slurmd restarted", node_daemon_restarted, Then.GOES_ON, RUNNING, OWN),
    Kind("node killed", node_killed, Then.GOES_ON, RUNNING, OWN, weight=2),
    Kind(
        "node never boots",
        never_boots,
        Then.GOES_ON,
        (Moment(Event.STARTED),),
        Lab(cloud=2),
        overrides=("resources.partition=cloud",),
    ),
    Kind("preempted", preempted, Then.GOES_ON, TRAINING, OWN),
    Kind("requeued", requeued, Then.GOES_ON, BEFORE_TRAINING, OWN, overrides=REQUEUE),
    # Slurm starts it with the same config, so from the base weights; the flow sees that and says so.
    Kind("requeued in training", requeued, Then.FAILS, SAVED, OWN, overrides=REQUEUE),
    Kind("time limit", time_limit, Then.GOES_ON, SAVED, OWN, step=2.0),
    Kind("scancel from outside", cancelled_from_outside, Then.STOPS, RUNNING, OWN),
    Kind("job held", held, Then.GOES_ON, BEFORE, OWN),
    Kind("log folder unwritable", log_folder_unwritable, Then.FAILS, BEFORE, OWN),
    Kind("disk full", disk_full, Then.FAILS, ANY, Lab(small_disk=24)),
    Kind("exit file late", nothing, Then.GOES_ON, (Moment(Event.STARTED),), Lab(late_exit=4.0)),
)
