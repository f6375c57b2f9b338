"""No process of a local job, its supervisor included, sees the caller's tokens."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from slurm.folder import JobFolder
from slurm.local import LocalScheduler
from slurm.spec import JobSpec
from slurm.submission import ensure_submitted

TOKEN = "hf_tokenOfTheCaller"


def environments(session_of: str) -> dict[int, bytes]:
    """Environments of the processes whose command line or environment names the folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command, environment = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if session_of.encode() in command and int(process.name) != os.getpid():
            found[int(process.name)] = environment
    return found


def test_the_token_of_the_caller_reaches_no_process_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    scheduler, folder = LocalScheduler(tmp_path / "é cluster"), JobFolder(tmp_path / "é cluster" / "job")
    payload = ("bash", "-c", "touch started; while [ ! -e go ]; do sleep 0.05; done")
    spec = JobSpec(payload=payload, environment="project", cwd=str(folder.path))
    ensure_submitted(scheduler, spec, folder, "n", guard=lambda: None, grace=timedelta(seconds=1))
    deadline = time.monotonic() + 20
    while not (folder.path / "started").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    seen = environments(str(tmp_path))
    (folder.path / "go").touch()
    assert len(seen) >= 2  # the supervisor and the script at least
    assert not [pid for pid, environment in seen.items() if TOKEN.encode() in environment]
    while folder.read_exit() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
