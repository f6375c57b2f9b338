"""What S3 states about an object's content, and whether a file agrees."""

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_SINGLE = re.compile(r'"?([0-9a-f]{32})"?')
_PARTS = re.compile(r'"?([0-9a-f]{32})-(\d+)"?')


class Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True)
class Proof:
    how: str  # sha256, md5, md5-parts, crc32 or size
    sha256: str  # of the content, always


@dataclass(frozen=True)
class Expected:
    """Size, ETag and the strongest statement about the content that can be checked here.

    An ETag is the MD5 of the content, or of the MD5s of the parts, unless the object is encrypted with KMS or a
    customer's key (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html). CRC32C and CRC64NVME would need a
    native library: such objects are checked by their ETag.
    """

    size: int  # bytes
    etag: str  # as S3 sends it, with its quotes
    how: str
    value: str  # hex
    part: int = 0  # bytes of a part, for md5-parts

    @classmethod
    def of(cls, head: Mapping[str, Any], first_part: Callable[[], int]) -> "Expected":
        """From the answer of HeadObject with ChecksumMode; `first_part` is asked only for a multipart ETag."""
        size, etag = int(head["ContentLength"]), str(head["ETag"])
        whole = head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"
        is_md5 = not (
            str(head.get("ServerSideEncryption", "")).startswith("aws:kms") or head.get("SSECustomerAlgorithm")
        )
        if whole and (sha256 := _hex(head.get("ChecksumSHA256"))):
            return cls(size, etag, "sha256", sha256)
        if is_md5 and (match := _SINGLE.fullmatch(etag)):
            return cls(size, etag, "md5", match[1])
        if is_md5 and (match := _PARTS.fullmatch(etag)):
            part = first_part()
            # Parts of different sizes cannot be told apart from outside.
            if part > 0 and -(-size // part) == int(match[2]):
                return cls(size, etag, "md5-parts", match[1], part)
        if whole and (crc32 := _hex(head.get("ChecksumCRC32"))):
            return cls(size, etag, "crc32", crc32)
        return cls(size, etag, "size", "")

    def check(self, path: Path) -> Proof | None:
        """Read the file once; None if it is another content."""
        if path.stat().st_size != self.size:
            return None
        makers: dict[str, Callable[[], Hash]] = {"sha256": hashlib.sha256}
        if self.how == "md5":
            makers["md5"] = _md5
        elif self.how == "md5-parts":
            makers["md5-parts"] = lambda: _PartsMD5(self.part)
        elif self.how == "crc32":
            makers["crc32"] = _CRC32
        hashes = hashes_of(path, makers)
        if self.how != "size" and hashes[self.how].hexdigest() != self.value:
            return None
        return Proof(self.how, hashes["sha256"].hexdigest())


def hashes_of(path: Path, makers: Mapping[str, Callable[[], Hash]]) -> dict[str, Hash]:
    """Several hashes of a file in one pass over it."""
    hashes = {name: make() for name, make in makers.items()}
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            for each in hashes.values():
                each.update(block)
    return hashes


def _hex(encoded: str | None) -> str:
    """S3 sends checksums in base64; `…-3` is one over the checksums of 3 parts, which says nothing about the whole."""
    return base64.b64decode(encoded).hex() if encoded and "-" not in encoded else ""


def _md5() -> Hash:
    return hashlib.md5(usedforsecurity=False)


class _CRC32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class _PartsMD5:
    """The MD5 of the MD5s of parts of a given size."""

    def __init__(self, part: int) -> None:
        self._size, self._filled = part, 0
        self._part, self._all = hashlib.md5(usedforsecurity=False), hashlib.md5(usedforsecurity=False)

    def update(self, data: bytes, /) -> None:
        view = memoryview(data)
        while view:
            taken = view[: self._size - self._filled]
            self._part.update(taken)
            self._filled += len(taken)
            view = view[len(taken) :]
            if self._filled == self._size:
                self._close()

    def _close(self) -> None:
        self._all.update(self._part.digest())
        self._part, self._filled = hashlib.md5(usedforsecurity=False), 0

    def hexdigest(self) -> str:
        if self._filled:
            self._close()
        return self._all.hexdigest()
