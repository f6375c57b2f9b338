"""A short selection of `make chaos`: the whole path through a real Slurm, broken at moments that a seed decides."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slurm
def test_a_short_selection_ends_without_a_stain() -> None:
    words = ["--runs", "3", "--rehearsals", "0", "--seed", "3", "--at-once", "3"]
    words += ["--only", "SIGKILL,API cancel,node killed"]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos", *words], cwd=ROOT, env=inherited, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last == "3 runs, 0 duplicates, 0 orphans, 0 wrong verdicts, 0 unequal results"
