"""Full rehearsals, with the trainer that really trains, interrupted during training."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from tests.chaos.acts_on_clusters import node_killed, preempted
from tests.chaos.cases import Event, Kind, Lab, Moment, Then
from tests.chaos.scene import Scene

OVERRIDES = (
    "training.max_steps=24",
    "training.checkpoint_every=6",
    "training.log_every=1",
    "training.warmup_steps=2",
    "evaluate.rows=4",
    "evaluate.samples=1",
)
AFTER_A_CHECKPOINT = (Moment(Event.SAVED, "train"),)


def trainer_killed(scene: Scene) -> None:
    """As by the kernel when memory runs out: the process that trains, and nothing else."""
    uid = scene.uid()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                named = f"SLURM_JOB_NAME={uid}-train-".encode() in (entry / "environ").read_bytes()
                if named and b"training_orchestrator.py" in (entry / "cmdline").read_bytes().split(b"\0")[2]:
                    os.kill(int(entry.name), signal.SIGKILL)


KINDS = (
    Kind("node killed", node_killed, Then.GOES_ON, AFTER_A_CHECKPOINT, Lab()),
    Kind("preempted", preempted, Then.GOES_ON, AFTER_A_CHECKPOINT, Lab()),
    Kind("trainer killed", trainer_killed, Then.GOES_ON, AFTER_A_CHECKPOINT),
)
