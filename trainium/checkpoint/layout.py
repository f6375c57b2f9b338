"""How a model is spread over tensor-parallel and pipeline ranks. Plain integers; no torch.

Rules and orders: the NxD 2.29 converter and trainer, measured (`tests/golden/`). One deviation: on trn2 with
replicated key/value heads the reference converter repeats them as on trn1, whereas the model there shares gradients
between adjacent ranks (NxD `parallel_state.arrange_kv_groups`); here adjacent ranks hold copies of the same head and
exactly the query heads that need it.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import LayoutError

Qkv = Literal["auto", "fused", "split", "coalesced", "plain"]
InstanceFamily = Literal["trn1", "trn2"]

BYTES_PER_RECORD = 350  # zip headers, padding and pickle of one tensor in a .pt file


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallel layout.

    tp, pp: tensor and pipeline parallel degree. kv_replicator: copies of each key/value head (KV_REPLICATOR).
    qkv: how q, k and v are stored: `fused` (`weight_qkv`), `split` (`weight_q`, …), `coalesced`
    (`qkv_proj.weight`, multi-head attention), `plain` (`q_proj.weight`, …), `auto` (see `resolve`).
    virtual_pp: pipeline stages per pipeline rank.
    """

    tp: int
    pp: int = 1
    kv_replicator: int = 1
    qkv: Qkv = "auto"
    virtual_pp: int = 1
    instance_family: InstanceFamily = "trn1"

    def __post_init__(self) -> None:
        for key in ("tp", "pp", "kv_replicator", "virtual_pp"):
            value: Any = getattr(self, key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{key}={value!r} must be a whole number of at least 1")
        for key, choices in (("qkv", get_args(Qkv)), ("instance_family", get_args(InstanceFamily))):
            if getattr(self, key) not in choices:
                raise LayoutError(f"{key}={getattr(self, key)!r} must be one of {', '.join(choices)}")

    @property
    def shard_count(self) -> int:
        """Files of one checkpoint, one per (tp, pp) rank."""
        return self.tp * self.pp

    @property
    def ranks(self) -> tuple[tuple[int, int], ...]:
        """All (tp rank, pp rank), tp first."""
        return tuple((tp, pp) for pp in range(self.pp) for tp in range(self.tp))

    def resolve(self, arch: Architecture) -> "Layout":
        """The same layout without `auto`: what the trainer's defaults make of this attention."""
        if self.qkv != "auto":
            return self
        return replace(self, qkv="coalesced" if arch.multi_head else "fused")

    def check(self, arch: Architecture) -> None:
        """Raise one LayoutError that lists everything about this layout that does not fit the model."""
        problems = [*self._head_problems(arch), *self._size_problems(arch)]
        if problems:
            raise LayoutError("\n".join([*problems, self._advice(arch)]))

    def pipeline_rank(self, layer: int, layers: int) -> int:
        """The pp rank that holds a layer: equal stages, and the last stages take one more where it does not divide."""
        stages = self.pp * self.virtual_pp
        size, remainder = divmod(layers, stages)
        small = (stages - remainder) * size
        stage = layer // size if layer < small else stages - remainder + (layer - small) // (size + 1)
        return stage % self.pp

    def query_heads(self, arch: Architecture, tp_rank: int) -> range:
        """The query heads of the model that this rank computes."""
        count = arch.heads // self.tp
        if self._interleaved:
            start = ((tp_rank % arch.kv_heads) * (self.tp // arch.kv_heads) + tp_rank // arch.kv_heads) * count
        else:
            start = tp_rank * count
        return range(start, start + count)

    def kv_heads(self, arch: Architecture, tp_rank: int) -> range:
        """The key/value heads of the model that this rank holds: those its query heads attend with."""
        if self._interleaved:
            start, count = tp_rank % arch.kv_heads, 1
        elif self.kv_replicator > 1:
            start, count = tp_rank // self.kv_replicator, 1
        else:
            count = arch.kv_heads // self.tp
            start = tp_rank * count
        return range(start, start + count)

    def predicted_bytes(self, arch: Architecture, dtype_bytes: int) -> int:
        """Size of all shard files together, inline form, exact to about 0.01% for models of real size."""
        layout = self.resolve(arch)
        queries = arch.heads * arch.head_dim // layout.tp
        keys = arch.kv_heads * arch.head_dim * layout.kv_replicator // layout.tp
        attention = (2 * queries + 2 * keys) * arch.hidden
        feed_forward = 3 * arch.intermediate // layout.tp * arch.hidden
        ends = arch.hidden + 2 * (arch.vocab // layout.tp) * arch.hidden
        biases = (queries + 2 * keys) * arch.qkv_bias
        norms = 2 * arch.hidden + 2 * arch.head_dim * arch.qk_norm
        elements = arch.layers * (attention + biases + feed_forward + norms) + ends
        together = layout.qkv in ("fused", "coalesced")
        records = arch.layers * (5 + (1 if together else 3) * (1 + arch.qkv_bias) + 2 * arch.qk_norm) + 3
        return layout.tp * (elements * dtype_bytes + records * BYTES_PER_RECORD)

    @property
    def _interleaved(self) -> bool:
        """trn1 tiles replicated heads K0..Kn, K0..Kn, …: neighbours hold different heads."""
        return self.instance_family == "trn1" and self.kv_replicator > 1

    def _head_problems(self, arch: Architecture) -> list[str]:
        """Why q, k and v cannot be divided like this. The rank-local attention of every other layout is right."""
        layout, problems = self.resolve(arch), []
        if arch.heads % layout.tp:
            problems.append(f"tp={layout.tp} must divide num_attention_heads={arch.heads}")
        copies = f"num_key_value_heads={arch.kv_heads} × kv_replicator={layout.kv_replicator}"
        if layout.qkv == "coalesced" and not arch.multi_head:
            problems.append(
                f"qkv=coalesced is for multi-head attention; this model has {arch.heads} query and {arch.kv_heads} "
                "key/value heads: use fused or split"
            )
        elif layout.qkv in ("coalesced", "plain"):
            if layout.kv_replicator > 1:
                problems.append(f"kv_replicator={layout.kv_replicator} must be 1 with qkv={layout.qkv}")
            if arch.kv_heads % layout.tp:
                problems.append(f"tp={layout.tp} must divide num_key_value_heads={arch.kv_heads} with qkv={layout.qkv}")
        elif layout.instance_family == "trn1" or layout.kv_replicator > 1:
            if arch.kv_heads * layout.kv_replicator != layout.tp:
                problems.append(f"{copies} must equal tp={layout.tp} (one key/value head per rank)")
        elif arch.kv_heads % layout.tp:
            problems.append(f"tp={layout.tp} must divide {copies}")
        return problems

    def _size_problems(self, arch: Architecture) -> list[str]:
        problems = [
            f"tp={self.tp} must divide {key}={value}"
            for key, value in (("intermediate_size", arch.intermediate), ("vocab_size", arch.vocab))
            if value % self.tp
        ]
        stages = self.pp * self.virtual_pp
        if stages > arch.layers:
            problems.append(
                f"pp={self.pp} × virtual_pp={self.virtual_pp} needs at least {stages} layers; "
                f"num_hidden_layers={arch.layers}"
            )
        return problems

    def _advice(self, arch: Architecture) -> str:
        """Every (tp, kv_replicator) that would do for this model, so that nobody has to guess."""
        pairs = []
        for tp in range(1, arch.heads + 1):
            for copies in sorted({1, max(1, tp // arch.kv_heads)}):
                other = replace(self, tp=tp, pp=1, virtual_pp=1, kv_replicator=copies)
                if not other._head_problems(arch) and not other._size_problems(arch):
                    pairs.append(f"tp={tp} kv_replicator={copies}")
        kind = f"qkv={self.resolve(arch).qkv} on {self.instance_family}"
        return f"With {kind} this model works with: {'; '.join(pairs) or 'no tp at all'}; pp up to {arch.layers}"
