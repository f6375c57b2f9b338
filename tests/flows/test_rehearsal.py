"""What a newcomer does first: the rehearsal through the command, from nothing to a model that has learned."""

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm.folder import JobFolder
from tasks.stage import STAGES
from trainium.run.folder import RunFolder
from trainium.run.lease import Standing

TRAINIUM = Path(sys.executable).with_name("trainium")


@dataclass(frozen=True)
class Rehearsed:
    folder: RunFolder
    first: "subprocess.CompletedProcess[str]"
    second: "subprocess.CompletedProcess[str]"
    jobs_after_first: frozenset[str]


def rehearse(runs: Path) -> "subprocess.CompletedProcess[str]":
    """Without a server: the command starts Prefect's ephemeral one by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    command = [str(TRAINIUM), "rehearse", "--run", "r", "--runs", str(runs)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def jobs(folder: RunFolder) -> frozenset[str]:
    return frozenset(path.parent.name for path in folder.jobs.glob("*/job.json"))


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    """The whole rehearsal, and the same command once more."""
    runs = tmp_path_factory.mktemp("it's a runs folder")
    folder = RunFolder.named(runs, "r")
    first = rehearse(runs)
    after_first = jobs(folder)
    return Rehearsed(folder, first, rehearse(runs), after_first)


def test_it_ends_well_and_says_where_things_are(rehearsed: Rehearsed) -> None:
    assert rehearsed.first.returncode == 0, rehearsed.first.stdout + rehearsed.first.stderr
    lines = rehearsed.first.stdout.splitlines()
    assert lines[-2] == f"Report: {rehearsed.folder.report}"
    assert lines[-1] == f"Model:  {rehearsed.folder.path / 'export'}"
    assert [line.split()[1] for line in lines if line.startswith("✓")] == list(STAGES)
    assert rehearsed.first.stderr == ""
    assert len(lines) < 60  # progress, not a wall of log lines


def test_the_second_time_submits_nothing(rehearsed: Rehearsed) -> None:
    assert rehearsed.second.returncode == 0, rehearsed.second.stdout + rehearsed.second.stderr
    assert jobs(rehearsed.folder) == rehearsed.jobs_after_first
    finished = [line for line in rehearsed.second.stdout.splitlines() if line.startswith("✓")]
    assert len(finished) == len(STAGES)
    assert all("done before" in line for line in finished)


def test_every_stage_has_a_record_with_what_it_proved(rehearsed: Rehearsed) -> None:
    for stage in STAGES:
        record = rehearsed.folder.record(stage)
        assert record is not None
        assert record.verified
        assert record.skippable
        for note in record.jobs:
            ended = JobFolder(rehearsed.folder.job(stage, note.attempt)).read_exit()
            assert ended is not None
            assert (ended.job_id, ended.code) == (note.id, 0)


def test_the_report_has_every_stage_job_and_proof(rehearsed: Rehearsed) -> None:
    text = rehearsed.folder.report.read_text()
    assert "This was a rehearsal" in text
    for stage in STAGES:
        record = rehearsed.folder.record(stage)
        assert record is not None
        row = next(line for line in text.splitlines() if line.startswith(f"| {stage} |"))
        assert all(note.id in row for note in record.jobs)
        assert " s |" in row
    assert "data:image/png;base64," in text


def test_the_export_loads_generates_and_has_learned(rehearsed: Rehearsed) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    export, base = rehearsed.folder.path / "export", rehearsed.folder.path / "base"
    tokenizer = AutoTokenizer.from_pretrained(export)
    tuned = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    inputs = tokenizer("What is 3 plus 4?", return_tensors="pt")
    generated = tuned.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert generated.shape[1] > inputs["input_ids"].shape[1]

    rows = [json.loads(line) for line in (rehearsed.folder.path / "data" / "validation.jsonl").read_text().splitlines()]

    def held_out_loss(model: torch.nn.Module) -> float:
        losses = []
        for row in rows[:16]:
            prompt = [tokenizer.bos_token_id, *tokenizer.encode(row["input"], add_special_tokens=False)]
            answer = [*tokenizer.encode(row["output"], add_special_tokens=False), tokenizer.eos_token_id]
            ids = torch.tensor([prompt + answer])
            labels = torch.tensor([[-100] * len(prompt) + answer])
            with torch.no_grad():
                losses.append(float(model(input_ids=ids, labels=labels).loss))
        return math.fsum(losses) / len(losses)

    before = held_out_loss(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    after = held_out_loss(tuned)
    assert after < 0.7 * before


def test_nothing_is_left_running_or_held(rehearsed: Rehearsed) -> None:
    assert rehearsed.folder.contest().look().standing is Standing.FREE
    here = str(rehearsed.folder.path)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert here not in process.read_bytes().decode(errors="replace")
        except OSError:
            continue  # it has just ended
