"""The files of a lease.

In its folder is a claim `<generation>.json` for everyone who ever had the lease; the highest counts, and none is ever
changed or removed. A claim is a hard link to a file `holder-<token>` that its owner has written before: a link is made
by exactly one, on NFS and Lustre too, and is whole when it is there. The lease is held while the claim has its second
name: to give it back, or to take it away, is to remove that name. The time of the file is the heartbeat: no content is
written, so no heartbeat is ever half there or fails because the disk is full, and none of an old owner counts for a new
one, since a token is used once.
"""

import errno
import os
import re
from contextlib import suppress
from pathlib import Path

from trainium.run.holder import Holder

ABSENT = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)

_CLAIM = re.compile(r"([1-9]\d*)\.json", re.ASCII)


def claim(folder: Path, generation: int) -> Path:
    return folder / f"{generation}.json"


def name_of(folder: Path, holder: Holder) -> Path:
    """The holder's own name of its claim."""
    return folder / f"holder-{holder.token}"


def latest(folder: Path) -> int:
    """The highest generation; 0 when there is none."""
    return max(_generations(folder), default=0)


def read(folder: Path, generation: int) -> tuple[os.stat_result, Holder | None]:
    """Status and content. Raises FileNotFoundError.

    Through one open file: an NFS client asks its server when a file is opened, whatever it remembers.
    """
    with claim(folder, generation).open("rb") as file:
        return os.fstat(file.fileno()), Holder.parse(file.read())


def is_there(path: Path) -> bool:
    """As the server has it; see `read`."""
    try:
        with path.open("rb"):
            return True
    except OSError as error:
        if error.errno in ABSENT:
            return False
        raise


def make(folder: Path, holder: Holder, generation: int) -> bool:
    """Claim this generation; False when somebody else was faster. Older owners have lost the lease then."""
    _make_folder(folder)
    own = name_of(folder, holder)
    try:
        _write(own, holder.render())
        claim(folder, generation).hardlink_to(own)
    except (FileExistsError, FileNotFoundError):
        # The answer to a link that was made may get lost: NFS then asks again, and is told that it exists.
        if not _is_claimed_by(folder, holder, generation):
            own.unlink(missing_ok=True)
            return False
    except BaseException:
        with suppress(OSError):
            own.unlink()
        raise
    _remove_names_before(folder, generation)
    return True


def _generations(folder: Path) -> list[int]:
    try:
        return [int(match[1]) for name in os.listdir(folder) if (match := _CLAIM.fullmatch(name))]  # noqa: PTH208
    except OSError as error:
        if error.errno in ABSENT:
            return []
        raise


def _is_claimed_by(folder: Path, holder: Holder, generation: int) -> bool:
    with suppress(FileNotFoundError):
        there = read(folder, generation)[1]
        return there is not None and there.token == holder.token
    return False


def _remove_names_before(folder: Path, generation: int) -> None:
    """Only names of older claims: one without a claim may be a contender's that is about to link it."""
    for older in _generations(folder):
        if older < generation:
            with suppress(FileNotFoundError):
                status, holder = read(folder, older)
                if status.st_nlink > 1 and holder is not None:
                    name_of(folder, holder).unlink()


def _make_folder(folder: Path) -> None:
    """With its parent's permissions: what several people may write stays so."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(folder.parent.stat().st_mode & 0o7777)


def _write(path: Path, content: bytes) -> None:
    """Not synced to the disk: a claim that a power cut takes away lets its owner find that it has lost."""
    try:
        with path.open("xb") as file:
            os.fchmod(file.fileno(), 0o644)  # other contenders read it, whatever the umask
            file.write(content)
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)  # a full disk does not say whose
        raise
