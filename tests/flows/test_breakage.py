"""What happens to a flow whose run folder is broken under its hands."""

import asyncio
import errno
import os
import shutil
from pathlib import Path

import pytest

from flows.lifecycle import kept_alive
from trainium.run.lease import Lease, LeaseLost

PATIENCE = 20  # seconds


QUICK = 0.12  # seconds: a heartbeat every 20 ms


def lease_of(path: Path) -> Lease:
    return Lease.take(path / "lease", stale_after=QUICK)


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


async def test_a_disk_that_fails_for_a_while_does_not_end_the_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, failed = lease_of(tmp_path / "r"), asyncio.Event()
    loop, beat = asyncio.get_running_loop(), os.utime

    def fail(path: Path) -> None:
        loop.call_soon_threadsafe(failed.set)
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    async with kept_alive(lease), asyncio.timeout(PATIENCE):
        monkeypatch.setattr(os, "utime", fail)
        await failed.wait()
        monkeypatch.setattr(os, "utime", beat)
        claim = tmp_path / "r" / "lease" / "1.json"
        os.utime(claim, (0, 0))
        while claim.stat().st_mtime == 0:
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
