"""What an output may not take the place of: the input, and weights that no conversion here has written."""

import re
from pathlib import Path

from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.huggingface import foreign_weights
from trainium.text import some

# Names that an earlier output may hold: out/model of `to_nxd`, and out of `to_hf`.
MODEL_FOLDER = re.compile(r"(dp_rank_\d+_)?tp_rank_\d+_pp_rank_\d+(\.pt)?(\.tensors|\.info\.pt)?")
WEIGHT_FOLDER = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json|checkpoint\.pt|config\.json"
)

_TRAINING = ("optim", "scheduler.pt", "user_content.pt")  # what NxD saves beside model/


def refuse_losses(out: Path, checkpoint: Path, config: object) -> None:
    """Raise CheckpointError when what is read, or weights that nobody made here, would be replaced by the output."""
    if out.name in ("", ".."):
        return  # refused as an output at all, with its own message
    for path in (checkpoint, *([config] if isinstance(config, Path) else [])):
        if out.resolve() in (path.resolve(), *path.resolve().parents):
            raise CheckpointError(
                f"{path} lies in {out}, which the output replaces; give another output folder, such as {out}-trained"
            )
    if out.is_dir() and (foreign := foreign_weights(out)):
        raise CheckpointError(
            f"{out} holds weights that are no earlier output ({some(foreign)}) and would be lost; "
            "give a new or an empty folder, or remove them first"
        )


def refuse_training(out: Path) -> None:
    """Raise CheckpointError when out/model is what a training has saved."""
    found = [name for name in _TRAINING if (out / name).exists()]
    if found and (out / "model").exists():
        raise CheckpointError(
            f"{out} is a checkpoint of a training ({some(found)} beside model/), whose weights would be lost; "
            "give a new or an empty folder"
        )
