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
from typing import Any

import numpy as np

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.readahead import map_ahead
from trainium.checkpoint.weights import ITEM_BYTES, Raw, TensorInfo, damaged, mapped_array
from trainium.checkpoint.zip_directory import Entry, NotAZipError, directory

_LOCAL_HEADER = 30  # bytes before the name in a local file header
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


@dataclass(frozen=True)
class Archive:
    """An open `.pt` file: `content` is what was pickled, with StoredTensor and TensorReference in place."""

    path: Path
    content: Any
    records: Mapping[str, Entry]
    mapped: mmap.mmap

    def raw(self, stored: StoredTensor) -> Raw:
        """A view of the file."""
        steps = zip(stored.info.shape, stored.stride, strict=True)
        width = ITEM_BYTES[stored.info.dtype]
        needed = 0 if 0 in stored.info.shape else 1 + stored.offset + sum((n - 1) * step for n, step in steps)
        record = self.records.get(f"data/{stored.record}")
        if record is None or record.size < needed * width:
            damaged(self.path, f"record data/{stored.record} is too short for the tensor it should hold")
        start = _start(self.path, self.mapped, record)
        return mapped_array(self.mapped, stored.info, start + stored.offset * width, stored.stride)

    def check(self, stored: StoredTensor) -> None:
        """Raise CheckpointError when the bytes are not those that were written."""
        _bytes(self.path, self.mapped, self.records[f"data/{stored.record}"])

    def ahead(self, stored: StoredTensor) -> None:
        """Have the disk begin to read a tensor, header included, without waiting for either."""
        record = self.records.get(f"data/{stored.record}")
        if record is not None:
            start = np.frombuffer(self.mapped, np.uint8).ctypes.data + record.offset
            map_ahead(start, start + record.size + mmap.PAGESIZE)


def open_archive(path: Path, *, about: bool = False) -> Archive:
    """Map a `.pt` file and read its structure.

    about: it tells of tensors (`.info.pt`), so it may name dtypes and torch.Size; they become names and tuples.
    Raises CheckpointError naming the file when it is missing, truncated, compressed, big-endian, of torch < 1.6, or
    asks for anything but tensors and references.
    """
    mapped = _mapped(path)
    records = {entry.name.partition("/")[2]: entry for entry in _directory(path, mapped)}
    if "data.pkl" not in records:
        damaged(path, "it is a zip file, but torch.save did not write it")
    if "byteorder" in records and bytes(_bytes(path, mapped, records["byteorder"])) != b"little":
        damaged(path, "it was written on a big-endian machine")
    content = _unpickle(path, bytes(_bytes(path, mapped, records["data.pkl"])), about)
    return Archive(path, content, records, mapped)


def check_whole(path: Path) -> None:
    """Raise CheckpointError unless the file's directory is there and everything it names lies within the file.

    For files whose pickles hold more than tensors (an optimizer's): nothing is unpickled, no content is read.
    """
    mapped = _mapped(path)
    for entry in _directory(path, mapped):
        if entry.offset + _LOCAL_HEADER + entry.size > len(mapped):
            damaged(path, f"it is truncated: record {entry.name} reaches beyond the end")


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        damaged(path, error)


def _directory(path: Path, mapped: mmap.mmap) -> list[Entry]:
    try:
        return list(directory(mapped))
    except NotAZipError as error:
        damaged(path, f"it is truncated, or torch.save did not write it ({error})")


def _start(path: Path, mapped: mmap.mmap, record: Entry) -> int:
    """Where a record's bytes begin: the local header's own lengths count, the central directory's may differ.

    Looked up when it is needed: all of them at once would be a read from the disk for every tensor.
    """
    header = mapped[record.offset : record.offset + _LOCAL_HEADER]
    if record.compressed or len(header) < _LOCAL_HEADER or header[:4] != b"PK\x03\x04":
        damaged(path, f"record {record.name} is compressed or its header is damaged")
    name, extra = struct.unpack("<HH", header[26:])
    start: int = record.offset + _LOCAL_HEADER + name + extra
    if start + record.size > len(mapped):
        damaged(path, f"it is truncated: record {record.name} reaches beyond the end")
    return start


def _bytes(path: Path, mapped: mmap.mmap, record: Entry) -> memoryview:
    """A record's bytes, compared with their checksum.

    torch.save can be told to leave out checksums and then writes 0, which says nothing.
    """
    start = _start(path, mapped, record)
    data = memoryview(mapped)[start : start + record.size]
    if record.crc and zlib.crc32(data) != record.crc:
        damaged(path, f"record {record.name.partition('/')[2]} is corrupted (its checksum differs)")
    return data


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
