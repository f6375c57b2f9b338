"""Looks at the queue and the accounts that many processes share: one asks, all learn the answer."""

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slurm import pace
from slurm.errors import SchedulerUnreachable
from slurm.pace import Board
from slurm.scheduler import AccountingRow, QueueRow, Scheduler, Timing
from slurm.snapshot import Snapshot
from slurm.states import JobState


@dataclass(frozen=True)
class Look:
    """The queue's rows of some jobs, asked for at `taken` (seconds since 1970). rows None: no answer, but `error`."""

    taken: float
    rows: Mapping[str, QueueRow] | None
    error: str = ""


@dataclass(frozen=True)
class Accounts:
    """What accounting, asked at `taken`, said of some jobs; None: it does not know the job, or did not answer."""

    taken: float
    rows: Mapping[str, AccountingRow | None]
    error: str = ""


class Looks:
    """One per watcher; not for several threads at a time. `shared`: the folder of a snapshot, see `slurm.snapshot`."""

    def __init__(self, scheduler: Scheduler, timing: Timing, shared: Path | None) -> None:
        self._scheduler, self._timing, self._all = scheduler, timing, shared is not None
        self._snapshot = Snapshot(shared)
        self._seen = self._accounted = self._looked = 0.0

    def queue_pause(self, want: float | None) -> float:
        """Seconds until `queue` has something to do; nothing is touched to know it."""
        board = pace.believable(self._snapshot.board, now := time.time())
        if board.asked > board.taken:
            return self._next_poll(board.asked) - now
        return pace.queue_due(board, want, self._timing) - now

    def queue(self, job_ids: Collection[str], want: float | None) -> Look | None:
        """A look that this object has not given yet: one that somebody else made, or one of its own when it is due.

        None: not due, or somebody is asking just now. `want` as for `slurm.pace.queue_due`. Blocks for the query.
        """
        board, now = self._update(lambda board, now: pace.claim_queue(board, self._seen, want, now, self._timing))
        if board.asked == now:
            rows, error = self._ask_queue(job_ids)
            board, _ = self._update(lambda board, _: pace.answer_queue(board, now, rows, error))
        if board.taken == self._seen:
            return None
        self._seen = board.taken
        return Look(board.taken, None if board.error else _thaw_queue(board.rows, job_ids), board.error)

    def accounts_pause(self, wanted: Collection[str]) -> float:
        """Seconds until `accounts` has something to do for these jobs; nothing is touched to know it."""
        board = pace.believable(self._snapshot.board, now := time.time())
        if any(job not in board.wanted for job in wanted):
            return 0.0
        if board.accounts_asked > board.accounts_taken:
            return self._next_poll(board.accounts_asked) - now
        return pace.accounts_due(board, self._timing) - now

    def accounts(self, wanted: Mapping[str, float]) -> Accounts | None:
        """What accounting knows of those of the `wanted` jobs (id → when it was submitted) that it was asked for.

        None: not due yet; whoever asks next asks for these jobs too. Blocks for the query.
        """
        claim = pace.claim_accounts
        board, now = self._update(lambda board, now: claim(board, self._accounted, wanted, now, self._timing))
        if board.accounts_asked == now:
            asked, text = set(board.wanted), self._ask_accounts(board.wanted)
            board, _ = self._update(lambda board, _: pace.answer_accounts(board, now, asked, text))
        if board.accounts_taken == self._accounted:
            return None
        self._accounted = board.accounts_taken
        return _thaw_accounts(board, wanted)

    def _ask_queue(self, job_ids: Collection[str]) -> tuple[str, str]:
        try:
            rows = self._scheduler.queue(None if self._all else job_ids)
        except SchedulerUnreachable as error:
            return "", str(error)
        return _freeze(rows), ""

    def _ask_accounts(self, wanted: Mapping[str, float]) -> str:
        try:
            found = self._scheduler.accounting(list(wanted), datetime.fromtimestamp(min(wanted.values()), UTC)) or {}
        except SchedulerUnreachable as error:
            return json.dumps({"error": str(error), "rows": dict.fromkeys(wanted)})
        return '{"error": "", "rows": ' + _freeze({job: found.get(job) for job in wanted}) + "}"

    def _update(self, change: Callable[[Board, float], Board]) -> tuple[Board, float]:
        """The new board, and the time that it was made of: the lock may have taken a while."""

        def changed(board: Board) -> Board:
            self._looked = time.time()
            return change(pace.believable(board, self._looked), self._looked)

        return self._snapshot.update(changed), self._looked

    def _next_poll(self, asked: float) -> float:
        """Somebody is asking since then: the answer takes moments, unless the command hangs."""
        return self._looked + max(self._timing.exit_scan / 8, (self._looked - asked) / 4)


def _freeze(rows: Mapping[str, QueueRow] | Mapping[str, AccountingRow | None]) -> str:
    return json.dumps({job: row and vars(row) for job, row in rows.items()}, default=datetime.isoformat)


def _thaw_queue(text: str, job_ids: Collection[str]) -> dict[str, QueueRow]:
    rows: dict[str, dict[str, Any]] = json.loads(text)
    return {job: QueueRow(**_typed(rows[job])) for job in job_ids if job in rows}


def _thaw_accounts(board: Board, job_ids: Collection[str]) -> Accounts:
    data = json.loads(board.accounts)
    rows: dict[str, dict[str, Any] | None] = data["rows"]
    found = {job: AccountingRow(**_typed(row)) if (row := rows[job]) else None for job in job_ids if job in rows}
    return Accounts(board.accounts_taken, found, data["error"])


def _typed(row: dict[str, Any]) -> dict[str, Any]:
    times = {name: datetime.fromisoformat(row[name]) for name in ("submitted", "started", "ended") if row.get(name)}
    return row | times | {"state": JobState(row["state"])}
