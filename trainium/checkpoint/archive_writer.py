"""`.pt` files that torch.load and torch_xla's loader read, made without torch.

Records carry their true CRC-32. torch.load does not look at it (its zip reader is built without the check), and could
be given 0; but zlib computes it at several GB/s from bytes that are in the processor's cache for the copy anyway, and
with it `unzip -t`, Python's zipfile and this project's reader tell a corrupted file from a good one.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod

from trainium.checkpoint.archive import REFERENCE_MODULE, REFERENCE_NAME, STORAGES
from trainium.checkpoint.weights import TensorInfo

ALIGNMENT = 64  # torch's own, so that mapped tensors are aligned for every dtype

_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}
_LARGE = 0xFFFFFFFF  # from here on a number is in a zip64 field
_UTF8, _DATE = 0x800, 0x21  # 1980-01-01: the same weights make the same file


class ArchiveImage:
    """torch's zip archive with a pickle and the storages `0`, `1`, … of `sizes` bytes. stem: of the file's name.

    Format: PyTorch, `caffe2/serialize/inline_container.cc`; PKWARE's APPNOTE.TXT.
    """

    def __init__(self, stem: str, structure: bytes, sizes: Sequence[int]) -> None:
        heads = [("data.pkl", structure), ("byteorder", b"little")]
        self._names = [f"{stem}/{name}" for name in ("data.pkl", "byteorder")]
        self._names += [f"{stem}/data/{index}" for index in range(len(sizes))] + [f"{stem}/version"]
        self._small = {0: structure, 1: b"little", len(sizes) + 2: b"3\n"}
        self._sizes = [len(content) for _, content in heads] + [*sizes, 2]
        self._headers: list[tuple[int, int]] = []  # (first byte, bytes) of each local header with its padding
        end = 0
        for name, size in zip(self._names, self._sizes, strict=True):
            bare = 30 + len(name.encode()) + (20 if size >= _LARGE else 0) + 4
            length = bare + -(end + bare) % ALIGNMENT
            self._headers.append((end, length))
            end += length + size
        self._directory = end
        self.offsets = tuple(start + length for start, length in self._headers[2:-1])
        self.size = end + len(self._ending([0] * len(self._names)))

    def header(self, index: int, crc: int) -> bytes:
        """The local header of storage `index`, padded as torch does with an extra field "FB"."""
        return self._header(index + 2, crc)

    def frame(self, crcs: Sequence[int]) -> list[tuple[int, bytes]]:
        """The pickle and the other small records, and the central directory."""
        small = {record: zlib.crc32(content) for record, content in self._small.items()}
        written = [
            (self._headers[record][0], self._header(record, small[record]) + content)
            for record, content in self._small.items()
        ]
        every = [small[0], small[1], *crcs, small[len(crcs) + 2]]
        return [*written, (self._directory, self._ending(every))]

    def _header(self, record: int, crc: int) -> bytes:
        name, size = self._names[record].encode(), self._sizes[record]
        long = struct.pack("<HHQQ", 1, 16, size, size) if size >= _LARGE else b""
        padding = self._headers[record][1] - 30 - len(name) - len(long) - 4
        extra = long + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        shown = min(size, _LARGE)
        fields = (45 if long else 20, _UTF8, 0, 0, _DATE, crc, shown, shown, len(name), len(extra))
        return b"PK\x03\x04" + struct.pack("<HHHHHIIIHH", *fields) + name + extra

    def _ending(self, crcs: Sequence[int]) -> bytes:
        entries = b"".join(self._entry(record, crc) for record, crc in enumerate(crcs))
        count, start = len(crcs), self._directory
        long = b""
        if start >= _LARGE or count >= 0xFFFF:
            end = struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, count, count, len(entries), start)
            long = b"PK\x06\x06" + end + b"PK\x06\x07" + struct.pack("<IQI", 0, start + len(entries), 1)
        shown = (min(count, 0xFFFF), min(count, 0xFFFF), len(entries), min(start, _LARGE), 0)
        return entries + long + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, *shown)

    def _entry(self, record: int, crc: int) -> bytes:
        name, size, start = self._names[record].encode(), self._sizes[record], self._headers[record][0]
        large = ([size, size] if size >= _LARGE else []) + ([start] if start >= _LARGE else [])
        long = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        shown, version = min(size, _LARGE), 45 if long else 20
        fields = (version, version, _UTF8, 0, 0, _DATE, crc, shown, shown, len(name), len(long))
        place = (0, 0, 0, 0, min(start, _LARGE))
        return b"PK\x01\x02" + struct.pack("<HHHHHHIIIHHHHHII", *fields, *place) + name + long


def tensors_image(stem: str, info: Mapping[str, TensorInfo]) -> ArchiveImage:
    """{name: tensor}, each with a storage of exactly its size."""
    write = _Opcodes()
    items = (write.text(name) + write.tensor(item, str(index)) for index, (name, item) in enumerate(info.items()))
    return ArchiveImage(stem, write.pickle(write.mapping(items)), [item.bytes for item in info.values()])


def tensor_image(stem: str, info: TensorInfo) -> ArchiveImage:
    """One bare tensor."""
    write = _Opcodes()
    return ArchiveImage(stem, write.pickle(write.tensor(info, "0")), [info.bytes])


def references_image(stem: str, names: Iterable[str]) -> ArchiveImage:
    """{name: TensorReference(tid)} with tids counted from 0."""
    write = _Opcodes()
    items = []
    for tid, name in enumerate(names):
        new = write.name(REFERENCE_MODULE, REFERENCE_NAME) + pickle.EMPTY_TUPLE + pickle.NEWOBJ
        items.append(write.text(name) + new + write.mapping([write.shared("tid") + write.number(tid)]) + pickle.BUILD)
    return ArchiveImage(stem, write.pickle(write.mapping(items)), [])


def reference_info_image(stem: str, info: Iterable[TensorInfo]) -> ArchiveImage:
    """{tid: {dtype, shape, expert_model_parallel}}, which NxD reads beside the references."""
    write = _Opcodes()
    items = []
    for tid, item in enumerate(info):
        dtype = write.shared("dtype") + write.name("torch", item.dtype)
        size = write.name("torch", "Size") + write.sequence([write.numbers(item.shape)]) + pickle.REDUCE
        expert = write.shared("expert_model_parallel") + pickle.NEWFALSE
        items.append(write.number(tid) + write.mapping([dtype, write.shared("shape") + size, expert]))
    return ArchiveImage(stem, write.pickle(write.mapping(items)), [])


class _Opcodes:
    """A pickle spelled out opcode by opcode; what is used again and again is remembered, as pickle does.

    pickle itself refuses to name a class of a module that is not installed, and importing torch for its names takes
    longer than writing a gigabyte.
    """

    def __init__(self) -> None:
        self._memo: dict[bytes, int] = {}

    def pickle(self, value: bytes) -> bytes:
        return pickle.PROTO + b"\x02" + value + pickle.STOP

    def tensor(self, info: TensorInfo, key: str) -> bytes:
        """A call of torch._utils._rebuild_tensor_v2(storage, offset, shape, stride, requires_grad, hooks)."""
        rebuild, shape = self.name("torch._utils", "_rebuild_tensor_v2"), info.shape
        parts = [self.shared("storage"), self.name("torch", _STORAGE_NAMES[info.dtype]), self.text(key)]
        storage = self.sequence([*parts, self.shared("cpu"), self.number(prod(shape))]) + pickle.BINPERSID
        stride = [prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape))]
        hooks = self.name("collections", "OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE
        where = [storage, self.number(0), self.numbers(shape), self.numbers(stride)]
        return rebuild + self.sequence([*where, pickle.NEWFALSE, hooks]) + pickle.REDUCE

    def mapping(self, items: Iterable[bytes]) -> bytes:
        return pickle.EMPTY_DICT + pickle.MARK + b"".join(items) + pickle.SETITEMS

    def sequence(self, items: Iterable[bytes]) -> bytes:
        """A tuple."""
        return pickle.MARK + b"".join(items) + pickle.TUPLE

    def numbers(self, values: Iterable[int]) -> bytes:
        return self.sequence(self.number(value) for value in values)

    def number(self, value: int) -> bytes:
        return pickle.dumps(value, 2)[2:-1]  # without the protocol before it and the stop after it

    def text(self, value: str) -> bytes:
        data = value.encode()
        return pickle.BINUNICODE + struct.pack("<I", len(data)) + data

    def name(self, module: str, name: str) -> bytes:
        """A class or function."""
        return self._remembered(pickle.GLOBAL + f"{module}\n{name}\n".encode())

    def shared(self, value: str) -> bytes:
        """Text that comes often."""
        return self._remembered(self.text(value))

    def _remembered(self, opcodes: bytes) -> bytes:
        if opcodes in self._memo:
            return pickle.BINGET + bytes([self._memo[opcodes]])
        self._memo[opcodes] = len(self._memo)
        return opcodes + pickle.BINPUT + bytes([self._memo[opcodes]])
