"""What happens to a flow whose run folder is broken under its hands."""

import asyncio
import shutil
from pathlib import Path

import pytest

from flows import lifecycle
from flows.lifecycle import kept_alive
from trainium.run.lease import Lease, LeaseLost

PATIENCE = 20  # seconds


@pytest.fixture(autouse=True)
def quick_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "HEARTBEAT_EVERY", 0.02)


def lease_of(path: Path) -> Lease:
    path.mkdir()
    return Lease.take(path / "lease.json")


async def test_a_flow_whose_run_folder_is_deleted_ends_with_the_reason(tmp_path: Path) -> None:
    lease = lease_of(tmp_path / "r")

    async def flow() -> None:
        async with kept_alive(lease):
            shutil.rmtree(tmp_path / "r")
            await asyncio.sleep(PATIENCE)

    with pytest.raises(LeaseLost, match="the run folder was deleted"):
        await flow()
    await asyncio.sleep(0)  # and nothing cancels what comes after it
    assert not (tmp_path / "r").exists()


async def test_a_disk_that_fails_for_a_while_does_not_end_the_flow(tmp_path: Path) -> None:
    lease = lease_of(tmp_path / "r")
    lock, away = tmp_path / "r" / "lease.lock", tmp_path / "away"
    async with kept_alive(lease):
        lock.rename(away)
        lock.mkdir()  # opening it fails, as everything does on such a disk
        await asyncio.sleep(0.2)
        lock.rmdir()
        away.rename(lock)
        written = (tmp_path / "r" / "lease.json").read_text()
        async with asyncio.timeout(PATIENCE):
            while (tmp_path / "r" / "lease.json").read_text() == written:
                await asyncio.sleep(0.02)
    lease.check()


async def test_a_cancellation_from_outside_stays_one(tmp_path: Path) -> None:
    lease, inside = lease_of(tmp_path / "r"), asyncio.Event()

    async def flow() -> None:
        async with kept_alive(lease):
            inside.set()
            await asyncio.sleep(PATIENCE)

    task = asyncio.create_task(flow())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
