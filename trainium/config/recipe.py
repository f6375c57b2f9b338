"""Recipes: YAML files composed with OmegaConf into one typed, frozen tree."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from yaml import YAMLError

from trainium.config.fields import is_repository
from trainium.config.problems import explain, suggestion
from trainium.config.schema import Recipe
from trainium.errors import UserError

# `trainium` may not import `deployments`; the files beside it may be read.
RECIPES = Path(__file__).parents[2] / "deployments" / "recipes"
BASE = "base"
FOLDER_KEYS = ("model.source", "model.folder", "dataset.source", "dataset.folder", "compile.cache")


class RecipeError(UserError):
    """The recipe or an override cannot be used; every problem that was found is in the message."""

    def __init__(self, recipe: str, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = "one problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"recipe {recipe} has {count}:" + "".join(f"\n  - {problem}" for problem in self.problems))


def known_recipes(folder: Path = RECIPES) -> list[str]:
    """Names that `load_recipe` knows, without `base`, which the others build on."""
    return sorted(path.stem for path in folder.glob("*.yaml") if path.stem != BASE)


def load_recipe(name_or_path: str | Path, overrides: Sequence[str] = (), *, folder: Path = RECIPES) -> Recipe:
    """The recipe with that name (in `folder`) or in that file, with `key=value` overrides applied in order.

    A file may build on others (`defaults: [base]`: names next to it or in `folder`, or paths) and use OmegaConf's
    interpolations (`${oc.env:HOME}`, `${training.max_steps}`), which are resolved here, once. Relative folders become
    absolute, seen from the working directory. Raises RecipeError with all problems at once.
    """
    label = str(name_or_path)
    path = _find(name_or_path, folder)
    if path is None:
        raise RecipeError(label, [_unknown_recipe(label, folder)])
    problems: list[str] = []
    try:
        config = _compose(path, folder, ())
    except (OSError, UnicodeError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise RecipeError(label, [f"{path}: {_one_line(error)}"]) from error
    for override in overrides:
        config = _override(config, override, problems)
    values = _resolved(config, "", problems)
    for key in FOLDER_KEYS:
        _make_absolute(values, key)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        told = {problem.partition("=")[0] for problem in problems}
        problems += [line for line in explain(error, Recipe) if line.partition("=")[0] not in told]
    else:
        if not problems:
            return recipe
    raise RecipeError(label, problems)


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML that `load_recipe` reads back to an equal recipe, whatever its texts hold."""
    return OmegaConf.to_yaml(OmegaConf.create(escaped(recipe.model_dump(mode="json"))))


def escaped(value: Any) -> Any:
    """Texts made safe from OmegaConf, which would read `${…}` in a path or a template as an interpolation."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda found: found[1] * 2 + r"\${", value)
    if isinstance(value, Mapping):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return value


def frozen_part(recipe: Recipe) -> dict[str, Any]:
    """The values that decide what comes out of a run: not the description, nor who does how much of it, how often."""
    return recipe.model_dump(
        mode="json",
        exclude={"resources": True, "attempts": True, "description": True, "convert": {"array", "workers"}},
    )


def difference(old: Mapping[str, Any] | BaseModel, new: Mapping[str, Any] | BaseModel) -> list[str]:
    """Dotted keys whose values differ, as `training.max_steps: 100 → 200`; a key that only one side has is `absent`."""
    before, after = _flat(old), _flat(new)
    return [
        f"{key}: {before.get(key, 'absent')!r} → {after.get(key, 'absent')!r}"
        for key in dict.fromkeys([*before, *after])
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    ]


_ABSENT = object()


def _flat(tree: Mapping[str, Any] | BaseModel, prefix: str = "") -> dict[str, Any]:
    values: Mapping[str, Any] = tree.model_dump(mode="json") if isinstance(tree, BaseModel) else tree
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _find(name_or_path: str | Path, folder: Path) -> Path | None:
    """A bare word is a name in the recipes folder; anything with a YAML suffix is a path."""
    text = str(name_or_path)
    if text.endswith((".yaml", ".yml")):
        path = Path(text).expanduser()
        return path if path.is_file() else None
    return folder / f"{text}.yaml" if text in known_recipes(folder) else None


def _unknown_recipe(label: str, folder: Path) -> str:
    known = ", ".join(known_recipes(folder)) or "none"
    return f"no recipe of this name and no such file. Known recipes: {known}; or give the path of a .yaml file"


def _compose(path: Path, folder: Path, inside: tuple[Path, ...]) -> DictConfig:
    """The file merged over the ones it builds on, depth first."""
    if path.resolve() in inside:
        raise ValueError("`defaults` goes round in a circle")
    loaded = OmegaConf.load(path)
    if not isinstance(loaded, DictConfig):
        raise ValueError("a recipe is a mapping of sections, this is not")
    parents = loaded.pop("defaults", None) or []
    if isinstance(parents, str) or not all(isinstance(parent, str) for parent in parents):
        raise ValueError("`defaults` is a list of recipe names or paths, such as [base]")
    merged = OmegaConf.create({})
    for parent in parents:
        candidates = (path.parent / f"{parent}.yaml", folder / f"{parent}.yaml", path.parent / parent)
        found = next((candidate for candidate in candidates if candidate.is_file()), None)
        if found is None:
            raise ValueError(f"`defaults` names {parent!r}, which is neither beside this file nor in {folder}")
        merged = _merge(merged, _compose(found, folder, (*inside, path.resolve())))
    return _merge(merged, loaded)


def _merge(lower: DictConfig, upper: DictConfig) -> DictConfig:
    merged = OmegaConf.merge(lower, upper)
    assert isinstance(merged, DictConfig)
    return merged


def _override(config: DictConfig, override: str, problems: list[str]) -> DictConfig:
    """`config` with one `key=value` laid over it; what is wrong with the override goes to `problems`."""
    key, equals, value = override.partition("=")
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        hint = f"; {suggestion(key, Recipe)}" if re.fullmatch(r"[\w.]+", key) else ""
        problems.append(f"{override!r}: an override is written key=value, such as training.max_steps=200{hint}")
        return config
    if re.fullmatch(r"\d+(:\d+)+", value):
        override = f"{key}='{value}'"  # YAML 1.1 would read 12:00:00 as the number 43200
    try:
        return _merge(config, OmegaConf.from_dotlist([override]))
    except (YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{key}={value!r}: {_one_line(error)}; put the value in quotes inside the argument")
        return config


def _resolved(node: DictConfig | ListConfig, prefix: str, problems: list[str]) -> Any:
    """The node as plain values; an interpolation that cannot be resolved is a problem and becomes null."""
    keys: Iterable[Any] = node.keys() if isinstance(node, DictConfig) else range(len(node))
    values: dict[Any, Any] = {}
    for key in keys:
        try:
            value = node[key]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)
            assert isinstance(raw, dict | list)
            problems.append(f"{prefix}{key}={raw[key]!r}: {_one_line(error)}")
            value = None
        nested = isinstance(value, DictConfig | ListConfig)
        values[key] = _resolved(value, f"{prefix}{key}.", problems) if nested else value
    return values if isinstance(node, DictConfig) else list(values.values())


def _make_absolute(values: Any, key: str) -> None:
    """A relative folder means the one seen from here; the run may go on elsewhere."""
    section, name = key.split(".")
    branch = values.get(section)
    text = branch.get(name) if isinstance(branch, dict) else None
    if not isinstance(text, str) or text in ("", "rehearsal") or "://" in text:
        return
    path = Path(text).expanduser()
    if name == "source" and section == "model" and is_repository(text) and not path.is_dir():
        return
    branch[name] = os.path.normpath(path.absolute())


def _one_line(error: Exception) -> str:
    """The first two lines say what and where; OmegaConf's further ones repeat them in its own terms."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(line for line in lines if not line.startswith(("full_key:", "object_type="))) or repr(error)
