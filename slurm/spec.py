"""What a job asks for: typed fields only, each checked so that neither Slurm nor the shell can misread it.

`#SBATCH` lines are no shell: Slurm cuts them at blanks and `#`, knows its own quotes and takes abbreviated option
names. Values that end up there must therefore match a narrow pattern per field. Values that the shell sees (payload,
env, paths) may hold any text; `slurm.script` quotes them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from slurm.errors import InvalidJobSpec

_NAME = r"[A-Za-z0-9][A-Za-z0-9_.+@-]*"
_NAMES = rf"{_NAME}(,{_NAME})*"
_HOSTS = r"[A-Za-z0-9][A-Za-z0-9_.-]*(\[[0-9,-]+\][A-Za-z0-9_.-]*)*"
_MAIL_TYPES = (
    r"NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT|TIME_LIMIT_90|TIME_LIMIT_80|TIME_LIMIT_50"
)
_AFTER = r"(after(any|ok|notok|corr)?(:[0-9]+(_[0-9]+)?(\+[0-9]+)?)+|singleton)"
# The signals that the job script passes on to the payload; any other one would just kill the script.
SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")

# field → (pattern of the whole value, the rule in words, an example of what works)
_PATTERNS: dict[str, tuple[str, str, str]] = {
    "partition": (_NAMES, "one or more partition names (letters, digits, _ . + @ -), joined by commas", "'trn1'"),
    "account": (_NAME, "one name of letters, digits, _ . + @ -", "'research'"),
    "qos": (_NAME, "one name of letters, digits, _ . + @ -", "'normal'"),
    "reservation": (_NAMES, "reservation names (letters, digits, _ . + @ -), joined by commas", "'maintenance-7'"),
    "constraint": (
        r"[A-Za-z0-9_(\[][A-Za-z0-9_.()\[\]&|,*:+-]*",
        "feature names joined by & | , ( ) [ ] *, without blanks or quotes",
        "'trn1&efa'",
    ),
    "nodelist": (rf"{_HOSTS}(,{_HOSTS})*", "a Slurm host list", "'trn1-[1-4],trn1-9'"),
    "exclude": (rf"{_HOSTS}(,{_HOSTS})*", "a Slurm host list", "'trn1-[1-4],trn1-9'"),
    "memory": (r"[0-9]+[KMGT]?", "a whole number with an optional K, M, G or T, per node", "'64G'"),
    "dependency": (rf"{_AFTER}([,?]{_AFTER})*", "after…:<job id> terms joined by , or ?", "'afterok:1234'"),
    "mail_type": (
        rf"({_MAIL_TYPES})(,({_MAIL_TYPES}))*",
        "mail types in capitals, joined by commas",
        "'END,FAIL'",
    ),
    "mail_user": (r"[A-Za-z0-9][A-Za-z0-9_.+%@-]*", "one user name or mail address", "'me@example.org'"),
    "signal": (
        rf"(R?B?:)?(SIG)?({'|'.join(SIGNALS)})(@[0-9]{{1,5}})?",
        f"one of {', '.join(SIGNALS)}, after B: to reach the job script itself, before @<seconds before the end>",
        "'B:USR1@300'",
    ),
    "array": (
        r"[0-9]+(-[0-9]+(:[0-9]+)?)?(,[0-9]+(-[0-9]+(:[0-9]+)?)?)*(%[0-9]+)?",
        "indexes and ranges of Slurm's --array",
        "'0-15%4'",
    ),
}
_COUNTS = ("nodes", "ntasks", "tasks_per_node", "cpus_per_task")
# Bash refuses to assign these, which would end the script before its payload.
_READONLY = frozenset({"UID", "EUID", "PPID", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"})


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job. Raises InvalidJobSpec naming the field, the value, the rule and what would work.

    `payload` is an argv; with `per_task` it runs once per task instead of once per job. `environment` says whose
    interpreter the payload wants; the caller puts the file that sets it up into `activate`, which the script sources.
    `env` is exported before that. `cwd` None means the job's own folder. `memory` is per node. `time` is a timedelta
    or `[D-]HH:MM:SS`. `array` is rendered, but one job folder holds one outcome: `ensure_submitted` refuses it.
    """

    payload: tuple[str, ...]
    environment: Literal["project", "toolchain"]
    activate: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    per_task: bool = False
    partition: str | None = None
    nodes: int = 1
    ntasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    time: timedelta | str | None = None
    memory: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    account: str | None = None
    qos: str | None = None
    reservation: str | None = None
    constraint: str | None = None
    requeue: bool | None = None
    signal: str | None = None
    array: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "payload", _payload(self.payload))
        object.__setattr__(self, "env", _env(self.env))
        object.__setattr__(self, "time", _time(self.time))
        if self.environment not in ("project", "toolchain"):
            raise InvalidJobSpec("environment", self.environment, "is one of two words", "'project' or 'toolchain'")
        for name in ("activate", "cwd"):
            if (path := getattr(self, name)) is not None:
                absolute_path(name, path)
        for name in _COUNTS:
            _count(name, getattr(self, name), optional=name != "nodes")
        for name in ("per_task", "exclusive", "requeue"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (name == "requeue" and value is None):
                raise InvalidJobSpec(name, value, "is a switch", "True or False")
        for name in _PATTERNS:
            if (value := getattr(self, name)) is not None:
                _matching(name, value)
        if self.ntasks is not None and self.ntasks < self.nodes:
            rule = f"fewer tasks than nodes ({self.nodes}) would make Slurm drop nodes"
            raise InvalidJobSpec("ntasks", self.ntasks, rule, f"at least {self.nodes}, or nodes={self.ntasks}")

    @property
    def time_limit(self) -> timedelta | None:
        """`time` as a timedelta."""
        assert self.time is None or isinstance(self.time, timedelta)
        return self.time

    @property
    def task_count(self) -> int:
        """How many tasks the job has: as asked, else one per node."""
        return self.ntasks or self.nodes * (self.tasks_per_node or 1)


def check_name(name: str) -> str:
    """A job name that squeue and sacct find again exactly (a comma would make it two names)."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", name):
        rule = "a job name has at most 128 letters, digits, _ . - and starts with a letter or digit"
        raise InvalidJobSpec("name", name, rule, "'3fa85f64-train-1'")
    return name


def absolute_path(name: str, path: str) -> str:
    """An absolute path in any script and with any quoting, but without control characters or `..`."""
    _text(name, path)
    if not path.startswith("/") or re.search(r"[\x00-\x1f\x7f]", path) or ".." in path.split("/"):
        rule = "is an absolute path without .. and control characters"
        raise InvalidJobSpec(name, path, rule, "the resolved path, such as '/fsx/runs/r1'")
    return path


def _matching(name: str, value: object) -> None:
    pattern, rule, example = _PATTERNS[name]
    # fullmatch: `$` would let a final newline through, and a newline in an #SBATCH line is a new option
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise InvalidJobSpec(name, value, f"is {rule}", example)


def _count(name: str, value: object, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1_000_000:
        raise InvalidJobSpec(name, value, "is a whole number from 1 on", "1")


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidJobSpec(name, value, "is text", "a str")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJobSpec(name, value, "is not encodable in UTF-8", "a name in UTF-8") from None
    if "\0" in value:
        raise InvalidJobSpec(name, value, "holds a NUL, which no process argument can", "it without the NUL")
    return value


def _payload(value: object) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, tuple | list) or not value:
        raise InvalidJobSpec("payload", value, "is a non-empty list of arguments", "('python', '-m', 'package')")
    argv = tuple(_text(f"payload[{i}]", part) for i, part in enumerate(value))
    if not argv[0] or argv[0].startswith("-"):
        rule = "is the program to run, and a leading dash would make it an option"
        raise InvalidJobSpec("payload[0]", argv[0], rule, "'./" + (argv[0] or "program") + "'")
    return argv


def _env(value: Mapping[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise InvalidJobSpec("env", name, "a variable name has letters, digits and _ only", "'MY_VARIABLE'")
        if name.startswith(("SLURM_", "SBATCH_", "SRUN_")) or name in _READONLY:
            raise InvalidJobSpec("env", name, "belongs to Slurm or bash and cannot be set", "the typed field for it")
        _text(f"env[{name}]", text)
    return dict(value)


def _time(value: object) -> timedelta | None:
    instead = "timedelta(hours=4) or '04:00:00'"
    if isinstance(value, str):
        if not (match := re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])", value, re.ASCII)):
            raise InvalidJobSpec("time", value, "is HH:MM:SS or D-HH:MM:SS", instead)
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    if value is not None and (not isinstance(value, timedelta) or value < timedelta(seconds=1)):
        raise InvalidJobSpec("time", value, "is a time limit of at least a second", instead)
    return value
