"""Where an attempt at training starts. Decided once: what is adopted must be described as it was submitted."""

from pathlib import Path

from slurm.folder import JobFolder
from trainium.checkpoint.training import list_checkpoints
from trainium.config.nxdt import ResumePoint
from trainium.files import read_json, write_json

DECISION = "starting-point.json"


def starting_point(job: Path, checkpoints: Path, *, shards: int, max_steps: int) -> tuple[str, ResumePoint | None]:
    """The config's name and the checkpoint to go on from; None: the converted weights.

    `job` is the attempt's folder, `<stage>-<attempt>`. A checkpoint of the last step is nothing to go on from: there
    would be no step left to train, and no loss to judge.
    """
    attempt = int(job.name.rpartition("-")[2])
    if attempt == 1:
        return "train", None
    checkpoint = _decided(job)
    if checkpoint is None:
        complete = [c for c in list_checkpoints(checkpoints, shards) if c.complete and c.step < max_steps]
        checkpoint = str(complete[-1].path) if complete else ""
        write_json(job / DECISION, {"checkpoint": checkpoint})
    if not checkpoint:
        return f"train-again-{attempt - 1}", None
    return f"train-resume-{attempt - 1}", ResumePoint(Path(checkpoint))


def _decided(job: Path) -> str | None:
    """What was decided when the attempt was submitted, "" for no checkpoint; None when it never was submitted."""
    if JobFolder(job).read_intent() is None:
        return None
    try:
        return str(read_json(job / DECISION)["checkpoint"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
