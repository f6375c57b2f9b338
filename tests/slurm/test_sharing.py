"""Watchers of one user share what they ask the scheduler, in one process as in many."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from slurm.cluster import SlurmScheduler
from slurm.errors import SchedulerUnreachable
from slurm.folder import JobFolder, JobRecord
from slurm.looks import Looks
from slurm.pace import Board, claim_queue
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.snapshot import Snapshot
from slurm.states import JobState
from slurm.submission import ensure_submitted
from slurm.verdict import JobStatus, Outcome
from slurm.watcher import Watcher
from tests.slurm.conftest import OnlyAsked, bash, eventually
from tests.slurm_lab.lab import SlurmLab

ROOT = Path(__file__).parents[2]
# The interval never comes round: every query after the first has a reason.
RARE = Timing(exit_scan=0.02, queue=3600, early=0.1, accounting=0.2, confirm=0.1, lost=1, settle=0.02)


@dataclass
class Queue(OnlyAsked):
    """A scheduler that counts what it is asked; all jobs in `rows` are this user's."""

    timing: Timing = RARE
    identity: str = "lab"
    rows: dict[str, QueueRow] = field(default_factory=dict)
    accounts: dict[str, AccountingRow] = field(default_factory=dict)
    down: bool = False
    queries: list[Collection[str] | None] = field(default_factory=list)
    accountings: list[set[str]] = field(default_factory=list)

    def runs(self, *jobs: str) -> None:
        self.rows |= {job: QueueRow(job, JobState.RUNNING, None, "n1", "n", 0, None) for job in jobs}

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        self.queries.append(job_ids)
        if self.down:
            raise SchedulerUnreachable("squeue failed: connect failure")
        return {job: row for job, row in self.rows.items() if job_ids is None or job in job_ids}

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        self.accountings.append(set(job_ids))
        return {job: row for job, row in self.accounts.items() if job in job_ids}


def submitted(root: Path, job_id: str) -> JobFolder:
    folder = JobFolder(root / "jobs" / job_id)
    folder.write(folder.job, JobRecord(job_id, "n", datetime.now(UTC)))
    folder.script.write_text("#!/bin/bash\n")
    return folder


def ends(folder: JobFolder, code: int = 0) -> None:
    now = datetime.now(UTC).isoformat()
    record = {"job_id": folder.path.name, "restart_count": 0, "node": "n1", "nodes": "n1", "code": code}
    whole = folder.path / "exit.tmp"
    whole.write_text(json.dumps(record | {"signal": None, "started": now, "ended": now}))
    whole.rename(folder.exit)


class Waiting:
    """Jobs that one watcher waits for."""

    def __init__(self, watcher: Watcher, folders: list[JobFolder]) -> None:
        self.status: dict[str, JobStatus] = {}
        self.tasks = [asyncio.create_task(watcher.wait(folder, self._note)) for folder in folders]
        self.jobs = {folder.path.name for folder in folders}

    def _note(self, status: JobStatus) -> None:
        self.status[status.job_id] = status

    async def all_show(self, state: JobState, note: str = "") -> None:
        async with asyncio.timeout(120):
            while not all(
                (s := self.status.get(job)) is not None and s.state is state and note in s.note for job in self.jobs
            ):
                await asyncio.sleep(0.01)

    async def outcomes(self) -> list[Outcome]:
        async with asyncio.timeout(120):
            return await asyncio.gather(*self.tasks)

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_one_query_answers_for_the_jobs_of_all_watchers(tmp_path: Path) -> None:
    queue, loop = Queue(), asyncio.get_running_loop()
    queue.runs(*map(str, range(40)))
    folders = [submitted(tmp_path, str(i)) for i in range(40)]
    began = loop.time()
    watchers = [Watcher(queue, shared=tmp_path / "shared") for _ in range(8)]
    waiting = [Waiting(watcher, folders[i::8]) for i, watcher in enumerate(watchers)]
    for group in waiting:
        await group.all_show(JobState.RUNNING)
    queue.rows.clear()
    for folder in folders:
        ends(folder)
    for group in waiting:
        assert all(outcome.succeeded for outcome in await group.outcomes())
    assert set(queue.queries) == {None}
    assert len(queue.queries) <= (loop.time() - began) / RARE.early + 2


async def test_a_job_of_another_user_is_asked_for_by_its_id(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    queue, folder = Queue(), submitted(tmp_path, "7")
    queue.runs("7")
    os.chown(folder.script, 12345, 12345)
    waiting = Waiting(Watcher(queue, shared=tmp_path / "shared"), [folder])
    await waiting.all_show(JobState.RUNNING)
    assert [set(ids or ()) for ids in queue.queries] == [{"7"}]
    await waiting.leave()


async def test_a_look_from_before_the_submission_says_nothing_about_the_job(tmp_path: Path) -> None:
    queue, shared = Queue(), tmp_path / "shared"
    queue.runs("1")
    first = Waiting(Watcher(queue, shared=shared), [submitted(tmp_path, "1")])
    await first.all_show(JobState.RUNNING)
    seen = len(queue.queries)
    queue.runs("2")
    second = Waiting(Watcher(queue, shared=shared), [submitted(tmp_path, "2")])
    await second.all_show(JobState.RUNNING)
    assert len(queue.queries) > seen
    await first.leave()
    await second.leave()


async def test_a_look_from_before_the_exit_file_does_not_confirm_it(tmp_path: Path) -> None:
    queue, shared, folder = Queue(), tmp_path / "shared", submitted(tmp_path, "1")
    queue.runs("1", "2")
    first = Waiting(Watcher(queue, shared=shared), [folder])
    await first.all_show(JobState.RUNNING)
    del queue.rows["1"]
    second = Waiting(Watcher(queue, shared=shared), [submitted(tmp_path, "2")])
    await second.all_show(JobState.RUNNING)  # this look shows job 1 no more, and its exit file is yet to come
    queue.runs("1")  # as it does while Slurm puts it back into the queue
    ends(folder, 3)
    await first.all_show(JobState.COMPLETING)
    assert not first.tasks[0].done()
    queue.rows.clear()
    assert [outcome.exit_code for outcome in await first.outcomes()] == [3]
    await second.leave()


async def test_a_look_of_another_one_confirms_an_exit_file_from_before_it(tmp_path: Path) -> None:
    queue, shared, folder = Queue(replace(RARE, settle=0)), tmp_path / "shared", submitted(tmp_path, "1")
    queue.runs("2")
    ends(folder, 3)
    first = Waiting(Watcher(queue, shared=shared), [submitted(tmp_path, "2")])
    await first.all_show(JobState.RUNNING)
    asked = len(queue.queries)
    second = Waiting(Watcher(queue, shared=shared), [folder])
    assert [outcome.exit_code for outcome in await second.outcomes()] == [3]
    assert len(queue.queries) == asked
    await first.leave()


async def test_who_was_killed_while_asking_is_waited_for_one_interval(tmp_path: Path) -> None:
    queue, shared = Queue(replace(RARE, queue=0.5)), tmp_path / "shared"
    queue.runs("1")

    def claimed(board: Board) -> Board:
        return claim_queue(board, 0, None, datetime.now(UTC).timestamp(), queue.timing)

    board = Snapshot(shared).update(claimed)
    waiting = Waiting(Watcher(queue, shared=shared), [submitted(tmp_path, "1")])
    await waiting.all_show(JobState.RUNNING)
    assert Snapshot(shared).update(lambda board: board).asked - board.asked >= 0.5
    await waiting.leave()


async def test_an_unreachable_controller_is_asked_by_one_for_all(tmp_path: Path) -> None:
    queue, loop = Queue(replace(RARE, queue=0.5), down=True), asyncio.get_running_loop()
    queue.runs(*map(str, range(10)))
    began = loop.time()
    folders = [submitted(tmp_path, str(i)) for i in range(10)]
    waiting = [Waiting(Watcher(queue, shared=tmp_path / "shared"), [folder]) for folder in folders]
    for group in waiting:
        await group.all_show(JobState.UNKNOWN, "does not answer")
    for folder in folders[:5]:
        ends(folder)
    assert len(queue.queries) <= (loop.time() - began) / queue.timing.queue + 1
    queue.down = False
    for folder in folders[:5]:
        del queue.rows[folder.path.name]
    for group in waiting[:5]:
        assert all(outcome.succeeded for outcome in await group.outcomes())
    for group in waiting[5:]:
        await group.all_show(JobState.RUNNING)
        await group.leave()


@pytest.mark.parametrize("trouble", ["file", "damaged"])
async def test_without_a_usable_file_everybody_asks_for_himself(tmp_path: Path, trouble: str) -> None:
    queue, shared, folder = Queue(), tmp_path / "shared", submitted(tmp_path, "1")
    if trouble == "file":
        shared.write_text("a file where the folder should be")
    else:
        shared.mkdir(mode=0o700)
        (shared / "queue").write_text("{")
    queue.runs("1")
    waiting = Waiting(Watcher(queue, shared=shared), [folder])
    await waiting.all_show(JobState.RUNNING)
    queue.rows.clear()
    ends(folder, 3)
    assert [outcome.exit_code for outcome in await waiting.outcomes()] == [3]


async def test_accounting_is_asked_for_the_unsettled_jobs_of_all(tmp_path: Path) -> None:
    queue, now = Queue(replace(RARE, queue=0.1)), datetime.now(UTC)
    jobs = [str(i) for i in range(6)]
    queue.accounts = {job: AccountingRow(job, JobState.FAILED, 4, 0, 0, "n1", "n", now, now, now) for job in jobs}
    began = asyncio.get_running_loop().time()
    waiting = [Waiting(Watcher(queue, shared=tmp_path / "shared"), [submitted(tmp_path, job)]) for job in jobs]
    for group in waiting:
        assert [outcome.exit_code for outcome in await group.outcomes()] == [4]
    passed = asyncio.get_running_loop().time() - began
    assert len(queue.accountings) <= passed / queue.timing.accounting + 1
    assert any(len(asked) > 1 for asked in queue.accountings)


def test_a_process_reads_what_another_one_asked(tmp_path: Path) -> None:
    """Through the file only: rows and accounts come back as they were."""
    queue, now = Queue(), datetime.now(UTC)
    queue.runs("1", "2")
    queue.rows["2"] = replace(queue.rows["2"], reason="Priority", submitted=now, exit_status=256)
    queue.accounts = {"3": AccountingRow("3", JobState.TIMEOUT, 0, 15, 0, "n1", "n", now, None, now)}
    one, other = (Looks(queue, RARE, tmp_path / "shared") for _ in range(2))
    assert one.queue(["1"], None)
    assert one.accounts({"3": now.timestamp(), "4": now.timestamp()})
    look, accounts = other.queue(["1", "2", "9"], None), other.accounts({"3": now.timestamp(), "9": 0.0})
    assert look
    assert look.rows == queue.rows
    assert accounts
    assert accounts.rows == queue.accounts  # nobody has asked for 9 yet
    assert (len(queue.queries), len(queue.accountings)) == (1, 1)


PROCESS = """
import asyncio, sys
from pathlib import Path
from slurm.cluster import SlurmScheduler
from slurm.folder import JobFolder
from slurm.scheduler import Timing
from slurm.watcher import Watcher

async def main(root, jobs):
    timing = Timing(exit_scan=0.1, queue=3600, early=0.5, accounting=60, confirm=1, lost=300, settle=0.1)
    watcher = Watcher(SlurmScheduler(bin=root / "bin", timing=timing), shared=root / "shared")
    waits = (watcher.wait(JobFolder(root / "jobs" / job), lambda s: print(s.state, flush=True)) for job in jobs)
    for outcome in await asyncio.gather(*waits):
        print(outcome.state, outcome.exit_code, flush=True)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2:]))
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    eventually(condition, what, 60)


def test_many_processes_ask_no_more_than_one(tmp_path: Path) -> None:
    """With a squeue that writes down that it was called."""
    (tmp_path / "bin").mkdir()
    squeue, calls, shown = (tmp_path / name for name in ("bin/squeue", "calls", "shown"))
    squeue.write_text(f'#!/bin/sh\necho "$(date +%s.%N)" "$@" >>{calls}\ncat {shown}\n')
    squeue.chmod(0o755)
    jobs = [str(i) for i in range(1, 21)]
    shown.write_text("".join("\x1f".join((job, "RUNNING", "None", "n1", "0", "N/A", "0", "n")) + "\n" for job in jobs))
    folders = [submitted(tmp_path, job) for job in jobs]
    processes = []
    for first in range(5):
        with (tmp_path / f"out{first}").open("w") as out:
            command = [sys.executable, "-c", PROCESS, str(tmp_path), *jobs[first::5]]
            processes.append(subprocess.Popen(command, stdout=out, cwd=ROOT))
    outputs = [tmp_path / f"out{first}" for first in range(5)]
    try:
        wait_for(lambda: all(out.read_text().count("RUNNING") == 4 for out in outputs), "all jobs run")
        empty = tmp_path / "empty"
        empty.write_text("")
        empty.rename(shown)
        for folder in folders:
            ends(folder, 3)
        assert [process.wait(60) for process in processes] == [0] * 5
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert all(out.read_text().count("FAILED 3") == 4 for out in outputs)
    asked = [float(line.split()[0]) for line in calls.read_text().splitlines()]
    assert len(asked) <= (asked[-1] - asked[0]) / 0.5 + 3  # 5 processes that ask for themselves make 10 calls
    assert all(f"-u {os.getuid()}" in line for line in calls.read_text().splitlines())


@pytest.mark.slurm
async def test_on_a_real_slurm(slurm: SlurmLab, tmp_path: Path) -> None:
    timing = Timing(exit_scan=0.1, queue=1, early=0.5, accounting=2, confirm=1, lost=60)
    scheduler = SlurmScheduler(conf=slurm.conf, timing=timing)
    place = tmp_path / f".scheduler-{scheduler.identity}"
    folders = [JobFolder(tmp_path / "jobs" / str(number)) for number in range(6)]
    for number, folder in enumerate(folders):
        job, name = bash(f"exit {number % 3}"), f"{tmp_path.name}-{number}"
        ensure_submitted(scheduler, job, folder, name, guard=lambda: None, grace=timedelta(seconds=3))
    waiting = [Waiting(Watcher(scheduler, shared=place), folders[first::2]) for first in range(2)]
    outcomes = [await group.outcomes() for group in waiting]
    assert [[outcome.exit_code for outcome in group] for group in outcomes] == [[0, 2, 1], [1, 0, 2]]
