"""Real processes on this machine."""

import os
import signal
import subprocess
import sys
import textwrap
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.errors import InvalidJobSpec, SchedulerUnreachable, SubmitRejected
from slurm.folder import JobFolder
from slurm.local import LocalScheduler
from slurm.local_supervisor import stat
from slurm.scheduler import QueueRow
from slurm.spec import JobSpec
from slurm.states import JobState
from tests.slurm.conftest import bash, eventually, record, spec


def submit(local: LocalScheduler, folder: JobFolder, spec: JobSpec, name: str = "u-train-1") -> str:
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.script.write_text(local.render(spec, folder, name), encoding="utf-8")
    return local.submit(folder.script, name)


def ended(local: LocalScheduler, job_id: str) -> QueueRow:
    def final() -> QueueRow | None:
        row = local.queue([job_id])[job_id]
        return row if row.state.is_final else None

    row: QueueRow = eventually(final, f"{job_id} ends")
    return row


def log(folder: JobFolder) -> str:
    return folder.log.read_text(encoding="utf-8") if folder.log.exists() else ""


def logged(folder: JobFolder, text: str) -> None:
    eventually(lambda: text in log(folder), f"{text!r} in the log")


def kill_supervisor(job: Path) -> None:
    pid = record(job / "state.json")["pid"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: (stat(pid) or "Z")[0] == "Z", "the supervisor is dead")


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [("echo hi", JobState.COMPLETED, 0), ("exit 3", JobState.FAILED, 3), ("kill -9 $$", JobState.FAILED, 137)],
)
def test_a_job_runs_to_its_end(
    local: LocalScheduler, folder: JobFolder, script: str, state: JobState, code: int
) -> None:
    job_id = submit(local, folder, bash(script))
    assert job_id.startswith("local-1-")
    row = ended(local, job_id)
    exit_file = folder.read_exit()
    assert exit_file is not None
    assert (row.state, row.exit_status, exit_file.code, exit_file.job_id) == (state, code << 8, code, job_id)
    assert (exit_file.nodes, row.name) == ("localhost", "u-train-1")


def test_a_job_sees_slurms_variables_and_nothing_of_the_caller(
    local: LocalScheduler, folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("SLURM_JOB_PARTITION", "leaked")
    job = submit(local, folder, bash("env", nodes=2, ntasks=4, cpus_per_task=3, env={"GIVEN": "x"}))
    ended(local, job)
    got = dict(line.split("=", 1) for line in log(folder).splitlines() if "=" in line)
    expected = {
        "SLURM_JOB_ID": job,
        "SLURM_JOB_NAME": "u-train-1",
        "SLURM_NTASKS": "4",
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_RESTART_COUNT": "0",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_CPUS_PER_TASK": "3",
        "GIVEN": "x",
    }
    assert {key: got.get(key) for key in expected} == expected
    assert "hf_secret" not in log(folder)
    assert "SLURM_JOB_PARTITION" not in got


def test_the_log_is_appended_to(local: LocalScheduler, folder: JobFolder) -> None:
    for _ in range(2):
        ended(local, submit(local, folder, bash("echo line")))
    assert log(folder) == "line\nline\n"


def test_a_task_per_rank(local: LocalScheduler, folder: JobFolder) -> None:
    script = "echo $SLURM_PROCID/$SLURM_NTASKS on $SLURM_NODEID/$SLURM_NNODES as $SLURM_LOCALID"
    ended(local, submit(local, folder, bash(script, per_task=True, nodes=2, ntasks=4)))
    assert sorted(log(folder).splitlines()) == [
        "0/4 on 0/2 as 0",
        "1/4 on 0/2 as 1",
        "2/4 on 1/2 as 0",
        "3/4 on 1/2 as 1",
    ]


def test_the_first_bad_task_ends_the_others(local: LocalScheduler, folder: JobFolder) -> None:
    script = """
        if [ $SLURM_PROCID = 1 ]; then until [ -e ready0 ] && [ -e ready2 ]; do sleep 0.05; done; exit 3; fi
        trap 'echo told; exit 9' TERM
        touch ready$SLURM_PROCID
        while :; do sleep 0.05; done"""
    ended(local, submit(local, folder, bash(script, per_task=True, ntasks=3)))
    exit_file = folder.read_exit()
    assert exit_file is not None
    assert (exit_file.code, log(folder).count("told")) == (3, 2)


def test_tasks_get_a_cancel_once(local: LocalScheduler, folder: JobFolder) -> None:
    script = "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    job = submit(local, folder, bash(script, per_task=True, ntasks=2))
    eventually(lambda: log(folder).count("ready") == 2, "both tasks run")
    local.cancel([job])
    assert ended(local, job).state is JobState.CANCELLED
    assert log(folder).count("told") == 2


def test_a_missing_task_program(local: LocalScheduler, folder: JobFolder) -> None:
    ended(local, submit(local, folder, spec("no-such-program", per_task=True)))
    exit_file = folder.read_exit()
    assert exit_file is not None
    assert exit_file.code == 127
    assert "srun: error: no-such-program: No such file or directory" in log(folder)


def test_a_job_survives_the_death_of_its_submitter(tmp_path: Path, local: LocalScheduler, folder: JobFolder) -> None:
    folder.path.mkdir(parents=True)
    folder.script.write_text(local.render(bash("echo begun; sleep 0.5; echo done"), folder, "n"), encoding="utf-8")
    code = f"""
        import os, signal, pathlib
        from slurm.local import LocalScheduler
        local = LocalScheduler({str(tmp_path / "cluster")!r})
        print(local.submit(pathlib.Path({str(folder.script)!r}), "n"), flush=True)
        os.killpg(0, signal.SIGKILL)
    """
    submitter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    job_id = submitter.communicate()[0].strip()
    assert submitter.returncode == -signal.SIGKILL
    assert ended(local, job_id).state is JobState.COMPLETED
    assert log(folder) == "begun\ndone\n"


def test_cancel_asks_then_kills_everything(local: LocalScheduler, folder: JobFolder) -> None:
    """Also what ignores SIGTERM, and what made itself a session of its own."""
    script = "trap '' TERM; setsid sleep 600 & echo $! $$; while :; do sleep 0.05; done"
    job = submit(local, folder, bash(script))
    eventually(lambda: log(folder).endswith("\n"), "it runs")
    pids = [int(pid) for pid in log(folder).split()]
    local.cancel([job])
    assert ended(local, job).state is JobState.CANCELLED
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    local.cancel([job, "local-99-unknown"])


def test_the_time_limit_holds_and_is_announced(local: LocalScheduler, folder: JobFolder) -> None:
    script = "trap 'echo save' USR1; while :; do sleep 0.05; done"
    job = submit(local, folder, bash(script, time=timedelta(seconds=2), signal="B:USR1@1"))
    assert ended(local, job).state is JobState.TIMEOUT
    assert log(folder).count("save") == 1


def test_nothing_of_a_job_outlives_it(local: LocalScheduler, folder: JobFolder) -> None:
    job = submit(local, folder, bash("sleep 600 & setsid sleep 600 & echo $!; exit 0"))
    assert ended(local, job).state is JobState.COMPLETED
    assert not Path(f"/proc/{log(folder).strip()}").exists()


def test_a_job_without_its_supervisor_is_alive_as_long_as_its_processes(
    tmp_path: Path, local: LocalScheduler, folder: JobFolder
) -> None:
    job = submit(local, folder, bash("echo ready; while [ ! -e go ]; do sleep 0.05; done; exit 4"))
    logged(folder, "ready")
    kill_supervisor(tmp_path / "cluster/jobs" / job)
    assert local.queue([job])[job].state is JobState.RUNNING
    (folder.path / "go").touch()
    eventually(lambda: job not in local.queue([job]), "gone from the queue")
    exit_file = folder.read_exit()
    assert exit_file is not None
    assert exit_file.code == 4


def test_a_job_without_its_supervisor_can_be_cancelled(
    tmp_path: Path, local: LocalScheduler, folder: JobFolder
) -> None:
    job = submit(local, folder, bash("trap '' TERM; echo ready; while :; do sleep 0.05; done"))
    logged(folder, "ready")
    kill_supervisor(tmp_path / "cluster/jobs" / job)
    local.cancel([job])
    assert local.queue([job]) == {}


def test_a_reused_pid_is_another_process(tmp_path: Path, local: LocalScheduler, folder: JobFolder) -> None:
    job = submit(local, folder, bash("echo ready; sleep 600"))
    logged(folder, "ready")
    path = tmp_path / "cluster/jobs" / job / "state.json"
    true = path.read_text()
    mine = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    path.write_text(true.replace(f'"pid": {record(path)["pid"]}', f'"pid": {os.getpid()}'))
    assert str(record(path)["start"]) != mine
    assert local.queue([job]) == {}
    path.write_text(true)


def test_a_job_of_another_machine_is_not_declared_dead(
    tmp_path: Path, local: LocalScheduler, folder: JobFolder
) -> None:
    job = submit(local, folder, bash("echo ready; sleep 600"))
    logged(folder, "ready")
    path = tmp_path / "cluster/jobs" / job / "state.json"
    true = path.read_text()
    path.write_text(true.replace(record(path)["host"], "elsewhere"))
    with pytest.raises(SchedulerUnreachable, match="elsewhere"):
        local.queue([job])
    path.write_text(true)


def test_find_by_name_and_time(local: LocalScheduler, folder: JobFolder) -> None:
    before = datetime.now(UTC)
    first = submit(local, folder, spec("true"), "u-train-1")
    other = submit(local, folder, spec("true"), "u-train-10")
    assert other.startswith("local-2-")
    assert [row.job_id for row in local.find("u-train-1", before)] == [first]
    assert local.find("u-train-1", datetime.now(UTC) + timedelta(seconds=10)) == []
    assert LocalScheduler("/nowhere").find("x", before) == []


def test_an_unwritable_log_ends_the_job_as_slurm_does(local: LocalScheduler, folder: JobFolder) -> None:
    folder.log.mkdir(parents=True)
    row = ended(local, submit(local, folder, spec("true")))
    assert (row.state, row.exit_status) == (JobState.FAILED, 53)


@pytest.mark.parametrize(
    ("text", "word"), [("echo", "batch script"), ("#!/bin/bash\n", "output"), (None, "cannot read")]
)
def test_what_is_no_job_script_is_refused(local: LocalScheduler, tmp_path: Path, text: str | None, word: str) -> None:
    script = tmp_path / "s.sh"
    if text is not None:
        script.write_text(text)
    with pytest.raises(SubmitRejected, match=word):
        local.submit(script, "n")


@pytest.mark.parametrize(("field", "value"), [("dependency", "afterok:1"), ("array", "0-3")])
def test_what_would_change_the_run_is_refused_not_ignored(
    local: LocalScheduler, folder: JobFolder, field: str, value: str
) -> None:
    with pytest.raises(InvalidJobSpec, match=field):
        local.render(spec("true", **{field: value}), folder, "n")
