"""One owner of a run at a time, whatever happens to the others."""

import subprocess
import sys
from pathlib import Path

import pytest

from trainium.files import read_json, write_json
from trainium.run.lease import Lease, LeaseLost, RunBusy

TAKE_AND_STAY = "import sys, pathlib; from trainium.run.lease import Lease; Lease.take(pathlib.Path(sys.argv[1])); "


def elsewhere(path: Path, then: str) -> "subprocess.Popen[str]":
    """Another process that takes the lease."""
    command = [sys.executable, "-c", TAKE_AND_STAY + then, str(path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def test_a_living_owner_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with elsewhere(path, "print('taken', flush=True); input()") as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(RunBusy, match=f"process {other.pid}"):
            Lease.take(path)
        other.communicate("\n")
    Lease.take(path).check()


def test_an_owner_that_died_here_loses_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    with elsewhere(path, "import os; os._exit(0)") as other:
        other.wait()
    Lease.take(path).check()


def test_two_flows_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    first = Lease.take(tmp_path / "lease.json")
    with pytest.raises(RunBusy):
        Lease.take(tmp_path / "lease.json")
    first.release()
    Lease.take(tmp_path / "lease.json").check()


def on_another_machine(path: Path, silent: float) -> None:
    held = read_json(path)
    held["owner"]["host"] = "another-machine"
    held["heartbeat"] -= silent
    write_json(path, held)


def test_an_owner_on_another_machine_loses_it_when_it_has_been_silent(tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    old = Lease.take(path)
    on_another_machine(path, silent=30)
    with pytest.raises(RunBusy, match="another-machine"):
        Lease.take(path)
    on_another_machine(path, silent=60)
    new = Lease.take(path)
    new.check()
    for touch in (old.check, old.beat):  # the old owner wakes up and touches nothing
        with pytest.raises(LeaseLost, match="taken over"):
            touch()
    old.release()
    new.check()


def test_a_deleted_folder_ends_the_lease(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lease.json"
    path.parent.mkdir()
    lease = Lease.take(path)
    for file in path.parent.iterdir():
        file.unlink()
    with pytest.raises(LeaseLost, match="deleted"):
        lease.check()
    path.parent.rmdir()
    lease.release()
    assert not path.parent.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b"\xff\0", b'{"owner": 3, "generation": "x"}'])
def test_a_damaged_lease_is_nobodys_to_take(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lease.json"
    lease = Lease.take(path)
    path.write_bytes(damage)
    for use in (lambda: Lease.take(path), lease.check, lease.beat):
        with pytest.raises(RunBusy, match=r"lease\.json is damaged .* remove it"):
            use()
    assert path.read_bytes() == damage
    path.unlink()
    Lease.take(path).check()
