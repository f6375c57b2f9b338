"""Where an attempt at training starts. Decided once: what is adopted must be described as it was submitted."""

import math
from collections.abc import Sequence
from pathlib import Path

from slurm.folder import JobFolder
from trainium.checkpoint.training import list_checkpoints
from trainium.config.nxdt import ResumePoint
from trainium.files import read_json, write_json

DECISION = "starting-point.json"
DIVERGENCE = "divergence.json"


def starting_point(job: Path, checkpoints: Path, *, shards: int, max_steps: int) -> tuple[str, ResumePoint | None]:
    """The config's name and the checkpoint to go on from; None: the converted weights.

    `job` is the attempt's folder, `<stage>-<attempt>`. A checkpoint of the last step is nothing to go on from: there
    would be no step left to train, and no loss to judge. Nor is one that was saved after the loss was lost. Such ones
    and incomplete ones are moved out of the way: NxDT's automatic resume takes the newest, whatever it is.
    """
    attempt = int(job.name.rpartition("-")[2])
    if attempt == 1:
        return "train", None
    checkpoint = _decided(job)
    if checkpoint is None:
        sound = min((max_steps - 1, *_sound_steps(job, attempt)))
        there = list_checkpoints(checkpoints, shards)
        complete = [c for c in there if c.complete and c.step <= sound]
        checkpoint = str(complete[-1].path) if complete else ""
        write_json(job / DECISION, {"checkpoint": checkpoint})
        _set_aside([c.path for c in there if c not in complete], checkpoints.parent / "set-aside" / job.name)
    if not checkpoint:
        return f"train-again-{attempt - 1}", None
    return f"train-resume-{attempt - 1}", ResumePoint(Path(checkpoint))


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


def _set_aside(checkpoints: Sequence[Path], folder: Path) -> None:
    for path in checkpoints:
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)


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
