"""When a scheduler may be asked again: pure decisions over what all processes that share its answers have noted.

Times are seconds since 1970, and a query's is always taken before it: what is true of its answer was true after then.
Machines that share must have clocks that agree to about a second (Slurm's munge wants that too).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from slurm.scheduler import Timing

_MINUTE = 61.0  # a command starts a moment after it was noted
_SKEW = 5.0


@dataclass(frozen=True)
class Board:
    """What those who share a scheduler know together; a time of 0 means never.

    calls: the latest queries of any kind, as many as a minute may have. asked: the latest look at the queue, answered
    or not; early: the latest one that did not wait for its interval. taken: the latest look that came back, with
    `rows` (text, for `slurm.looks`) or with the `error`. wanted: jobs that only accounting can settle, and when each
    was submitted. accounts_asked, accounts_taken, accounts: as for the queue.
    """

    calls: tuple[float, ...] = ()
    asked: float = 0.0
    early: float = 0.0
    taken: float = 0.0
    rows: str = ""
    error: str = ""
    wanted: Mapping[str, float] = field(default_factory=dict)
    accounts_asked: float = 0.0
    accounts_taken: float = 0.0
    accounts: str = ""


def believable(board: Board, now: float) -> Board:
    """An empty one instead of one from the future: a clock was set back, and waiting for it could take hours."""
    return Board() if max(board.asked, board.accounts_asked) > now + _SKEW else board


def queue_due(board: Board, want: float | None, timing: Timing) -> float:
    """When the queue is to be asked next. `want`: a look taken then or later is wanted before the interval is over.

    A look that has not come back, because a command hangs or its process was killed, counts for one interval, and one
    that failed is followed by no early one: a controller in trouble is left alone.
    """
    due = board.asked + timing.queue
    if want is not None and board.taken >= board.asked and not board.error:
        due = min(due, max(want, board.early + timing.early))
    return max(due, _in_budget(board, timing))


def claim_queue(board: Board, seen: float, want: float | None, now: float, timing: Timing) -> Board:
    """The board with `asked == now` when it is the caller's turn to ask; else as it was.

    `seen` is the look that the caller knows: when there is another one it takes that first.
    """
    if board.taken != seen or now < queue_due(board, want, timing):
        return board
    early = now if now < board.asked + timing.queue else board.early
    return replace(_called(board, now, timing), asked=now, early=early)


def answer_queue(board: Board, taken: float, rows: str, error: str) -> Board:
    """The look of `taken` has come back; a slow one does not replace a later one."""
    return board if board.taken > taken else replace(board, taken=taken, rows=rows, error=error)


def accounts_due(board: Board, timing: Timing) -> float:
    """When accounting may be asked next, if there is something to ask."""
    return max(board.accounts_asked + timing.accounting, _in_budget(board, timing))


def claim_accounts(board: Board, seen: float, wanted: Mapping[str, float], now: float, timing: Timing) -> Board:
    """The board with these jobs wanted, and with `accounts_asked == now` when it is the caller's turn to ask for all
    that are wanted."""
    if any(job not in board.wanted for job in wanted):
        board = replace(board, wanted={**board.wanted, **wanted})
    if board.accounts_taken != seen or now < accounts_due(board, timing):
        return board
    return replace(_called(board, now, timing), accounts_asked=now)


def answer_accounts(board: Board, taken: float, asked: Collection[str], accounts: str) -> Board:
    """The accounts of `taken` have come back; who wants more of these jobs says so again."""
    if board.accounts_taken > taken:
        return board
    left = {job: since for job, since in board.wanted.items() if job not in asked}
    return replace(board, accounts_taken=taken, accounts=accounts, wanted=left)


def _in_budget(board: Board, timing: Timing) -> float:
    """From when on one more call keeps any minute within its number of calls."""
    full = timing.calls is not None and len(board.calls) >= timing.calls
    return board.calls[-timing.calls] + _MINUTE if full and timing.calls else 0.0


def _called(board: Board, now: float, timing: Timing) -> Board:
    return replace(board, calls=(*board.calls, now)[-timing.calls :] if timing.calls else ())
