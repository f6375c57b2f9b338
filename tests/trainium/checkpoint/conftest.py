"""Small Llamas with random weights, and the golden checkpoints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trainium.checkpoint.architecture import Architecture

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def golden() -> Path:
    """What the reference converter wrote; see its README.md."""
    return Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="session")
def config() -> dict[str, Any]:
    """The config.json of the model that `make_model` makes."""
    return dict(CONFIG)


@pytest.fixture(scope="session")
def random_state() -> Callable[..., dict[str, Tensor]]:
    """Random weights of an architecture; no lm_head where embeddings are tied; `extra` adds rotary buffers."""

    def make(
        arch: Architecture, dtype: torch.dtype = torch.bfloat16, *, seed: int = 0, extra: bool = False
    ) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        state = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in arch.tensor_shapes().items()
            if not (arch.tied and name == "lm_head.weight")
        }
        if extra:
            layers = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(arch.layers)]
            for name in ("model.rotary_emb.inv_freq", *layers):
                state[name] = torch.randn(arch.head_dim, generator=generator)
        return state

    return make


@pytest.fixture
def make_model(tmp_path: Path, random_state: Callable[..., dict[str, Tensor]]) -> Callable[..., Path]:
    """A Hugging Face folder with random weights; keyword arguments change the config."""

    def make(name: str = "hf", dtype: torch.dtype = torch.bfloat16, extra: bool = False, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        merged = CONFIG | changes
        (folder / "config.json").write_text(json.dumps(merged))
        save_file(random_state(Architecture.from_config(merged), dtype, extra=extra), folder / "model.safetensors")
        return folder

    return make
