"""Pydantic's errors said so that a user knows what to write instead."""

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One line per error: dotted key, value, rule, and what would work."""
    return [_line(detail, model) for detail in error.errors(include_url=False)]


def dotted_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the tree, sections before their fields."""
    for name, field in model.model_fields.items():
        yield prefix + name
        section = section_of(field)
        if section is not None:
            yield from dotted_keys(section, f"{prefix}{name}.")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field `X` or `X | None`; None when the field is a plain value."""
    union = get_origin(field.annotation) in (Union, types.UnionType)
    candidates = get_args(field.annotation) if union else (field.annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def suggestion(key: str, model: type[BaseModel]) -> str:
    """What a mistyped dotted key probably meant: a neighbour, the same word elsewhere, or the section's keys."""
    *path, name = key.split(".")
    section, parent = model, ""
    for part in path:
        field = section.model_fields.get(part)
        inner = section_of(field) if field is not None else None
        if inner is None:
            break
        section, parent = inner, f"{parent}{part}."
    neighbours = difflib.get_close_matches(name, list(section.model_fields), n=1, cutoff=0.75)
    if neighbours:
        return f"did you mean {parent}{neighbours[0]}?"
    everywhere = {known.rsplit(".", 1)[-1]: known for known in reversed(list(dotted_keys(model)))}
    elsewhere = difflib.get_close_matches(name, list(everywhere), n=1, cutoff=0.75)
    if elsewhere:
        return f"did you mean {everywhere[elsewhere[0]]}?"
    return f"known here: {', '.join(section.model_fields)}"


def _line(detail: ErrorDetails, model: type[BaseModel]) -> str:
    location = detail["loc"]
    key = _dotted(location)
    field = _field(location, model)
    about = (field.description or "") if field is not None else ""
    if detail["type"] == "extra_forbidden":
        return f"{key}={_shown(detail['input'])}: there is no such key; {suggestion(key, model)}"
    if detail["type"] == "missing":
        return f"{key}: missing. {about} (A recipe that says `defaults: [base]` inherits a value for most keys.)"
    rule = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "string_pattern_mismatch":
        rule = "not of the right form"
    elif detail["type"] == "string_type" and isinstance(detail["input"], int):
        rule = "text is needed here: put it in quotes (YAML reads 12:00:00 without quotes as a number)"
    return f"{key}={_shown(detail['input'])}: {rule}. {about}".rstrip()


def _field(location: Sequence[int | str], model: type[BaseModel]) -> FieldInfo | None:
    """The innermost field on the way to the error."""
    found: FieldInfo | None = None
    section: type[BaseModel] | None = model
    for part in location:
        if section is None or part not in section.model_fields:
            break
        found = section.model_fields[str(part)]
        section = section_of(found)
    return found


def _dotted(location: Sequence[int | str]) -> str:
    return _short(".".join(str(part) for part in location)) or "recipe"


def _shown(value: Any) -> str:
    return _short(repr(value))


def _short(text: str) -> str:
    return text if len(text) <= 80 else text[:77] + "…"
