"""What can happen to a flow, to Prefect's server, and to the files of a run."""

import signal
import subprocess
import time
from collections.abc import Callable

from tests.chaos.cases import Event, Kind, Moment, Then, moments
from tests.chaos.scene import REFUSED, TRAINIUM, Scene

DIES = 60.0  # seconds a flow may take to end after it was told to
EVERYWHERE = moments(Event.STARTED, Event.SUBMITTING, Event.RUNNING, Event.SAVED, Event.ENDED)
WITH_JOB = moments(Event.SUBMITTING, Event.RUNNING, Event.SAVED)


def sent(number: signal.Signals) -> Callable[[Scene], None]:
    """The flow gets a signal, once, and has to end of it."""

    def act(scene: Scene) -> None:
        scene.flow.send(number)
        _ends(scene, number.name)

    return act


def interrupt_twice(scene: Scene) -> None:
    """Ctrl-C, and again while it says how to cancel: the jobs go too."""
    scene.flow.send(signal.SIGINT)
    scene.until(lambda: scene.flow.ended or "Ctrl-C again" in scene.flow.text(), DIES)
    scene.flow.wait(scene.case.random.uniform(0.1, 2.0))
    if not scene.flow.ended:
        scene.flow.send(signal.SIGINT)
    _ends(scene, "the second Ctrl-C")
    scene.expect_no_jobs("the second Ctrl-C")


def sleep_through_a_takeover(scene: Scene) -> None:
    """Stopped for longer than its lease is good for; awake again, it must touch nothing more."""
    asleep = scene.flow
    asleep.send(signal.SIGSTOP)
    second = scene.start_until_accepted(scene.settings.patience)
    if second is None or (second.ended and second.code != 0):
        scene.wrong.append("no second start could take over the run of a flow that was stopped")
        return
    time.sleep(scene.case.random.uniform(0, 3))
    asleep.send(signal.SIGCONT)
    code = asleep.wait(DIES)
    if code in (None, 0):
        scene.wrong.append(f"the flow that lost its lease ended with {code}")


def cancel_by_api(scene: Scene) -> None:
    """The button in the UI, as soon as the flow run is known by its folder."""
    if not scene.until(lambda: scene.flow.ended or scene.server.flow_runs(scene.run.path), DIES, 0.3):
        scene.wrong.append("no flow run has the run folder as its label")
    if scene.flow.ended:
        return
    scene.server.cancel(scene.server.flow_runs(scene.run.path)[0]["id"])
    scene.expect_no_jobs("the cancellation through the API")
    _ends(scene, "a cancellation through the API")
    state = scene.server.flow_runs(scene.run.path)[0]["state_type"]
    if state != "CANCELLED":
        scene.wrong.append(f"the flow run that was cancelled is {state}")


def kill_then_cancel(scene: Scene) -> None:
    """The flow is gone before somebody runs `trainium cancel`."""
    scene.flow.send(signal.SIGKILL)
    _ends(scene, "SIGKILL")
    words = [str(TRAINIUM), "cancel", scene.run.name, "--runs", str(scene.run.path.parent)]
    done = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=120)
    if done.returncode:
        scene.wrong.append(f"trainium cancel ended with {done.returncode}: {done.stderr.strip()[-200:]}")
    scene.expect_no_jobs("trainium cancel")


def second_at_once(scene: Scene) -> None:
    """Two starts in one moment: one has the run, the other is refused."""
    first = scene.flow
    second = scene.start()
    scene.until(lambda: first.ended or second.ended, scene.settings.patience)
    refused, working = (first, second) if first.ended else (second, first)
    if refused.code != REFUSED:
        scene.wrong.append(f"of two flows at once one ended with {refused.code}: {refused.last_line()}")
    scene.flows.remove(refused)
    scene.flows.append(scene.flows.pop(scene.flows.index(working)))


def lose_a_record(scene: Scene) -> None:
    """The flow is killed, and one of the records of finished stages with it."""
    scene.flow.send(signal.SIGKILL)
    _ends(scene, "SIGKILL")
    records = sorted((scene.run.path / "stages").glob("*.json"))
    if records:
        lost = scene.case.random.choice(records)
        scene.notes.append(f"lost {lost.name}")
        lost.unlink()


def lose_a_job_record(scene: Scene) -> None:
    """The flow is killed between a submission and the writing of the job's id: job.json is not there."""
    scene.flow.send(signal.SIGKILL)
    _ends(scene, "SIGKILL")
    latest = max(scene.run.jobs.glob("*/intent.json"), key=lambda path: path.stat().st_mtime, default=None)
    if latest is not None:
        scene.notes.append(f"lost job.json of {latest.parent.name}")
        latest.with_name("job.json").unlink(missing_ok=True)


def server_restarted(scene: Scene) -> None:
    scene.server.stop()
    scene.server.start()


def server_hangs(scene: Scene) -> None:
    scene.server.freeze()
    time.sleep(scene.outage())
    scene.server.thaw()


def server_away(scene: Scene) -> None:
    scene.server.kill()
    time.sleep(scene.outage())
    scene.server.start()


def database_lost(scene: Scene) -> None:
    """The server comes back without a memory; whoever runs it registers the blocks again."""
    scene.server.kill()
    scene.server.lose_database()
    scene.server.start()
    scene.register()


def _ends(scene: Scene, why: str) -> None:
    code = scene.flow.wait(DIES)
    if code is None:
        scene.wrong.append(f"{DIES:.0f} s after {why} the flow still lives")
    elif code == 0 and not scene.done:
        scene.wrong.append(f"after {why} the flow ended with 0 and has not done its work")


KINDS = (
    Kind("SIGKILL", sent(signal.SIGKILL), Then.NEXT_START, EVERYWHERE, weight=3),
    Kind("SIGTERM", sent(signal.SIGTERM), Then.NEXT_START, EVERYWHERE, weight=2),
    Kind("SIGHUP", sent(signal.SIGHUP), Then.NEXT_START, EVERYWHERE),
    Kind("SIGINT once", sent(signal.SIGINT), Then.NEXT_START, EVERYWHERE),
    Kind("SIGINT twice", interrupt_twice, Then.STOPS, WITH_JOB),
    Kind("SIGSTOP and takeover", sleep_through_a_takeover, Then.NEXT_START, WITH_JOB),
    Kind("API cancel", cancel_by_api, Then.STOPS, WITH_JOB, weight=2),
    Kind("killed and cancelled", kill_then_cancel, Then.STOPS, WITH_JOB),
    Kind("second start at once", second_at_once, Then.GOES_ON, (Moment(Event.STARTED),)),
    Kind("stage record lost", lose_a_record, Then.NEXT_START, moments(Event.RUNNING, stages=("compile", "train"))),
    Kind("job record lost", lose_a_job_record, Then.NEXT_START, WITH_JOB),
    Kind("server restarted", server_restarted, Then.GOES_ON, EVERYWHERE[1:], own_server=True),
    Kind("server hangs", server_hangs, Then.GOES_ON, EVERYWHERE[1:], own_server=True),
    Kind("server away", server_away, Then.GOES_ON, EVERYWHERE[1:], own_server=True),
    Kind("database lost", database_lost, Then.NEXT_START, EVERYWHERE[1:], own_server=True),
)
