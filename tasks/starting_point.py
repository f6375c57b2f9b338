"""Where an attempt at training starts. Decided once: what is adopted must be described as it was submitted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurm.folder import JobFolder
from trainium.checkpoint.training import TrainingCheckpoint, list_checkpoints, unreadable_parts
from trainium.config.nxdt import ResumePoint
from trainium.files import read_json, write_json
from trainium.text import some

DECISION = "starting-point.json"
DIVERGENCE = "divergence.json"


def starting_point(job: Path, checkpoints: Path, *, shards: int, max_steps: int) -> tuple[str, ResumePoint | None]:
    """The config's name and the checkpoint to go on from; None: the converted weights.

    `job` is the attempt's folder, `<stage>-<attempt>`. A checkpoint of the last step is nothing to go on from: there
    would be no step left to train, and no loss to judge. Nor is one that was saved after the loss was lost, nor one
    that lacks a part or has one that cannot be read. Such ones are moved out of the way: NxDT's automatic resume takes
    the newest, whatever it is.
    """
    attempt = _number(job)
    if attempt == 1:
        return "train", None
    checkpoint = _decided(job)
    if checkpoint is None:
        found = _look(job, checkpoints, shards=shards, max_steps=max_steps)
        checkpoint = str(found.checkpoint.path) if found.checkpoint else ""
        step = found.checkpoint.step if found.checkpoint else 0
        write_json(job / DECISION, {"checkpoint": checkpoint, "step": step, "set_aside": found.useless})
        _set_aside([checkpoints / name for name in found.useless], checkpoints.parent / "set-aside" / job.name)
    if not checkpoint:
        return f"train-again-{attempt - 1}", None
    return f"train-resume-{attempt - 1}", ResumePoint(Path(checkpoint))


def began_at(job: Path) -> int:
    """The global step at which an attempt began: the one of its checkpoint, 0 for the converted weights."""
    try:
        return int(read_json(job / DECISION)["step"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return 0


def position_after(job: Path, checkpoints: Path, *, shards: int, max_steps: int) -> int:
    """The global step from which an attempt after this one would go on. Moves nothing."""
    after = job.with_name(f"{job.name.rpartition('-')[0]}-{_number(job) + 1}")
    found = _look(after, checkpoints, shards=shards, max_steps=max_steps)
    return found.checkpoint.step if found.checkpoint else 0


def note_divergence(job: Path, losses: Sequence[tuple[int, float]]) -> None:
    """Leave with a failed attempt how far its weights can be trusted, of (global step, loss) in order.

    A finite loss of step n was computed from the weights after n updates; what was saved later may not be finite.
    """
    sound = 0
    for step, loss in losses:
        if not math.isfinite(loss):
            break
        sound = step
    write_json(job / DIVERGENCE, {"sound_until": sound})


@dataclass(frozen=True)
class _Found:
    """The checkpoint to go on from, and why which others are in its way."""

    checkpoint: TrainingCheckpoint | None
    useless: dict[str, str]


def _look(job: Path, checkpoints: Path, *, shards: int, max_steps: int) -> _Found:
    """The newest first: of several that are complete, most often only one is read."""
    sound = min((max_steps - 1, *_sound_steps(job, _number(job))))
    useless: dict[str, str] = {}
    chosen = None
    for checkpoint in reversed(list_checkpoints(checkpoints, shards)):
        if not checkpoint.complete:
            useless[checkpoint.path.name] = f"lacks {some(checkpoint.missing)}"
        elif checkpoint.step > sound:
            useless[checkpoint.path.name] = f"step {checkpoint.step} is none to go on from, {sound} would be the last"
        elif chosen is None:
            if unreadable := unreadable_parts(checkpoint.path):
                useless[checkpoint.path.name] = some(unreadable)
            else:
                chosen = checkpoint
    return _Found(chosen, useless)


def _set_aside(checkpoints: Sequence[Path], folder: Path) -> None:
    for path in checkpoints:
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)


def _number(job: Path) -> int:
    return int(job.name.rpartition("-")[2])


def _sound_steps(job: Path, attempt: int) -> list[int]:
    """What earlier attempts noted."""
    stage = job.name.rpartition("-")[0]
    notes = (job.with_name(f"{stage}-{number}") / DIVERGENCE for number in range(1, attempt))
    return [int(read_json(note)["sound_until"]) for note in notes if note.exists()]


def _decided(job: Path) -> str | None:
    """What was decided when the attempt was submitted, "" for no checkpoint; None when it never was submitted."""
    if JobFolder(job).read_intent() is None:
        return None
    try:
        return str(read_json(job / DECISION)["checkpoint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
