"""Which slice of which Hugging Face tensor goes where. Plain integers, so that every converter, check and
prediction reads the same table."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.layout import Layout
from trainium.text import some

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Shape = tuple[int, ...]

_QKV = re.compile(r"([qkv])_proj\.(weight|bias)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
# Parameters that look replicable but are not where the architecture does not have them: a whole copy per rank would be
# added once per rank, or not be used.
_FOREIGN = re.compile(
    r"(_proj\.bias|\.(q|k)_norm\.weight|\.(experts|block_sparse_moe)\..*|_proj\.weight_scale(_inv)?)$"
)


@dataclass(frozen=True)
class Cut:
    """A slice `start:stop` along `dim` of a source tensor; all of it where dim is None."""

    source: str
    dim: int | None = None
    start: int = 0
    stop: int = 0

    def shape(self, source: Shape) -> Shape:
        if self.dim is None:
            return source
        return (*source[: self.dim], self.stop - self.start, *source[self.dim + 1 :])


@dataclass(frozen=True)
class Target:
    """A tensor of one rank: the cuts one under another (along dim 0)."""

    name: str
    cuts: tuple[Cut, ...]

    def shape(self, sources: Mapping[str, Shape]) -> Shape:
        shapes = [cut.shape(sources[cut.source]) for cut in self.cuts]
        return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class Placement:
    """Where one cut of a source tensor lies: rows from `offset` on of tensor `target` of that rank."""

    tp_rank: int
    pp_rank: int
    target: str
    offset: int
    cut: Cut


def source_shapes(found: Mapping[str, Shape], arch: Architecture, where: str) -> dict[str, Shape]:
    """The tensors to convert, in the order in which the reference writes them (sorted by name).

    `found` must have all that the architecture needs, in those shapes; more is replicated. A missing output
    projection is allowed only where the embeddings are tied. Raises CheckpointError naming the tensors.
    """
    expected = arch.tensor_shapes()
    if arch.tied:
        found = {HEAD: expected[HEAD]} | dict(found)
    missing = [name for name in expected if name not in found]
    if missing:
        raise CheckpointError(f"{where} lacks {some(missing)}, which config.json says the model has")
    wrong = [f"{name} {list(found[name])}" for name, shape in expected.items() if found[name] != shape]
    if wrong:
        first = next(name for name, shape in expected.items() if found[name] != shape)
        raise CheckpointError(f"{where}: {some(wrong)}; config.json says {list(expected[first])} for {first}")
    refuse_foreign([name for name in found if name not in expected], arch, where)
    beyond = [name for name in found if (layer := layer_of(name)) is not None and layer >= arch.layers]
    if beyond:
        raise CheckpointError(f"{where} has {some(beyond)}, but config.json says num_hidden_layers={arch.layers}")
    return {name: tuple(found[name]) for name in sorted(found)}


def refuse_foreign(unknown: Iterable[str], arch: Architecture, where: str) -> None:
    """Raise CheckpointError for tensors that the architecture does not have and that must not be replicated."""
    foreign = [name for name in unknown if _FOREIGN.search(name)]
    if foreign:
        raise CheckpointError(f"{where} has {some(foreign)}, which model_type={arch.model_type} has no place for")


def layer_of(name: str) -> int | None:
    """The layer number in a tensor's name."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def rank_targets(
    sources: Mapping[str, Shape], arch: Architecture, layout: Layout, tp_rank: int, pp_rank: int, *, untie: bool = False
) -> list[Target]:
    """The tensors of one rank, in the order of the reference's files. `layout` is resolved.

    With `untie` the output projection is cut from the embedding.
    """
    ordered: list[Target] = []
    last: list[Target] = []  # the reference fuses q, k and v after all else
    for name in sources:
        if not _on_stage(name, arch, layout, pp_rank):
            continue
        for target in _targets(name, arch, layout, tp_rank):
            if untie and name == HEAD:
                target = Target(HEAD, tuple(Cut(EMBEDDING, cut.dim, cut.start, cut.stop) for cut in target.cuts))
            (last if layout.qkv in ("fused", "coalesced") and ".qkv_proj." in target.name else ordered).append(target)
    return ordered + last


def placements(sources: Mapping[str, Shape], arch: Architecture, layout: Layout) -> dict[str, list[Placement]]:
    """For every source tensor, where all its cuts are: the inverse of `rank_targets`."""
    found: dict[str, list[Placement]] = {name: [] for name in sources}
    for tp_rank, pp_rank in layout.ranks:
        for target in rank_targets(sources, arch, layout, tp_rank, pp_rank):
            offset = 0
            for cut in target.cuts:
                found[cut.source].append(Placement(tp_rank, pp_rank, target.name, offset, cut))
                offset += (cut.shape(sources[cut.source]) or (1,))[0]
    return found


def _on_stage(name: str, arch: Architecture, layout: Layout, pp_rank: int) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return layout.pipeline_rank(layer, arch.layers) == pp_rank
    if name == EMBEDDING:
        return pp_rank == 0
    if name in (HEAD, FINAL_NORM):
        return pp_rank == layout.pp - 1
    return True


def _targets(name: str, arch: Architecture, layout: Layout, tp_rank: int) -> Iterable[Target]:
    """What the source tensor `name` starts on a rank; partners (up, q, v of a fused tensor) ride along."""
    layer, _, kind = name.rpartition(".self_attn." if ".self_attn." in name else ".mlp.")
    if name in (EMBEDDING, HEAD):
        return [Target(name, (_even(name, 0, arch.vocab, layout.tp, tp_rank),))]
    if name.endswith(".mlp.gate_proj.weight"):
        rows = [
            _even(f"{layer}.mlp.{part}_proj.weight", 0, arch.intermediate, layout.tp, tp_rank)
            for part in ("gate", "up")
        ]
        return [Target(f"{layer}.mlp.gate_up_proj.weight", tuple(rows))]
    if name.endswith(".mlp.up_proj.weight"):
        return []
    if name.endswith(".mlp.down_proj.weight"):
        return [Target(name, (_even(name, 1, arch.intermediate, layout.tp, tp_rank),))]
    if name.endswith(".self_attn.o_proj.weight"):
        return [Target(name, (_heads(name, 1, layout.query_heads(arch, tp_rank), arch),))]
    if match := _QKV.fullmatch(kind):
        return _attention_targets(layer, match[1], match[2], arch, layout, tp_rank)
    return [Target(name, (Cut(name),))]


def _attention_targets(
    layer: str, part: str, kind: str, arch: Architecture, layout: Layout, tp_rank: int
) -> Iterable[Target]:
    """q, k or v (`part`), weight or bias (`kind`).

    Names and order of biases: NxD `modules/qkv_linear.py` (`bias_qkv`, `bias_q`, …) and, for the others, the `bias` of
    its ColumnParallelLinear; read, not run, since NxDT builds all of them without biases.
    """
    heads = {"q": layout.query_heads(arch, tp_rank)} | dict.fromkeys("kv", layout.kv_heads(arch, tp_rank))
    cuts = {key: _heads(f"{layer}.self_attn.{key}_proj.{kind}", 0, heads[key], arch) for key in "qkv"}
    if layout.qkv == "plain":
        return [Target(f"{layer}.self_attn.{part}_proj.{kind}", (cuts[part],))]
    if layout.qkv == "split":
        return [Target(f"{layer}.self_attn.qkv_proj.{kind}_{part}", (cuts[part],))]
    if part != "q":
        return []
    suffix = kind if layout.qkv == "coalesced" else f"{kind}_qkv"
    return [Target(f"{layer}.self_attn.qkv_proj.{suffix}", tuple(cuts.values()))]


def _even(name: str, dim: int, size: int, tp: int, tp_rank: int) -> Cut:
    part = size // tp
    return Cut(name, dim, tp_rank * part, (tp_rank + 1) * part)


def _heads(name: str, dim: int, heads: range, arch: Architecture) -> Cut:
    return Cut(name, dim, heads.start * arch.head_dim, heads.stop * arch.head_dim)
