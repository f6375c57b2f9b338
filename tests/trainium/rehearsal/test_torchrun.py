"""torchrun's arguments, environment, exit codes and words; train_setup.sh and activate."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import trainium

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Toolchain, Workspace

FOLDER = Path(trainium.__file__).parent / "rehearsal" / "toolchain"


def script(folder: Path, text: str) -> str:
    file = folder / "script.py"
    file.write_text(text)
    return str(file)


def test_one_process_stands_for_the_ranks_of_a_node(toolchain: Toolchain, tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "REHEARSAL_RANKS_PER_NODE")
    code = f"import os, sys, json; print(json.dumps([[os.environ[n] for n in {names}], sys.argv[1:]]))"
    where = [
        "--nproc_per_node=32",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master_addr",
        "n1",
        "--master_port",
        "41000",
    ]
    result = toolchain.run("torchrun", *where, script(tmp_path, code), "--config-name=x", "a=b", cwd=tmp_path)
    assert result.returncode == 0
    banner, note, printed = result.stdout.splitlines()
    assert banner.startswith("REHEARSAL: ")
    assert note == "REHEARSAL: one process on this node (node 1 of 2) stands for 32 ranks."
    assert json.loads(printed) == [["32", "0", "64", "n1", "41000", "32"], ["--config-name=x", "a=b"]]


def test_a_failing_script(toolchain: Toolchain, tmp_path: Path) -> None:
    failing = script(tmp_path, "raise SystemExit(7)")
    result = toolchain.run("torchrun", "--nproc_per_node", "4", failing, cwd=tmp_path)
    assert result.returncode == 1
    assert "failed (exitcode: 7) local_rank: 0 (pid: " in result.stdout
    assert "Root Cause (first observed failure):" in result.stdout


def test_a_signal_is_passed_on(toolchain: Toolchain, tmp_path: Path) -> None:
    waiting = script(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    with toolchain.start("torchrun", "--nproc_per_node", "4", waiting, cwd=tmp_path) as process:
        assert process.stdout
        while process.stdout.readline() != "ready\n":
            assert process.poll() is None
        process.terminate()
        output, _ = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Received 15 death signal, shutting down workers" in output


def test_unknown_arguments_are_refused(toolchain: Toolchain, tmp_path: Path) -> None:
    result = toolchain.run("torchrun", "--nproc_per_node", "4", "--standalone", "x.py", cwd=tmp_path)
    assert result.returncode == 2
    assert "unrecognized arguments" in result.stdout or "invalid" in result.stdout or "--standalone" in result.stdout


def test_modules_in_the_working_directory_are_not_picked_up(toolchain: Toolchain, tmp_path: Path) -> None:
    (tmp_path / "trainium").mkdir()
    (tmp_path / "trainium" / "__init__.py").write_text("raise RuntimeError('wrong package')")
    (tmp_path / "json.py").write_text("raise RuntimeError('wrong module')")
    assert toolchain.run("neuron-ls", "-j", cwd=tmp_path).returncode == 0


def test_every_command_needs_its_interpreter(tmp_path: Path) -> None:
    for command in (FOLDER / "bin").iterdir():
        result = subprocess.run([command], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert "REHEARSAL_PYTHON" in result.stderr
        assert result.stderr.count("\n") == 1


def setup(toolchain: Toolchain, folder: Path, **env: str) -> dict[str, str]:
    """Variables after activate and train_setup.sh were sourced by a script with the caller's own settings."""
    code = f"""
        set -eo pipefail
        export NEURON_COMPILE_CACHE_URL=/mine EXPLICIT_LOGDIR=/mine NEMO_EXPM_VERSION=mine
        source '{FOLDER}/activate'
        source '{FOLDER}/examples/train_setup.sh'
        type -p torchrun
        for name in NEURON_COMPILE_CACHE_URL EXPLICIT_LOGDIR NEMO_EXPM_VERSION MASTER_ADDR MASTER_PORT NODEID NTASKS; do
            echo "$name=${{!name}}"
        done
    """
    result = toolchain.run("bash", "-c", code, cwd=folder, HOME=str(folder), **env)
    assert result.returncode == 0, result.stdout
    assert f"{FOLDER}/bin/torchrun" in result.stdout
    return dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)


def test_train_setup_overwrites_what_the_real_one_overwrites(toolchain: Toolchain, tmp_path: Path) -> None:
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_JOB_ID": "28"}
    found = setup(toolchain, tmp_path, **slurm)
    assert found["NEURON_COMPILE_CACHE_URL"] == f"{tmp_path}/neuron_cache"
    assert (found["EXPLICIT_LOGDIR"], found["NEMO_EXPM_VERSION"], found["MASTER_PORT"]) == ("null", "28", "41000")
    assert (found["NODEID"], found["NTASKS"]) == ("1", "2")
    assert (tmp_path / "logs" / "28" / "0" / "1").is_dir()


def test_train_setup_takes_loopback_for_nodes_without_an_address(toolchain: Toolchain, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\nprintf 'node-a.invalid\\nnode-b.invalid\\n'\n")
    (tools / "scontrol").chmod(0o755)
    slurm = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "0", "SLURM_JOB_ID": "28"}
    found = setup(toolchain, tmp_path, PATH=f"{tools}:{toolchain.env['PATH']}", **slurm)
    assert found["MASTER_ADDR"] == "127.0.0.1"


def test_train_setup_without_slurm(toolchain: Toolchain, tmp_path: Path) -> None:
    found = setup(toolchain, tmp_path)
    assert (found["MASTER_ADDR"], found["NODEID"], found["NTASKS"]) == ("localhost", "0", "1")


def test_train_sh_goes_on_without_its_config(toolchain: Toolchain, tmp_path: Path) -> None:
    examples = shutil.copytree(FOLDER / "examples", tmp_path / "examples")
    result = toolchain.run("./train.sh", cwd=examples, HOME=str(tmp_path))
    assert "Error: YAML file './conf/megatron_gpt_config.yaml' not found!" in result.stdout
    assert "usage: torchrun" in result.stdout
    assert result.returncode != 0


def test_train_sh_loses_the_cache_of_its_caller(workspace: Workspace, toolchain: Toolchain, tmp_path: Path) -> None:
    """As the real one does: train_setup.sh has its own ideas. What the caller's own launch must set again."""
    examples = shutil.copytree(FOLDER / "examples", tmp_path / "examples")
    env = {
        "COMPILE": "1",
        "CONF_FILE": "hf_rehearsal_SFT_config",
        "HOME": str(tmp_path),
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "mine"),
        "EXP_DIR": str(tmp_path / "experiments"),
        "CHECKPOINT_DIR": str(workspace.nxd()),
        "DATA_DIR": str(workspace.data),
        "ORIGINAL_MODEL_PATH": str(workspace.base),
        "MODEL_CONFIG_PATH": str(workspace.base / "config.json"),
    }
    result = toolchain.run("./train.sh", cwd=examples, **env)
    assert result.returncode == 0, result.stdout
    assert "Total failed compilations: 0" in result.stdout
    assert list((tmp_path / "neuron_cache").rglob("model.neff"))
    assert not (tmp_path / "mine").exists()
