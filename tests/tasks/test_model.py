"""Where the model stage looks for a base model."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from blocks import LocalCluster, NeuronToolchain
from tasks.context import Run
from tasks.jobspecs import Site
from tasks.model import fetch_model
from trainium.config.recipe import load_recipe
from trainium.errors import TransientError
from trainium.run.folder import RunFolder


async def test_without_a_hub_block_the_hub_is_the_one_of_hf_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # HF_ENDPOINT, read when the library was imported
    folder = RunFolder.named(tmp_path, "r")
    lease = folder.start("", {}, lambda _: [])
    recipe = load_recipe("rehearsal", ["model.source=lab/tiny"])
    run = Run(Site(recipe, folder, LocalCluster(runs=tmp_path), NeuronToolchain.stand_in()), lease)
    with pytest.raises(TransientError, match=r"lab/tiny: no connection to http://127\.0\.0\.1:9 "):
        await fetch_model.fn(run)
