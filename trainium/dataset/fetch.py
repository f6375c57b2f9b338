"""Dataset files from a local folder or S3, resumed where a download broke off and proved before they get their name."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import boto3
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import ClientError

from trainium.dataset.s3_errors import FetchError, explain, listed
from trainium.dataset.verify import Expected, hashes_of
from trainium.errors import TransientError
from trainium.files import sync_folder

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class S3Access:
    """How to reach S3. Keys that are None are looked up in boto3's own chain (environment, ~/.aws, instance role)."""

    unsigned: bool = False  # a public bucket: no credentials are looked for (`aws s3 --no-sign-request`)
    region: str | None = None
    endpoint_url: str | None = None
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"S3Access(unsigned={self.unsigned}, region={self.region!r}, endpoint_url={self.endpoint_url!r})"

    def client(self) -> Any:
        """A boto3 S3 client, whose methods exist only at run time."""
        config = Config(
            signature_version=UNSIGNED if self.unsigned else None,
            retries={"mode": "standard", "max_attempts": 3},
            connect_timeout=10,
            read_timeout=60,
            # Whole files are verified here, over all their ranges; botocore sees one range at a time.
            response_checksum_validation="when_required",
        )
        return boto3.session.Session().client(
            "s3",
            region_name=self.region,
            endpoint_url=self.endpoint_url,
            aws_access_key_id=None if self.unsigned else self.access_key_id,
            aws_secret_access_key=None if self.unsigned else self.secret_access_key,
            aws_session_token=None if self.unsigned else self.session_token,
            config=config,
        )


@dataclass(frozen=True)
class FetchedFile:
    """A dataset file on disk.

    `verified` names what its content was compared with: sha256, md5 (the ETag), md5-parts (the ETag of a multipart
    upload), crc32, size (S3 stated nothing better), or local (read where it is, nothing to compare with).
    """

    source: str
    path: Path
    bytes: int
    sha256: str
    verified: str
    reused: bool


def fetch(
    source: str | Path,
    files: Sequence[str],
    folder: Path,
    *,
    access: S3Access | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[FetchedFile, ...]:
    """The named files of a local folder (used in place) or of `s3://bucket/prefix` (downloaded into `folder`).

    A source that is itself one file takes no names. `progress` gets (bytes of this file on disk, bytes of this file).
    Raises FetchError (not there, with what is there; refused; no credentials; disk full) and TransientError (no
    connection, throttled, cut off, replaced underway, other bytes than S3 states), after which the next call goes on
    where this one broke off.
    """
    source = str(source)
    if source.startswith("s3://"):
        bucket, prefix = _location(source)
        keys = [f"{prefix.rstrip('/')}/{name}".lstrip("/") for name in files] if files else [prefix]
        if not all(key and not key.endswith("/") for key in keys):
            raise FetchError(
                f"dataset source {source!r} names no file: write s3://bucket/folder and the names of the files."
            )
        _refuse_same_name(keys)
        client = (access or S3Access()).client()
        return tuple(_fetch_object(client, bucket, key, folder, progress) for key in keys)
    if "://" in source:
        raise FetchError(f"dataset source {source!r}: only local paths and s3://bucket/prefix can be read.")
    return tuple(_local(path) for path in _local_files(Path(source).expanduser(), files))


def _location(source: str) -> tuple[str, str]:
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    if not bucket:
        raise FetchError(f"dataset source {source!r} names no bucket: write s3://bucket/folder.")
    return bucket, prefix


def _refuse_same_name(keys: Sequence[str]) -> None:
    names = [Path(key).name for key in keys]
    if len(set(names)) != len(names) or any(name in {"", ".", ".."} for name in names):
        raise FetchError(
            f"dataset files {', '.join(keys)} do not have different names: they would overwrite each other."
        )


def _local_files(source: Path, files: Sequence[str]) -> list[Path]:
    if source.is_file() and not files:
        return [source]
    if not source.is_dir():
        raise FetchError(
            f"dataset source {source} is no folder. Give an existing folder, or the path of one file and no file names."
        )
    if not files:
        raise FetchError(f"dataset source {source} is a folder: say which of its files. {listed(_names(source))}")
    for name in files:
        if not (source / name).is_file():
            raise FetchError(f"dataset file {source / name} does not exist. {listed(_names(source))}")
    return [source / name for name in files]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file())


def _local(path: Path) -> FetchedFile:
    digest = hashes_of(path, {"sha256": hashlib.sha256})["sha256"].hexdigest()
    return FetchedFile(str(path), path, path.stat().st_size, digest, "local", reused=True)


def _fetch_object(
    client: Any, bucket: str, key: str, folder: Path, progress: Callable[[int, int], None] | None
) -> FetchedFile:
    source, target = f"s3://{bucket}/{key}", folder / Path(key).name
    with _explained(client, bucket, key):
        head = client.head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
        expected = Expected.of(head, partial(_first_part, client, bucket, key))
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and (proof := expected.check(target)) is not None and proof.how != "size":
            return FetchedFile(source, target, expected.size, proof.sha256, proof.how, reused=True)
        # The version is part of the name, so what another version left behind is never continued.
        part = folder / f".{target.name}.{hashlib.sha256(expected.etag.encode()).hexdigest()[:12]}.part"
        _transfer(client, bucket, key, expected, part, progress)
        proof = expected.check(part)
        if proof is None:
            part.unlink()
            raise TransientError(
                f"{source} arrived with other bytes than S3 states (ETag {expected.etag}). A retry starts afresh."
            )
        part.replace(target)
        sync_folder(folder)
        for stale in folder.glob(f".{target.name}.*.part"):
            stale.unlink()
    return FetchedFile(source, target, expected.size, proof.sha256, proof.how, reused=False)


def _transfer(
    client: Any,
    bucket: str,
    key: str,
    expected: Expected,
    part: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Append what is missing to the partial file, of exactly this version of the object."""
    done = part.stat().st_size if part.exists() else 0
    if done > expected.size:
        part.unlink()
        done = 0
    with part.open("ab") as file:
        if done < expected.size:
            wanted: dict[str, Any] = {"Bucket": bucket, "Key": key, "IfMatch": expected.etag}
            if done:
                wanted["Range"] = f"bytes={done}-"
            answer = client.get_object(**wanted)
            if (
                done and answer["ResponseMetadata"]["HTTPStatusCode"] != 206
            ):  # a server that does not know Range sends all
                file.truncate(0)
                done = 0
            for block in answer["Body"].iter_chunks(_BLOCK):
                file.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, expected.size)
        file.flush()
    if done != expected.size:
        raise TransientError(
            f"s3://{bucket}/{key} broke off after {done} of {expected.size} bytes. A retry goes on from there."
        )


def _first_part(client: Any, bucket: str, key: str) -> int:
    """Bytes of the first part of a multipart upload; all but the last have this size."""
    return int(client.head_object(Bucket=bucket, Key=key, PartNumber=1)["ContentLength"])


@contextmanager
def _explained(client: Any, bucket: str, key: str) -> Iterator[None]:
    try:
        yield
    except (FetchError, TransientError):
        raise
    except Exception as error:
        known = explain(error, bucket, key, partial(_siblings, client, bucket, key))
        if known is None:
            raise
        raise known from None


def _siblings(client: Any, bucket: str, key: str) -> tuple[str, list[str]]:
    """What is beside a missing object: the error code of the listing ('' when it worked), and up to 11 names."""
    folder = key.rpartition("/")[0]
    try:
        page = client.list_objects_v2(Bucket=bucket, Prefix=f"{folder}/" if folder else "", MaxKeys=11)
    except ClientError as error:
        return str(error.response["Error"]["Code"]), []
    return "", [entry["Key"].removeprefix(f"{folder}/") for entry in page.get("Contents", [])]
