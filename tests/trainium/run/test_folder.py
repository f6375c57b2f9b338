"""The run folder: names, the frozen recipe, records that stand for work, and the ledger of attempts."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainium.run.folder import (
    BrokenRun,
    RecipeChanged,
    RunFolder,
    RunNameError,
    RunsFolderError,
    SourceChanged,
    check_run_name,
)
from trainium.run.lease import LeaseLost
from trainium.run.records import JobNote, Output, StageRecord, digest


def start(folder: RunFolder, frozen: dict[str, object] | None = None) -> None:
    values = frozen or {"steps": 1}
    lease = folder.start("name: x\n", values, lambda old: [] if old == values else [f"steps: {old} → {values}"])
    lease.release()


def record(stage: str, inputs: str, *outputs: Output) -> StageRecord:
    return StageRecord(
        stage=stage,
        inputs=inputs,
        started="2026-01-01T00:00:00+00:00",
        ended="2026-01-01T00:00:01+00:00",
        seconds=1.0,
        outputs=outputs,
        jobs=(JobNote(id="7", attempt=1, state="COMPLETED", exit_code=0, nodes="n1", log="/l", seconds=0.5),),
        verified=("all there",),
        table=({"a": 1},),
    )


def note(attempt: int, state: str) -> JobNote:
    return JobNote(id="7", attempt=attempt, state=state, exit_code=1, nodes="n1", log="/l")


@pytest.mark.parametrize("name", ["a", "7b", "a.b-c_d+e", "_x", "x" * 80])
def test_names_that_work(name: str, tmp_path: Path) -> None:
    assert RunFolder.named(tmp_path, name).path == tmp_path / name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "-x",
        ".x",
        "a b",
        "a\n",
        "a\nb",
        "$(id)",
        "a;b",
        "a'b",
        'a"b',
        "ラン",
        "x" * 81,
        "a\0",
    ],
)
def test_names_that_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RunNameError, match=r"run name .* does not work"):
        RunFolder.named(tmp_path, name)


@given(st.text())
def test_an_accepted_name_is_one_folder_below_the_runs_folder(name: str) -> None:
    try:
        check_run_name(name)
    except RunNameError:
        return
    assert RunFolder.named(Path("/runs"), name).path.parent == Path("/runs")
    assert name.isascii()
    assert name.isprintable()


def test_values_can_be_mended_until_a_job_was_submitted(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    start(folder, {"steps": 2})
    folder.job("convert", 1).mkdir(parents=True)
    start(folder, {"steps": 2})
    with pytest.raises(RecipeChanged):
        start(folder)


def test_a_second_start_keeps_the_uid_and_another_value_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    folder.job("convert", 1).mkdir(parents=True)
    uid = folder.uid
    start(folder)
    assert folder.uid == uid
    with pytest.raises(RecipeChanged, match=r"steps: .* → .*"):
        start(folder, {"steps": 2})
    assert folder.uid == uid
    start(folder)  # the refused start left nothing behind, no lease either


def test_a_folder_that_is_made_again_is_another_run(tmp_path: Path) -> None:
    first, second = RunFolder.named(tmp_path, "a"), RunFolder.named(tmp_path, "b")
    start(first)
    start(second)
    assert first.uid != second.uid


def test_a_record_stands_while_inputs_and_outputs_are_the_same(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    made = folder.path / "made"
    made.mkdir()
    (made / "a").write_bytes(b"123")
    folder.finish(record("convert", "k1", Output.of(made)))
    assert folder.finished("convert", "k1") == folder.record("convert")
    assert folder.finished("convert", "k2") is None
    assert folder.finished("train", "k1") is None
    (made / "a").write_bytes(b"12")
    assert folder.finished("convert", "k1") is None
    (made / "a").unlink()
    made.rmdir()
    assert folder.finished("convert", "k1") is None


def test_the_ledger_says_which_attempts_failed(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    assert folder.attempts("train") == ()
    for number in (1, 2, 10):
        folder.job("train", number).mkdir(parents=True)
    folder.job("train-x", 3).mkdir()
    assert folder.attempts("train") == (1, 2, 10)
    folder.end_attempt("train", note(1, "FAILED"), succeeded=False)
    folder.end_attempt("train", note(2, "COMPLETED"), succeeded=True)
    assert [folder.attempt_failed("train", n) for n in (1, 2, 10)] == [True, False, False]
    folder.end_attempt("train", note(2, "COMPLETED"), succeeded=False)
    assert folder.attempt_failed("train", 2)
    start(folder)
    assert folder.attempt_failed("train", 1)


def test_digests_do_not_depend_on_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    assert digest({"a": 1}) != digest({"a": 2})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "\0", '{"uid": "a"}'])
def test_a_damaged_run_is_refused_by_name_and_nothing_of_it_is_touched(text: str, tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    (folder.path / "run.json").write_text(text)
    for use in (lambda: start(folder), lambda: folder.uid, lambda: folder.attempt_failed("train", 1)):
        with pytest.raises(BrokenRun, match=r"run\.json is damaged"):
            use()
    assert (folder.path / "run.json").read_text() == text


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"stage": "convert"}', b"\xff\xfe\0", b'"convert"'])
def test_a_damaged_record_of_a_stage_is_none(damage: bytes, tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    folder.finish(record("convert", "k1"))
    (folder.path / "stages" / "convert.json").write_bytes(damage)
    assert folder.record("convert") is None
    assert folder.finished("convert", "k1") is None


def test_the_jobs_of_a_retired_record_are_not_used_again_and_others_are(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    old = record("convert", "k1")
    folder.end_attempt("convert", old.jobs[0], succeeded=True)
    folder.end_attempt("convert", note(2, "COMPLETED"), succeeded=True)
    folder.retire(old)
    folder.retire(old)
    assert [folder.attempt_failed("convert", n) for n in (1, 2)] == [True, False]


def test_a_shared_output_may_grow_and_may_not_shrink(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "a").write_bytes(b"123")
    own, shared = Output.of(cache), Output.of(cache, shared=True)
    (cache / "b").write_bytes(b"4")
    assert [own.still_there(), shared.still_there()] == [False, True]
    (cache / "a").unlink()
    assert not shared.still_there()


@pytest.mark.parametrize("runs", ["a\nb", "a\n", "a\\b", "a\x1b[31m", "a\x7f", "\udcff", "\t"])
def test_runs_folders_that_job_scripts_cannot_carry_are_refused_at_once(runs: str, tmp_path: Path) -> None:
    with pytest.raises(RunsFolderError, match="Use a folder without them"):
        RunFolder.named(tmp_path / runs, "r")


def test_a_runs_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (RunFolder.named(tmp_path / "file", "r"), RunFolder.named(tmp_path / "file" / "below", "r")):
        for use in (folder.check_place, lambda folder=folder: start(folder)):
            with pytest.raises(RunsFolderError, match="it is not a folder"):
                use()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_runs_folder_that_may_not_be_written_is_refused() -> None:
    with pytest.raises(RunsFolderError, match="you may not write there"):
        RunFolder.named(Path("/proc/runs"), "r").check_place()


def test_a_run_is_the_same_however_its_folder_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    written = [tmp_path / "runs", Path("../runs"), Path("./../runs/."), tmp_path / "x" / ".." / "runs"]
    assert {RunFolder.named(runs, "r").path for runs in written} == {tmp_path / "runs" / "r"}


def test_a_folder_deleted_at_work_says_so(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)
    shutil.rmtree(folder.path)
    for use in (lambda: folder.uid, lambda: folder.end_attempt("train", note(1, "FAILED"), succeeded=False)):
        with pytest.raises(LeaseLost, match="the run folder was deleted"):
            use()
    assert not folder.path.exists()


def test_a_source_may_change_until_a_job_has_worked_with_it(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    start(folder)

    def model(content: str, inputs: str = "k") -> StageRecord:
        return replace(record("model", inputs), jobs=(), facts={"digest": content})

    folder.finish(model("a"))
    folder.finish(model("b"))
    folder.job("convert", 1).mkdir(parents=True)
    folder.finish(model("b"))  # read again, for a file more in the folder
    with pytest.raises(SourceChanged, match=r"the model of run 'r' has changed .* Put that back"):
        folder.finish(model("a"))
    kept = folder.record("model")
    assert kept is not None
    assert kept.facts == {"digest": "b"}
    folder.finish(model("a", inputs="another place"))  # all that comes after it will be done again


def test_a_run_is_of_the_flow_run_that_worked_on_it_last(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    assert folder.is_of("anybody's")
    folder.start("", {}, lambda _: [], folder.contest(flow_run="first")).release()
    assert [folder.is_of("first"), folder.is_of("second")] == [True, False]
    folder.start("", {}, lambda _: [], folder.contest(flow_run="second"))
    assert [folder.is_of("first"), folder.is_of("second")] == [False, True]
