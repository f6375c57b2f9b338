"""A digit too many in a recipe: refused or planned with, and never worked on for minutes."""

from contextlib import suppress

import pytest

from trainium.config.fields import LARGEST
from trainium.config.plan import PlanError, plan
from trainium.config.problems import dotted_keys
from trainium.config.recipe import RecipeError, load_recipe
from trainium.config.schema import Recipe


def numbers() -> list[str]:
    """Keys of whole numbers; keep_checkpoints among them, a Boolean not."""
    values = load_recipe("rehearsal").model_dump()

    def value(key: str) -> object:
        found = values
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else None
        return found

    return [key for key in dotted_keys(Recipe) if type(value(key)) is int]


@pytest.mark.parametrize("key", numbers())
def test_a_number_beyond_32_bits_is_refused_and_the_largest_is_planned_with_at_once(key: str) -> None:
    for beyond in (LARGEST + 1, 10**30):
        with pytest.raises(RecipeError, match=key):
            load_recipe("rehearsal", [f"{key}={beyond}"])
    with suppress(RecipeError, PlanError):  # it may be wrong for another reason, but nothing hangs over it
        plan(load_recipe("rehearsal", [f"{key}={LARGEST}"]), None).check()


def test_the_fix_for_a_cadence_that_does_not_fit_is_the_nearest_divisor() -> None:
    recipe = load_recipe("rehearsal", ["training.max_steps=2147483646", "training.checkpoint_every=50000000"])
    with pytest.raises(PlanError, match="=51130563"):
        plan(recipe, None).check()
