"""Weights in the formats that transformers reads: safetensors (mapped, streamed out), `.bin` and `.pt` files."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.image import write_image
from trainium.checkpoint.shards import open_shard
from trainium.checkpoint.weights import ITEM_BYTES, TensorInfo, Weights, byte_view, damaged, mapped_array
from trainium.files import sync_file

if TYPE_CHECKING:
    from torch import Tensor

_CONVERTER = "trainium"  # by which a later conversion knows that it may replace a file
_MAX_HEADER = 100_000_000  # the format's own limit
INDEX = "model.safetensors.index.json"

# safetensors' names of dtypes, https://huggingface.co/docs/safetensors
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "BF16": "bfloat16",
    "F16": "float16",
    "I16": "int16",
    "F32": "float32",
    "I32": "int32",
    "F64": "float64",
    "I64": "int64",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_config(path: Path) -> dict[str, Any]:
    """A model's config.json, given the file or its folder. Raises CheckpointError as `read_object`."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise CheckpointError(f"{file} does not exist; a Hugging Face model folder has a config.json")
    return read_object(file)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError naming the file when it is missing or something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}. Download or copy it again.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object. Download or copy it again.")
    return value


def open_weights(path: Path) -> Weights:
    """Map the weights of a Hugging Face folder (single file or index), or one `.safetensors`, `.bin` or `.pt` file.

    Raises CheckpointError naming the file that is missing or damaged.
    """
    if path.is_file():
        return _open_file(path)
    # as transformers looks: what was converted to safetensors later leaves its older form beside it
    names = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json", "checkpoint.pt")
    for name in names:
        if (path / name).is_file():
            return (_open_index if name.endswith(".json") else _open_file)(path / name)
    raise CheckpointError(f"{path} holds no weights: neither model.safetensors nor {INDEX} nor pytorch_model.bin")


def plan_files(info: Mapping[str, TensorInfo], max_bytes: int) -> list[tuple[str, list[str]]]:
    """File name → tensors, in order, no file above `max_bytes` of tensors unless one tensor is."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, item in info.items():
        if groups[-1] and size + item.bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += item.bytes
    if len(groups) == 1:
        return [("model.safetensors", groups[0])]
    return [(f"model-{n:05d}-of-{len(groups):05d}.safetensors", names) for n, names in enumerate(groups, 1)]


class SafetensorsImage:
    """One safetensors file with these tensors in this order, which has wider dtypes first (`file_order`)."""

    def __init__(self, info: Mapping[str, TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt", "converter": _CONVERTER}}
        ends = [0]
        for name, item in info.items():
            ends.append(ends[-1] + item.bytes)
            header[name] = {"dtype": _NAMES[item.dtype], "shape": item.shape, "data_offsets": ends[-2:]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._header = len(text).to_bytes(8, "little") + text
        self.offsets = tuple(len(self._header) + start for start in ends[:-1])
        self.size = len(self._header) + ends[-1]

    def header(self, index: int, crc: int) -> bytes:
        """Nothing lies between tensors."""
        return b""

    def frame(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """The header; safetensors have no checksums."""
        return [(0, self._header)]


def foreign_weights(folder: Path) -> list[str]:
    """Names of the safetensors in a folder that no conversion of ours has written."""
    mark = f'{{"__metadata__":{{"format":"pt","converter":"{_CONVERTER}"'.encode()
    names = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            if file.read(8 + len(mark))[8:] != mark:
                names.append(path.name)
    return names


def file_order(info: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Wider dtypes first, so that every tensor is aligned for its dtype."""
    return dict(sorted(info.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))


def write_safetensors(
    path: Path, info: Mapping[str, TensorInfo], load: Callable[[str], Tensor], written: Callable[[int], None]
) -> None:
    """Stream tensors into one file, each loaded when it is its turn."""
    ordered = file_order(info)
    write_image(path, SafetensorsImage(ordered), (byte_view(load(name)) for name in ordered), written)


def write_index(folder: Path, info: Mapping[str, TensorInfo], files: Sequence[tuple[str, Sequence[str]]]) -> None:
    """The index that says which file holds which tensor."""
    total = sum(item.bytes for item in info.values())
    weight_map = {name: file for file, names in files for name in names}
    write_object(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """JSON that is on the disk when this returns.

    Not through a temporary file: of a killed conversion one would stay in the folder with which the next goes on.
    """
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sync_file(path)


def _open_file(path: Path) -> Weights:
    return _open_safetensors(path) if path.suffix == ".safetensors" else open_shard(path)


def _open_safetensors(path: Path) -> Weights:
    """Format: https://huggingface.co/docs/safetensors — 8 bytes of header length, a JSON header, the tensors."""
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        damaged(path, error)
    length = int.from_bytes(mapped[:8], "little")
    if len(mapped) < 8 or not 2 <= length <= min(len(mapped) - 8, _MAX_HEADER):
        damaged(path, "it is truncated, or not in the safetensors format (the header's length is impossible)")
    try:
        header = json.loads(mapped[8 : 8 + length])
        entries = {name: _entry(item) for name, item in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        damaged(path, f"its header is damaged ({type(error).__name__}: {error})")
    starts, end = {}, 0
    for name, (info, first, last) in sorted(entries.items(), key=lambda entry: entry[1][1:]):
        if first != end or last - first != info.bytes:
            damaged(path, f"its header is damaged: {name} is said to be at {first}:{last}")
        starts[name], end = 8 + length + first, last
    if end != len(mapped) - 8 - length:
        damaged(path, f"it is truncated or damaged: {end} bytes of tensors expected, {len(mapped) - 8 - length} found")
    infos = {name: item for name, (item, _, _) in entries.items()}
    return Weights(path, infos, lambda name: mapped_array(mapped, infos[name], starts[name]))


def _entry(item: Mapping[str, Any]) -> tuple[TensorInfo, int, int]:
    dtype, shape, (first, last) = _DTYPES.get(item["dtype"]), tuple(item["shape"]), item["data_offsets"]
    if dtype is None:
        raise ValueError(f"dtype {item['dtype']} is not supported")
    if not all(type(number) is int and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"shape {shape} at {first}:{last} is impossible")
    return TensorInfo(dtype, shape), first, last


def _open_index(path: Path) -> Weights:
    index = read_object(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{path} has no weight_map from tensor names to file names")
    opened = {}
    for file in sorted(set(weight_map.values())):
        if Path(file).name != file:
            raise CheckpointError(f"{path}: {file!r} is not the plain name of a file beside it")
        if not (path.parent / file).is_file():
            raise CheckpointError(f"{path.parent / file} does not exist, but {path.name} names it")
        opened[file] = _open_file(path.parent / file)
    lost = [name for name, file in weight_map.items() if name not in opened[file]]
    if lost:
        raise CheckpointError(f"{path.parent / weight_map[lost[0]]} lacks {lost[0]}, which {path.name} says it holds")
    info = {name: opened[file].info[name] for name, file in sorted(weight_map.items())}
    return Weights(
        path.parent,
        info,
        lambda name: opened[weight_map[name]].raw(name),
        check=lambda name: opened[weight_map[name]].check(name),
        files=tuple(part for weights in opened.values() for part in weights.files),
    )
