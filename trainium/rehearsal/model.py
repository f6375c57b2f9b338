"""The embedded default: a small random Llama with a tokenizer of its own, and a dataset that it can learn from.

Both depend on nothing but their arguments. The files are written by hand with transformers 4's spelling, as the models
people really start from are.
"""

import json
import random
from pathlib import Path
from typing import Any

from trainium.files import write_atomic, write_json

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_model(folder: Path, *, seed: int = 0, **sizes: Any) -> None:
    """Write a Llama with random bf16 weights that transformers loads.

    Args:
        sizes: keys of config.json to set otherwise than `SIZES`; vocab_size must be at least 259.
    """
    import torch
    from safetensors.torch import save_file

    from trainium.checkpoint.architecture import Architecture

    config = _config(SIZES | sizes)
    architecture = Architecture.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in architecture.tensor_shapes().items():
        if architecture.tied and name == "lm_head.weight":
            continue
        values = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 0.02
        weights[name] = values.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "transformers_version": "4.52.4",
        },
    )
    _write_tokenizer(folder, config["vocab_size"], config["max_position_embeddings"])


def write_dataset(folder: Path, *, rows: int = 512, validation_rows: int = 64, seed: int = 0) -> None:
    """Write train.jsonl and validation.jsonl: little sums in words, no question in both. At most 900 rows in all."""
    questions = [(first, second) for first in range(30) for second in range(30)]
    if rows + validation_rows > len(questions):
        raise ValueError(
            f"rows + validation_rows = {rows + validation_rows} is more than the {len(questions)} there are"
        )
    random.Random(seed).shuffle(questions)
    lines = [
        json.dumps({"input": f"What is {a} plus {b}?", "output": f"The sum of {a} and {b} is {a + b}."}) + "\n"
        for a, b in questions
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "train.jsonl", "".join(lines[:rows]))
    write_atomic(folder / "validation.jsonl", "".join(lines[rows : rows + validation_rows]))


def _config(sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": "llama",
        "pad_token_id": 0,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "use_cache": True,
        **sizes,
    }


def _write_tokenizer(folder: Path, vocab_size: int, longest: int) -> None:
    """One token per byte after the three special ones; the rest of the vocabulary is reserved, as in Llama 3's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = [PAD, BOS, EOS]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(special) + len(letters):
        raise ValueError(f"vocab_size={vocab_size} must be at least {len(special) + len(letters)}")
    reserved = [f"<reserved_{n}>" for n in range(vocab_size - len(special) - len(letters))]
    names = [*special, *letters, *reserved]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, 1)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*special, *reserved)])
    write_atomic(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    write_json(folder / "special_tokens_map.json", tokens)
    write_json(
        folder / "tokenizer_config.json",
        {
            **tokens,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "model_max_length": longest,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
