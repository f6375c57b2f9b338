"""Reading `.pt` files (torch's zip format) without unpickling anything but tensors and XLA's tensor references.

The structure is read without torch; a tensor is a view of the mapped file. Format: PyTorch,
`torch/serialization.py` and `caffe2/serialize/inline_container.h`.
"""

from __future__ import annotations

import collections
import io
import mmap
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.weights import ITEM_BYTES, Raw, TensorInfo, damaged, mapped_array
from trainium.checkpoint.zip_directory import Entry, NotAZipError, directory

REFERENCE_MODULE, REFERENCE_NAME = "torch_xla.utils.serialization", "TensorReference"

STORAGES: Mapping[str, str] = {
    "BFloat16Storage": "bfloat16",
    "HalfStorage": "float16",
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "BoolStorage": "bool",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
}


class TensorReference:
    """Stands for torch_xla's class of that name: the tensor is in `<file>.tensors/tensor_<tid>.pt`."""

    tid: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor inside the archive: strides and offset in elements, `record` the storage's file in the zip."""

    info: TensorInfo
    stride: tuple[int, ...]
    offset: int
    record: str


@dataclass(frozen=True)
class _Storage:
    dtype: str
    record: str


class Place(NamedTuple):
    """Where a record's bytes are in the file, and their CRC-32 as the directory has it."""

    start: int
    size: int
    crc: int


@dataclass(frozen=True)
class Archive:
    """An open `.pt` file: `content` is what was pickled, with StoredTensor and TensorReference in place."""

    path: Path
    content: Any
    places: Mapping[str, Place]  # record → its bytes
    mapped: mmap.mmap

    def raw(self, stored: StoredTensor) -> Raw:
        """A view of the file."""
        place = self.places.get(f"data/{stored.record}", Place(0, -1, 0))
        steps = zip(stored.info.shape, stored.stride, strict=True)
        width = ITEM_BYTES[stored.info.dtype]
        if place.size < (1 + stored.offset + sum((n - 1) * step for n, step in steps)) * width and (
            0 not in stored.info.shape
        ):
            damaged(self.path, f"record data/{stored.record} is too short for the tensor it should hold")
        return mapped_array(self.mapped, stored.info, place.start + stored.offset * width, stored.stride)

    def check(self, stored: StoredTensor) -> None:
        """Raise CheckpointError when the bytes are not those that were written.

        torch.save can be told to leave out checksums and then writes 0, which says nothing.
        """
        start, size, crc = self.places[f"data/{stored.record}"]
        if crc and zlib.crc32(memoryview(self.mapped)[start : start + size]) != crc:
            damaged(self.path, f"record data/{stored.record} is corrupted (its checksum differs)")


def open_archive(path: Path, *, about: bool = False) -> Archive:
    """Map a `.pt` file and read its structure.

    about: it tells of tensors (`.info.pt`), so it may name dtypes and torch.Size; they become names and tuples.
    Raises CheckpointError naming the file when it is missing, truncated, compressed, big-endian, of torch < 1.6, or
    asks for anything but tensors and references.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        damaged(path, error)
    try:
        places = {entry.name.partition("/")[2]: _place(path, entry, mapped) for entry in directory(mapped)}
    except NotAZipError as error:
        damaged(path, f"it is truncated, or torch.save did not write it ({error})")
    if "data.pkl" not in places:
        damaged(path, "it is a zip file, but torch.save did not write it")
    if "byteorder" in places and _content(path, mapped, places, "byteorder") != b"little":
        damaged(path, "it was written on a big-endian machine")
    content = _unpickle(path, _content(path, mapped, places, "data.pkl"), about)
    return Archive(path, content, places, mapped)


def _content(path: Path, mapped: mmap.mmap, places: Mapping[str, Place], name: str) -> bytes:
    place = places[name]
    data = mapped[place.start : place.start + place.size]
    if place.crc and zlib.crc32(data) != place.crc:
        damaged(path, f"record {name} is corrupted (its checksum differs)")
    return data


def _place(path: Path, entry: Entry, mapped: mmap.mmap) -> Place:
    """Where a stored record's bytes are: the local header's own lengths count, the central directory's may differ."""
    header = mapped[entry.offset : entry.offset + 30]
    if entry.compressed or len(header) < 30 or header[:4] != b"PK\x03\x04":
        damaged(path, f"record {entry.name} is compressed or its header is damaged")
    name, extra = struct.unpack("<HH", header[26:])
    start = entry.offset + 30 + name + extra
    if start + entry.size > len(mapped):
        damaged(path, f"it is truncated: record {entry.name} reaches beyond the end")
    return Place(start, entry.size, entry.crc)


def _unpickle(path: Path, data: bytes, about: bool) -> Any:
    try:
        return _Unpickler(path, io.BytesIO(data), about).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle can raise anything; it runs nothing but the constructors below
        damaged(path, f"its pickle is damaged ({type(error).__name__}: {error})")


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: Path, file: Any, about: bool) -> None:
        super().__init__(file)
        self._path, self._about = path, about

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if self._about and module == "torch" and (name in ITEM_BYTES or name == "Size"):
            return tuple if name == "Size" else name
        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): collections.OrderedDict,
            ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _stored_tensor(*arguments[:4]),
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            (REFERENCE_MODULE, REFERENCE_NAME): TensorReference,
        }
        if (module, name) not in allowed:
            raise CheckpointError(
                f"{self._path} is refused: its pickle asks for {module}.{name}; only tensors and "
                f"{REFERENCE_MODULE}.{REFERENCE_NAME} are read from a checkpoint"
            )
        return allowed[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        return _Storage(str(dtype), str(key))


def _stored_tensor(storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> StoredTensor:
    numbers = (offset, *shape, *stride)
    if (
        storage.dtype not in ITEM_BYTES
        or len(shape) != len(stride)
        or not all(type(n) is int and n >= 0 for n in numbers)
    ):
        raise ValueError(f"no tensor has dtype {storage.dtype}, shape {shape}, stride {stride} and offset {offset}")
    return StoredTensor(TensorInfo(storage.dtype, tuple(shape)), tuple(stride), offset, storage.record)
