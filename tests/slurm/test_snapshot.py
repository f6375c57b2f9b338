"""The shared file: what one process writes all others read, and nothing that is wrong with it stops anybody."""

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from slurm.pace import Board
from slurm.snapshot import Snapshot

ROOT = Path(__file__).parents[2]


def asked(time: float) -> Callable[[Board], Board]:
    return lambda board: replace(board, asked=time, calls=(*board.calls, time))


def same(board: Board) -> Board:
    return board


def snapshot(folder: Path, patience: float = 5) -> Snapshot:
    return Snapshot(folder, patience=patience)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "runs" / ".scheduler-lab-0"


def test_what_one_writes_the_others_read(place: Path) -> None:
    snapshot(place).update(asked(7))
    snapshot(place).update(lambda board: replace(board, rows='{"1": {}}', wanted={"2": 3.5}))
    assert snapshot(place).update(same) == Board(asked=7, calls=(7,), rows='{"1": {}}', wanted={"2": 3.5})


def test_without_a_folder_it_is_private(tmp_path: Path) -> None:
    one, other = Snapshot(None, patience=1), Snapshot(None, patience=1)
    assert one.update(asked(7)).asked == 7
    assert other.update(same) == Board()


def test_only_its_user_can_read_it(place: Path) -> None:
    snapshot(place).update(asked(7))
    assert [path.stat().st_mode & 0o777 for path in (place, place / "queue")] == [0o700, 0o600]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: b"\x00" * len(data),
        lambda data: data[:-10],
        lambda data: data + b"}",
        lambda data: data.replace(b"7.5", b"9.5", 1),
        lambda data: data.replace(b"snapshot", b"snapsh0t", 1),
        lambda data: json.dumps({"asked": 9}).encode(),
    ],
)
def test_a_damaged_or_foreign_content_is_ignored_and_rewritten(place: Path, damage: Callable[[bytes], bytes]) -> None:
    one = snapshot(place)
    one.update(asked(7.5))
    file = place / "queue"
    file.write_bytes(damage(file.read_bytes()))
    assert snapshot(place).update(same) == Board()
    file.write_bytes(b"not ours")
    assert one.update(asked(8)).calls == (7.5, 8)  # who knows something goes on with that
    assert snapshot(place).update(same).calls == (7.5, 8)


def test_a_link_or_a_file_that_others_can_write_is_replaced(place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not ours")
    place.mkdir(parents=True, mode=0o700)
    (place / "queue").symlink_to(elsewhere)
    snapshot(place).update(asked(7))
    assert elsewhere.read_text() == "not ours"
    (place / "queue").chmod(0o666)
    assert snapshot(place).update(same) == Board()
    assert (place / "queue").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_nothing_of_another_user_is_used(place: Path) -> None:
    snapshot(place).update(asked(7))
    os.chown(place / "queue", 12345, 12345)
    assert snapshot(place).update(asked(8)).calls == (8,)
    os.chown(place, 12345, 12345)
    assert snapshot(place).update(asked(9)).calls == (9,)
    os.chown(place, 0, 0)
    assert snapshot(place).update(same).calls == (8,)


@contextmanager
def no_room() -> Iterator[None]:
    """Every write to a file fails, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_full_disk_leaves_everybody_with_what_they_know(place: Path) -> None:
    one = snapshot(place)
    one.update(asked(7))
    with no_room():
        assert one.update(asked(8)).calls == (7, 8)
        assert snapshot(place).update(asked(9)).calls == (9,)
    assert one.update(asked(10)).calls == (7, 8, 10)
    assert snapshot(place).update(same).calls == (7, 8, 10)


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    one = snapshot(tmp_path / "file" / "runs")
    one.update(asked(7))
    assert one.update(asked(8)).calls == (7, 8)
    assert len(caplog.records) == 1
    assert "asks the scheduler by itself" in caplog.text


def holder(place: Path) -> "subprocess.Popen[str]":
    """A process that is in the middle of an update."""
    script = """
import sys, time
from dataclasses import replace
from pathlib import Path
from slurm.snapshot import Snapshot
seen = []
def change(board):
    seen.append(board)
    if len(seen) == 2:  # the first time it is only asked whether there is something to write
        print("inside", flush=True)
        time.sleep(600)
    return replace(board, asked=99.0)
Snapshot(Path(sys.argv[1]), patience=5).update(change)
"""
    command = [sys.executable, "-c", script, str(place)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "inside\n"
    return process


def test_a_process_killed_while_it_holds_the_lock_frees_it(place: Path) -> None:
    snapshot(place).update(asked(7))
    with holder(place) as process:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    assert snapshot(place, patience=60).update(asked(8)).calls == (7, 8)


def test_a_stopped_process_that_holds_the_lock_holds_nobody_up(place: Path) -> None:
    one = snapshot(place, patience=0.1)
    one.update(asked(7))
    with holder(place) as process:
        process.send_signal(signal.SIGSTOP)
        try:
            assert one.update(asked(8)).calls == (7, 8)
        finally:
            process.kill()


def test_no_update_of_many_processes_is_lost(place: Path) -> None:
    script = """
import sys
from dataclasses import replace
from pathlib import Path
from slurm.snapshot import Snapshot
snapshot = Snapshot(Path(sys.argv[1]), patience=60)
for _ in range(50):
    snapshot.update(lambda board: replace(board, asked=board.asked + 1))
"""
    command = [sys.executable, "-c", script, str(place)]
    processes = [subprocess.Popen(command, cwd=ROOT) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert snapshot(place).update(same).asked == 200
