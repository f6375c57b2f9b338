"""A harness that finds nothing must be one that would have found it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.chaos.cases import draw
from tests.chaos.evidence import Job, duplicates, jobs_of, orphans, wrong_verdicts
from tests.chaos.kinds import KINDS
from tests.chaos.results import Result, summary
from tests.slurm_lab.faults import EndedJob, QueuedJob
from trainium.files import write_json
from trainium.run.folder import RunFolder

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def job(job_id: int, name: str, submitted: float, ended: float | None, state: str = "COMPLETED") -> Job:
    return Job(str(job_id), name, at(submitted), None if ended is None else at(ended), state, "0:0")


def test_every_kind_comes_before_any_comes_again_and_the_seed_decides() -> None:
    weights = sum(kind.weight for kind in KINDS)
    cases = draw(KINDS, weights, 1)
    assert {case.kind.name for case in cases} == {kind.name for kind in KINDS}
    assert [(c.kind.name, c.moment) for c in draw(KINDS, 30, 5)] == [
        (c.kind.name, c.moment) for c in draw(KINDS, 30, 5)
    ]
    assert [(c.kind.name, c.moment) for c in draw(KINDS, 30, 5)] != [
        (c.kind.name, c.moment) for c in draw(KINDS, 30, 6)
    ]


def test_two_jobs_of_one_name_are_a_duplicate_and_a_later_attempt_is_none() -> None:
    first = job(1, "u-train-1", 0, 10, "NODE_FAIL")
    assert duplicates([first, job(2, "u-train-1", 20, 30)])
    assert not duplicates([first, job(2, "u-train-2", 10, 30)])  # cut to seconds: submitted in the second of the end
    assert duplicates([first, job(2, "u-train-2", 9, 30)])
    assert duplicates([job(1, "u-train-1", 0, None), job(2, "u-train-2", 5, None)])
    assert not duplicates([job(1, "u-convert-1", 0, 10), job(2, "u-train-1", 5, 30)])
    assert not duplicates([job(1, "u-convert-share-1-1", 0, 10), job(2, "u-convert-share-2-1", 0, 30)])


def test_the_starts_of_a_requeued_job_are_one_job_and_other_runs_are_not_looked_at() -> None:
    ended = [
        EndedJob("7", "u-train-1", "REQUEUED", "0:0", at(0), at(1), at(5)),
        EndedJob("7", "u-train-1", "COMPLETED", "0:0", at(0), at(8), at(20)),
        EndedJob("8", "other-train-1", "COMPLETED", "0:0", at(0), at(8), at(20)),
    ]
    (found,) = jobs_of(["u"], ended, [])
    assert (found.job_id, found.state, found.ended) == ("7", "COMPLETED", at(20))
    (found,) = jobs_of(["u"], ended[:1], [QueuedJob("7", "u-train-1", "PENDING", "")])
    assert found.ended is None  # an orphan, if the run is over


def test_a_job_in_the_queue_is_an_orphan_unless_its_script_has_ended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    alive = job(7, "u-train-1", 0, None, "RUNNING")
    assert orphans(run, [alive, job(6, "u-convert-1", 0, 5)]) == ["job 7 u-train-1 is RUNNING"]
    record = {"restart_count": 0, "node": "n1", "nodes": "n1", "code": 0, "signal": None, "started": str(NOON)}
    write_json(run.job("train", 1) / "exit.json", {"job_id": "7", "ended": str(NOON), **record})
    assert not orphans(run, [alive])  # a controller that lost its memory still shows it
    assert orphans(run, [replace(alive, job_id="8")])


def test_an_id_that_is_given_again_is_another_job() -> None:
    first = EndedJob("5", "u-train-1", "COMPLETED", "0:0", at(0), at(1), at(5))
    again = EndedJob("5", "u-export-1", "COMPLETED", "0:0", at(10), at(11), at(15))
    assert [found.name for found in jobs_of(["u"], [first, again], [])] == ["u-export-1", "u-train-1"]


def test_a_ledger_that_says_otherwise_than_slurm_is_a_wrong_verdict(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def ledger(state: str) -> None:
        write_json(tmp_path / "run.json", {"attempts": [{"stage": "train", "attempt": 1, "id": "1", "state": state}]})

    done, failed = job(1, "u-train-1", 0, 10), job(1, "u-train-1", 0, 10, "NODE_FAIL")
    ledger("COMPLETED")
    assert not wrong_verdicts(run, [done])
    assert wrong_verdicts(run, [failed])
    assert wrong_verdicts(run, [replace(done, ended=None, state="RUNNING")])
    assert wrong_verdicts(run, [])
    ledger("NODE_FAIL")
    assert not wrong_verdicts(run, [])  # forgotten by a controller that was killed
    assert not wrong_verdicts(run, [failed])
    assert wrong_verdicts(run, [done])


def test_only_a_summary_without_a_stain_is_a_success() -> None:
    good = Result(1, "SIGKILL", "started", equal=True)
    assert summary([good])[1] == 0
    assert summary([])[1] == 1
    for stain in ({"equal": False}, {"duplicates": ["x"]}, {"orphans": ["x"]}, {"wrong": ["x"]}):
        assert summary([good, replace(good, **stain)])[1] == 1
