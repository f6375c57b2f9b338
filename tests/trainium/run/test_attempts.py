"""What comes after an attempt that did not succeed: a table of ends, budgets, progress, nodes."""

from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from slurm.ending import Cause
from trainium.logs.diagnose import diagnose
from trainium.run.attempts import Again, Budgets, Ended, Kind, Stop, classes_of, decide

BUDGETS = Budgets(
    hardware=3,
    preemption=3,
    time_limit=3,
    capacity=3,
    transient=3,
    ambiguous=1,
    capacity_delay=timedelta(minutes=10),
    transient_delay=timedelta(seconds=30),
)
NOW, LATER, SOON = timedelta(), BUDGETS.capacity_delay, BUDGETS.transient_delay
CAUSES = tuple(str(cause) for cause in Cause if cause is not Cause.NONE)
CLASSES = ("transient", "interrupted", "deterministic", "config", "cache", "node", "ambiguous", "capacity")


def ended(cause: str, *classes: str, nodes: tuple[str, ...] = ("n1",), position: int | None = None) -> Ended:
    return Ended(cause=cause, classes=classes, nodes=nodes, position=position)


@pytest.mark.parametrize(
    ("end", "delay", "exclude"),
    [
        (ended("node"), NOW, ("n1",)),
        (ended("node", "deterministic"), NOW, ("n1",)),  # Slurm decides, the text only explains
        (ended("node", nodes=()), NOW, ()),
        (ended("lost"), NOW, ()),
        (ended("preempted"), NOW, ()),
        (ended("preempted", position=0), NOW, ()),
        (ended("time_limit", position=10), NOW, ()),
        (ended("capacity"), LATER, ()),
        (ended("launch"), NOW, ("n1",)),
        (ended("unknown"), NOW, ("n1",)),
        (ended("code", "transient"), SOON, ()),
        (ended("code", "capacity"), LATER, ()),
        (ended("code", "node"), NOW, ("n1",)),
        (ended("code", "cache"), NOW, ()),
        (ended("code", "ambiguous", "deterministic"), NOW, ("n1",)),  # the root comes first
    ],
)
def test_ends_that_are_tried_again(end: Ended, delay: timedelta, exclude: tuple[str, ...]) -> None:
    decision = decide([end], BUDGETS)
    assert isinstance(decision, Again), decision
    assert (decision.delay, decision.exclude) == (delay, exclude)
    assert "(attempts." in decision.why
    assert all(node in decision.why for node in exclude)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (ended("cancelled_outside"), "somebody's decision"),
        (ended("cancelled_outside", "transient"), "somebody's decision"),
        (ended("cancelled_by_us"), "this run cancelled it"),
        (ended("memory"), "raise `memory`"),
        (ended("code"), "nothing in its log"),
        (ended("code", "deterministic"), "on every node"),
        (ended("code", "config"), "until a setting is changed"),
        (ended("code", "interrupted"), "nobody knows by whom"),
        (ended("unknown", "interrupted", "transient"), "nobody knows by whom"),
        (ended("time_limit"), "raise `time`"),
        (ended("time_limit", position=0), "raise resources.train.time"),
    ],
)
def test_ends_that_are_not(end: Ended, why: str) -> None:
    decision = decide([end], BUDGETS)
    assert isinstance(decision, Stop), decision
    assert why in decision.why


def test_every_end_has_an_answer_that_says_why() -> None:
    for cause, classes, position in product(CAUSES, ((), *((cls,) for cls in CLASSES)), (None, 0, 5)):
        decision = decide([ended(cause, *classes, position=position)], BUDGETS)
        assert decision.why
        assert not decision.why.endswith(".")


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (ended("node"), Kind.HARDWARE),
        (ended("preempted"), Kind.PREEMPTION),
        (ended("capacity"), Kind.CAPACITY),
        (ended("code", "transient"), Kind.TRANSIENT),
        (ended("code", "ambiguous"), Kind.AMBIGUOUS),
    ],
)
def test_budgets_are_separate_and_count_over_the_whole_history(end: Ended, kind: Kind) -> None:
    allowed = BUDGETS.of(kind)
    others = [ended("preempted"), ended("node"), ended("cancelled_by_us"), ended("cancelled_outside")]
    others = [other for other in others if other.cause != end.cause] * 5
    assert isinstance(decide([*others, *[end] * allowed], BUDGETS), Again)
    decision = decide([end, *others, *[end] * allowed], BUDGETS)
    assert isinstance(decision, Stop)
    assert f"attempts.{kind}={allowed}" in decision.why


def test_without_a_budget_nothing_is_tried_again() -> None:
    none = Budgets(**{**BUDGETS.__dict__, **{kind.value: 0 for kind in Kind}})
    for cause, position in product(CAUSES, (None, 5)):
        assert isinstance(decide([ended(cause, "transient", position=position)], none), Stop)


def test_time_after_time_needs_checkpoint_after_checkpoint() -> None:
    slices = [ended("time_limit", position=step) for step in (10, 20, 30)]
    assert isinstance(decide(slices, BUDGETS), Again)
    stuck = decide([*slices[:2], ended("time_limit", position=20)], BUDGETS)
    assert isinstance(stuck, Stop)
    assert "step 20" in stuck.why
    # An attempt that never got to its checkpoints (no node, say) stands between them and hides nothing.
    assert isinstance(decide([slices[0], ended("node", position=10), slices[1]], BUDGETS), Again)
    assert isinstance(decide([slices[0], ended("node", position=10), slices[0]], BUDGETS), Stop)


def test_nodes_that_failed_stay_excluded_and_doubtful_ones_only_for_the_next_attempt() -> None:
    failed, doubtful = ended("node", nodes=("n1",)), ended("code", "ambiguous", nodes=("n2",))
    first = decide([failed, doubtful], BUDGETS)
    assert isinstance(first, Again)
    assert first.exclude == ("n1", "n2")
    second = decide([failed, doubtful, ended("preempted", nodes=("n3",))], BUDGETS)
    assert isinstance(second, Again)
    assert second.exclude == ("n1",)


def test_the_ledger_keeps_all_of_it() -> None:
    for end in (ended("node", "ambiguous", "config", position=7), ended("code", nodes=())):
        assert Ended.from_json(end.to_json()) == end


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("", ()),
        ("all is well\n", ()),
        ("ERROR:multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 1) of binary: x\n", ()),
        ("DMA TX engine 0 is in an abort state\n", ("node",)),
        ("An error occurred (InsufficientInstanceCapacity) when calling the RunInstances operation\n", ("capacity",)),
        ("NeuronCore(s) not available - Requested:nc1-nc1 Available:0\n", ("transient",)),
        ("Failed to allocate 4.000GB (alignment: none, usage: tensors) on ND 0:NC 4\n", ("deterministic",)),
        ("  exitcode  : -9 (pid: 8158)\n", ("ambiguous",)),
    ],
)
def test_what_a_log_says_of_a_retry(tmp_path: Path, text: str, classes: tuple[str, ...]) -> None:
    log = tmp_path / "output.log"
    log.write_text(text)
    assert classes_of(diagnose(log, "train")) == classes
