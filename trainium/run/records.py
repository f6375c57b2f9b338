"""What a finished stage leaves behind, and what makes it the same stage again."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SHARED_LEASE = ".lease"  # folder in a shared output, of whoever is writing to it


@dataclass(frozen=True)
class Output:
    """A file or folder that a stage made: path, files in it, bytes in all of them (apparent size).

    `shared`: others add to it, such as a compile cache, to which training and other runs do.
    """

    path: str
    files: int
    bytes: int
    shared: bool = False

    @classmethod
    def of(cls, path: Path, *, shared: bool = False) -> "Output":
        """Measure what is there now. Raises FileNotFoundError when there is nothing."""
        if path.is_file():
            return cls(str(path), 1, path.stat().st_size, shared)
        if not path.is_dir():
            raise FileNotFoundError(path)
        files = (file for file in path.rglob("*") if not (shared and file.parent == path / SHARED_LEASE))
        sizes = [file.stat().st_size for file in files if file.is_file()]
        return cls(str(path), len(sizes), sum(sizes), shared)

    def still_there(self) -> bool:
        """Whether the path still holds as many files and bytes. Contents are not read again: that could be hours."""
        try:
            now = Output.of(Path(self.path), shared=self.shared)
        except FileNotFoundError:
            return False
        return now == self or (self.shared and now.files >= self.files and now.bytes >= self.bytes)


@dataclass(frozen=True, kw_only=True)
class JobNote:
    """The Slurm (or local) job that did the work of a stage; `seconds` as its own script measured them."""

    id: str
    attempt: int
    state: str
    exit_code: int | None
    nodes: str | None
    log: str
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StageRecord:
    """Written last and atomically: the stage is finished, and this is what it did.

    `inputs` is the digest of everything that decides the result (and of the stages before), so a record whose inputs
    are equal and whose outputs are still there stands for the work. `table` is what people want to see, as rows with
    equal keys; `verified` says in words what was proved.
    """

    stage: str
    inputs: str
    started: str
    ended: str
    seconds: float
    outputs: tuple[Output, ...] = ()
    jobs: tuple[JobNote, ...] = ()
    verified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    table: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StageRecord":
        return cls(
            **{
                **value,
                "outputs": tuple(Output(**output) for output in value["outputs"]),
                "jobs": tuple(JobNote(**job) for job in value["jobs"]),
                "verified": tuple(value["verified"]),
                "notes": tuple(value["notes"]),
            }
        )

    @property
    def skippable(self) -> bool:
        """Whether the outputs are still where they were, as large as they were."""
        return all(output.still_there() for output in self.outputs)


def digest(value: Any) -> str:
    """SHA-256 (hex, 64 digits) of a value as canonical JSON: the same in every process and on every day."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
