"""The folder of one job: every file in it by name, and typed readers for the records."""

import json
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from slurm.errors import BrokenRecord

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Intent:
    """Written before a submission: from `first` on a job of this name may exist. `tries` counts submissions."""

    name: str
    first: datetime
    latest: datetime
    tries: int = 1


@dataclass(frozen=True)
class JobRecord:
    """Written after a submission. `adopted`: found by its name instead of being told its id by the submission."""

    job_id: str
    name: str
    submitted: datetime
    adopted: bool = False
    cancel_requested: datetime | None = None


@dataclass(frozen=True)
class StartRecord:
    """Written by the job script when it starts; `nodes` is a Slurm host list."""

    job_id: str
    restart_count: int
    node: str
    nodes: str
    started: datetime


@dataclass(frozen=True)
class ExitRecord:
    """Written by the job script when the payload has ended.

    `code` is the shell's (128 + n for a payload killed by signal n); `signal` is one that the script itself received.
    """

    job_id: str
    restart_count: int
    node: str
    nodes: str
    code: int
    signal: int | None
    started: datetime
    ended: datetime


class JobFolder:
    """Paths and records of one job; the folder need not exist yet."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links that nodes may not have
        self.script = self.path / "script.sh"
        self.intent = self.path / "intent.json"
        self.job = self.path / "job.json"
        self.start = self.path / "start.json"
        self.exit = self.path / "exit.json"
        self.log = self.path / "output.log"

    def __repr__(self) -> str:
        return f"JobFolder({str(self.path)!r})"

    def read_intent(self) -> Intent | None:
        """None when there is none. Raises BrokenRecord."""
        return _own(self.intent, lambda d: Intent(d["name"], _time(d["first"]), _time(d["latest"]), int(d["tries"])))

    def read_job(self) -> JobRecord | None:
        """None when there is none. Raises BrokenRecord."""

        def parse(data: Mapping[str, Any]) -> JobRecord:
            asked = data["cancel_requested"]
            return JobRecord(
                data["job_id"], data["name"], _time(data["submitted"]), data["adopted"], _time(asked) if asked else None
            )

        return _own(self.job, parse)

    def read_start(self) -> StartRecord | None:
        """None when there is none, or when it is not a whole record (it is the job's, not ours: no error)."""

        def parse(data: Mapping[str, Any]) -> StartRecord:
            return StartRecord(**_identity(data), started=_time(data["started"]))

        return _foreign(self.start, parse)

    def read_exit(self) -> ExitRecord | None:
        """None when there is none, or when it is not a whole record.

        The folder is listed first, which makes NFS clients look at the server instead of their cache.
        """
        try:
            if self.exit.name not in os.listdir(self.path):  # noqa: PTH208 - names only, this runs every two seconds
                return None
        except OSError:
            return None

        def parse(data: Mapping[str, Any]) -> ExitRecord:
            number = signal.Signals[f"SIG{data['signal']}"].value if data["signal"] else None
            started, ended = _time(data["started"]), _time(data["ended"])
            return ExitRecord(**_identity(data), code=int(data["code"]), signal=number, started=started, ended=ended)

        return _foreign(self.exit, parse)

    def write(self, path: Path, record: Intent | JobRecord) -> None:
        """One of our own records, whole or not at all."""
        write_atomic(path, json.dumps(asdict(record), indent=2, default=datetime.isoformat) + "\n")


def _own(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
    try:
        return parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise BrokenRecord(f"{path} is not a whole record ({error!r}); restore or remove it") from error


def _foreign(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> T | None:
    try:
        return parse(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not a whole record (%r); treated as missing", path, error)
        return None


def _identity(data: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "job_id": str(data["job_id"]),
        "restart_count": int(data["restart_count"]),
        "node": str(data["node"]),
        "nodes": str(data["nodes"]),
    }


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def write_atomic(path: Path, text: str) -> None:
    """Write through a temporary file, fsync file and folder, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException as error:
        Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not say whose
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
