"""SlurmScheduler against canned output, as measured on Slurm 22.05 (reference: tests/slurm/test_on_real_slurm.py)."""
# ruff: noqa: E501 - a table row is a line

import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.cluster import SlurmScheduler
from slurm.commands import SEPARATOR, CommandTimeout, Completed, clean_environment, parse_submission, run
from slurm.errors import SchedulerUnreachable, SlurmError, SubmitRejected, SubmitUncertain
from slurm.folder import JobFolder
from slurm.spec import JobSpec
from slurm.states import JobState

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)


class Canned:
    """A runner that gives what it is told and remembers what it was asked."""

    def __init__(self, **answers: Completed | Exception) -> None:
        self.answers = answers
        self.asked: list[list[str]] = []
        self.env: Mapping[str, str] = {}

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], timeout: float) -> Completed:
        self.asked.append(list(argv))
        self.env = env
        answer = self.answers[Path(argv[0]).name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def ok(*lines: str) -> Completed:
    return Completed(0, "".join(line + "\n" for line in lines), "")


def bad(stderr: str, code: int = 1) -> Completed:
    return Completed(code, "", stderr)


def squeue_line(*fields: str) -> str:
    return SEPARATOR.join(fields)


def sacct_line(*fields: str) -> str:
    return SEPARATOR.join(fields)


RUNNING = squeue_line("26", "RUNNING", "None", "n[1-2]", "0", "2030-01-01T12:00:00", "0", "u-train-1")
NO_ACCOUNTING = bad("Slurm accounting storage is disabled\n")


@pytest.mark.parametrize(
    ("stdout", "job_id"),
    [
        ("26\n", "26"),
        ("43;lab\n", "43"),
        ("*** welcome to cluster 7 ***\n2030\tnews\n\n26;lab\n", "26"),
        ("", None),
        ("Submitted batch job 26\n", None),
    ],
)
def test_submission_output(stdout: str, job_id: str | None) -> None:
    assert parse_submission(stdout) == job_id


def test_submit_is_an_argv_without_a_shell() -> None:
    canned = Canned(sbatch=ok("26"))
    assert SlurmScheduler(runner=canned, bin="/opt/slurm/bin").submit(Path("/fsx/a b/script.sh"), "u-train-1") == "26"
    assert canned.asked == [["/opt/slurm/bin/sbatch", "--parsable", "--export=ALL", "/fsx/a b/script.sh"]]


@pytest.mark.parametrize(
    ("stderr", "code", "error", "word"),
    [
        ("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed: Invalid partition name specified\n", 1, SubmitRejected, "sinfo"),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available\n", 1, SubmitRejected, "ask for less"),
        ("sbatch: error: Batch job submission failed: Node count specification invalid\n", 1, SubmitRejected, "fewer nodes"),
        ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n", 1, SubmitRejected, "sacctmgr"),
        ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)\n", 1, SubmitRejected, "DOS"),
        ("sbatch: error: Invalid --time specification\n", 255, SubmitRejected, "--time"),
        ("something new\n", 1, SubmitRejected, "something new"),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n", 1, SubmitUncertain, "may have"),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received\n", 1, SubmitUncertain, "may have"),
        ("", -9, SubmitUncertain, "may have"),
        ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)\n", 1, SchedulerUnreachable, "reach"),
        ("sbatch: error: Munge encode failed: Failed to access \"/run/munge/munge.socket.2\"\nsbatch: error: Batch job submission failed: Protocol authentication error\n", 1, SchedulerUnreachable, "Munge"),
        ("sbatch: fatal: Could not establish a configuration source\n", 1, SchedulerUnreachable, "configuration"),
    ],
)  # fmt: skip
def test_a_failed_sbatch_is_refused_uncertain_or_unheard(
    stderr: str, code: int, error: type[SlurmError], word: str
) -> None:
    with pytest.raises(error, match=word):
        SlurmScheduler(runner=Canned(sbatch=bad(stderr, code))).submit(Path("/s.sh"), "n")


def test_an_sbatch_that_hangs_or_says_nothing_is_uncertain() -> None:
    with pytest.raises(SubmitUncertain, match="150 s"):
        SlurmScheduler(runner=Canned(sbatch=CommandTimeout("sbatch did not answer within 150 s"))).submit(
            Path("/s"), "n"
        )
    with pytest.raises(SubmitUncertain, match="no job id"):
        SlurmScheduler(runner=Canned(sbatch=ok("hello"))).submit(Path("/s"), "n")


def test_a_machine_without_slurm_says_so() -> None:
    with pytest.raises(SlurmError, match="submits to the cluster"):
        SlurmScheduler(bin="/nowhere").queue(["1"])


def test_queue_reads_everything_from_one_call() -> None:
    canned = Canned(
        squeue=ok(
            "banner",
            RUNNING,
            squeue_line("27", "PENDING", "ReqNodeNotAvail, UnavailableNodes:n9", "", "2", "2030-01-01T12:00:01", "0", "na|me é"),
            squeue_line("28", "FAILED", "NonZeroExitCode", "n1", "0", "2030-01-01T12:00:02", "768", f"odd{SEPARATOR}name"),
            squeue_line("29", "CONFIGURING", "launch failed requeued held", "(null)", "0", "N/A", "0", "x"),
        )
    )  # fmt: skip
    rows = SlurmScheduler(runner=canned).queue(["27", "26", "28", "29", "30"])
    assert len(canned.asked) == 1
    assert canned.asked[0][:7] == ["squeue", "-h", "-a", "-t", "all", "-j", "26,27,28,29,30"]
    assert set(rows) == {"26", "27", "28", "29"}
    assert (rows["26"].state, rows["26"].nodes, rows["26"].reason, rows["26"].submitted) == (
        JobState.RUNNING, "n[1-2]", None, NOW,
    )  # fmt: skip
    assert (rows["27"].reason, rows["27"].restarts, rows["27"].name) == (
        "ReqNodeNotAvail, UnavailableNodes:n9", 2, "na|me é",
    )  # fmt: skip
    assert (rows["28"].exit_status, rows["28"].name) == (768, f"odd{SEPARATOR}name")
    assert (rows["29"].state.is_waiting, rows["29"].submitted, rows["29"].exit_status) == (True, None, None)


def test_a_purged_single_id_is_no_error_but_an_outage_is() -> None:
    assert (
        SlurmScheduler(runner=Canned(squeue=bad("slurm_load_jobs error: Invalid job id specified\n"))).queue(["1"])
        == {}
    )
    for text in (
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "squeue: error: Munge encode failed",
        "something else",
    ):
        with pytest.raises(SchedulerUnreachable, match="squeue"):
            SlurmScheduler(runner=Canned(squeue=bad(text))).queue(["1"])
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(runner=Canned(squeue=CommandTimeout("squeue did not answer"))).queue(["1"])


def test_nothing_to_ask_costs_nothing() -> None:
    canned = Canned()
    scheduler = SlurmScheduler(runner=canned)
    assert scheduler.queue([]) == {}
    assert scheduler.accounting([], NOW) == {}
    scheduler.cancel([])
    assert canned.asked == []


def test_accounting_that_is_not_there_is_none() -> None:
    assert SlurmScheduler(runner=Canned(sacct=NO_ACCOUNTING)).accounting(["1"], NOW) is None
    text = "sacct: error: slurm_persist_conn_open_without_init: failed\nsacct: error: Problem talking to the database: Connection refused\n"
    with pytest.raises(SchedulerUnreachable, match="database"):
        SlurmScheduler(runner=Canned(sacct=bad(text))).accounting(["1"], NOW)


def test_accounting_leaves_out_an_older_job_of_the_same_id() -> None:
    old = "2029-06-01T00:00:00"
    canned = Canned(
        sacct=ok(
            sacct_line("26", "CANCELLED by 0", "0:0", "0:0", "n1", old, old, old, "other"),
            sacct_line(
                "27", "FAILED", "3:0", "5:0", "n1", "2030-01-01T12:00:00", "2030-01-01T12:00:05", "Unknown", "x"
            ),
        )
    )
    rows = SlurmScheduler(runner=canned).accounting(["26", "27"], NOW)
    assert rows is not None
    assert set(rows) == {"27"}
    row = rows["27"]
    assert (row.state, row.exit_code, row.derived_exit_code, row.ended) == (JobState.FAILED, 3, 5, None)
    assert "2030-01-01T11:59:00" in canned.asked[0]


def test_find_asks_by_exact_name_user_and_time() -> None:
    older = squeue_line("3", "RUNNING", "None", "n1", "0", "2029-01-01T12:00:00", "0", "u-train-1")
    other = squeue_line("4", "RUNNING", "None", "n1", "0", "2030-01-01T12:00:00", "0", "u-train-10")
    canned = Canned(squeue=ok(RUNNING, older, other), sacct=NO_ACCOUNTING)
    assert [row.job_id for row in SlurmScheduler(runner=canned).find("u-train-1", NOW)] == ["26"]


def test_find_adds_what_only_accounting_knows_but_no_refused_submission() -> None:
    at = "2030-01-01T12:00:00"
    canned = Canned(
        squeue=ok(),
        sacct=ok(
            sacct_line("26", "FAILED", "1:0", "0:0", "None assigned", at, "Unknown", at, "u-train-1"),
            sacct_line("27", "COMPLETED", "0:0", "0:0", "n1", at, at, at, "u-train-1"),
        ),
    )
    found = SlurmScheduler(runner=canned).find("u-train-1", NOW)
    assert [(row.job_id, row.state) for row in found] == [("27", JobState.COMPLETED)]


def test_scancel() -> None:
    canned = Canned(scancel=ok())
    SlurmScheduler(runner=canned).cancel(["2", "1"])
    assert canned.asked == [["scancel", "1", "2"]]
    with pytest.raises(SchedulerUnreachable):
        SlurmScheduler(runner=Canned(scancel=bad("Unable to contact slurm controller (connect failure)", 8))).cancel(
            ["1"]
        )
    with pytest.raises(SlurmError, match="Access/permission denied"):
        SlurmScheduler(runner=Canned(scancel=bad("scancel: error: Kill job error on job id 1: Access/permission denied", 210))).cancel(["1"])  # fmt: skip


def test_the_callers_slurm_variables_do_not_leak() -> None:
    environ = {
        "SBATCH_PARTITION": "x",
        "SLURM_JOB_ID": "1",
        "SRUN_X": "",
        "SQUEUE_FORMAT": "%i",
        "SLURM_CONF": "/etc/s",
    }
    clean = clean_environment(environ | {"PATH": "/bin", "SACCT_FORMAT": "User"}, None)
    assert clean == {"PATH": "/bin", "SLURM_CONF": "/etc/s", "TZ": "UTC", "LC_ALL": "C.UTF-8"}
    assert clean_environment(environ, "/mine")["SLURM_CONF"] == "/mine"


def test_the_real_runner_has_no_terminal_and_ends_what_hangs() -> None:
    code = "import os, sys; print(sys.stdin.read() == '', os.getsid(0) == os.getpid()); sys.exit(3)"
    done = run([sys.executable, "-c", code], env={}, timeout=30)
    assert (done.code, done.stdout) == (3, "True True\n")
    with pytest.raises(CommandTimeout):
        run(["sleep", "600"], env={"PATH": "/usr/bin:/bin"}, timeout=0.1)


def test_default_timing_is_gentle_to_the_controller() -> None:
    timing = SlurmScheduler().timing
    assert (timing.exit_scan, timing.queue, timing.early) == (2, 15, 5)
    assert timedelta(seconds=timing.accounting) == timedelta(minutes=1)


def test_jobs_find_slurms_commands_where_the_submitter_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ParallelCluster's /opt/slurm/bin is in the PATH of login shells only."""
    spec = JobSpec(payload=("true",), environment="toolchain", per_task=True)
    assert "PATH=$PATH:/opt/slurm/bin\n" in SlurmScheduler(bin="/opt/slurm/bin").render(spec, JobFolder("/r"), "n")
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"PATH=$PATH:{tmp_path}\n" in SlurmScheduler().render(spec, JobFolder("/r"), "n")
    monkeypatch.setenv("PATH", "")
    assert "PATH=$PATH:" not in SlurmScheduler().render(spec, JobFolder("/r"), "n")


@pytest.mark.parametrize(
    ("state", "parsed", "by"),
    [
        ("CANCELLED by 1000", JobState.CANCELLED, "1000"),
        ("CANCELLED", JobState.CANCELLED, ""),
        ("TIMEOUT", JobState.TIMEOUT, ""),
    ],
)
def test_accounting_says_who_cancelled(state: str, parsed: JobState, by: str) -> None:
    """A controller that lost its state leaves CANCELLED behind, by nobody."""
    at = "2030-01-01T12:00:00"
    canned = Canned(sacct=ok("banner", sacct_line("26", state, "0:0", "0:0", "n1", at, at, at, "x")))
    rows = SlurmScheduler(runner=canned).accounting(["26"], NOW)
    assert rows is not None
    assert (rows["26"].state, rows["26"].cancelled_by) == (parsed, by)


def test_banner_lines_are_no_jobs() -> None:
    """Sites print a greeting, federations and -M a line per cluster."""
    canned = Canned(squeue=ok("CLUSTER: lab", "*** maintenance on Friday 26 RUNNING ***", "", RUNNING))
    assert set(SlurmScheduler(runner=canned).queue(["26"])) == {"26"}
