"""The converter's command lines run for real, against the rehearsal toolchain's script of the same options."""

import os
import subprocess
import sys
from pathlib import Path

import torch

import trainium
from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.convert import to_nxd
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.verify import verify_nxd
from trainium.model.nxdt_converter import (
    FULL_STATE,
    SCRIPT,
    Direction,
    converter_argv,
    converter_env,
    prepare,
)

PACKAGE = Path(trainium.__file__).parent
CONVERTER = PACKAGE / "rehearsal" / "toolchain" / "examples" / SCRIPT
LAYOUT = Layout(tp=4, kv_replicator=2, pp=2, qkv="fused")


def call(*argv: str) -> str:
    environment = {**os.environ, **converter_env(), "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def command(direction: Direction, source: Path, out: Path, base: Path) -> tuple[str, ...]:
    arch = Architecture.from_config(read_config(base))
    return converter_argv(CONVERTER, direction, source, out, base / "config.json", LAYOUT, arch, python=sys.executable)


def test_there_and_back_with_tied_embeddings(tied_base: Path, tmp_path: Path) -> None:
    prepare(tied_base, tmp_path / "base.pt")
    there = command(Direction.TO_NXD, tmp_path / "base.pt", tmp_path / "nxd", tied_base)
    call(*there)
    assert verify_nxd(tied_base, tmp_path / "nxd", LAYOUT).ok

    to_nxd(tied_base, tmp_path / "trained", LAYOUT, form="per-tensor")
    back = command(Direction.TO_HF, tmp_path / "trained" / "model", tmp_path / "hf", tied_base)
    call(*back)
    base, merged = open_weights(tied_base), open_weights(tmp_path / "hf" / FULL_STATE)
    assert set(merged) == set(base) | {"lm_head.weight"}
    assert all(torch.equal(merged[name], base[name]) for name in base)
