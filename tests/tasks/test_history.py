"""One history out of the logs of several attempts."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tasks.history import Attempted, merge, read_attempt
from tasks.starting_point import DECISION
from trainium.logs.progress import Point


def attempt(began: int, *steps: int, mark: float = 0.0) -> Attempted:
    return Attempted(began, tuple(Point(step, loss=step + mark) for step in steps))


def test_one_attempt_is_its_own_history() -> None:
    history = merge([attempt(0, 0, 1, 2)])
    assert history.losses == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert (history.attempts, history.repeated) == (1, 0)


def test_what_came_after_the_checkpoint_is_replaced_by_the_attempt_that_went_on_from_it() -> None:
    history = merge([attempt(0, 0, 1, 2, 3), attempt(2, 2, 3, 4, mark=0.5)])
    assert history.losses == [(0, 0.0), (1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]
    assert (history.attempts, history.repeated) == (2, 2)


def test_an_attempt_that_shows_nothing_or_begins_anew_counts_as_well() -> None:
    assert merge([attempt(0, 0, 1, 2, 3), attempt(2), attempt(2, 2, 3)]).losses == [(s, float(s)) for s in range(4)]
    anew = merge([attempt(0, 0, 1, 2, 3), attempt(0, 0, 1, mark=0.5)])
    assert anew.losses == [(0, 0.5), (1, 1.5)]
    assert anew.repeated == 4


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6), st.integers(1, 5))
def test_interrupted_anywhere_it_is_the_undisturbed_history(cuts: list[tuple[int, int]], every: int) -> None:
    """Attempts that reach any step and go on from any earlier one, logging every few steps."""
    attempts, began = [], 0
    for reached, back in cuts:
        end = max(began, reached)
        attempts.append(attempt(began, *(step for step in range(began, end) if step % every == 0)))
        began = min(back, end)
    attempts.append(attempt(began, *(step for step in range(began, 30) if step % every == 0)))
    assert merge(attempts).losses == [(step, float(step)) for step in range(0, 30, every)]


def test_an_attempt_is_read_from_its_folder(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert read_attempt(tmp_path, log) == Attempted(0, ())
    (tmp_path / DECISION).write_text(json.dumps({"checkpoint": "/c", "step": 25}))
    bar = "Epoch 0:   3%|▎| 26/91 [16:05<7:52:06, 321.89s/it, reduced_train_loss=13.40, global_step=25.00]"
    log.write_text(f"\r{bar}\nTraceback (most recent call last):\n")
    found = read_attempt(tmp_path, log)
    assert found.began == 25
    assert [(point.step, point.loss) for point in found.points] == [(25, 13.4)]
