"""The catalogue of log lines: `rules.yaml`, loaded and validated when this module is imported."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

STAGES = ("convert", "compile", "train", "export", "evaluate")


class RuleClass(StrEnum):
    """What a retry would bring; `BENIGN` and `MARKER` are no failures."""

    TRANSIENT = "transient"
    INTERRUPTED = "interrupted"
    DETERMINISTIC = "deterministic"
    CONFIG = "config"
    CACHE = "cache"
    NODE = "node"
    AMBIGUOUS = "ambiguous"
    BENIGN = "benign"
    MARKER = "marker"


class Scope(StrEnum):
    """The circumstances in which a rule holds."""

    ANY = "any"
    ONE_NODE = "one-node"
    SEVERAL_NODES = "several-nodes"
    TRIAL_RUN = "trial-run"
    RESUME_EXPECTED = "resume-expected"
    EXCEPTION = "exception"


class Quote(StrEnum):
    """Which part of the line goes into the summary."""

    FROM = "from"
    AFTER = "after"


class Role(StrEnum):
    """Where a finding stands when the root cause is sought; the order of the members is the order of the search."""

    CAUSE = "cause"
    CONSEQUENCE = "consequence"
    COLLATERAL = "collateral"
    HINT = "hint"

    @property
    def order(self) -> int:
        """0 for what is most likely the root."""
        return list(Role).index(self)


@dataclass(frozen=True)
class Context:
    """What is known about the job whose log is read.

    Args:
        stage: one of `STAGES`, or None when it is not known: then the rules of every stage hold.
        nodes: how many nodes the job has.
        expect_resume: whether the job was to continue from a checkpoint.
    """

    stage: str | None = None
    nodes: int = 1
    expect_resume: bool = False

    def __post_init__(self) -> None:
        if self.stage is not None and self.stage not in STAGES:
            raise ValueError(f"stage {self.stage!r} is none of {', '.join(STAGES)}")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of log line; the fields are explained at the top of `rules.yaml`."""

    id: str
    pattern: str
    cls: RuleClass
    meaning: str
    source: str
    order: int
    stages: tuple[str, ...] = ()
    scope: Scope = Scope.ANY
    role: Role = Role.CAUSE
    action: str = ""
    silent: bool = False
    quote: Quote | None = None

    @property
    def is_failure(self) -> bool:
        """Whether the line belongs to something that went wrong."""
        return self.cls not in (RuleClass.BENIGN, RuleClass.MARKER)

    def applies(self, context: Context) -> bool:
        """Whether the rule holds for this job. Without a stage, no trial run is assumed."""
        if self.stages and context.stage is not None and context.stage not in self.stages:
            return False
        match self.scope:
            case Scope.ONE_NODE:
                return context.nodes == 1
            case Scope.SEVERAL_NODES:
                return context.nodes > 1
            case Scope.TRIAL_RUN:
                return context.stage == "compile"
            case Scope.RESUME_EXPECTED:
                return context.expect_resume
            case _:
                return True


class RuleError(Exception):
    """The catalogue itself is wrong: a fault of this project, not of the user."""


_KEYS = {"id", "stage", "pattern", "class", "scope", "role", "meaning", "action", "source", "silent", "quote"}


def expand_blanks(pattern: str) -> str:
    """Let every space of a pattern stand for a run of blanks, since spacing differs between log formats.

    A space with `?` or `*` behind it may be missing altogether; spaces inside of brackets stay as they are.
    """
    out: list[str] = []
    in_brackets = escaped = False
    index = 0
    while index < len(pattern):
        char = pattern[index]
        index += 1
        if char == " " and not in_brackets and not escaped:
            following = pattern[index : index + 1]
            out.append(r"[ \t]*" if following in ("?", "*") else r"[ \t]+")
            index += following in ("?", "*", "+") and following != ""
            continue
        if not escaped:
            in_brackets = (char == "[") or (in_brackets and char != "]")
        escaped = char == "\\" and not escaped
        out.append(char)
    return "".join(out)


def _rule(entry: Mapping[str, Any], order: int) -> Rule:
    name = entry.get("id", f"number {order}")
    if unknown := set(entry) - _KEYS:
        raise RuleError(f"rule {name}: unknown keys {sorted(unknown)}; allowed are {sorted(_KEYS)}")
    if missing := {"id", "pattern", "class", "meaning", "source"} - set(entry):
        raise RuleError(f"rule {name}: {sorted(missing)} missing")
    stage = entry.get("stage", [])
    stages = () if stage == "any" else tuple([stage] if isinstance(stage, str) else stage)
    if wrong := set(stages) - set(STAGES):
        raise RuleError(f"rule {name}: stages {sorted(wrong)} are none of {STAGES}")
    if not entry["pattern"].isascii():
        raise RuleError(f"rule {name}: the pattern is not ASCII")
    try:
        rule = Rule(
            id=name,
            pattern=expand_blanks(entry["pattern"]),
            cls=RuleClass(entry["class"]),
            meaning=entry["meaning"],
            source=entry["source"],
            order=order,
            stages=stages,
            scope=Scope(entry.get("scope", "any")),
            role=Role(entry.get("role", "cause")),
            action=entry.get("action", ""),
            silent=entry.get("silent", False),
            quote=Quote(entry["quote"]) if "quote" in entry else None,
        )
    except ValueError as error:
        raise RuleError(f"rule {name}: {error}") from error
    if rule.is_failure and not rule.action:
        raise RuleError(f"rule {name}: a failure needs an action")
    return rule


def parse_rules(entries: Iterable[Mapping[str, Any]]) -> tuple[Rule, ...]:
    """Rules in their order of precedence. Raises RuleError naming the rule."""
    rules = tuple(_rule(entry, order) for order, entry in enumerate(entries))
    names = [rule.id for rule in rules]
    if twice := {name for name in names if names.count(name) > 1}:
        raise RuleError(f"rules with the same id: {sorted(twice)}")
    return rules


def _load() -> tuple[Rule, ...]:
    # The C loader, where PyYAML has it, reads the catalogue ten times faster: it counts in a command that starts often.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    text = Path(__file__).with_name("rules.yaml").read_text(encoding="utf-8")
    return parse_rules(yaml.load(text, Loader=loader))


RULES: tuple[Rule, ...] = _load()
BY_ID: Mapping[str, Rule] = {rule.id: rule for rule in RULES}
