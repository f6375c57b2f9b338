"""Several nodes: who has which shards, and training in step."""

from __future__ import annotations

import re
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from trainium.checkpoint.convert import to_nxd
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.shards import read_shard
from trainium.rehearsal.world import World

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Toolchain, Workspace


def test_every_shard_is_written_by_one_node_and_read_by_those_that_have_its_ranks() -> None:
    spread = [World(nodes=2, node=node, ranks_per_node=4, tp=4, pp=2) for node in (0, 1)]
    assert [world.writes() for world in spread] == [[(tp, 0) for tp in range(4)], [(tp, 1) for tp in range(4)]]
    assert spread[0].reads() == spread[0].writes()
    replicas = [World(nodes=2, node=node, ranks_per_node=4, tp=4, pp=1) for node in (0, 1)]
    assert (replicas[0].dp, replicas[0].writes(), replicas[1].writes()) == (2, [(tp, 0) for tp in range(4)], [])
    assert replicas[1].reads() == replicas[0].reads()


@pytest.mark.parametrize(("nodes", "count"), [(2, 8), (3, 8), (4, 2)])
def test_micro_batches_are_divided_among_nodes_without_gaps(nodes: int, count: int) -> None:
    parts = [World(nodes=nodes, node=node, ranks_per_node=1, tp=1, pp=1).own(count) for node in range(nodes)]
    assert [unit for part in parts for unit in part] == list(range(count))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def train_on_two_nodes(toolchain: Toolchain, config: Path, *, ranks: int) -> list[str]:
    """Output of both nodes."""
    port = free_port()
    commands = [toolchain.training(config, nodes=2, node=node, port=port, ranks=ranks) for node in (0, 1)]
    nodes = [toolchain.start(*command, cwd=config) for command in commands]
    outputs = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    return outputs


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of model/ and optim/ of every rank of tp 4, pp 2."""
    parts = [(part, tp, pp) for part in ("model", "optim") for tp in range(4) for pp in range(2)]
    shards = {key: read_shard(shard_path(checkpoint / key[0], *key[1:])) for key in parts}
    return {f"{key}{name}": tensor for key, shard in shards.items() for name, tensor in shard.items()}


def test_two_nodes_train_in_step(
    workspace: Workspace,
    toolchain: Toolchain,
    tmp_path: Path,
    trainer_environment: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two replicas over two pipeline stages, one per node: neither node can read all shards by itself.

    They exchange them, each writes its own, and the outcome is that of one node with all ranks.
    """
    to_nxd(workspace.base, tmp_path / "pp2", Layout(tp=4, pp=2, qkv="fused"))
    changes = {
        "distributed_strategy__pipeline_model_parallel_size": 2,
        "exp_manager__resume_from_checkpoint": str(tmp_path / "pp2"),
        "exp_manager__checkpoint_callback_params__every_n_train_steps": 6,
        "trainer__max_steps": 6,
    }
    first, second, one = (tmp_path / name for name in ("first", "second", "one"))
    outputs = train_on_two_nodes(toolchain, workspace.write_config(first, **changes), ranks=8)
    losses = [float(value) for value in re.findall(r"reduced_train_loss=([\d.]+)", outputs[0])]
    assert losses[-1] < losses[0] - 0.5
    assert "`Trainer.fit` stopped" in outputs[0]
    assert "reduced_train_loss" not in outputs[1]  # only global rank 0 has a progress bar and an end marker
    assert "`Trainer.fit` stopped" not in outputs[1]
    assert "initializing data parallel with size 2" in outputs[0]
    train_on_two_nodes(toolchain, workspace.write_config(second, **changes), ranks=8)
    monkeypatch.setenv("REHEARSAL_RANKS_PER_NODE", "16")
    workspace.train(workspace.write_config(one, **changes), "trainer.devices=16")
    once, again, alone = (weights(workspace.checkpoints(folder)[0]) for folder in (first, second, one))
    assert once.keys() == again.keys() == alone.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in once.items())
    assert all(torch.allclose(tensor, alone[name], rtol=1e-2, atol=1e-3) for name, tensor in once.items())


def test_all_nodes_end_after_the_same_step_when_one_is_asked_to(
    workspace: Workspace, toolchain: Toolchain, tmp_path: Path
) -> None:
    config, port = workspace.write_config(tmp_path), free_port()
    commands = [toolchain.training(config, nodes=2, node=node, port=port, ranks=2) for node in (0, 1)]
    first, second = (toolchain.start(*command, cwd=config, REHEARSAL_FAULT="train:slow=0.3") for command in commands)
    assert first.stdout
    output = ""
    while "global_step=1" not in output:
        assert first.poll() is None, output
        output += first.stdout.read(64)
    second.send_signal(signal.SIGUSR1)
    rest = first.communicate(timeout=120)[0]
    second.communicate(timeout=120)
    assert [first.returncode, second.returncode] == [1, 1]
    assert "asked to end (SIGUSR1)" in rest
