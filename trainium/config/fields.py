"""Kinds of values in a recipe, and the rules on a single one."""

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
FileName = Annotated[str, Field(pattern=r"^[^/\x00-\x1f]+\.jsonl?$")]
Folder = Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]
Duration = Annotated[str, Field(pattern=r"^([0-9]{1,4}-)?[0-9]{1,4}:[0-5][0-9]:[0-5][0-9]$")]
Memory = Annotated[str, Field(pattern=r"^[1-9][0-9]*[KMGT]$")]
# No blank, quote or leading dash gets as far as a job script; the finer rules per option are Slurm's.
SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9(\[_][A-Za-z0-9_.,:;+@%&|()\[\]*-]*$")]
# What NxDT, Slurm and C libraries take for a count; a digit too many is refused and not worked with.
LARGEST = 2**31 - 1
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Few = Annotated[int, Field(ge=1, le=10_000)]  # what rules go through one by one


def as_timedelta(duration: str) -> timedelta:
    """A Duration of a recipe.

    >>> as_timedelta("1-02:30:00")
    datetime.timedelta(days=1, seconds=9000)
    """
    days, _, clock = duration.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return timedelta(days=int(days or 0), hours=hours, minutes=minutes, seconds=seconds)


def is_repository(source: str) -> bool:
    """Whether this is owner/name, a repository of the Hugging Face hub. (`load_recipe` has made folders absolute.)"""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source) is not None


def given(hint: str) -> BeforeValidator:
    """A recipe may leave a source open (null) for its user to fill in; then the message says how."""

    def check(value: object) -> object:
        if value is None or value == "":
            raise ValueError(f"the recipe leaves this open: say {hint}")
        return value

    return BeforeValidator(check)


def keep_two(value: int) -> int:
    if value == -1 or 2 <= value <= LARGEST:
        return value
    raise ValueError(
        "at least 2 are needed, or -1 for all: with one, an interrupted save leaves nothing to resume from"
    )


def s3_or_folder(value: str) -> str:
    if "://" in value and not re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?", value):
        raise ValueError("only s3://bucket/prefix, a folder, or rehearsal")
    return value


def hub_or_folder(value: str) -> str:
    if "://" in value:
        raise ValueError("only a Hugging Face repository id (owner/name), a folder, or rehearsal")
    return value
