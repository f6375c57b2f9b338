"""What the tests of jobs rely on: a real Slurm that runs jobs, can be broken on purpose, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.slurm_lab.lab import SlurmLab, SlurmLabError, slurm_lab

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slurm


def wait_until(true: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.05)


def submit(lab: SlurmLab, folder: Path, *options: str, payload: str = "hostname") -> str:
    script = folder / "job.sh"
    script.write_text(f"#!/bin/sh\n{payload}\n")
    return lab.run("sbatch", "--parsable", f"--output={folder}/%j.log", *options, script, check=True).stdout.strip()


def state(lab: SlurmLab, job: str) -> str:
    return lab.run("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").stdout.strip()


def processes_of(folder: Path) -> set[int]:
    """The processes whose environment names the lab: its daemons and their jobs."""
    found = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURM_CONF={folder}/".encode() in environ.read_bytes():
                found.add(int(environ.parent.name))
        except OSError:
            continue  # ended meanwhile
    return found


def test_batch_jobs_run_on_each_node(slurm: SlurmLab, tmp_path: Path) -> None:
    jobs = {
        node: submit(slurm, tmp_path, f"--nodelist={node}", "--cpus-per-task=128", payload="echo $SLURMD_NODENAME")
        for node in slurm.nodes
    }
    for node, job in jobs.items():
        wait_until(lambda job=job: state(slurm, job) == "COMPLETED", f"job {job} is completed")  # type: ignore[misc]
        assert (tmp_path / f"{job}.log").read_text() == f"{node}\n"


def test_srun_spans_two_nodes(slurm: SlurmLab) -> None:
    result = slurm.run("srun", "-N2", "--ntasks-per-node=1", "sh", "-c", "echo $SLURMD_NODENAME", check=True)
    assert sorted(result.stdout.split()) == ["n1", "n2"]


def test_a_job_of_the_high_partition_preempts(slurm: SlurmLab, tmp_path: Path) -> None:
    low = submit(slurm, tmp_path, "-N2", "--exclusive", "--requeue", payload="sleep 600")
    wait_until(lambda: state(slurm, low) == "RUNNING", "the first job runs")
    high = submit(slurm, tmp_path, "-N2", "--exclusive", "-p", "hi")
    wait_until(lambda: state(slurm, high) == "COMPLETED", "the preempting job is completed")
    slurm.run("scancel", low, check=True)
    slurm.wait_idle()


def test_without_accounting_sacct_says_so(slurm: SlurmLab) -> None:
    result = slurm.run("sacct")
    assert result.returncode == 1
    assert "Slurm accounting storage is disabled" in result.stderr


def test_accounting_knows_the_end_of_a_job(slurm_with_accounting: SlurmLab, tmp_path: Path) -> None:
    lab = slurm_with_accounting
    job = submit(lab, tmp_path)

    def recorded() -> str:
        return lab.run("sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode", check=True).stdout.strip()

    wait_until(lambda: recorded() == "COMPLETED|0:0", "sacct says completed")


def test_surrounding_slurm_variables_do_not_leak(
    slurm: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "no-such-partition")
    monkeypatch.setenv("SLURM_CONF", "/no/such/file")
    job = submit(slurm, tmp_path)
    wait_until(lambda: state(slurm, job) == "COMPLETED", f"job {job} is completed")


@pytest.fixture
def own_lab() -> Iterator[SlurmLab]:
    """A lab to break. Clients give up soon."""
    with slurm_lab(nodes=1, message_timeout=2) as lab:
        yield lab


def test_a_frozen_controller_hangs_and_comes_back(own_lab: SlurmLab) -> None:
    own_lab.freeze("slurmctld")
    frozen = own_lab.run("squeue")
    assert frozen.returncode == 1
    assert "Socket timed out" in frozen.stderr
    own_lab.thaw("slurmctld")
    own_lab.wait_idle()


def test_every_daemon_stops_and_starts_again(own_lab: SlurmLab, tmp_path: Path) -> None:
    for name in own_lab.daemons:
        pid = own_lab.pid(name)
        own_lab.stop(name)
        assert not own_lab.is_running(name)
        assert not Path(f"/proc/{pid}").exists()
        if name == "slurmctld":
            assert "Unable to contact slurm controller" in own_lab.run("squeue").stderr
        own_lab.start(name)
        own_lab.kill(name)
        own_lab.start(name)
    job = submit(own_lab, tmp_path)
    wait_until(lambda: state(own_lab, job) == "COMPLETED", f"job {job} is completed")


def test_a_job_outlives_its_slurmd(own_lab: SlurmLab, tmp_path: Path) -> None:
    job = submit(own_lab, tmp_path, payload=f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")
    wait_until(lambda: state(own_lab, job) == "RUNNING", "the job runs")
    own_lab.stop("slurmd.n1")
    own_lab.start("slurmd.n1")
    assert state(own_lab, job) == "RUNNING"
    (tmp_path / "go").touch()
    wait_until(lambda: state(own_lab, job) == "COMPLETED", f"job {job} is completed")


def test_labs_side_by_side_do_not_meet(tmp_path: Path) -> None:
    with ExitStack() as stack:
        labs = [stack.enter_context(slurm_lab(nodes=nodes)) for nodes in (1, 3)]
        for lab in labs:
            names = lab.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N", check=True).stdout.split()
            assert tuple(names) == lab.nodes
        submit(labs[0], tmp_path, payload="sleep 600")
        assert labs[1].run("squeue", "-h", "-t", "all", check=True).stdout == ""


@pytest.mark.parametrize("accounting", [False, True])
def test_nothing_is_left(accounting: bool, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), slurm_lab(accounting=accounting) as lab:  # noqa: PT012
        # A job that leaves its session, and one controller that could not react to a polite request.
        submit(lab, tmp_path, payload=f"setsid sleep 600 & touch {tmp_path}/started; sleep 600")
        wait_until((tmp_path / "started").exists, "the job has started")
        assert len(processes_of(lab.folder)) >= len(lab.daemons) + 3
        lab.freeze("slurmctld")
        _ = 1 / 0  # a test that fails
    assert processes_of(lab.folder) == set()
    assert not lab.folder.exists()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_process_that_is_ended(end: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.slurm_lab", "--nodes=1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        line = holder.stdout.readline().strip()
        assert line.startswith("export SLURM_CONF=")
        conf = Path(line.partition("=")[2])
        environment = {**os.environ, "SLURM_CONF": str(conf)}
        subprocess.run(["sbatch", "--wrap=sleep 600", "--output=/dev/null"], env=environment, check=True)
        assert processes_of(conf.parent)
        holder.send_signal(end)
        try:
            holder.wait(60)
        finally:
            holder.kill()
    wait_until(lambda: not conf.parent.exists(), "the lab's folder is gone")
    assert processes_of(conf.parent) == set()


def test_a_lab_that_cannot_start_shows_the_log() -> None:
    message = r"(?s)slurmctld ended with 1 .*slurmctld\.out.*NoSuchKey"
    with pytest.raises(SlurmLabError, match=message), slurm_lab(extra="NoSuchKey=1"):
        pytest.fail("it started")


def test_a_daemon_that_dies_is_named(own_lab: SlurmLab) -> None:
    os.kill(own_lab.pid("slurmd.n1"), signal.SIGKILL)
    wait_until(lambda: not own_lab.is_running("slurmd.n1"), "slurmd has ended")
    with pytest.raises(SlurmLabError, match=r"slurmd\.n1 ended with -9"):
        own_lab.wait_idle()


def test_missing_programs_are_named_with_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(SlurmLabError, match=r"sbatch.*install\.sh.*slurm-client"), slurm_lab():
        pytest.fail("it started")


def test_install_script_has_nothing_to_do() -> None:
    result = subprocess.run([ROOT / "tests/slurm_lab/install.sh"], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("", "")
