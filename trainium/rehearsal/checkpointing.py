"""When checkpoints are written, what they are called, which are deleted, and from which one a run starts.

Behaviour of NeMo's `exp_manager.check_resume` and of Lightning's ModelCheckpoint with `monitor: step, mode: max`.
"""

import re
import string
from collections.abc import Mapping
from pathlib import Path

from trainium.rehearsal.lines import nemo, say
from trainium.rehearsal.settings import Experiment


def find_start(experiment: Experiment) -> Path | None:
    """The checkpoint to load: that of the automatic resume, or `resume_from_checkpoint`, which overrides it.

    Raises FileNotFoundError when a resume is asked for, there is nothing to resume, and that is not to be ignored.
    """
    automatic = _newest(experiment) if experiment.resume_if_exists else None
    explicit = experiment.resume_from_checkpoint
    if automatic and explicit:
        say(
            f"`trainer.ckpt_path = '{automatic}'` was called but then you passed "
            f"`trainer.fit(ckpt_path='{explicit}')`. The latter will be loaded."
        )
    return explicit or automatic


def _newest(experiment: Experiment) -> Path | None:
    """The newest checkpoint by modification time, complete or not."""
    folder = experiment.checkpoints
    found = sorted(folder.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime) if folder.is_dir() else []
    if found:
        nemo(f"Resuming from {found[-1]}", where="exp_manager:414")
        return found[-1]
    problem = (
        f"There were no checkpoints found in {folder}."
        if folder.is_dir()
        else f"There was no checkpoint folder at checkpoint_dir :{folder}."
    )
    if not experiment.resume_ignore_no_checkpoint:
        raise FileNotFoundError(f"{problem} Cannot resume.")
    nemo(f"{problem} Training from scratch.", level="W", where="exp_manager:395")
    return None


def consumed_samples_of(checkpoint: Path) -> int:
    """The (possibly stale) number in a checkpoint's name; 0 with a warning when there is none."""
    match = re.search(r"consumed_samples=([0-9]+.[0-9]+)", str(checkpoint))
    if not match:
        say("Cannot parse the checkpoint file to get the consumed samples. assume it is zero.")
        return 0
    return int(float(match[1]))


def checkpoint_name(template: str, values: Mapping[str, float]) -> str:
    """Lightning's file name: `{step}` becomes `step=50`; a metric that was never logged is 0."""
    parts = []
    for text, field, spec, _ in string.Formatter().parse(template):
        parts.append(text)
        if field is not None:
            parts.append(f"{field}={format(values.get(field, 0), spec or '')}")
    return f"{''.join(parts)}.ckpt"


def is_due(experiment: Experiment, global_step: int) -> bool:
    """Whether a checkpoint is written after this many steps."""
    every = experiment.every_n_train_steps
    return experiment.create_checkpoints and experiment.save_top_k != 0 and every > 0 and global_step % every == 0


def superfluous(experiment: Experiment, known: list[Path]) -> list[Path]:
    """Of `known`, oldest first, those that go when only save_top_k may stay; -1 keeps all."""
    return [] if experiment.save_top_k < 0 else known[: max(0, len(known) - experiment.save_top_k)]


def known_checkpoints(experiment: Experiment) -> list[Path]:
    """Checkpoints of earlier runs in this folder by their step; a run that does not resume does not know them."""
    if not experiment.resume_if_exists:
        return []
    steps = {path: re.search(r"step=(\d+)", path.name) for path in experiment.checkpoints.glob("*.ckpt")}
    return [path for _, path in sorted((int(match[1]), path) for path, match in steps.items() if match)]
