"""Models of random numbers in the sizes that are measured."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.huggingface import SafetensorsImage
from trainium.checkpoint.image import write_image
from trainium.checkpoint.weights import TensorInfo, flat_bytes

# name → hidden size, layers, intermediate size; 32 query and 8 key/value heads, bf16.
SIZES = {
    "0.5B": (1536, 12, 6144),
    "1.1B": (2048, 16, 8192),
    "2B": (2560, 20, 10240),
    "4B": (3072, 28, 12288),
}
LAYOUT = ("--tp", "32", "--kv-replicator", "4")
TP, KV_REPLICATOR = 32, 4


def config(name: str) -> dict[str, Any]:
    """config.json."""
    hidden, layers, intermediate = SIZES[name]
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def make(name: str, folder: Path, seed: int = 0) -> Path:
    """A Hugging Face folder with one safetensors file. Left alone when it is there."""
    path = folder / "model.safetensors"
    info = {n: TensorInfo("bfloat16", s) for n, s in Architecture.from_config(config(name)).tensor_shapes().items()}
    image = SafetensorsImage(info)
    if not path.exists() or path.stat().st_size != image.size:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config(name)))
        write_image(path, image, _numbers(info.values(), np.random.default_rng(seed)))
    return folder


def _numbers(infos: Any, generator: np.random.Generator) -> Iterator[memoryview]:
    for info in infos:
        bits = np.frombuffer(generator.bytes(info.bytes), np.uint16) & np.uint16(
            0xBFFF
        )  # finite: no exponent of all ones
        yield flat_bytes(bits)
