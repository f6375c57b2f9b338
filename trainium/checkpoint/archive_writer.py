"""Writing `.pt` files that torch.load and torch_xla's loader read, one tensor in memory at a time."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainium.checkpoint.archive import REFERENCE_MODULE, REFERENCE_NAME, STORAGES
from trainium.checkpoint.weights import TensorInfo, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64  # torch's own, so that mapped tensors are aligned for every dtype
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}


def write_tensors(path: Path, info: Mapping[str, TensorInfo], tensors: Iterable[Tensor]) -> None:
    """Write {name: tensor}; `tensors` in the order of `info`, each made only when it is its turn."""
    entries = {name: _Entry(item, str(index)) for index, (name, item) in enumerate(info.items())}
    with _zip(path, _pickled(entries)) as archive:
        for index, tensor in enumerate(tensors):
            _record(archive, f"{path.stem}/data/{index}", byte_view(tensor))


def write_tensor(path: Path, tensor: Tensor) -> None:
    """Write one bare tensor."""
    info = TensorInfo(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    with _zip(path, _pickled(_Entry(info, "0"))) as archive:
        _record(archive, f"{path.stem}/data/0", byte_view(tensor))


def write_references(path: Path, names: Iterable[str]) -> None:
    """Write {name: TensorReference(tid)} with tids counted from 0.

    The opcodes are spelled out because pickle refuses to name a class of a module that is not installed.
    """
    tid_key = _text("tid")
    parts = [pickle.PROTO, b"\x02", pickle.EMPTY_DICT, pickle.MARK]
    for tid, name in enumerate(names):
        reference = pickle.GLOBAL + f"{REFERENCE_MODULE}\n{REFERENCE_NAME}\n".encode()
        state = pickle.EMPTY_DICT + tid_key + pickle.BININT + struct.pack("<i", tid) + pickle.SETITEM
        parts += [_text(name), reference, pickle.EMPTY_TUPLE, pickle.NEWOBJ, state, pickle.BUILD]
    parts += [pickle.SETITEMS, pickle.STOP]
    with _zip(path, b"".join(parts)):
        pass


def write_reference_info(path: Path, info: Iterable[TensorInfo]) -> None:
    """Write {tid: {dtype, shape, expert_model_parallel}}, which NxD reads beside the references."""
    import torch

    torch.save(
        {
            tid: {"dtype": torch_dtype(item.dtype), "shape": torch.Size(item.shape), "expert_model_parallel": False}
            for tid, item in enumerate(info)
        },
        path,
    )
    sync(path)


def byte_view(tensor: Tensor) -> memoryview:
    """The tensor's bytes in row-major order; copies only what is not contiguous."""
    import torch

    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def sync(path: Path) -> None:
    """Bring a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


class _Entry:
    """Pickles as a tensor whose storage is `key`."""

    def __init__(self, info: TensorInfo, key: str) -> None:
        self.info, self.key = info, key


class _Storage:
    def __init__(self, entry: _Entry) -> None:
        self.entry = entry


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, _Entry):
            return NotImplemented
        from collections import OrderedDict

        from torch._utils import _rebuild_tensor_v2

        shape = value.info.shape
        return _rebuild_tensor_v2, (_Storage(value), 0, shape, _row_major(shape), False, OrderedDict())

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        import torch

        info = value.entry.info
        elements = 1
        for size in info.shape:
            elements *= size
        return "storage", getattr(torch, _STORAGE_NAMES[info.dtype]), value.entry.key, "cpu", elements


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(value)
    return buffer.getvalue()


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _text(value: str) -> bytes:
    data = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


@contextmanager
def _zip(path: Path, structure: bytes) -> Iterator[zipfile.ZipFile]:
    """A torch archive with its pickle; the caller adds the storages. On disk when the block ends."""
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
            _record(archive, f"{path.stem}/data.pkl", memoryview(structure))
            _record(archive, f"{path.stem}/byteorder", memoryview(b"little"))
            yield archive
            _record(archive, f"{path.stem}/version", memoryview(b"3\n"))
        _finish(file)


def _finish(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _record(archive: zipfile.ZipFile, name: str, data: memoryview) -> None:
    """Append a record whose data start at a multiple of ALIGNMENT, padded as torch does with an extra field "FB"."""
    record = zipfile.ZipInfo(name)  # a fixed date: the same weights make the same file
    record.file_size, record.compress_size, record.CRC = data.nbytes, 0, 0
    large = data.nbytes > 2**31 - 2**20
    assert archive.fp is not None
    start = archive.fp.tell() + len(record.FileHeader(zip64=large)) + 4
    padding = -start % ALIGNMENT
    record.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(record, "w", force_zip64=large) as target:
        target.write(data)
    record.extra = b""  # the padding belongs to the local header alone
