"""The other engine: NxDT's own converter both ways, its output proved by this project."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors import safe_open

from blocks import LocalCluster
from flows.finetune import finetune
from slurm.folder import JobFolder
from trainium.config.overrides import RecipeOverrides
from trainium.rehearsal.model import write_model
from trainium.run.folder import RunFolder
from trainium.run.lease import Standing
from trainium.run.records import StageRecord

HOSTILE = """it's a "$(folder)"; of `runs`, all=1"""


@dataclass(frozen=True)
class Tuned:
    base: Path
    folder: RunFolder

    def record(self, stage: str) -> StageRecord:
        record = self.folder.record(stage)
        assert record is not None, f"{stage} left no record"
        return record

    def job(self, name: str) -> JobFolder:
        return JobFolder(self.folder.job(name, 1))


@pytest.fixture(scope="module")
def tuned(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """As in the tutorial a core has one query head, and each key/value head is there in several copies."""
    root = tmp_path_factory.mktemp("engines") / HOSTILE
    base, runs = root / "a model", root / "runs"
    write_model(base, num_attention_heads=4, num_key_value_heads=2)
    overrides = RecipeOverrides.model_validate(
        {
            "model": {
                "source": str(base),
                "expected": {"layers": 4, "hidden_size": 128, "heads": 4, "kv_heads": 2},
            },
            "parallelism": {"tensor": 4, "kv_replicator": 2},
            "convert": {"engine": "nxdt"},
            "training": {"max_steps": 4, "checkpoint_every": 2, "warmup_steps": 1, "log_every": 1},
            "evaluate": {"rows": 4, "samples": 1, "max_new_tokens": 4},
        }
    )
    asyncio.run(finetune("rehearsal", overrides=overrides, run_name="nxdt", cluster=LocalCluster(runs=runs)))
    return Tuned(base, RunFolder.named(runs, "nxdt"))


def test_conversion_is_prepared_done_by_the_converter_and_verified_by_us(tuned: Tuned) -> None:
    record = tuned.record("convert")
    ids = {}
    for name in ("convert-prepare", "convert", "convert-verify"):
        ended = tuned.job(name).read_exit()
        assert ended is not None
        assert ended.code == 0
        ids[name] = ended.job_id
    assert [job.id for job in record.jobs] == list(ids.values())
    assert record.facts["verification"]["ok"] is True
    assert record.verified[0].startswith("4 shards, ")
    log = tuned.job("convert").log.read_text()
    assert "rehearsal" in log.lower()  # the toolchain's converter, not ours
    assert "Saving to " in log
    assert not (tuned.folder.path / "base-single-file" / "checkpoint.pt").exists()


def test_the_converter_needs_no_terminal_and_no_token(tuned: Tuned) -> None:
    for name in ("convert", "export-merge"):
        script = tuned.job(name).script.read_text()
        assert "HF_HUB_OFFLINE=1" in script
        assert "hf_model_name" not in script


def test_the_export_is_what_the_converter_merged_and_verified(tuned: Tuned) -> None:
    record = tuned.record("export")
    merge, described = tuned.job("export-merge").read_exit(), tuned.job("export").read_exit()
    assert merge is not None
    assert described is not None
    assert [job.id for job in record.jobs] == [merge.job_id, described.job_id]
    assert "Saving full checkpoint to " in tuned.job("export-merge").log.read_text()
    results = {row["check"]: row["result"] for row in record.table}
    assert set(results.values()) == {"passed"}
    assert "copies across ranks" in results
    assert any("is its slice of the merged model" in line for line in record.verified)
    assert not (tuned.folder.path / "export-single-file" / "checkpoint.pt").exists()


def test_the_whole_chain_holds_with_such_paths(tuned: Tuned) -> None:
    losses = tuned.record("train").facts["losses"]
    assert len(losses) == 4
    assert tuned.record("train").facts["step"] == 4
    assert tuned.record("evaluate").verified
    export = tuned.folder.path / "export"
    with (
        safe_open(tuned.base / "model.safetensors", "pt") as before,
        safe_open(export / "model.safetensors", "pt") as after,
    ):
        assert sorted(after.keys()) == sorted(before.keys())
    assert (export / "config.json").read_bytes() == (tuned.base / "config.json").read_bytes()
    assert tuned.folder.contest().look().standing is Standing.FREE
