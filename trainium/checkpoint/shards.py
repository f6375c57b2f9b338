"""One rank's weights on disk, in both forms."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainium.checkpoint.archive import Archive, StoredTensor, TensorReference, open_archive
from trainium.checkpoint.archive_writer import (
    ArchiveImage,
    reference_info_image,
    references_image,
    tensor_image,
    tensors_image,
)
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import Form
from trainium.checkpoint.image import write_image
from trainium.checkpoint.paths import tensor_folder
from trainium.checkpoint.readahead import read_ahead
from trainium.checkpoint.weights import Raw, TensorInfo, Weights, byte_view, damaged

if TYPE_CHECKING:
    from torch import Tensor

_OPEN_PARTS = 1  # of each shard: thousands of open files are more than a process may have


def open_shard(path: Path, *, headers_only: bool = False) -> Weights:
    """Map a shard of either form. Raises CheckpointError naming the file that is missing, damaged or refused.

    headers_only: of the per-tensor form, believe the file that tells dtypes and shapes (where there is one), instead of
    opening thousands.
    """
    archive = open_archive(path)
    entries = _entries(archive)
    told = _told(path) if headers_only else {}

    @lru_cache(maxsize=_OPEN_PARTS)
    def part(tid: int) -> Archive:
        return open_archive(tensor_folder(path) / f"tensor_{tid}.pt")

    def stored(name: str) -> tuple[Archive, StoredTensor]:
        entry = entries[name]
        if isinstance(entry, StoredTensor):
            return archive, entry
        return part(entry.tid), _bare(part(entry.tid))

    def raw(name: str) -> Raw:
        opened, tensor = stored(name)
        return opened.raw(tensor)

    def ahead(name: str) -> None:
        entry = entries[name]
        if isinstance(entry, StoredTensor):
            archive.ahead(entry)
        else:
            read_ahead(tensor_folder(path) / f"tensor_{entry.tid}.pt")

    checked: set[str] = set()

    def check(name: str) -> None:
        if name not in checked:
            opened, tensor = stored(name)
            opened.check(tensor)
            checked.add(name)

    info = {name: told.get(getattr(entry, "tid", None)) or stored(name)[1].info for name, entry in entries.items()}
    return Weights(path, info, raw, check=check, ahead=ahead, files=(path, *_parts(path, entries)))


def read_shard(path: Path) -> dict[str, Tensor]:
    """A shard's tensors in memory, free to be changed."""
    return {name: tensor.clone() for name, tensor in open_shard(path).items()}


def tensor_files(path: Path) -> tuple[Path, ...]:
    """The files beside a shard that its reference dict names; none for the inline form. No torch needed."""
    return _parts(path, _entries(open_archive(path)))


def check_structure(path: Path) -> None:
    """Raise CheckpointError unless every tensor of a shard lies whole in its file, as far as the structure tells.

    No weights are read: a tensor's bytes may still be wrong (`Weights.check` compares them).
    """
    archive = open_archive(path)
    for entry in _entries(archive).values():
        if isinstance(entry, StoredTensor):
            archive.raw(entry)
        else:
            part = open_archive(tensor_folder(path) / f"tensor_{entry.tid}.pt")
            part.raw(_bare(part))


def write_shard(
    path: Path,
    info: Mapping[str, TensorInfo],
    tensors: Iterable[Tensor],
    form: Form = "inline",
    written: Callable[[int], None] = lambda _: None,
) -> None:
    """Write one rank: `info` says what comes, `tensors` yields it in that order, one in memory at a time.

    Each tensor gets a storage of exactly its size. `written` is told the bytes of each tensor.
    """
    names = shard_images(path.name, info, form)
    tensors = iter(tensors)
    if form == "per-tensor":
        tensor_folder(path).mkdir()
    for name, image in names.items():
        views = (byte_view(tensor) for tensor in islice(tensors, len(image.offsets)))
        write_image(path.parent / name, image, views, written)


def shard_images(name: str, info: Mapping[str, TensorInfo], form: Form) -> dict[str, ArchiveImage]:
    """The files of one rank by name, in the order of the tensors; the one that names the others comes last."""
    stem = name.removesuffix(".pt")
    if form == "inline":
        return {name: tensors_image(stem, info)}
    folder = tensor_folder(Path(name)).name
    parts = {f"{folder}/tensor_{tid}.pt": tensor_image(f"tensor_{tid}", item) for tid, item in enumerate(info.values())}
    about = reference_info_image(f"{name}.info", info.values())
    return parts | {f"{name}.info.pt": about, name: references_image(stem, info)}


def _entries(archive: Archive) -> dict[str, StoredTensor | TensorReference]:
    content = archive.content
    if not isinstance(content, dict):
        raise CheckpointError(f"{archive.path} holds a {type(content).__name__}, not a dict of tensors")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, StoredTensor | TensorReference):
            raise CheckpointError(f"{archive.path}: entry {name!r} is a {type(value).__name__}, not a tensor")
        if isinstance(value, TensorReference) and not isinstance(getattr(value, "tid", None), int):
            damaged(archive.path, f"the reference for {name} has no tensor number")
    return dict(content)


def _parts(path: Path, entries: Mapping[str, StoredTensor | TensorReference]) -> tuple[Path, ...]:
    references = (entry for entry in entries.values() if isinstance(entry, TensorReference))
    return tuple(tensor_folder(path) / f"tensor_{reference.tid}.pt" for reference in references)


def _told(path: Path) -> dict[int | None, TensorInfo]:
    """dtype and shape by tensor number, of the tensors whose files are there; nothing where nothing tells it."""
    about, folder = path.with_name(f"{path.name}.info.pt"), tensor_folder(path)
    if not about.is_file() or not folder.is_dir():
        return {}
    content, there = open_archive(about, about=True).content, set(os.listdir(folder))  # noqa: PTH208 (names, fast)
    try:
        return {
            tid: TensorInfo(str(item["dtype"]), tuple(item["shape"]))
            for tid, item in content.items()
            if f"tensor_{tid}.pt" in there
        }
    except (AttributeError, KeyError, TypeError) as error:
        damaged(about, f"it should tell dtype and shape of each tensor ({type(error).__name__}: {error})")


def _bare(archive: Archive) -> StoredTensor:
    if not isinstance(archive.content, StoredTensor):
        damaged(archive.path, "it should hold one bare tensor")
    return archive.content
