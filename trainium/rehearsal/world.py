"""The ranks of a run, which node has them, and how the node processes talk to each other.

Rank order is NxD's: tensor parallel fastest, then data parallel, then pipeline (`parallel_state.py`). One process per
node stands for all ranks of the node; it holds the whole model, but reads and writes only the shards of its own ranks.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

JOIN_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True)
class World:
    """nodes × ranks_per_node ranks, seen from one node."""

    nodes: int
    node: int
    ranks_per_node: int
    tp: int
    pp: int

    @classmethod
    def from_environment(cls, tp: int, pp: int) -> "World":
        """From what the rehearsal's torchrun exports. Raises NxD's RuntimeError when tp × pp is no divisor."""
        env = os.environ
        if "REHEARSAL_RANKS_PER_NODE" not in env:
            raise RuntimeError("training_orchestrator.py is started by torchrun: REHEARSAL_RANKS_PER_NODE is not set")
        world = cls(
            int(env["REHEARSAL_NODES"]), int(env["REHEARSAL_NODE_RANK"]), int(env["REHEARSAL_RANKS_PER_NODE"]), tp, pp
        )
        if world.size % (tp * pp):
            raise RuntimeError(
                f"invalid implied data parallel degree: `world_size` ({world.size}) is not divisible by "
                f"tensor_model_parallel_size ({tp}) x pipeline_model_parallel_size ({pp})context_parallel_size (1)"
            )
        return world

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.size // (self.tp * self.pp)

    def holders(self, tp_rank: int, pp_rank: int) -> list[int]:
        """The nodes that have this (tp, pp) rank of some data-parallel replica; the first has that of replica 0."""
        ranks = (pp_rank * self.dp * self.tp + replica * self.tp + tp_rank for replica in range(self.dp))
        return list(dict.fromkeys(rank // self.ranks_per_node for rank in ranks))

    def reads(self) -> list[tuple[int, int]]:
        """The (tp, pp) shards that this node's ranks load."""
        return [shard for shard in self.shards() if self.node in self.holders(*shard)]

    def writes(self) -> list[tuple[int, int]]:
        """The (tp, pp) shards that this node saves: those of replica 0."""
        return [shard for shard in self.shards() if self.holders(*shard)[0] == self.node]

    def own(self, count: int) -> range:
        """This node's part of `count` micro batches, in order."""
        return range(count * self.node // self.nodes, count * (self.node + 1) // self.nodes)

    def shards(self) -> list[tuple[int, int]]:
        """All (tp, pp) ranks."""
        return [(tp, pp) for pp in range(self.pp) for tp in range(self.tp)]


class Group:
    """The node processes of a run, over gloo; with one node nothing is bound and every call is a no-op."""

    def __init__(self, world: World) -> None:
        """Meets the other nodes at MASTER_ADDR:MASTER_PORT; raises RuntimeError when one does not come in 5 minutes."""
        self._world = world
        if world.nodes > 1:
            address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            dist.init_process_group(
                "gloo", init_method=address, world_size=world.nodes, rank=world.node, timeout=JOIN_TIMEOUT
            )

    def barrier(self) -> None:
        """Wait for every node."""
        if self._world.nodes > 1:
            dist.barrier()

    def sum_(self, tensors: list[torch.Tensor]) -> None:
        """Replace every tensor by its sum over the nodes; the same bits on every node."""
        if self._world.nodes > 1:
            flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
            dist.all_reduce(flat)
            for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def complete(
        self, mine: Mapping[tuple[int, int], Mapping[str, torch.Tensor]]
    ) -> dict[tuple[int, int], Mapping[str, torch.Tensor]]:
        """All shards, where every node brings those of its own ranks."""
        shards = dict(mine)
        for shard in self._world.shards():
            holders = self._world.holders(*shard)
            if len(holders) < self._world.nodes:
                box: list[Mapping[str, torch.Tensor] | None] = [shards.get(shard)]
                dist.broadcast_object_list(box, src=holders[0])
                if box[0] is not None:
                    shards[shard] = box[0]
        return shards

    def close(self) -> None:
        """Leave the group."""
        if self._world.nodes > 1:
            dist.destroy_process_group()
