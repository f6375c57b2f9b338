"""Every rule: at least one line in which it holds, in several disguises, and a near miss."""

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from trainium.logs.matcher import Hit, Matcher
from trainium.logs.rules import BY_ID, RULES, Context, Rule, RuleClass, RuleError, Scope, expand_blanks, parse_rules
from trainium.logs.scanner import Marker, Scanner

SAMPLES = yaml.safe_load(Path(__file__).with_name("samples.yaml").read_text())
POSITIVE = [(name, line) for name, sample in SAMPLES.items() for line in sample["positive"]]
NEGATIVE = [(name, line) for name, sample in SAMPLES.items() for line in sample["negative"]]

DISGUISES = {
    "plain": "{}",
    "srun label": "0: {}",
    "MPI": "[1,0]<stdout>:{}",
    "torchrun": "[default7]:{}",
    "compiler dots": "..........{}",
    "progress bar": "Epoch 0:   3%|x| 3/91 [16:05<7:52:06, 321.89s/it]\r{}",
    "old wrapper": "2024-02-26 16:03:05.000270:  175  INFO ||NEURON_CACHE||: {}",
    "new wrapper": "2026-04-13 01:46:33.000003: 837617 [INFO]: {}",
    "glued": "2024-02-26 16:03:05.000270:  175  INFO ||NEURON_CACHE||: Compile cache path: /x {}",
}


def context_of(rule: Rule) -> Context:
    stage = rule.stages[0] if rule.stages else "train"
    if rule.scope is Scope.TRIAL_RUN:
        stage = "compile"
    return Context(stage, nodes=2 if rule.scope is Scope.SEVERAL_NODES else 1, expect_resume=True)


def seen(context: Context, text: str) -> set[str]:
    """The ids of all rules found in a text, markers included."""
    markers: list[Marker] = []
    scanner = Scanner(context, markers.append)
    scanner.feed(text.encode() + b"\n")
    return {rule for rule, _ in scanner.findings} | {marker.rule for marker in markers}


def own_hits(rule: Rule, line: str) -> list[Hit]:
    """What the pattern of a benign rule matches, taken as if it were a failure."""
    return Matcher([replace(rule, cls=RuleClass.AMBIGUOUS)]).hits(line.encode())


def as_exception(line: str) -> str:
    return f'Traceback (most recent call last):\n  File "/home/me/x.py", line 3, in <module>\n    f()\n{line}'


def test_every_rule_has_samples() -> None:
    assert set(SAMPLES) == set(BY_ID)
    assert all(sample["positive"] and sample["negative"] for sample in SAMPLES.values())


@pytest.mark.parametrize("disguise", DISGUISES)
def test_rules_hold_in_every_disguise(disguise: str) -> None:
    missed = []
    for name, line in POSITIVE:
        rule = BY_ID[name]
        if rule.scope is Scope.EXCEPTION:
            continue
        if line.startswith(("Killed", "python: ")) and disguise in ("glued", "old wrapper", "new wrapper"):
            continue  # the shell and the C library write these on lines of their own
        text = DISGUISES[disguise].format(line)
        found = seen(context_of(rule), text)
        if rule.cls is RuleClass.BENIGN:
            found -= {"training-progress"}
            if found or not own_hits(rule, text):
                missed.append((name, text, found))
        elif name not in found:
            missed.append((name, text, found))
    assert not missed


def test_other_spacing_makes_no_difference() -> None:
    missed = []
    for name, line in POSITIVE:
        rule = BY_ID[name]
        if rule.cls is RuleClass.BENIGN or rule.scope is Scope.EXCEPTION or line.startswith("./train.sh"):
            continue
        if name not in seen(context_of(rule), line.replace(" ", "   ")):
            missed.append((name, line))
    # The summary of torchrun and the wrappers' JSON have fixed spacing.
    assert not missed


@pytest.mark.parametrize(("name", "line"), [(n, line) for n, line in POSITIVE if BY_ID[n].scope is Scope.EXCEPTION])
def test_exception_rules_hold_at_the_end_of_a_traceback_only(name: str, line: str) -> None:
    context = context_of(BY_ID[name])
    assert name in seen(context, as_exception(line))
    assert name not in seen(context, line)


@pytest.mark.parametrize(("name", "line"), NEGATIVE)
def test_near_misses_do_not_match(name: str, line: str) -> None:
    rule = BY_ID[name]
    if rule.cls is RuleClass.BENIGN:
        assert not own_hits(rule, line)
    else:
        assert name not in seen(context_of(rule), as_exception(line) if rule.scope is Scope.EXCEPTION else line)


def test_every_failure_tells_what_to_do() -> None:
    assert all(rule.action for rule in RULES if rule.is_failure)


def test_patterns_are_not_anchored() -> None:
    assert [rule.id for rule in RULES if rule.pattern.startswith(("^", r"\A"))] == []


def test_the_special_rule_wins_over_the_general_one() -> None:
    line = "ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc']: [NCC_EXTP003] Instructions generated"
    assert seen(Context("compile"), line) == {"graph-too-large", "compile-failed"}


def test_an_unknown_error_glued_to_a_benign_one_is_found() -> None:
    benign = "2025-Jan-03 21:00:33.247541 13423:13423 ERROR   NRT:nrt_close   Unexpected runtime state: NRT_STATE_START"
    new = "2025-Jan-03 21:00:33.247541 13424:13424 ERROR   NRT:nrt_new   never seen"
    assert seen(Context("compile"), benign + new) == {"unknown-error"}
    assert seen(Context("compile"), new + benign) == {"unknown-error"}
    assert seen(Context("compile"), benign + benign) == set()


def test_interleaved_ranks_are_judged_by_their_messages() -> None:
    torn = (
        "2022-Mar-10 18:51:19.07392022-Mar-10 18:51:19.0739 17821:17931 ERROR  "
        "TDRV:exec_consume_infer_status_notifications  17822:18046 ERROR  TDRV:exec_consume_infer_status_notifications "
        " Missing infer_status notification: (end:1)Missing infer_status notification: (end:2)"
    )
    assert seen(Context("train"), torn) == {"execution-hang"}


def test_scope_decides() -> None:
    efa = "CCOM WARN OFI plugin initNet() failed is EFA enabled?"
    assert seen(Context("train", nodes=1), efa) == set()
    assert seen(Context("train", nodes=4), efa) == {"ofi-failed"}
    device = "ERROR  TDRV:tdrv_get_dev_info   No neuron device available"
    assert seen(Context("compile"), device) == set()
    assert seen(Context("train"), device) == {"no-device"}
    scratch = "There were no checkpoints found in /e. Training from scratch."
    assert seen(Context("train"), scratch) == set()
    assert seen(Context("train", expect_resume=True), scratch) == {"from-scratch"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"class": "odd"}, "'odd' is not a valid RuleClass"),
        ({"scope": "odd"}, "'odd' is not a valid Scope"),
        ({"stage": "odd"}, "odd"),
        ({"patern": "x"}, "unknown keys"),
        ({"pattern": "bär"}, "ASCII"),
        ({"action": ""}, "needs an action"),
    ],
)
def test_a_wrong_rule_is_refused(change: dict[str, str], message: str) -> None:
    good = {"id": "a", "pattern": "x", "class": "config", "meaning": "m", "action": "a", "source": "s"}
    assert parse_rules([good])[0].id == "a"
    with pytest.raises(RuleError, match=message):
        parse_rules([good | change])


def test_two_rules_of_one_name_are_refused() -> None:
    good = {"id": "a", "pattern": "x", "class": "config", "meaning": "m", "action": "a", "source": "s"}
    with pytest.raises(RuleError, match="same id"):
        parse_rules([good, good])


def test_a_blank_in_a_pattern_is_a_run_of_blanks() -> None:
    assert expand_blanks(r"a b ?c[ x]d\ e") == r"a[ \t]+b[ \t]*c[ x]d\ e"
