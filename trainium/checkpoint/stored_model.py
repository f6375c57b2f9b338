"""A model on disk, whatever its form, as Hugging Face tensors. Opening reads headers and pickles only. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.inventory import TensorProblem, take_inventory
from trainium.checkpoint.layout import InstanceFamily, Layout
from trainium.checkpoint.paths import find_shards, holds_shards, model_folder
from trainium.checkpoint.placement import EMBEDDING, HEAD
from trainium.checkpoint.rows import Held, Piece, Rows
from trainium.checkpoint.stored_layout import GivenLayout, rank_reader, read_layout
from trainium.checkpoint.weights import TensorInfo, Weights


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model that has been opened.

    form: what it is, for people. tied: config.json says that the output projection is the embedding. problems: tensors
    that ranks lack or have in another shape; they are not in `info`. copies: pieces that ranks hold again.
    """

    path: Path
    form: str
    info: Mapping[str, TensorInfo]
    rows: Callable[[str], Rows]
    tied: bool = False
    problems: tuple[TensorProblem, ...] = ()
    copies: int = 0

    def untied(self) -> "StoredModel":
        """The same model with the embedding as its output projection, which is what tied embeddings mean."""
        return replace(
            self,
            info={**self.info, HEAD: self.info[EMBEDDING]},
            rows=lambda name: self.rows(EMBEDDING if name == HEAD else name),
        )


def open_model(
    path: Path,
    config: Mapping[str, Any] | None = None,
    *,
    headers_only: bool = False,
    family: InstanceFamily | None = None,
) -> StoredModel:
    """Open a Hugging Face folder, a `.safetensors`, `.bin` or `.pt` file, or an NxD checkpoint.

    config: the content of a checkpoint's config.json. headers_only: no weights will be read. family: where it was
    trained, for a checkpoint whose copies of key heads do not tell. Raises CheckpointError, ArchitectureError or
    LayoutError when it cannot be read as that.
    """
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.is_dir() and holds_shards(model_folder(path)):
        return _open_checkpoint(path, config, headers_only, family)
    weights = open_weights(path)
    return StoredModel(
        path=path,
        form="Hugging Face folder" if path.is_dir() else "file",
        info=weights.info,
        rows=lambda name: _whole(weights, name),
        tied=bool((own_config(path) or {}).get("tie_word_embeddings")),
    )


def own_config(path: Path) -> dict[str, Any] | None:
    """The config.json of a folder, or the one beside a file."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    return read_config(file) if file.is_file() else None


def _whole(weights: Weights, name: str) -> Rows:
    return Rows((Piece(None, 0, 0, (Held(weights.raw(name), weights.info[name].dtype, weights.where.name),)),))


def _open_checkpoint(
    path: Path, config: Mapping[str, Any] | None, headers_only: bool, family: InstanceFamily | None
) -> StoredModel:
    if config is None:
        raise CheckpointError(
            f"{path} is an NxD checkpoint, whose files do not say how many heads the model has: give the base model's "
            "config.json with --config"
        )
    arch = Architecture.from_config(config)
    read = rank_reader(find_shards(model_folder(path)), headers_only=headers_only)
    # which ranks hold copies changes no name and no shape
    layout = read_layout(path, arch, GivenLayout(instance_family=family), read=read, headers_only=headers_only)
    layout.check(arch)
    inventory = take_inventory(read, arch, layout)
    return StoredModel(
        path=path,
        form=_form(layout, told=not headers_only),
        info=inventory.info,
        rows=inventory.rows,
        tied=arch.tied,
        problems=inventory.problems,
        copies=inventory.copies,
    )


def _form(layout: Layout, *, told: bool) -> str:
    degrees = f"tp={layout.tp} pp={layout.pp} kv_replicator={layout.kv_replicator} qkv={layout.qkv}"
    virtual = f" virtual_pp={layout.virtual_pp}" if layout.virtual_pp > 1 else ""
    family = f" on {layout.instance_family}" if told and layout.kv_replicator > 1 else ""
    return f"NxD checkpoint, {degrees}{virtual}{family}"
