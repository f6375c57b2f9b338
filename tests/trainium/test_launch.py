"""The launch script against a toolchain that is nothing but recorders."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainium.launch import MISSING_CONFIG, MONITOR_SAMPLE, Launch, render_launch

NASTY = "we ird '\"$(touch pwned)`x`;&|"
SETUP = """set -e
NODEID=0 NTASKS=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=41000
export NEURON_COMPILE_CACHE_URL=/home/somewhere/else EXPLICIT_LOGDIR=null NEMO_EXPM_VERSION=17
"""
RECORDER = '#!/bin/bash\nfor word in "$0" "$@"; do echo "arg:$word"; done; env | sed s/^/env:/\n'


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """A launch whose every path is hostile, and a toolchain whose commands print what they are given."""
    examples, config, tools = tmp_path / f"examples {NASTY}".replace("/", ""), tmp_path / NASTY, tmp_path / "bin"
    for folder in (examples, config, tools):
        folder.mkdir()
    (examples / "train_setup.sh").write_text(SETUP)
    (config / "train.yaml").write_text("")
    for name in ("torchrun", "neuron_parallel_compile"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)
    return Launch(
        phase="train",
        examples=examples,
        config=config / "train.yaml",
        cache=tmp_path / f"cache {NASTY}",
        log_folder=tmp_path / f"logs {NASTY}",
        version="r1",
        cores=32,
    )


def run(launch: Launch, tmp_path: Path) -> tuple[int, list[str], dict[str, str], str]:
    script = tmp_path / "launch.sh"
    script.write_text(render_launch(launch))
    environment = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    arguments = [line.removeprefix("arg:") for line in lines if line.startswith("arg:")]
    variables = dict(line.removeprefix("env:").split("=", 1) for line in lines if line.startswith("env:"))
    return done.returncode, arguments, variables, done.stderr


def test_what_train_setup_overwrites_is_set_again(launch: Launch, tmp_path: Path) -> None:
    code, arguments, variables, _ = run(launch, tmp_path)
    assert code == 0
    assert variables["NEURON_COMPILE_CACHE_URL"] == str(launch.cache)
    assert variables["EXPLICIT_LOGDIR"] == str(launch.log_folder)
    assert variables["NEMO_EXPM_VERSION"] == "r1"
    assert "COMPILE" not in variables
    assert arguments[0] == str(tmp_path / "bin" / "torchrun")
    assert f"--config-path={launch.config.parent}" in arguments
    assert "--config-name=train" in arguments
    assert str(launch.examples / "training_orchestrator.py") in arguments
    assert arguments[1:11] == [
        *("--nproc_per_node", "32"),
        *("--nnodes", "2"),
        *("--node_rank", "0"),
        *("--master_addr", "10.0.0.1"),
        *("--master_port", "41000"),
    ]
    assert not (tmp_path / "pwned").exists()


def test_compile_wraps_the_same_command_for_ten_trial_steps(launch: Launch, tmp_path: Path) -> None:
    values = {**launch.__dict__, "phase": "compile"}
    code, arguments, variables, _ = run(Launch(**values), tmp_path)
    assert code == 0
    assert arguments[0] == str(tmp_path / "bin" / "neuron_parallel_compile")
    assert arguments[1] == "torchrun"
    assert variables["COMPILE"] == "1"
    assert variables["NEURON_PARALLEL_COMPILE_DUMP_RESULTS"] == "1"


def test_a_missing_config_aborts(launch: Launch, tmp_path: Path) -> None:
    launch.config.unlink()
    code, arguments, _, errors = run(launch, tmp_path)
    assert code == MISSING_CONFIG
    assert not arguments
    assert str(launch.config) in errors


def test_a_failing_train_setup_aborts(launch: Launch, tmp_path: Path) -> None:
    (launch.examples / "train_setup.sh").write_text("return 3")
    code, arguments, _, _ = run(launch, tmp_path)
    assert code == 3
    assert not arguments


def test_the_monitor_leaves_its_newest_sample_and_ends_with_the_training(launch: Launch, tmp_path: Path) -> None:
    monitor = tmp_path / "bin" / "neuron-monitor"
    monitor.write_text(
        "#!/bin/bash\necho $$ > monitor.pid\nfor n in 1 2 3; do echo '{\"n\": '$n'}'; done\nexec sleep 600\n"
    )
    monitor.chmod(0o755)
    sample = tmp_path / MONITOR_SAMPLE.format("0")
    wait = f"#!/bin/bash\nuntil grep -qs 3 {shlex.quote(str(sample))}; do sleep 0.01; done\nexit 5\n"
    (tmp_path / "bin" / "torchrun").write_text(wait)
    code, _, _, _ = run(launch, tmp_path)
    assert code == 5  # the training's, not the monitor's
    assert json.loads(sample.read_text()) == {"n": 3}
    gone = Path("/proc") / (tmp_path / "monitor.pid").read_text().strip()
    deadline = time.monotonic() + 10
    while gone.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not gone.exists()


@pytest.mark.parametrize(
    ("torchrun", "code"),
    [
        ("#!/bin/bash\nkill -s USR1 $PPID $$\n", 0),
        (
            f"#!{sys.executable}\nimport os, signal, sys\n"
            "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))\nos.kill(os.getpid(), signal.SIGUSR1)\n",
            7,
        ),
    ],
    ids=["a trainer without a handler", "a trainer with one"],
)
def test_the_notice_before_the_time_limit_ends_nobody_against_his_will(
    launch: Launch, tmp_path: Path, torchrun: str, code: int
) -> None:
    """srun passes it on to every process of the step."""
    (tmp_path / "bin" / "torchrun").write_text(torchrun)
    assert run(launch, tmp_path)[0] == code
