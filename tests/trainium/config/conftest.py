from pathlib import Path
from typing import Any

import pytest

from trainium.config.recipe import load_recipe
from trainium.config.schema import Recipe

TANUKI: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65024,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def tanuki_config() -> dict[str, Any]:
    """A config.json of the tutorial model's shape (its sizes follow from the tutorial's heads and 14 GB)."""
    return dict(TANUKI)


@pytest.fixture
def tanuki() -> Recipe:
    return load_recipe("tanuki-8b-sft")


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Overrides that name a model and a dataset folder which exist."""
    model, data = tmp_path / "model", tmp_path / "data"
    model.mkdir()
    data.mkdir()
    (model / "config.json").write_text("{}")
    for name in ("train.jsonl", "validation.jsonl"):
        (data / name).write_text("")
    return [f"model.source={model}", f"dataset.source={data}"]
