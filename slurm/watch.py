"""One job that is waited for: what has been seen of it, and when the scheduler is worth asking because of it."""

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from slurm.errors import BrokenRecord
from slurm.exits import ExitFile, Found
from slurm.folder import JobFolder, JobRecord
from slurm.looks import Accounts, Look
from slurm.markers import read_marker
from slurm.scheduler import Timing
from slurm.verdict import JobStatus, Observations, Outcome, Standing, Verdict, judge, matching_exit

_ENDING = timedelta(seconds=60)


@dataclass(eq=False)
class Watch:
    """after: only looks taken later (seconds since 1970) tell something about the latest that is known of the job.
    want: when one is wanted before the interval is over. events: for the one who waits."""

    folder: JobFolder
    record: JobRecord
    exit_file: ExitFile
    seen: Observations
    after: float
    want: float | None
    events: "asyncio.Queue[JobStatus | Outcome | BaseException]" = field(default_factory=asyncio.Queue)
    status: JobStatus | None = None
    is_new: bool = True
    ask_accounting: bool = False

    @classmethod
    def of(cls, folder: JobFolder, record: JobRecord) -> "Watch":
        seen, now = Observations(job_id=record.job_id, name=record.name, submitted=record.submitted), time.time()
        return cls(folder, record, ExitFile(folder), seen, after=now, want=now)

    def notice(self, found: Found, timing: Timing) -> None:
        """The exit file is another one: only a look taken after it was written confirms it."""
        self.seen = replace(self.seen, start=found.start, exit=found.end)
        if found.end is not None:
            now = time.time()
            self.after = min(now, found.written + timing.settle)  # a clock of a node or a file server may be ahead
            self.want = None if self.is_confirmed else min(now, found.written) + timing.settle

    @property
    def is_confirmed(self) -> bool:
        """The latest look is later than what is known from files."""
        at = self.seen.queue_at
        return self.seen.reachable and at is not None and at.timestamp() > self.after

    def take_look(self, look: Look) -> None:
        self.want = None
        if look.rows is None:
            self.seen = replace(self.seen, reachable=False)
            return
        row = look.rows.get(self.record.job_id)
        last, at = row or self.seen.last_row, datetime.fromtimestamp(look.taken, UTC)
        self.seen = replace(self.seen, reachable=True, queue_at=at, row=row, last_row=last)

    def take_accounts(self, accounts: Accounts) -> None:
        at, row = datetime.fromtimestamp(accounts.taken, UTC), accounts.rows[self.record.job_id]
        self.seen = replace(self.seen, accounting_at=at, accounting=row)

    async def judge(self, timing: Timing) -> Verdict | None:
        """How the job stands; None: an exit file has just come that the look is older than."""
        verdict = judge(self.seen, timing)
        if verdict.standing is not Standing.LIVE and not (verdict.outcome and verdict.outcome.succeeded):
            if found := await asyncio.to_thread(self.exit_file.look):  # it came after the last scan
                self.notice(found, timing)
                if not self.seen.row and not self.is_confirmed:
                    return None
            verdict = judge(await asyncio.to_thread(self._with_clues), timing)
        self.seen = replace(self.seen, claim=verdict.claim, claim_at=verdict.claim_at)
        self.ask_accounting = verdict.ask_accounting
        self.want = self.want or self._wanted(verdict, timing)
        return verdict

    def tell(self, verdict: Verdict) -> None:
        """Whoever waits hears of the end, and of a status that is another one."""
        if verdict.outcome:
            self.events.put_nowait(verdict.outcome)
            return
        row, old = self.seen.row or self.seen.last_row, self.status
        reason = row.reason if row and verdict.state.is_waiting else None
        nodes = row.nodes if row else ""
        since = old.since if old and old.state is verdict.state else datetime.now(UTC)
        status = JobStatus(self.record.job_id, verdict.state, reason, nodes, since, verdict.note)
        if old != status:
            self.status = status
            self.events.put_nowait(status)

    def is_of_another_user(self) -> bool:
        """Whether somebody else submitted the job, and this user's queue does not show it: they wrote its script."""
        with contextlib.suppress(OSError):
            return self.folder.script.stat().st_uid != os.getuid()
        return False

    def _wanted(self, verdict: Verdict, timing: Timing) -> float | None:
        """When a look is wanted before the interval is over."""
        looked = self.seen.queue_at.timestamp() if self.seen.queue_at else 0.0
        if verdict.standing is Standing.SETTLING and verdict.claim_at:
            confirms = verdict.claim_at.timestamp() + timing.confirm
            return confirms if confirms > looked else None  # what takes longer to settle has time
        return looked if verdict.standing is Standing.LIVE and _is_ending(self.seen) else None

    def _with_clues(self) -> Observations:
        """What explains an end, read only once there is one.

        The wish to cancel is written by others at any time, but always before the job ends of it.
        """
        try:
            record = self.folder.read_job()
        except BrokenRecord:
            record = None
        requested = bool((record or self.record).cancel_requested)
        marker, start = read_marker(self.folder.log, self.record.job_id), self.folder.read_start()
        return replace(self.seen, start=start, cancel_requested=requested, marker=marker)


def _is_ending(seen: Observations) -> bool:
    """The payload has just ended and the queue has not noticed; an epilog that hangs for longer is not worth asking."""
    record = matching_exit(seen)
    return seen.reachable and record is not None and datetime.now(UTC) - record.ended < _ENDING
