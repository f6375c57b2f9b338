"""One owner of a run at a time, whatever happens to the others."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainium.run import claims
from trainium.run.folder import NotYourRun, RunFolder
from trainium.run.holder import Holder
from trainium.run.lease import STALE_AFTER, Contest, Lease, LeaseLost, NoLease, RunBusy, Standing, holder_of

SOON = 0.3  # seconds; a stale time to wait for
PATIENCE = 20  # seconds

TAKE = """
import pathlib, sys
from trainium.run.lease import Lease, LeaseLost
lease = Lease.take(pathlib.Path(sys.argv[1]), stale_after=float(sys.argv[2]))
print("taken", flush=True)
"""
BEAT = """
import time
while True:
    time.sleep(0.02)
    lease.beat()
"""


def process(folder: Path, then: str, stale_after: float = STALE_AFTER) -> "subprocess.Popen[str]":
    """Another process that has taken the lease."""
    command, pipe = [sys.executable, "-c", TAKE + then, str(folder), str(stale_after)], subprocess.PIPE
    other = subprocess.Popen(command, stdout=pipe, stdin=pipe, stderr=pipe, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "taken\n"
    return other


def elsewhere(folder: Path, *, clock: float = 0.0, stale_after: float = STALE_AFTER) -> Lease:
    """A lease that a process on another machine takes, where the clock is that many seconds ahead."""
    holder = replace(Holder.me(stale_after, str(folder.parent)), machine="another boot", host="another-machine")
    generation = claims.latest(folder) + 1
    assert claims.make(folder, holder, generation)
    beat(folder, time.time() + clock)
    return Lease(folder, holder, generation)


def beat(folder: Path, at: float) -> None:
    """A heartbeat of whoever has the lease, as its filesystem dates it."""
    os.utime(claims.claim(folder, claims.latest(folder)), (at, at))


def until_gone(contest: Contest) -> None:
    deadline = time.monotonic() + PATIENCE
    while contest.look().standing is not Standing.GONE:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_lost(lease: Lease, why: str) -> None:
    for touch in (lease.check, lease.beat):
        with pytest.raises(LeaseLost, match=why):
            touch()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "lease"


def test_a_living_owner_is_named_and_left_alone(folder: Path) -> None:
    with process(folder, "input()") as other:
        with pytest.raises(RunBusy, match=f"process {other.pid}.*--wait"):
            Lease.take(folder)
        other.communicate("\n")
    Lease.take(folder).check()


@pytest.mark.parametrize("reaped", [True, False])
def test_an_owner_that_died_here_loses_it_at_once(folder: Path, reaped: bool) -> None:
    with process(folder, "import os; os.kill(os.getpid(), 9)") as other:
        if reaped:
            other.wait()
        else:
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # a zombie, as its parent leaves it
        Lease.take(folder).check()


def test_two_flows_of_one_process_exclude_each_other(folder: Path) -> None:
    first = Lease.take(folder)
    with pytest.raises(RunBusy):
        Lease.take(folder)
    first.release()
    second = Lease.take(folder)
    second.check()
    with pytest.raises(LeaseLost, match="taken over"):
        first.check()
    first.beat()  # one that was on its way when the lease was given back
    first.release()
    second.check()


def test_a_lease_that_was_given_back_is_held_by_nobody(folder: Path) -> None:
    lease = Lease.take(folder)
    lease.release()
    with pytest.raises(LeaseLost, match="given back"):
        lease.check()
    assert Contest(folder).look().standing is Standing.FREE
    assert getattr(holder_of(folder), "token", None) == lease.token


def test_an_owner_on_another_machine_loses_it_when_it_has_been_silent(folder: Path) -> None:
    old = elsewhere(folder, stale_after=SOON)
    contest = Contest(folder)
    with pytest.raises(RunBusy, match="another-machine"):
        contest.take()
    until_gone(contest)
    new = contest.take()
    new.check()
    assert_lost(old, "taken over by .*process")
    old.release()
    new.check()


@pytest.mark.parametrize("clock", [-300.0, -20.0, 0.0, 20.0, 300.0])
def test_clocks_that_differ_neither_kill_nor_keep_alive(folder: Path, clock: float) -> None:
    elsewhere(folder, clock=clock, stale_after=SOON)
    contest = Contest(folder)
    assert contest.look().standing is not Standing.GONE
    beat(folder, time.time() + clock + 0.1)
    assert contest.look().standing is Standing.ALIVE  # whatever time it is there
    until_gone(contest)


def test_a_holder_that_nobody_can_judge_yet_is_watched_before_it_is_refused_or_taken_over(folder: Path) -> None:
    elsewhere(folder, clock=-300, stale_after=SOON)
    assert Contest(folder).look().standing is Standing.SILENT
    lease = Lease.take(folder, stale_after=SOON)  # watched until it was gone
    assert lease.generation == 2


def test_an_owner_that_was_stopped_wakes_up_and_finds_that_it_has_lost(folder: Path) -> None:
    with process(folder, BEAT, SOON) as old:
        old.send_signal(signal.SIGSTOP)
        contest = Contest(folder)
        until_gone(contest)
        new = contest.take()
        old.send_signal(signal.SIGCONT)
        assert "taken over" in old.communicate(timeout=PATIENCE)[1]
    new.check()


def test_a_deleted_folder_ends_the_lease(folder: Path) -> None:
    lease = Lease.take(folder)
    shutil.rmtree(folder.parent)
    assert_lost(lease, "deleted")
    lease.release()
    assert not folder.parent.exists()


def test_a_folder_that_was_deleted_and_made_again_belongs_to_the_new_owner(folder: Path) -> None:
    old = Lease.take(folder)
    shutil.rmtree(folder.parent)
    new = Lease.take(folder)
    assert new.generation == old.generation
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert_lost(old, "deleted")
    old.release()
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    new.check()
    new.beat()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff\0", b'{"owner": 3, "generation": "x"}'])
def test_a_damaged_claim_is_somebodys_until_its_heartbeat_stops(damage: bytes, folder: Path) -> None:
    old = elsewhere(folder)
    claims.claim(folder, 1).write_bytes(damage)
    contest = Contest(folder, stale_after=SOON)
    with pytest.raises(RunBusy, match="claim is damaged"):
        contest.take()
    until_gone(contest)
    contest.take().check()
    assert_lost(old, "taken over")


def test_a_heartbeat_writes_nothing_that_could_be_half_there(folder: Path) -> None:
    lease = Lease.take(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    contest = Contest(folder)
    contest.look()
    os.utime(claims.claim(folder, 1), (0, 0))
    lease.beat()
    assert contest.look().silent < SOON
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_full_disk_is_named_and_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fchmod", full)
        with pytest.raises(OSError, match=r"No space left on device: .*lease/holder-"):
            Lease.take(folder)
    assert list(folder.iterdir()) == []
    Lease.take(folder).check()


@pytest.mark.parametrize("number", [errno.EPERM, errno.EROFS, errno.EACCES])
def test_a_place_that_takes_no_claim_is_refused_by_name(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    with pytest.raises(NoLease, match=r"cannot make .*lease/1\.json: .*hard links"):
        Lease.take(folder)
    assert list(folder.iterdir()) == []


def test_a_copy_of_a_run_folder_is_nobodys(folder: Path) -> None:
    Lease.take(folder)
    shutil.copytree(folder.parent, folder.parent.with_name("copy"))
    Lease.take(folder.parent.with_name("copy") / "lease").check()


def contending(what: str, folder: Path) -> list[str]:
    script = Path(__file__).with_name("contending.py")
    done = subprocess.run([sys.executable, str(script), what, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_of_many_that_want_the_same_generation_exactly_one_gets_it(tmp_path: Path) -> None:
    assert contending("race", tmp_path)[-1].startswith("won:")


def test_whoever_is_killed_while_taking_a_lease_leaves_one_that_can_be_taken(tmp_path: Path) -> None:
    assert len(contending("kill", tmp_path)) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can come as two users")
def test_another_user_is_refused_and_changes_nothing() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own folders are closed to others
        said = dict(line.split(": ", 1) for line in contending("users", Path(place)))
        assert said["started-755"].startswith("NotYourRun: run 'started-755' in")
        assert "belongs to root" in said["started-755"]
        assert said["started-777"].startswith("NotYourRun:")
        assert said["started-700"].startswith("RunsFolderError:")
        assert said["foreign"].startswith("RunsFolderError:")
        assert said["open"].startswith("NoLease: cannot make")
        for name in ("started-755", "started-777"):
            assert len(list((Path(place) / name / "lease").iterdir())) == 1


def test_the_owner_of_a_run_is_the_one_who_started_it(tmp_path: Path) -> None:
    folder = RunFolder.named(tmp_path, "r")
    folder.start("", {}, lambda _: []).release()
    record = json.loads((folder.path / "run.json").read_text())
    record["user"] = {"name": "alice", "id": os.geteuid() + 1}
    (folder.path / "run.json").write_text(json.dumps(record))
    before = sorted(path.name for path in folder.path.rglob("*"))
    for use in (folder.check_place, lambda: folder.start("", {}, lambda _: [])):
        with pytest.raises(NotYourRun, match=r"belongs to alice.*another name"):
            use()
    assert sorted(path.name for path in folder.path.rglob("*")) == before
