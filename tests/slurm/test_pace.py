"""When the scheduler may be asked: a table, and every sequence of askers within the limits."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slurm.pace import (
    Board,
    accounts_due,
    answer_accounts,
    answer_queue,
    believable,
    claim_accounts,
    claim_queue,
    queue_due,
)
from slurm.scheduler import Timing

SLURM = Timing(exit_scan=2, queue=15, early=5, accounting=60, confirm=10, lost=300, settle=0.5, calls=12)
LOOKED = Board(asked=100, taken=100, rows="{}")


def test_when_the_queue_is_due() -> None:
    assert queue_due(Board(), None, SLURM) < 100  # nobody has ever asked
    assert queue_due(LOOKED, None, SLURM) == 115
    assert queue_due(LOOKED, 103, SLURM) == 103  # the look before was one of the interval's
    early = claim_queue(LOOKED, 100, 103, 103, SLURM)
    assert queue_due(answer_queue(early, 103, "{}", ""), 104, SLURM) == 108
    assert queue_due(early, 104, SLURM) == 118  # somebody is asking, or died of it
    assert queue_due(answer_queue(early, 103, "", "connect failure"), 104, SLURM) == 118
    assert queue_due(LOOKED, 200, SLURM) == 115  # the interval is not made longer by it


def test_only_one_asks_and_a_look_that_is_there_is_taken_first() -> None:
    assert claim_queue(LOOKED, 100, None, 115, SLURM).asked == 115
    assert claim_queue(claim_queue(LOOKED, 100, None, 115, SLURM), 100, None, 115.1, SLURM).asked == 115
    assert claim_queue(LOOKED, 80, None, 115, SLURM) == LOOKED


def test_a_slow_answer_does_not_replace_a_later_one() -> None:
    later = answer_queue(LOOKED, 120, '{"later": 1}', "")
    assert answer_queue(later, 110, "{}", "") == later
    assert answer_accounts(Board(accounts_taken=120), 110, ["1"], "{}") == Board(accounts_taken=120)


def test_accounting_is_asked_for_all_jobs_that_somebody_wants() -> None:
    board = Board(accounts_asked=100, accounts_taken=100)
    board = claim_accounts(board, 100, {"1": 10.0}, 110, SLURM)
    assert board.accounts_asked == 100
    board = claim_accounts(board, 100, {"2": 20.0}, 160, SLURM)
    assert (board.accounts_asked, dict(board.wanted)) == (160, {"1": 10.0, "2": 20.0})
    later = claim_accounts(board, 100, {"3": 30.0}, 161, SLURM)
    assert dict(answer_accounts(later, 160, ["1", "2"], "{}").wanted) == {"3": 30.0}
    assert accounts_due(later, SLURM) == 220


def test_a_board_from_the_future_is_not_waited_for() -> None:
    assert believable(LOOKED, 99) == LOOKED
    assert believable(LOOKED, 10) == Board()
    assert believable(Board(accounts_asked=100), 10) == Board()


# (seconds since the last step, a look is wanted, accounting instead of the queue, the query comes back, it succeeds)
STEPS = st.lists(st.tuples(st.floats(0, 20), st.booleans(), st.booleans(), st.booleans(), st.booleans()), max_size=300)


@given(steps=STEPS)
def test_no_minute_has_more_calls_than_allowed_and_early_looks_are_apart(
    steps: list[tuple[float, bool, bool, bool, bool]],
) -> None:
    board, now, calls, early = Board(), 1000.0, list[float](), list[float]()
    for pause, wanted, accounting, returns, succeeds in steps:
        now += pause
        if accounting:
            before, board = board, claim_accounts(board, board.accounts_taken, {"1": 0.0}, now, SLURM)
            asks = board.accounts_asked != before.accounts_asked
            assert not asks or now - before.accounts_asked >= 60
            board = answer_accounts(board, now, ["1"], "{}") if asks and returns else board
        else:
            before, board = board, claim_queue(board, board.taken, now if wanted else None, now, SLURM)
            asks = board.asked != before.asked
            early += [board.early] if board.early != before.early else []
            assert not asks or before.asked <= before.taken or now - before.asked >= 15  # one at a time
            assert not asks or not before.error or now - before.asked >= 15
            board = answer_queue(board, now, "{}", "" if succeeds else "no") if asks and returns else board
        calls += [now] if asks else []
    assert all(b - a >= 5 for a, b in pairwise(early))
    assert all(later - first >= 60 for first, later in zip(calls, calls[12:], strict=False))
