import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from trainium.config.problems import dotted_keys, section_of
from trainium.config.recipe import (
    RecipeError,
    difference,
    escaped,
    frozen_part,
    known_recipes,
    load_recipe,
    recipe_yaml,
)
from trainium.config.schema import Recipe, Section


def refused(name: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    return list(caught.value.problems)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_recipes_of_the_house_load() -> None:
    assert known_recipes() == ["rehearsal", "smollm2", "tanuki-8b-sft"]
    assert load_recipe("rehearsal").instance_type == "rehearsal"
    assert load_recipe("tanuki-8b-sft").parallelism.tensor == 32
    assert load_recipe("smollm2", ["model.source=/m", "dataset.source=/d"]).parallelism.pipeline == 2


def test_an_open_source_is_refused_with_what_to_say() -> None:
    problems = refused("smollm2")
    assert len(problems) == 2
    assert "model.source=PATH" in problems[0]
    assert "dataset.source=FOLDER" in problems[1]


def test_an_override_leaves_the_neighbours_alone() -> None:
    plain, changed = load_recipe("rehearsal"), load_recipe("rehearsal", ["training.max_steps=100", "training.seed=3"])
    changes = difference(plain, changed)
    assert set(changes) == {"training.seed: 1234 → 3", "training.max_steps: 50 → 100"}
    assert len(changes) == 2


def test_a_later_override_wins() -> None:
    assert load_recipe("rehearsal", ["training.seed=3", "training.seed=4"]).training.seed == 4


@pytest.mark.parametrize("name", ["rehersal", "base", "../rehearsal", "", "nowhere/x.yaml", "/etc/passwd", "-x"])
def test_an_unknown_recipe_is_answered_with_the_known_ones(name: str) -> None:
    assert "rehearsal, smollm2, tanuki-8b-sft" in refused(name)[0]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.max_step=5", "did you mean training.max_steps?"),
        ("max_steps=5", "did you mean training.max_steps?"),
        ("parallelism.tensors=5", "did you mean parallelism.tensor?"),
        ("resources.train.cpus=5", "known here: time, cpus_per_task, memory, exclusive"),
        ("zzz=5", "known here: name, description"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(override: str, hint: str) -> None:
    (problem,) = refused("rehearsal", override)
    key, _, value = override.partition("=")
    assert problem.startswith(f"{key}={value}")
    assert hint in problem


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("compile.mode=later", "'aot' or 'jit'"),
        ("training.max_steps=0", "greater than or equal to 1"),
        ("training.max_steps=ten", "valid integer"),
        ("training.keep_checkpoints=1", "at least 2"),
        ("training.betas=[0.9,1.5]", "less than 1"),
        ("training.learning_rate=.nan", "finite"),
        ("dataset.source=http://example.org/x", "only s3://"),
        ("model.source=https://huggingface.co/a/b", "repository id"),
        ("dataset.train_file=../x.jsonl", "File name"),
        ("instance_type=trn9.huge", "trn1.32xlarge"),
        ("resources.train.time=fast", "HH:MM:SS"),
        ("resources.partition='a b'", "partition"),
        ("resources.partition='--wrap'", "partition"),
        ("name='../x'", "Short name"),
        ('model.folder="/a\\nb"', "Folder"),
    ],
)
def test_a_wrong_value_is_answered_with_key_and_rule(override: str, rule: str) -> None:
    (problem,) = refused("rehearsal", override)
    assert override.partition("=")[0] in problem
    assert rule in problem


def test_all_problems_come_at_once() -> None:
    problems = refused("rehearsal", "compile.mode=later", "zzz=1", "notanoverride", "training.seed=${oc.env:NOT_SET_X}")
    assert len(problems) == 4
    assert any("NOT_SET_X" in problem for problem in problems)


@pytest.mark.parametrize("override", ["training", "+training.seed=1", "~training.seed=", "=3", "training..seed=3"])
def test_what_is_no_override_is_refused(override: str) -> None:
    (problem,) = refused("rehearsal", override)
    assert "key=value" in problem


def test_times_are_not_read_as_numbers() -> None:
    assert load_recipe("rehearsal", ["resources.train.time=12:00:00"]).resources.train.time == "12:00:00"


def test_a_time_without_quotes_in_a_file_is_explained(tmp_path: Path) -> None:
    text = "defaults: [rehearsal]\nresources: {train: {time: 12:00:00}}\n"
    (problem,) = refused(write(tmp_path / "r.yaml", text))
    assert "quotes" in problem


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE_X", "/fsx/data")
    recipe = load_recipe(
        "rehearsal", ["dataset.source=${oc.env:WHERE_X}/rows", "training.warmup_steps=${training.seed}"]
    )
    assert recipe.dataset.source == "/fsx/data/rows"
    assert recipe.training.warmup_steps == recipe.training.seed


def test_a_file_inherits_from_neighbours_and_from_the_house(tmp_path: Path) -> None:
    write(tmp_path / "team.yaml", "defaults: [rehearsal]\ntraining: {seed: 7}\n")
    mine = write(tmp_path / "mine.yaml", "defaults: [team]\nname: mine\n")
    recipe = load_recipe(mine)
    assert (recipe.name, recipe.training.seed, recipe.training.max_steps) == ("mine", 7, 50)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [nobody]\n", "nobody"),
        ("defaults: base\n", "list"),
        ("defaults: [self]\n", "circle"),
        ("- a\n", "mapping"),
        ("a: [\n", "line"),
        ("a: 1\na: 2\n", "duplicate"),
        ("\tx: 1\n", "line"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path / "self.yaml", text)
    (problem,) = refused(path)
    assert str(path) in problem
    assert message in problem


def test_missing_keys_point_to_the_defaults(tmp_path: Path) -> None:
    problems = refused(write(tmp_path / "r.yaml", "name: mine\n"))
    assert all("missing" in problem for problem in problems)
    assert "defaults: [base]" in problems[0]


def test_relative_folders_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    here = load_recipe("rehearsal", ["model.source=models/mine", "dataset.source=a/../rows", "compile.cache=./c"])
    assert here.model.source == str(tmp_path / "models" / "mine")
    assert here.model.kind == "folder"
    assert here.dataset.source == str(tmp_path / "rows")
    assert here.compile.cache == str(tmp_path / "c")
    hub = load_recipe("rehearsal", ["model.source=owner/name"])
    assert (hub.model.source, hub.model.kind) == ("owner/name", "hub")


def test_kinds_of_sources() -> None:
    assert load_recipe("rehearsal").model.kind == load_recipe("rehearsal").dataset.kind == "rehearsal"
    assert load_recipe("tanuki-8b-sft").dataset.kind == "s3"
    assert load_recipe("rehearsal", ["dataset.source=/d"]).dataset.kind == "folder"


@pytest.mark.parametrize("name", ["rehearsal", "tanuki-8b-sft"])
def test_a_recipe_round_trips(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    assert load_recipe(write(tmp_path / "recipe.yaml", recipe_yaml(recipe))) == recipe


def test_hostile_texts_round_trip(tmp_path: Path) -> None:
    template = "{{ bos }} ${oc.env:HOME} \\${x} \\\\${y} '\"\n\t# no comment: - [x]\n"
    recipe = load_recipe("rehearsal")
    recipe = recipe.model_copy(update={"export": recipe.export.model_copy(update={"chat_template": template})})
    read = load_recipe(write(tmp_path / "recipe.yaml", recipe_yaml(recipe)))
    assert read.export.chat_template == template


@given(st.text(st.sampled_from("ab\\${}:.'\" \n#é"), max_size=12))
def test_an_escaped_text_is_read_back_as_it_was(text: str) -> None:
    read = OmegaConf.to_container(
        OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create({"t": escaped(text)}))), resolve=True
    )
    assert read == {"t": text}


def test_resources_and_attempts_are_not_frozen_and_everything_else_is() -> None:
    recipe = load_recipe("rehearsal")
    other = load_recipe("rehearsal", ["resources.train.cpus_per_task=9", "attempts.hardware=9", "description=x"])
    assert frozen_part(recipe) == frozen_part(other)
    changed = load_recipe("rehearsal", ["training.seed=1"])
    assert difference(frozen_part(recipe), frozen_part(changed)) == ["training.seed: 1234 → 1"]
    assert difference({"a": {"b": 1}}, {"c": 2}) == ["a.b: 1 → 'absent'", "c: 'absent' → 2"]


def test_every_field_says_what_it_is() -> None:
    def undescribed(model: type[Section], prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():
            if not field.description:
                found.append(prefix + name)
            section = section_of(field)
            if section is not None and issubclass(section, Section):
                found += undescribed(section, f"{prefix}{name}.")
        return found

    assert undescribed(Recipe) == []
    assert "resources.train.time" in set(dotted_keys(Recipe))


def test_the_tutorials_recipe_is_the_tutorials_run() -> None:
    recipe = load_recipe("tanuki-8b-sft")
    assert recipe.model.source == "weblab-GENIAC/Tanuki-8B-dpo-v1.0"
    assert recipe.dataset.source == "s3://neuron-s3/training_datasets/llama/sft/"
    assert (recipe.dataset.train_file, recipe.dataset.unsigned) == ("training.jsonl", True)
    assert (recipe.parallelism.tensor, recipe.parallelism.pipeline, recipe.parallelism.kv_replicator) == (32, 1, 4)
    assert (recipe.training.max_steps, recipe.training.checkpoint_every) == (100, 50)
    assert (recipe.resources.compile.cpus_per_task, recipe.resources.train.cpus_per_task) == (128, 128)
    assert recipe.model.expected is not None
    assert recipe.model.expected.model_dump() == {"layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8}


def test_the_tutorials_chat_template_renders() -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = load_recipe("tanuki-8b-sft").export.chat_template
    assert template is not None
    rendered = jinja2.Template(template).render(
        messages=[
            {"role": "system", "content": "S"},
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "A"},
        ],
        bos_token="<s>",
        eos_token="</s>",
    )
    assert rendered == "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] A </s>"


def test_torch_is_not_imported() -> None:
    code = (
        "import sys, trainium.config.nxdt, trainium.config.plan, trainium.config.overrides;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'prefect')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
