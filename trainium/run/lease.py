"""One flow run per run folder at a time, on a filesystem that many machines see. `claims` has the files.

Nobody waits for a lock, so an owner that is stopped at any moment blocks nobody. Whoever takes a lease over makes the
claim of the next generation and removes the old owner's name; should the old owner wake up, it looks for both before
everything that cannot be undone, and finds that it has lost. It finds the same when the run folder was deleted and made
again.

Clocks of two machines differ, and the time of a file may come from a third. So nobody is taken for dead by comparing
times: a lease is taken over when its heartbeat has not changed while the contender watched it for the stale time by a
clock that only counts seconds, or when its process belonged to this machine and is gone. A comparison of times only
lets a start be refused at once where watching would take a while; clocks that are wrong by less than the stale time
then refuse for that much longer.
"""

import errno
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from trainium.errors import UserError
from trainium.run import claims
from trainium.run.holder import Holder

STALE_AFTER = 60.0  # seconds; for a flow, the cluster block's `stale_after` counts
BEATS = 6  # heartbeats, and a contender's looks, in the stale time

_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTSUP, errno.ENOTDIR)


class LeaseLost(RuntimeError):
    """Another process took the run over, or its folder was deleted; this one must touch nothing more."""


class NoLease(UserError):
    """The place of the lease cannot be written."""


class Standing(Enum):
    """FREE: nobody has it. ALIVE: its holder lives. SILENT: nobody knows yet. GONE: its holder is dead or stopped."""

    FREE = "free"
    ALIVE = "alive"
    SILENT = "silent"
    GONE = "gone"


@dataclass(frozen=True)
class Seen:
    """One look at a lease. `silent`: seconds without a sign of life, as far as clocks can be believed."""

    generation: int
    holder: Holder | None
    standing: Standing
    silent: float

    def __str__(self) -> str:
        return f"{self.holder or 'somebody whose claim is damaged'}, last seen {self.silent:.0f} s ago"


class RunBusy(UserError):
    """Another process works on this run folder, or may do so."""

    def __init__(self, folder: Path, seen: Seen) -> None:
        self.seen = seen
        super().__init__(
            f"The run in {folder} is being worked on by {seen}. Wait for it (--wait), watch it in the Prefect UI, or "
            "give this run another name."
        )


class Lease:
    """The right to submit and cancel jobs of one run, or to compile into one cache."""

    def __init__(self, folder: Path, holder: Holder, generation: int) -> None:
        self._folder = folder
        self._holder = holder
        self._generation = generation
        self._own = claims.name_of(folder, holder)
        self._lock = threading.Lock()  # a heartbeat in a thread must not come after the release
        self._given_back = False

    @classmethod
    def take(cls, folder: Path, *, stale_after: float = STALE_AFTER) -> "Lease":
        """Take the lease, or raise RunBusy naming who has it. Blocks for up to the stale time of a silent holder."""
        contest = Contest(folder, stale_after=stale_after)
        while True:
            try:
                return contest.take()
            except RunBusy as busy:
                if busy.seen.standing is Standing.ALIVE:
                    raise
            time.sleep(contest.look_every)

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def token(self) -> str:
        """Names this one taking of this one lease."""
        return self._holder.token

    @property
    def beat_every(self) -> float:
        """Seconds between two heartbeats."""
        return self._holder.stale_after / BEATS

    def check(self) -> None:
        """Raise LeaseLost unless this process still has the lease. Called right before every sbatch and scancel."""
        if not claims.is_there(self._own) or claims.latest(self._folder) != self._generation:
            raise LeaseLost(self._why_lost())

    def beat(self) -> None:
        """Say that this process is alive. Raises LeaseLost when it no longer matters."""
        with self._lock:
            if self._given_back:
                return
            self.check()
            try:
                os.utime(self._own)
            except FileNotFoundError:
                raise LeaseLost(self._why_lost()) from None

    def release(self) -> None:
        """Give the lease back; harmless when it was lost, or given back before."""
        with self._lock:
            self._given_back = True
            with suppress(OSError):  # what cannot be given back goes stale
                self._own.unlink()

    def _why_lost(self) -> str:
        place = self._folder.parent
        with suppress(OSError):
            mine, latest = claims.read(self._folder, self._generation)[1], claims.latest(self._folder)
            if claims.is_there(self._own) or (mine is not None and mine.token == self.token):
                if latest == self._generation:
                    return f"{place} was given back: this process has it no longer."
                return f"{place} was taken over by {claims.read(self._folder, latest)[1]}."
        return f"{place} is not what it was: the run folder was deleted while this flow was working in it."


class Contest:
    """One contender for a lease, with what it has seen of the holder's heartbeat. No method waits."""

    def __init__(
        self, folder: Path, *, stale_after: float = STALE_AFTER, run: Path | None = None, flow_run: str = ""
    ) -> None:
        """`run`: the run folder that the lease is for; the folder that `folder` is in unless given."""
        self._folder = folder
        self._stale_after = stale_after
        self._run = run or folder.parent
        self._flow_run = flow_run
        self._pulse: tuple[int, int] | None = None
        self._unchanged_since = 0.0

    @property
    def look_every(self) -> float:
        """Seconds between two looks while waiting."""
        return self._stale_after / BEATS

    def look(self) -> Seen:
        """How the lease stands. A holder elsewhere is known to be gone after looks over the whole stale time."""
        generation = claims.latest(self._folder)
        try:
            status, holder = claims.read(self._folder, generation)
        except (FileNotFoundError, NotADirectoryError):  # none yet, or deleted under our eyes
            return Seen(0, None, Standing.FREE, 0.0)
        now, before = time.monotonic(), self._pulse
        pulse = self._pulse = generation, status.st_mtime_ns
        if pulse != before:
            self._unchanged_since = now
        unchanged = now - self._unchanged_since
        age = time.time() - status.st_mtime
        limit = holder.stale_after if holder else self._stale_after
        if status.st_nlink < 2:
            standing = Standing.FREE
        elif unchanged >= limit or (holder and holder.known_dead()):
            standing = Standing.GONE
        elif before not in (None, pulse) or abs(age) < limit:
            standing = Standing.ALIVE
        else:
            standing = Standing.SILENT
        return Seen(generation, holder, standing, max(unchanged, age if abs(age) < limit else 0.0))

    def take(self) -> Lease:
        """The lease, if it is free or its holder is gone. Raises RunBusy, NoLease and OSError (a full disk)."""
        while True:
            seen = self.look()
            if seen.standing not in (Standing.FREE, Standing.GONE):
                raise RunBusy(self._folder.parent, seen)
            if lease := self.claim(seen):
                return lease

    def claim(self, seen: Seen) -> Lease | None:
        """The lease after what was seen, whoever has it; None when another contender was faster."""
        holder = Holder.me(self._stale_after, str(self._run), self._flow_run)
        generation = seen.generation + 1
        try:
            if not claims.make(self._folder, holder, generation):
                return None
        except OSError as error:
            if error.errno not in _NOT_WRITABLE:
                raise
            raise NoLease(
                f"cannot make {claims.claim(self._folder, generation)}: {error.strerror}. Whoever starts a run must be "
                "allowed to write there, and the filesystem must know hard links, as ext4, XFS, NFS and Lustre do."
            ) from error
        lease = Lease(self._folder, holder, generation)
        try:
            lease.check()  # this process may have slept since it made the claim
        except LeaseLost:
            return None
        return lease


def holder_of(folder: Path) -> Holder | None:
    """Whoever had the lease last, whether or not it was given back; None where there is no readable claim."""
    try:
        return claims.read(folder, claims.latest(folder))[1]
    except OSError:
        return None
