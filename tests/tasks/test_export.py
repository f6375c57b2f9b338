"""What the export stage tells the model card."""

from pathlib import Path
from typing import Any

import pytest

from blocks import LocalCluster, NeuronToolchain
from tasks.context import Run
from tasks.export import export
from tasks.jobspecs import Site
from trainium.config.recipe import load_recipe
from trainium.errors import StageFailed
from trainium.files import read_json, write_json
from trainium.run.folder import RunFolder
from trainium.run.records import StageRecord


async def test_the_card_is_given_what_the_stages_before_found(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    lease = folder.start("", {}, lambda _: [])
    facts: dict[str, dict[str, Any]] = {
        "model": {"commit": "0123abcd"},
        "dataset": {"rows": 512},
        "train": {"checkpoint": str(tmp_path / "x.ckpt"), "losses": [[0, 5.8], [49, 0.7]]},
    }
    for stage, found in facts.items():
        folder.finish(StageRecord(stage=stage, inputs="", started="", ended="", seconds=1, facts=found))
    write_json(folder.toolchain, {"versions": {"neuronx-cc": "2.21", "torch-neuronx": None}})
    cluster = LocalCluster(runs=tmp_path, python=Path("/bin/true"))
    run = Run(Site(load_recipe("rehearsal"), folder, cluster, NeuronToolchain.stand_in()), lease)
    with pytest.raises(StageFailed, match=r"result\.json is missing"):  # this interpreter exports nothing
        await export.fn(run)
    card = read_json(folder.job("export", 1) / "model-card.json")
    assert (card["base_revision"], card["rows"], card["final_loss"]) == ("0123abcd", 512, 0.7)
    assert card["toolchain"] == {"neuronx-cc": "2.21"}
