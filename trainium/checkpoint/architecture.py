"""The sizes of a Llama-like model, which models can be converted, and which of those NxDT can train."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainium.checkpoint.errors import ArchitectureError


@dataclass(frozen=True)
class Family:
    """A model_type whose tensors convert exactly.

    note: what a user must know about training it. untrainable: why NxDT cannot train it at all ("" when it can).
    NxDT builds every HF-style model that is not a Mixtral as its Llama (`models/hf_models/modeling_llama.py`, read,
    not run): projections without biases, no normalization of queries and keys.
    """

    note: str = ""
    untrainable: str = ""
    qkv_bias: bool = False
    qk_norm: bool = False


KNOWN: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(
        note="Mistral has the tensors of a Llama, but NxDT trains HF-style models as plain Llamas: "
        "without the sliding window, and so only correct where it is off or longer than the sequences."
    ),
    "qwen2": Family(
        untrainable="Qwen2's q, k and v projections have biases; NxDT's Llama has none and would train another model",
        qkv_bias=True,
    ),
    "qwen3": Family(
        untrainable="Qwen3 normalizes queries and keys (q_norm, k_norm); NxDT's Llama does not and would train another "
        "model",
        qk_norm=True,
    ),
}

# Models that people try, and what the Llama layout has no place for.
REFUSED: Mapping[str, str] = {
    "qwen2_moe": "it has experts instead of one feed-forward block",
    "qwen3_moe": "it has experts instead of one feed-forward block",
    "gemma": "its norms and embeddings are scaled differently",
    "gemma2": "it has four norms per layer and soft-capped logits",
    "gemma3": "it has four norms per layer and normalizes queries and keys",
    "gemma3_text": "it has four norms per layer and normalizes queries and keys",
    "mixtral": "it has experts, and nobody could check here how NxDT stacks them; `trainium convert` hands it to the "
    "upstream engine, NxDT's examples/checkpoint_converter_scripts/hf_nxdt_mixtral_ckpt_converter.py",
    "phi3": "its checkpoint stores q, k, v and gate, up as single tensors",
    "smollm3": "some of its layers have no rotary embedding",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a Llama-like model.

    tied: the output projection is the embedding. qkv_bias: q, k and v have biases, o has none (Qwen2). qk_norm: one
    norm of head_dim numbers for all query heads of a layer, and one for its key heads (Qwen3).
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    model_type: str = "llama"

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Architecture":
        """Read a Hugging Face config.json, as transformers 4 or 5 writes it.

        Raises ArchitectureError when a size is missing or impossible, and when the Llama layout has no place for
        something the config says the model has.
        """
        model_type = _known_type(config)
        for key in ("attention_bias", "mlp_bias"):
            if config.get(key):
                raise ArchitectureError(
                    f"config.json: {key} is true, but NxD's Llama layout has no place for these biases"
                )
        if config.get("quantization_config"):
            raise ArchitectureError(
                "config.json: quantization_config is set; convert the unquantized weights, "
                "or dequantize them, save them and drop that key"
            )
        hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        kv_heads = _size(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ArchitectureError(
                f"config.json: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
            )
        if config.get("head_dim") is None and hidden % heads:
            raise ArchitectureError(
                f"config.json: hidden_size={hidden} is no multiple of num_attention_heads={heads}, "
                "and there is no head_dim"
            )
        return cls(
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_size(config, "head_dim", hidden // heads),
            intermediate=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=KNOWN[model_type].qkv_bias,
            qk_norm=KNOWN[model_type].qk_norm,
            model_type=model_type,
        )

    @property
    def multi_head(self) -> bool:
        """Every query head has a key/value head of its own."""
        return self.heads == self.kv_heads

    @property
    def untrainable(self) -> dict[str, str]:
        """Why NxDT cannot train this model although its tensors convert exactly, by what it is about."""
        reasons = {"model-family": KNOWN[self.model_type].untrainable}
        if self.head_dim * self.heads != self.hidden:
            reasons["head-dim"] = (
                f"config.json has head_dim={self.head_dim}; NxDT computes hidden_size / num_attention_heads = "
                f"{self.hidden / self.heads:g} and would train another model"
            )
        return {about: reason for about, reason in reasons.items() if reason}

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should hear about training this model, although its tensors convert exactly."""
        note = KNOWN[self.model_type].note
        reasons = [f"The tensors convert, but NxDT cannot train this model: {r}." for r in self.untrainable.values()]
        return (*([note] if note else []), *reasons)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face name → shape of every tensor such a model must have, `lm_head.weight` included."""
        shapes: dict[str, tuple[int, ...]] = {
            "lm_head.weight": (self.vocab, self.hidden),
            "model.embed_tokens.weight": (self.vocab, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                f"{prefix}input_layernorm.weight": (self.hidden,),
                f"{prefix}mlp.down_proj.weight": (self.hidden, self.intermediate),
                f"{prefix}mlp.gate_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}mlp.up_proj.weight": (self.intermediate, self.hidden),
                f"{prefix}post_attention_layernorm.weight": (self.hidden,),
                f"{prefix}self_attn.k_proj.weight": (keys, self.hidden),
                f"{prefix}self_attn.o_proj.weight": (self.hidden, queries),
                f"{prefix}self_attn.q_proj.weight": (queries, self.hidden),
                f"{prefix}self_attn.v_proj.weight": (keys, self.hidden),
            }
            if self.qkv_bias:
                rows = {"q": queries, "k": keys, "v": keys}
                shapes |= {f"{prefix}self_attn.{part}_proj.bias": (rows[part],) for part in "qkv"}
            if self.qk_norm:
                shapes |= {f"{prefix}self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        return shapes


def _known_type(config: Mapping[str, Any]) -> str:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in KNOWN:
        return model_type
    reason = REFUSED.get(str(model_type), "nobody has checked that its tensors are those of a Llama")
    raise ArchitectureError(
        f"config.json: model_type={model_type!r} cannot be converted: {reason}. Known: {', '.join(KNOWN)}"
    )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ArchitectureError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArchitectureError(f"config.json: {key}={value!r} must be a positive whole number")
    return value
