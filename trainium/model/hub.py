"""A pinned revision of a hub repository, on disk and proved file by file."""

import hashlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.tqdm import tqdm

from trainium.errors import TransientError
from trainium.model.errors import HubError, explain
from trainium.model.wanted import is_weights, wanted_files
from trainium.text import size

_METADATA_TIMEOUT = 30.0  # seconds
_PARALLEL_FILES = 4


@dataclass(frozen=True)
class FileReport:
    """One verified file. `digest`, as the hub states it: `sha256:…` (stored by LFS) or `git-sha1:…` (stored by git)."""

    path: str
    bytes: int
    digest: str
    reused: bool


@dataclass(frozen=True)
class SnapshotReport:
    """What is in the folder now; every size and digest was compared with the hub's metadata of that commit."""

    repo: str
    commit: str
    folder: Path
    files: tuple[FileReport, ...]

    @property
    def downloaded_bytes(self) -> int:
        return sum(file.bytes for file in self.files if not file.reused)


@dataclass(frozen=True)
class DownloadProgress:
    """Bytes of the files that are missing at the start; `bytes_done` may jump back when a file starts again."""

    bytes_done: int
    bytes_total: int


def resolve(repo: str, revision: str = "main", *, token: str | None = None, endpoint: str | None = None) -> str:
    """The commit id (40 hex digits) that a branch, tag or commit stands for now.

    Without a token, that of `hf auth login` or HF_TOKEN is used, as in every hub client; without an endpoint,
    HF_ENDPOINT.
    Raises HubError (missing, private, gated, unknown revision, offline) and TransientError (no connection, 5xx, 429).
    """
    token = _clean(token)
    with _explained(repo, revision, endpoint, token):
        info = HfApi(endpoint=endpoint, token=token).model_info(repo, revision=revision, timeout=_METADATA_TIMEOUT)
        if info.sha is None:
            where = endpoint or constants.ENDPOINT
            raise HubError(f"{where} names no commit for {repo} at {revision!r}: it is not a Hugging Face hub.")
        return info.sha


def download(
    repo: str,
    commit: str,
    folder: Path,
    *,
    token: str | None = None,
    endpoint: str | None = None,
    progress: Callable[[DownloadProgress], None] | None = None,
) -> SnapshotReport:
    """Bring the files that a run needs into `folder` and compare each with the hub's size and digest.

    A file that is there and right is kept, one that is wrong is fetched again. After a lost connection the
    transfer goes on inside the file (HTTP Range), after a lost process with the files that were not finished. Raises
    HubError and TransientError as `resolve`, and HubError for weights of another model in the folder, a repository
    without weights, and too little disk space (looked at before the first byte).
    """
    token = _clean(token)
    with _explained(repo, commit, endpoint, token):
        files = _listing(repo, commit, token, endpoint)
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_strangers(folder, files)
        _forget_transfers(folder)
        kept = {file.path for file in files if _is_right(folder / file.path, file)}
        missing = [file for file in files if file.path not in kept]
        _check_space(folder, sum(file.size for file in missing))
        count = _Counter(sum(file.size for file in missing), progress)

        def fetch(file: RepoFile) -> None:
            (folder / file.path).unlink(missing_ok=True)
            hf_hub_download(
                repo,
                file.path,
                revision=commit,
                local_dir=folder,
                token=token,
                endpoint=endpoint,
                tqdm_class=count.bar(),
            )
            if not _is_right(folder / file.path, file):
                (folder / file.path).unlink(missing_ok=True)
                raise TransientError(
                    f"model {repo}: {file.path} arrived with other bytes than {commit[:12]} has ({_digest(file)}). It "
                    "was removed; a retry fetches it again. If it stays, a proxy or mirror changes or caches the "
                    "file."
                )

        with ThreadPoolExecutor(_PARALLEL_FILES) as pool:
            try:
                for _ in pool.map(fetch, missing):
                    pass
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        _forget_transfers(folder)
    return SnapshotReport(
        repo, commit, folder, tuple(FileReport(f.path, f.size, _digest(f), reused=f.path in kept) for f in files)
    )


def _listing(repo: str, commit: str, token: str | None, endpoint: str | None) -> list[RepoFile]:
    tree = HfApi(endpoint=endpoint, token=token).list_repo_tree(repo, revision=commit)
    files = {entry.path: entry for entry in tree if isinstance(entry, RepoFile)}
    wanted = [files[name] for name in wanted_files(list(files))]
    if not any(is_weights(file.path) for file in wanted):
        formats = sorted(
            {Path(name).suffix for name in files if Path(name).suffix in {".gguf", ".onnx", ".h5", ".msgpack"}}
        )
        raise HubError(
            f"model {repo} has neither *.safetensors nor pytorch_model*.bin at {commit[:12]}"
            + (f", only {', '.join(formats)}" if formats else "")
            + ". Choose the repository with the original weights."
        )
    return wanted


def _refuse_strangers(folder: Path, files: Sequence[RepoFile]) -> None:
    """Weights that are not of this commit would be loaded together with its own, or instead of them."""
    ours = {file.path for file in files}
    strangers = sorted(p.name for p in folder.iterdir() if is_weights(p.name) and p.name not in ours)
    if strangers:
        raise HubError(
            f"{folder} holds weights of another model or revision: {', '.join(strangers[:5])}. Remove them or give an "
            "empty folder."
        )


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HubError(
            f"{folder} has {size(free)} free and the download needs {size(needed)} more. Free space "
            "there or choose a folder on a larger disk."
        )


def _is_right(path: Path, file: RepoFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    if file.lfs is not None:
        digest = hashlib.sha256()
    else:  # what git calls the blob's id
        digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest() == (file.lfs.sha256 if file.lfs is not None else file.blob_id)


def _digest(file: RepoFile) -> str:
    return f"sha256:{file.lfs.sha256}" if file.lfs is not None else f"git-sha1:{file.blob_id}"


def _forget_transfers(folder: Path) -> None:
    """Remove huggingface_hub's book-keeping and the parts of killed processes, which it never reads again."""
    cache = folder / ".cache"
    shutil.rmtree(cache / "huggingface", ignore_errors=True)
    if cache.is_dir() and not any(cache.iterdir()):
        cache.rmdir()


def _clean(token: str | None) -> str | None:
    """The token of a file or block: without the newline an editor leaves, and never quoted in an error."""
    token = (token or "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise HubError("The hub token holds blanks or characters that no token has: copy it again, on one line.")
    return token or None


@contextmanager
def _explained(repo: str, revision: str, endpoint: str | None, token: str | None) -> Iterator[None]:
    try:
        yield
    except (HubError, TransientError):
        raise
    except Exception as error:
        known = explain(error, repo=repo, revision=revision, endpoint=endpoint, token=token)
        if known is None:
            raise
        # The original's text may hold a signed address; the explanation is complete without it.
        raise known from None


class _Counter:
    """Adds up what the parallel transfers report."""

    def __init__(self, total: int, progress: Callable[[DownloadProgress], None] | None) -> None:
        self._total, self._progress = total, progress
        self._done, self._lock = 0, threading.Lock()

    def add(self, count: float | None) -> None:
        with self._lock:
            self._done += int(count or 0)
            if self._progress is not None:
                self._progress(DownloadProgress(self._done, self._total))

    def bar(self) -> type[tqdm]:
        """A progress bar for huggingface_hub that draws nothing; it is the only hook that a running transfer has."""
        add = self.add

        class Silent(tqdm):
            def __init__(self, *args: object, **options: object) -> None:
                super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

            def update(self, n: float | None = 1) -> None:
                add(n)

            def update_transfer(self, n: float | None = 1) -> None:
                """Bytes on the wire of a xet transfer; `update` gets the same bytes once they are on disk."""

            def set_transfer_postfix_str(self, *args: object, **options: object) -> None:
                """The rate of those bytes."""

        return Silent
