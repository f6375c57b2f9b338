"""A model folder, looked at without torch: is it whole, and what is in it."""

import hashlib
import json
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainium.errors import UserError

# https://github.com/huggingface/safetensors: length of the header (8 bytes, little-endian), JSON header, tensors.
_ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_TOKENIZERS = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip


class SnapshotError(UserError):
    """The folder is not a whole Hugging Face model; the message names the file and what to do."""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor as the header of its safetensors file describes it."""

    dtype: str  # as safetensors spells it: BF16, F32, …
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class ModelFolder:
    """Facts of a whole model folder. `tensors` is empty for `pytorch` weights, which only torch can list."""

    folder: Path
    config: Mapping[str, Any]
    format: Literal["safetensors", "pytorch"]
    weights: Mapping[str, int]  # file name → bytes
    tensors: Mapping[str, HeaderEntry]
    tokenizer: tuple[str, ...]  # file names
    digest: str  # sha256 over names, sizes and headers of the weights, and the content of config and tokenizer

    @property
    def total_bytes(self) -> int:
        """Of the weight files."""
        return sum(self.weights.values())


def check_snapshot(folder: Path) -> ModelFolder:
    """Read config, headers, index and tokenizer of a downloaded or local model. Raises SnapshotError."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise SnapshotError(
            f"model folder {folder} {what}. Give a folder with config.json, *.safetensors and a tokenizer."
        )
    config = _json(folder / "config.json", "a model folder")
    tokenizer = _tokenizer(folder)
    files, index = _weight_files(folder)
    format_: Literal["safetensors", "pytorch"] = "safetensors" if files[0].suffix == ".safetensors" else "pytorch"
    tensors: dict[str, HeaderEntry] = {}
    digest = hashlib.sha256()
    for file in files:
        header = _checked_header(file) if format_ == "safetensors" else _checked_archive(file)
        digest.update(f"{file.name} {file.stat().st_size} {hashlib.sha256(header).hexdigest()}\n".encode())
        if format_ == "safetensors":
            for name, tensor in _tensors(file, header).items():
                if name in tensors:
                    raise SnapshotError(
                        f"{folder}: tensor {name} is in both {tensors[name].file} and {file.name}. Remove one."
                    )
                tensors[name] = tensor
    if index is not None and format_ == "safetensors":
        _check_index(folder, index, tensors)
    for name in ("config.json", *tokenizer):
        digest.update(f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n".encode())
    sizes = {file.name: file.stat().st_size for file in files}
    return ModelFolder(folder, config, format_, sizes, tensors, tokenizer, digest.hexdigest())


def _weight_files(folder: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """The files that transformers would load, in its order of preference, and the index of the shards."""
    for single, suffix in (("model.safetensors", ".safetensors"), ("pytorch_model.bin", ".bin")):
        if (folder / single).exists():
            return [folder / single], None
        index_file = folder / f"{single}.index.json"
        if index_file.exists():
            index = _json(index_file, "a sharded model").get("weight_map")
            if not isinstance(index, dict) or not index or not all(isinstance(v, str) for v in index.values()):
                raise SnapshotError(f"{index_file} has no weight_map of tensor names to file names. Download it again.")
            names = sorted(set(index.values()))
            missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
            if missing:
                raise SnapshotError(
                    f"{folder} lacks {', '.join(missing[:5])} ({len(missing)} of {len(names)} shards that "
                    f"{index_file.name} names). Download or copy them."
                )
            return [folder / name for name in names], index
        links = sorted(path.name for path in folder.glob(f"*{suffix}*") if not path.exists())
        if links:
            raise SnapshotError(
                f"{folder}: {', '.join(links[:3])} are links to files that are gone. Download the model again, or copy "
                "the files instead of the links."
            )
        shards = sorted(path.name for path in folder.glob(f"*{suffix}"))
        if shards:
            raise SnapshotError(
                f"{folder} has {', '.join(shards[:3])} but neither {single} nor {index_file.name}, so nothing says "
                f"which tensor is where. Copy {index_file.name} too, or name a single file {single}."
            )
    raise SnapshotError(
        f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json nor pytorch_model.bin. "
        f"There are: {_names(folder)}."
    )


def _checked_header(file: Path) -> bytes:
    """The JSON header of a safetensors file whose length is what the header promises."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
        _refuse_pointer(file, start)
        stream.seek(0)
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if 2 <= length <= _MAX_HEADER and 8 + length > size:
            raise SnapshotError(
                f"{file} is truncated: it ends inside its header, after {size} bytes. Download or copy it again."
            )
        header = stream.read(length) if 2 <= length <= _MAX_HEADER else b""
    if not header.startswith(b"{"):
        raise SnapshotError(
            f"{file} ({size} bytes) is no safetensors file: it has no header. Download or copy it again."
        )
    return header


def _tensors(file: Path, header: bytes) -> dict[str, HeaderEntry]:
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        tensors = {n: HeaderEntry(e["dtype"], tuple(map(int, e["shape"])), file.name) for n, e in entries.items()}
        spans = {
            name: (int(entry["data_offsets"][0]), int(entry["data_offsets"][1])) for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SnapshotError(
            f"{file} is damaged: its header cannot be read ({error}). Download or copy it again."
        ) from error
    end = 0
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        tensor = tensors[name]
        bits = _ITEM_BITS.get(tensor.dtype)
        if first != end or (bits is not None and (last - first) * 8 != bits * math.prod(tensor.shape)):
            raise SnapshotError(
                f"{file} is damaged: tensor {name} ({tensor.dtype} {list(tensor.shape)}) does not lie where its "
                "header says. Download or copy it again."
            )
        end = last
    promised, size = 8 + len(header) + end, file.stat().st_size
    if size != promised:
        what = "truncated" if size < promised else "too long"
        raise SnapshotError(
            f"{file} is {what}: its header promises {promised} bytes, it has {size}. Download or copy it again."
        )
    return tensors


def _checked_archive(file: Path) -> bytes:
    """The member list of a `torch.save` file, a zip archive whose directory is at its end: a truncated one has none."""
    with file.open("rb") as stream:
        start = stream.read(len(_LFS_POINTER))
    _refuse_pointer(file, start)
    try:
        with zipfile.ZipFile(file) as archive:
            members = [(info.filename, info.file_size) for info in archive.infolist()]
    except zipfile.BadZipFile as error:
        raise SnapshotError(
            f"{file} ({file.stat().st_size} bytes) is truncated or not in PyTorch's zip format (1.6 and later). "
            "Download it again, or convert the model to safetensors."
        ) from error
    return repr(members).encode()


def _refuse_pointer(file: Path, start: bytes) -> None:
    if start.startswith(_LFS_POINTER):
        raise SnapshotError(
            f"{file} is a Git LFS pointer, not the weights: the repository was cloned without LFS. Run `git lfs pull` "
            "in it, or let the model stage download the repository."
        )


def _check_index(folder: Path, index: Mapping[str, str], tensors: Mapping[str, HeaderEntry]) -> None:
    lacking = sorted(name for name, file in index.items() if name not in tensors or tensors[name].file != file)
    if lacking:
        raise SnapshotError(
            f"{folder}: the index names {len(lacking)} tensors that are not in their file, for example {lacking[0]} "
            f"in {index[lacking[0]]}. Index and shards are of different revisions: download both again."
        )
    unnamed = sorted(set(tensors) - set(index))
    if unnamed:
        raise SnapshotError(
            f"{folder}: {len(unnamed)} tensors are missing in the index, for example {unnamed[0]} of "
            f"{tensors[unnamed[0]].file}. Index and shards are of different revisions: download both again."
        )


def _tokenizer(folder: Path) -> tuple[str, ...]:
    if not any(all((folder / name).is_file() for name in names) for names in _TOKENIZERS):
        raise SnapshotError(
            f"{folder} has no tokenizer: tokenizer.json, tokenizer.model, or vocab.json with merges.txt. There are: "
            f"{_names(folder)}."
        )
    return tuple(name for name in _TOKENIZER_FILES if (folder / name).is_file())


def _json(path: Path, of: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SnapshotError(
            f"{path.parent} is not {of}: it has no {path.name}. There are: {_names(path.parent)}."
        ) from None
    except (ValueError, OSError) as error:
        raise SnapshotError(f"{path} cannot be read as JSON: {error}. Download or copy it again.") from error
    if not isinstance(value, dict):
        raise SnapshotError(f"{path} holds no JSON object. Download or copy it again.")
    return value


def _names(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:10]) + (" …" if len(names) > 10 else "") if names else "no files at all"
