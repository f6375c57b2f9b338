"""One small model, its shards, and the toolchain on a PATH, shared by all rehearsal tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

import trainium
from trainium.checkpoint.convert import to_nxd
from trainium.checkpoint.layout import Layout
from trainium.rehearsal import orchestrator
from trainium.rehearsal.model import write_dataset, write_model

TOOLCHAIN = Path(trainium.__file__).parent / "rehearsal" / "toolchain"
EXAMPLES = TOOLCHAIN / "examples"
PROJECT = Path(trainium.__file__).parents[1]


@dataclass(frozen=True)
class Workspace:
    """A base model with its shards and data."""

    root: Path

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def data(self) -> Path:
        return self.root / "data"

    def nxd(self, name: str = "tp4") -> Path:
        return self.root / name

    @staticmethod
    def train(config: Path, *overrides: str) -> None:
        """One node's training in this process; the fixture `trainer_environment` must be in use."""
        orchestrator.main([f"--config-path={config}", "--config-name=train", *overrides])

    @staticmethod
    def checkpoints(folder: Path) -> list[Path]:
        """The checkpoints of the experiment in `folder`, by step."""
        found = (folder / "experiment" / "checkpoints").glob("*.ckpt")
        return sorted(found, key=lambda path: int(path.name.split("step=")[1].split("-")[0]))

    def config(self, *, log_dir: Path, **changes: Any) -> DictConfig:
        """The shipped sample config for this workspace, with changes by dotted key (`__` for the dot)."""
        config = OmegaConf.load(EXAMPLES / "conf" / "hf_rehearsal_SFT_config.yaml")
        assert isinstance(config, DictConfig)
        settings = {
            "exp_manager.exp_dir": None,
            "exp_manager.explicit_log_dir": str(log_dir),
            "exp_manager.resume_from_checkpoint": str(self.nxd()),
            "exp_manager.checkpoint_callback_params.every_n_train_steps": 4,
            "trainer.max_steps": 8,
            "data.train_dir": str(self.data / "train.jsonl"),
            "data.val_dir": str(self.data / "validation.jsonl"),
            "data.tokenizer.type": str(self.base),
            "model.model_config": str(self.base / "config.json"),
        } | {key.replace("__", "."): value for key, value in changes.items()}
        for key, value in settings.items():
            OmegaConf.update(config, key, value, force_add=True)
        return config

    def write_config(self, folder: Path, **changes: Any) -> Path:
        """The same as `<folder>/config/train.yaml`; the experiment goes to `<folder>/experiment`."""
        config = self.config(log_dir=folder / "experiment", **changes)
        (folder / "config").mkdir(parents=True, exist_ok=True)
        OmegaConf.save(config, folder / "config" / "train.yaml")
        return folder / "config"


@dataclass(frozen=True)
class Toolchain:
    """Runs the stand-in's commands as a job script would."""

    env: dict[str, str]

    @staticmethod
    def training(config: Path, *, nodes: int = 1, node: int = 0, port: int = 1, ranks: int = 4) -> list[str]:
        """The command line of our launch."""
        where = ["--nproc_per_node", str(ranks), "--nnodes", str(nodes), "--node_rank", str(node)]
        return [
            *("torchrun", *where, "--master_addr", "127.0.0.1", "--master_port", str(port)),
            *(str(EXAMPLES / "training_orchestrator.py"), f"--config-path={config}", "--config-name=train"),
            *(f"trainer.devices={ranks}", f"trainer.num_nodes={nodes}"),
        ]

    def start(self, *command: str, cwd: Path, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command, cwd=cwd, env=self.env | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *command: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
        with self.start(*command, cwd=cwd, **env) as process:
            output, _ = process.communicate(timeout=120)
        return subprocess.CompletedProcess(command, process.returncode, output)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    found = Workspace(tmp_path_factory.mktemp("rehearsal"))
    write_model(found.base, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    write_dataset(found.data, rows=160, validation_rows=16)
    to_nxd(found.base, found.nxd(), Layout(tp=4, qkv="fused"))
    return found


@pytest.fixture(scope="session")
def toolchain() -> Toolchain:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("NEURON", "SLURM", "REHEARSAL"))}
    path = f"{TOOLCHAIN / 'bin'}:{env['PATH']}"
    return Toolchain(env | {"PATH": path, "REHEARSAL_PYTHON": sys.executable, "PYTHONPATH": str(PROJECT)})


@pytest.fixture
def trainer_environment(tmp_path: Path) -> Iterator[None]:
    """What torchrun exports for one node of four ranks, in this process; undone afterwards."""
    before, threads = dict(os.environ), torch.get_num_threads()
    for name in [name for name in os.environ if name.startswith(("NEURON", "REHEARSAL", "NEMO"))]:
        del os.environ[name]
    os.environ |= {
        "REHEARSAL_NODES": "1",
        "REHEARSAL_NODE_RANK": "0",
        "REHEARSAL_RANKS_PER_NODE": "4",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
    }
    yield
    os.environ.clear()
    os.environ |= before
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
