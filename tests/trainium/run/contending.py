"""Takes a lease from many processes at once, dies in the middle of taking it, and comes as another user.

    python contending.py race|kill|users FOLDER

In a process of its own without threads, so that a contender is a fork and not a new interpreter.
"""

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

from trainium.errors import UserError
from trainium.run.folder import RunFolder
from trainium.run.lease import Contest, Lease, LeaseLost

CONTENDERS, ROUNDS = 6, 200
NOBODY = 65534


def race(folder: Path) -> None:
    """All have seen the same, and all want what comes after it: one gets it, and everybody before has lost."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(CONTENDERS)
    contenders = [context.Process(target=_contend, args=(folder, number, barrier)) for number in range(CONTENDERS)]
    for process in contenders:
        process.start()
    for process in contenders:
        process.join()
        assert process.exitcode == 0
    won = [json.loads((folder / f"won-{number}").read_text()) for number in range(CONTENDERS)]
    assert sorted(generation for generations in won for generation in generations) == list(range(1, ROUNDS + 1))
    assert len(list(folder.glob("lease/holder-*"))) == 1
    print("won:", *map(len, won))


def _contend(folder: Path, number: int, barrier: Barrier) -> None:
    won: list[Lease] = []
    for _ in range(ROUNDS):
        contest = Contest(folder / "lease")
        seen = contest.look()
        barrier.wait(60)
        lease = contest.claim(seen)
        barrier.wait(60)
        if won:
            assert _is_lost(won[-1])
        if lease is not None:
            lease.check()
            won.append(lease)
        barrier.wait(60)
    (folder / f"won-{number}").write_text(json.dumps([lease.generation for lease in won]))


def _is_lost(lease: Lease) -> bool:
    try:
        lease.check()
    except LeaseLost:
        return True
    return False


def kill(folder: Path) -> None:
    """Killed before each of its system calls, whoever takes a lease leaves one that can be taken."""
    for name, before in (("new", _nothing), ("held", Lease.take), ("given back", _give_back)):
        killed, moment = True, 0
        while killed:
            place = folder / f"{name}-{moment}" / "lease"
            old = before(place)
            killed = _killed(moment, partial(_take_over, place))
            new = _take_over(place)
            assert new is not None, f"before call {moment}"
            new.check()
            assert old is None or _is_lost(old)
            assert [path.name for path in place.glob("holder-*") if path.stat().st_nlink > 1] == [f"holder-{new.token}"]
            moment += 1
        print("killed at", moment - 1, "moments")
        assert moment > 8


def _take_over(lease: Path) -> Lease | None:
    contest = Contest(lease)
    return contest.claim(contest.look())


def _nothing(lease: Path) -> None:
    pass


def _give_back(lease: Path) -> None:
    Lease.take(lease).release()


def _killed(moment: int, work: Callable[[], object]) -> bool:
    """Python tells audit hooks of every call that opens, lists, makes, links, changes or removes a file, before it."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: object) -> None:
            nonlocal count
            if event == "open" or event.startswith("os."):
                count += 1  # first: the kill is a call too
                if count - 1 == moment:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def users(folder: Path) -> None:
    """What nobody is told about root's folders."""
    folder.chmod(0o755)
    for mode in (0o755, 0o700, 0o777):
        run = RunFolder(folder / f"started-{mode:o}")
        _start(run).release()
        run.path.chmod(mode)
    (folder / "foreign").mkdir()
    (folder / "open" / "lease").mkdir(parents=True)
    (folder / "open").chmod(0o777)
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with suppress(BrokenPipeError):
            for path in sorted(folder.iterdir()):
                try:
                    _start(RunFolder(path))
                    print(f"{path.name}: started")
                except UserError as error:
                    print(f"{path.name}: {type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def _start(run: RunFolder) -> Lease:
    return run.start("name: x\n", {}, lambda _: [])


if __name__ == "__main__":
    {"race": race, "kill": kill, "users": users}[sys.argv[1]](Path(sys.argv[2]))
