"""A small hub for the tests, and a model to put into it."""

import json
import struct
from collections.abc import Iterator

import pytest

from tests.hub_server import Hub, serving


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # No token of whoever runs the tests.
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    with serving() as hub:
        yield hub


@pytest.fixture(name="model_files")
def _model_files() -> dict[str, bytes]:
    return model_files()


def safetensors(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> bytes:
    """A safetensors file of (dtype, shape, bytes)."""
    header, end = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(content)]}
        end += len(content)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(content for _, _, content in tensors.values())


def model_files() -> dict[str, bytes]:
    """A whole, sharded model folder."""
    first = safetensors({"model.embed_tokens.weight": ("F32", (4, 2), bytes(range(32)))})
    second = safetensors(
        {"lm_head.weight": ("BF16", (4, 2), bytes(range(16))), "model.norm.weight": ("F32", (2,), bytes(8))}
    )
    index = {
        "metadata": {"total_size": 56},
        "weight_map": {
            "model.embed_tokens.weight": "model-00001-of-00002.safetensors",
            "lm_head.weight": "model-00002-of-00002.safetensors",
            "model.norm.weight": "model-00002-of-00002.safetensors",
        },
    }
    return {
        "config.json": b'{"model_type": "llama", "vocab_size": 4}',
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00002.safetensors": first,
        "model-00002-of-00002.safetensors": second,
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
    }
