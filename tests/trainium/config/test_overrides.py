import pytest
from pydantic import TypeAdapter, ValidationError

from trainium.config.overrides import RecipeOverrides
from trainium.config.problems import dotted_keys
from trainium.config.recipe import difference, load_recipe
from trainium.config.schema import Recipe


def test_the_twin_has_every_key_and_needs_none() -> None:
    assert list(dotted_keys(RecipeOverrides)) == list(dotted_keys(Recipe))
    assert RecipeOverrides().as_dict() == {}
    assert RecipeOverrides().as_dotlist() == []


def test_one_nested_value_changes_only_itself() -> None:
    overrides = RecipeOverrides.model_validate({"training": {"activations_checkpoint": {"granularity": "full"}}})
    plain, changed = load_recipe("rehearsal"), load_recipe("rehearsal", overrides.as_dotlist())
    assert difference(plain, changed) == ["training.activations_checkpoint.granularity: 'selective' → 'full'"]


def test_empty_values_mean_not_given() -> None:
    """Prefect fills a form's untouched fields with null, and so does a dump of the model."""
    sent = {"training": {"max_steps": 7, "seed": None}, "compile": {"cache": None}, "model": None}
    overrides = RecipeOverrides.model_validate(sent)
    again = RecipeOverrides.model_validate(overrides.model_dump(mode="json"))
    assert overrides.as_dict() == again.as_dict() == {"training": {"max_steps": 7}}


@pytest.mark.parametrize("text", ["a ${x} 'b'\n\"c\": #d", "null", "1e3", "[a", "\u2028 é \t", "\\${y}", "yes", ""])
def test_any_text_arrives_as_it_was(text: str) -> None:
    overrides = RecipeOverrides.model_validate({"export": {"chat_template": text}, "model": {"source": "/a b/${c}"}})
    recipe = load_recipe("rehearsal", overrides.as_dotlist())
    assert recipe.export.chat_template == text
    assert recipe.model.source == "/a b/${c}"


def test_every_value_of_a_recipe_survives() -> None:
    recipe = load_recipe("tanuki-8b-sft")
    overrides = RecipeOverrides.model_validate(recipe.model_dump(mode="json"))
    assert load_recipe("tanuki-8b-sft", overrides.as_dotlist()) == recipe
    assert overrides.as_dict()["training"]["betas"] == [0.9, 0.999]


@pytest.mark.parametrize(
    "sent", [{"training": {"max_step": 7}}, {"train": {}}, {"training": {"max_steps": 0}}, {"compile": {"mode": "x"}}]
)
def test_unknown_keys_and_wrong_values_are_refused(sent: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RecipeOverrides.model_validate(sent)


def test_it_works_as_a_parameter_type() -> None:
    adapter: TypeAdapter[list[str] | RecipeOverrides] = TypeAdapter(list[str] | RecipeOverrides)
    assert adapter.validate_python(["a=1"]) == ["a=1"]
    assert isinstance(adapter.validate_python({"training": {"seed": 1}}), RecipeOverrides)
    schema = adapter.json_schema()
    training = schema["$defs"]["TrainingOverrides"]["properties"]
    assert "description" in training["max_steps"]
    assert schema["$defs"]["TrainingOverrides"]["additionalProperties"] is False
