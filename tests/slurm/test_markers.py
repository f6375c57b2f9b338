"""The last words of slurmstepd and srun, as Slurm 19.05 to 24.11 print them."""
# ruff: noqa: E501 - log lines are long

from pathlib import Path

import pytest

from slurm.markers import MarkerKind, find_marker, read_marker

K = MarkerKind


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("slurmstepd: error: *** JOB 7 ON node-6 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***", K.TIME_LIMIT),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO PREEMPTION ***", K.PREEMPTED),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***", K.NODE),
        ("slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO JOB REQUEUE ***", K.REQUEUED),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 ***", K.CANCELLED),
        ("slurmstepd: error: *** JOB 7 ON n1 UNCORRECTABLE MEMORY ERROR AT 2025-01-21T17:34:19 ***", K.NODE),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.", K.MEMORY),
        ("slurmstepd: error: Detected 12 oom_kill events in StepId=7.batch. Some of the step tasks have been OOM Killed.", K.MEMORY),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch cgroup. Some of your processes may have been killed", K.MEMORY),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in step 7.0 cgroup.", K.MEMORY),
        ("srun: error: n1: task 0: Out Of Memory", K.MEMORY),
        ("srun: error: n1: tasks 0-3,7: Out Of Memory", K.MEMORY),
        ("srun: error: Node failure on n2", K.NODE),
        ("srun: error: Nodes n2 are still not ready\nsrun: error: Something is wrong with the boot of the nodes.", K.CAPACITY),
        ("[slurm_plugin.instance_manager:_launch_instances] - ERROR - … (InsufficientInstanceCapacity) when calling the RunInstances operation", K.CAPACITY),
        # glued behind other output
        ("Epoch 0:  6%| 4/62 [03:24<49:27]slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***", K.TIME_LIMIT),
        ("loss=1\rloss=2\rslurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 ***\r\n", K.CANCELLED),
        # a step that srun ended itself, after a task failed
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 ***", None),
        ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TASK FAILURE ***", None),
        # other jobs
        ("slurmstepd: error: *** JOB 77 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***", None),
        ("slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO PREEMPTION ***", None),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.", None),
        ("all went well", None),
        ("", None),
    ],
)  # fmt: skip
def test_lines(text: str, kind: MarkerKind | None) -> None:
    marker = find_marker(text, "7")
    assert (marker.kind if marker else None) is kind


CANCELLED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 ***"
LIMIT = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***"
PREEMPTED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO PREEMPTION ***"
OOM = "srun: error: n1: task 0: Out Of Memory"
NODE = "srun: error: Node failure on n2"
NOT_READY = "srun: error: Nodes n2 are still not ready"


@pytest.mark.parametrize(
    ("lines", "kind"),
    [
        ([OOM, "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2025-01-21T17:34:19 ***"], K.MEMORY),
        ([OOM, LIMIT], K.TIME_LIMIT),
        ([LIMIT, OOM], K.TIME_LIMIT),
        ([NODE, NOT_READY], K.CAPACITY),
        ([NOT_READY, NODE], K.CAPACITY),
        ([NODE, OOM], K.MEMORY),
        ([CANCELLED, LIMIT], K.TIME_LIMIT),
        ([PREEMPTED, "job script: start 1 of job 7", "loss=1"], None),
        ([PREEMPTED, "job script: start 1 of job 7", LIMIT], K.TIME_LIMIT),
        ([OOM, "job script: start 1 of job 7", "loss=1"], None),
    ],
)
def test_the_latest_start_and_the_strongest_reason_count(lines: list[str], kind: MarkerKind | None) -> None:
    marker = find_marker("\n".join(lines), "7")
    assert (marker.kind if marker else None) is kind


def test_the_evidence_is_one_clean_line() -> None:
    marker = find_marker(f"\x1b[31mbar 3%|\x07{LIMIT}\x1b[0m{'x' * 5000}", "7")
    assert marker is not None
    assert marker.line.startswith("*** JOB 7 ON n1 CANCELLED AT 2025-01-21T17:34:19 DUE TO TIME LIMIT ***")
    assert len(marker.line) <= 200
    assert marker.line.isprintable()


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    log.write_bytes(b"\xff\xfe no utf-8\n" * 100_000 + LIMIT.encode() + b"\nbye\n")
    assert (marker := read_marker(log, "7")) is not None
    assert marker.kind is K.TIME_LIMIT
    log.write_bytes(LIMIT.encode() + b"\n" + b"much later\n" * 100_000)
    assert read_marker(log, "7") is None


def test_no_log_no_marker(tmp_path: Path) -> None:
    assert read_marker(tmp_path / "missing.log", "7") is None
    assert read_marker(tmp_path, "7") is None
