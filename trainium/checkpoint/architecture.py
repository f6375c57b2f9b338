"""The sizes of a Llama-like model, and which models have its tensor layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainium.checkpoint.errors import ArchitectureError

# model_type → what a user must know although the tensors convert ("" when there is nothing).
KNOWN: Mapping[str, str] = {
    "llama": "",
    "mistral": "Mistral has the tensors of a Llama, but NxDT trains HF-style models as plain Llamas: "
    "without the sliding window, and so only correct where it is off or longer than the sequences.",
}

# Models that people try, and what the Llama layout has no place for.
REFUSED: Mapping[str, str] = {
    "qwen2": "its q, k and v projections have biases",
    "qwen3": "it normalizes queries and keys (q_norm, k_norm)",
    "gemma": "its norms and embeddings are scaled differently",
    "gemma2": "it has four norms per layer and soft-capped logits",
    "gemma3": "it has four norms per layer and normalizes queries and keys",
    "gemma3_text": "it has four norms per layer and normalizes queries and keys",
    "mixtral": "it has experts instead of one feed-forward block; use the upstream engine for it",
    "phi3": "its checkpoint stores q, k, v and gate, up as single tensors",
    "smollm3": "some of its layers have no rotary embedding",
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes of a Llama-like model; `tied`: the output projection is the embedding."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
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
                raise ArchitectureError(f"config.json: {key} is true, but NxDT's Llama has no biases to put them in")
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
            model_type=model_type,
        )

    @property
    def multi_head(self) -> bool:
        """Every query head has a key/value head of its own."""
        return self.heads == self.kv_heads

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should hear about training this model, although its tensors convert exactly."""
        notes = [KNOWN.get(self.model_type, "")]
        if self.head_dim * self.heads != self.hidden:
            notes.append(
                f"head_dim={self.head_dim} is not hidden_size / num_attention_heads: the tensors convert, "
                "but NxDT computes head_dim from those two and cannot train this model."
            )
        return tuple(note for note in notes if note)

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
