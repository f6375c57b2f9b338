"""The recipe's all-optional twin: what the Prefect form and the API hand over to change single values."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from trainium.config.problems import section_of
from trainium.config.recipe import escaped
from trainium.config.schema import Recipe


def _optional_twin(model: type[BaseModel], name: str) -> type[BaseModel]:
    """`model` with every field optional and no default but None, all the way down; descriptions are kept."""
    fields: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        section = section_of(field)
        kind: Any = (
            field.rebuild_annotation() if section is None else _optional_twin(section, f"{section.__name__}Overrides")
        )
        fields[key] = (kind | None, Field(default=None, description=field.description))
    twin: type[BaseModel] = create_model(
        name, __config__=ConfigDict(extra="forbid", frozen=True), __doc__=model.__doc__, **fields
    )
    return twin


if TYPE_CHECKING:
    _Fields = BaseModel  # the fields are made at run time; to a type checker this is just a model
else:
    _Fields = _optional_twin(Recipe, "RecipeFields")


class RecipeOverrides(_Fields):
    """Values that replace the recipe's. What is left empty (null) keeps the recipe's value.

    (To set a value to null, use the override `key=null` instead.)
    """

    def as_dict(self) -> dict[str, Any]:
        """The given values only, nested; a section without any is absent."""
        return _without_empty(self.model_dump(mode="json", exclude_none=True))

    def as_dotlist(self) -> list[str]:
        """The given values as `key=value` for `load_recipe`, whatever characters they hold."""
        return [f"{key}={json.dumps(escaped(value), ensure_ascii=True)}" for key, value in _leaves(self.as_dict())]


def _without_empty(values: dict[str, Any]) -> dict[str, Any]:
    cleaned = {key: _without_empty(value) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in cleaned.items() if value != {}}


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
