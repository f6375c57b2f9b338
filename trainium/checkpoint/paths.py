"""Names of shard files, new and old. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainium.checkpoint.errors import CheckpointError

_NEW = re.compile(r"dp_rank_(\d+)(?:_ep_rank_(\d+))?_tp_rank_(\d+)_pp_rank_(\d+)\.pt")
_OLD = re.compile(r"tp_rank_(\d+)_pp_rank_(\d+)")


@dataclass(frozen=True)
class ShardFiles:
    """The shard files of one folder, by (tp rank, pp rank)."""

    folder: Path
    files: Mapping[tuple[int, int], Path]

    @property
    def tp(self) -> int:
        """Tensor-parallel degree as the highest rank tells it."""
        return 1 + max(tp for tp, _ in self.files)

    @property
    def pp(self) -> int:
        return 1 + max(pp for _, pp in self.files)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of files that the highest ranks say there should be."""
        ranks = [(tp, pp) for tp in range(self.tp) for pp in range(self.pp)]
        return tuple(shard_path(self.folder, *rank).name for rank in ranks if rank not in self.files)


def shard_path(model_dir: Path, tp_rank: int, pp_rank: int) -> Path:
    """The file that the trainer reads for this rank."""
    return model_dir / f"dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


def tensor_folder(shard: Path) -> Path:
    """Where the per-tensor form keeps the tensors of a shard."""
    return shard.with_name(f"{shard.name}.tensors")


def holds_shards(folder: Path) -> bool:
    """Whether a folder has a file or folder named like a shard."""
    return folder.is_dir() and any(_NEW.fullmatch(path.name) or _OLD.fullmatch(path.name) for path in folder.iterdir())


def find_shards(folder: Path) -> ShardFiles:
    """All shard files of a folder; with several names for one rank the oldest name counts, as in NxD.

    Raises CheckpointError when there are none, or shards of experts.
    """
    files: dict[tuple[int, int], Path] = {}
    old: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if match := _NEW.fullmatch(path.name):
            data, expert, tp, pp = (int(group or 0) for group in match.groups())
            if expert:
                raise CheckpointError(f"{path}: shards of experts (ep_rank) cannot be converted here")
            if data == 0:
                files[tp, pp] = path
        elif match := _OLD.fullmatch(path.name):
            old[int(match[1]), int(match[2])] = path / "checkpoint.pt" if path.is_dir() else path
    if not files and not old:
        raise CheckpointError(f"{folder} holds no shards (dp_rank_00_tp_rank_00_pp_rank_00.pt and so on)")
    return ShardFiles(folder, files | old)


def model_folder(checkpoint: Path) -> Path:
    """The folder of the model's shards: `model/` inside a checkpoint, or the folder itself."""
    if not checkpoint.is_dir():
        raise CheckpointError(f"{checkpoint} is no folder; a checkpoint is the folder that holds model/")
    return checkpoint / "model" if (checkpoint / "model").is_dir() else checkpoint
