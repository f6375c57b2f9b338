"""Shared by the tests of `slurm/`: a short-lived local scheduler, and job specs."""

import json
import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from slurm.folder import JobFolder
from slurm.local import LocalScheduler
from slurm.scheduler import QueueRow
from slurm.spec import JobSpec


def spec(*payload: str, **fields: Any) -> JobSpec:
    return JobSpec(payload=payload or ("true",), environment="project", **fields)


def bash(script: str, **fields: Any) -> JobSpec:
    return spec("bash", "-c", script, **fields)


def eventually(condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    """What the condition gives once it is true; fails after a deadline instead of sleeping and hoping."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not in {seconds} s: {what}"
        time.sleep(0.02)
    return value


class OnlyAsked:
    """What a stand-in scheduler of the watcher's tests does not do: a watcher only asks."""

    def submit(self, script: Path, name: str) -> str:
        raise NotImplementedError

    def find(self, name: str, since: datetime) -> list[QueueRow]:
        raise NotImplementedError

    def cancel(self, job_ids: Collection[str]) -> None:
        raise NotImplementedError

    def render(self, spec: JobSpec, folder: JobFolder, name: str) -> str:
        raise NotImplementedError


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path / "runs" / "r 1" / "jobs" / "train-1")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalScheduler]:
    """Whatever a test leaves running is ended."""
    scheduler = LocalScheduler(tmp_path / "cluster", kill_wait=timedelta(seconds=2))
    yield scheduler
    jobs = tmp_path / "cluster" / "jobs"
    if jobs.is_dir():
        scheduler.cancel([path.name for path in jobs.iterdir() if not path.name.startswith(".")])


def record(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
