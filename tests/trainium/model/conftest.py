"""A tiny Llama with a tokenizer, built without transformers so that it costs milliseconds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE = 2, 32, 4, 2, 48
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = [*SPECIAL, "Hello", "one", "two", "three", "four", "five", "six", "plus", "is", "what", "?", ".", "the"]


def tiny_state(*, tied: bool, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by name, Llama's names and shapes."""
    torch.manual_seed(seed)
    head = HIDDEN // HEADS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(WORDS), HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * head, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * head, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * head),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    shapes["model.norm.weight"] = (HIDDEN,)
    if not tied:
        shapes["lm_head.weight"] = (len(WORDS), HIDDEN)
    return {
        name: (torch.ones(shape) if "norm" in name else torch.randn(shape) * 0.2).to(dtype)
        for name, shape in shapes.items()
    }


def write_base(folder: Path, *, tied: bool = False, seed: int = 0, **config: Any) -> Path:
    """A base model folder as the Hub delivers it."""
    folder.mkdir(parents=True)
    save_file(tiny_state(tied=tied, seed=seed), folder / "model.safetensors", metadata={"format": "pt"})
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": len(WORDS),
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 64,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "_note": "größer",
    }
    (folder / "config.json").write_text(json.dumps(values | config, indent=4))
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, "model_max_length": 64}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": 2}))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\nlanguage:\n- ja\n---\n# Base\n")
    return folder


@pytest.fixture(scope="session")
def tied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("tied") / "base", tied=True)


@pytest.fixture(scope="session")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("untied") / "base")
