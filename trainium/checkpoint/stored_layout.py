"""The parallel layout of a checkpoint, as its files tell it. No torch."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError, LayoutError
from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.checkpoint.paths import ShardFiles, find_shards, model_folder
from trainium.checkpoint.placement import layer_of
from trainium.checkpoint.readahead import read_ends_ahead
from trainium.checkpoint.shards import open_shard
from trainium.checkpoint.weights import Weights
from trainium.text import some

Read = Callable[[int, int], Weights]  # by tp rank and pp rank
_LOOKED_AT = 1 << 16  # bytes at both ends of a shard, where its structure is
_OPEN_FILES = 400  # a process may have 1024, and a shard can have one of its tensors open

# How q, k and v are stored → the end of the name by which it is known, longer names first.
QKV_MARKS: Mapping[Qkv, str] = {
    "fused": ".qkv_proj.weight_qkv",
    "split": ".qkv_proj.weight_q",
    "coalesced": ".qkv_proj.weight",
    "plain": ".q_proj.weight",
}


@dataclass(frozen=True, kw_only=True)
class GivenLayout:
    """What the user says about a checkpoint's layout; None: as the files have it."""

    tp: int | None = None
    pp: int | None = None
    kv_replicator: int | None = None
    virtual_pp: int | None = None
    qkv: Qkv = "auto"
    instance_family: InstanceFamily | None = None


def read_layout(
    checkpoint: Path,
    arch: Architecture,
    given: GivenLayout = GivenLayout(),
    *,
    read: Read | None = None,
    headers_only: bool = False,
) -> Layout:
    """The layout of a checkpoint of this model: degrees from file names, the rest from names and shapes in them.

    trn1 and trn2 differ only in which ranks hold copies of a key head, so the first layer whose key heads differ tells.
    read: a reader of the ranks, where one is open already. headers_only: look at no weights, and take trn1 for granted
    where only they tell. Raises LayoutError naming what differs from `given` or must be given, CheckpointError when the
    files are not those of such a model.
    """
    shards = find_shards(model_folder(checkpoint))
    if shards.missing:
        raise CheckpointError(f"{shards.folder} lacks {some(shards.missing)}")
    tp, pp, read = shards.tp, shards.pp, read or rank_reader(shards, headers_only=True)
    where = f"{shards.folder} (tp={tp})"
    qkv = stored_qkv(read(0, 0))
    keys = _key_rows(read(0, 0), qkv, arch, tp)
    rows = arch.kv_heads * arch.head_dim
    if (keys * tp) % rows or not keys:
        raise CheckpointError(
            f"{where}: {keys} rows of keys per rank, but config.json makes it a multiple of {rows} in all; the "
            "checkpoint is of another model"
        )
    found = Layout(
        tp=tp,
        pp=pp,
        kv_replicator=keys * tp // rows,
        qkv=qkv,
        virtual_pp=_virtual_pp([{layer_of(name) for name in read(0, rank)} for rank in range(pp)], arch.layers),
    )
    found = replace(found, instance_family=given.instance_family or _family(read, arch, found, headers_only, where))
    _check_given(found, given, str(shards.folder))
    return found


def rank_reader(shards: ShardFiles, *, headers_only: bool = False) -> Read:
    """Opens the shard of a (tp rank, pp rank) when it is first asked for; see `open_shard`."""
    read_ends_ahead(shards.files.values(), _LOOKED_AT)

    @lru_cache(maxsize=_OPEN_FILES)
    def read(tp_rank: int, pp_rank: int) -> Weights:
        return open_shard(shards.files[tp_rank, pp_rank], headers_only=headers_only)

    return read


def stored_qkv(names: Iterable[str]) -> Qkv:
    """How q, k and v are stored. Raises CheckpointError when there are none."""
    names = list(names)
    for kind, mark in QKV_MARKS.items():
        if any(name.endswith(mark) for name in names):
            return kind
    raise CheckpointError("tp rank 0, pp rank 0 has no q, k and v projections: this is no Llama of NxD")


def _check_given(found: Layout, given: GivenLayout, where: str) -> None:
    if found.pp == 1 and given.pp in (None, 1):  # one rank has all stages, however many: the files are the same
        given = replace(given, virtual_pp=None)
    wrong = [
        f"{key}={wanted} was given, but the files have {key}={getattr(found, key)}"
        for key, wanted in given.__dict__.items()
        if wanted not in (None, "auto", getattr(found, key))
    ]
    if wrong:
        raise LayoutError(f"{where}: {'; '.join(wrong)}. Leave these options out, or give the right checkpoint.")


def _first(shard: Weights, qkv: Qkv) -> str:
    return next(name for name in shard if name.endswith(QKV_MARKS[qkv]))


def _key_rows(shard: Weights, qkv: Qkv, arch: Architecture, tp: int) -> int:
    """Rows of keys in one rank."""
    name = _first(shard, qkv)
    rows = shard.info[name].shape[0]
    if qkv in ("fused", "coalesced"):
        return (rows - arch.heads * arch.head_dim // tp) // 2
    key = name.removesuffix(QKV_MARKS[qkv]) + QKV_MARKS[qkv].replace("weight_q", "weight_k").replace(".q_", ".k_")
    return shard.info[key].shape[0] if key in shard else 0


def _virtual_pp(stages: list[set[int | None]], layers: int) -> int:
    """Pipeline stages per rank: the only number that puts the layers where they are."""
    pp = len(stages)
    if pp == 1:
        return 1
    held = [stage - {None} for stage in stages]
    for virtual in range(1, layers // pp + 1):
        layout = Layout(tp=1, pp=pp, virtual_pp=virtual)
        if all(layout.pipeline_rank(layer, layers) == rank for rank in range(pp) for layer in held[rank] if layer):
            return virtual
    raise CheckpointError(
        f"no division of {layers} layers into pipeline stages of pp={pp} puts them where the files have them; the "
        "checkpoint has another number of layers than config.json"
    )


def _family(read: Read, arch: Architecture, layout: Layout, headers_only: bool, where: str) -> InstanceFamily:
    if layout.kv_replicator == 1:  # both put the heads alike, but only on trn2 may a rank hold several key heads
        return "trn2" if layout.qkv in ("fused", "split") and layout.tp != arch.kv_heads else "trn1"
    if headers_only or arch.kv_heads == 1:
        return "trn1"
    return _family_of_copies(read, layout.qkv, arch, layout, where)


def _family_of_copies(read: Read, qkv: Qkv, arch: Architecture, layout: Layout, where: str) -> InstanceFamily:
    """The one by which more ranks hold copies of what they should; a damaged copy does not decide.

    Key heads of a layer can be equal, as of a fresh or a pruned model: then the next layer is asked.
    """

    def keys(name: str, tp_rank: int, pp_rank: int) -> bytes:
        shard = read(tp_rank, pp_rank)
        if name not in shard:
            return b""
        if qkv == "split":
            return shard.raw(name.removesuffix("_q") + "_k").tobytes()
        queries = arch.heads * arch.head_dim // layout.tp
        return shard.raw(name)[queries : queries + arch.head_dim].tobytes()

    for pp_rank in range(layout.pp):
        for name in (name for name in read(0, pp_rank) if name.endswith(QKV_MARKS[qkv])):
            for rank in range(layout.tp):
                if name in read(rank, pp_rank):
                    read(rank, pp_rank).ahead(name)
            held = [hash(keys(name, rank, pp_rank)) for rank in range(layout.tp)]
            tiled = sum(key == held[rank % arch.kv_heads] for rank, key in enumerate(held))
            repeated = sum(key == held[rank - rank % layout.kv_replicator] for rank, key in enumerate(held))
            if repeated != tiled:
                return "trn2" if repeated > tiled else "trn1"
    raise LayoutError(
        f"{where}: trn1 and trn2 put copies of key heads on different ranks, and here no layer's copies tell which; "
        "say where it was trained with --instance-family trn1 or trn2"
    )
