"""The files beside the weights: copied byte for byte, or with the recorded keys changed and nothing else; the card."""

import json
from pathlib import Path

import pytest
import yaml

from trainium.errors import UserError
from trainium.files import read_json
from trainium.model.companions import changed_json, config_changes, read_chat_template, write_companions
from trainium.model.manifest import digest, manifest
from trainium.model.model_card import ModelCardData, base_front_matter, load_card_data, render_card


def copied_base(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_without_changes_everything_is_copied_byte_for_byte(untied_base: Path, tmp_path: Path) -> None:
    assert write_companions(untied_base, tmp_path, (), None) == ()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in untied_base.iterdir()} - {"model.safetensors", "README.md"}
    assert all((tmp_path / name).read_bytes() == (untied_base / name).read_bytes() for name in names)


def test_untying_changes_one_key_and_keeps_the_order(tied_base: Path, tmp_path: Path) -> None:
    before = read_json(tied_base / "config.json")
    changes = config_changes(before, untied=True, dtype="bfloat16")
    write_companions(tied_base, tmp_path, changes, None)
    text = (tmp_path / "config.json").read_text()
    assert list(json.loads(text).items()) == list((before | {"tie_word_embeddings": False}).items())
    assert "größer" in text
    assert '"rms_norm_eps": 1e-05' in text
    assert [(change.key, change.before, change.after) for change in changes] == [("tie_word_embeddings", True, False)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, {"torch_dtype": "float32"}),
        ({"dtype": "bfloat16"}, {"dtype": "float32"}),
        ({"torch_dtype": "bfloat16", "dtype": "bfloat16"}, {"torch_dtype": "float32", "dtype": "float32"}),
        ({"torch_dtype": "float32"}, {}),
        ({}, {"torch_dtype": "float32"}),
    ],
)
def test_the_dtype_keeps_its_spelling(config: dict[str, str], expected: dict[str, str]) -> None:
    changes = config_changes(config, untied=False, dtype="float32")
    assert {change.key: change.after for change in changes} == expected


def test_a_chat_template_is_one_key_of_the_tokenizer_config(untied_base: Path, tmp_path: Path) -> None:
    changes = write_companions(untied_base, tmp_path, (), "{{ x }}")
    before, after = read_json(untied_base / "tokenizer_config.json"), read_json(tmp_path / "tokenizer_config.json")
    assert after == before | {"chat_template": "{{ x }}"}
    assert [change.key for change in changes] == ["chat_template"]
    assert not (tmp_path / "chat_template.jinja").exists()


def test_the_template_file_of_the_base_says_the_same(untied_base: Path, tmp_path: Path) -> None:
    base = copied_base(untied_base, tmp_path / "base")
    (base / "chat_template.jinja").write_text("old")
    write_companions(base, tmp_path / "kept", (), None)
    assert (tmp_path / "kept/chat_template.jinja").read_text() == "old"
    write_companions(base, tmp_path / "new", (), "{{ x }}")
    assert (tmp_path / "new/chat_template.jinja").read_text() == "{{ x }}"
    assert read_json(tmp_path / "new/tokenizer_config.json")["chat_template"] == "{{ x }}"


def test_a_template_already_there_is_no_change(untied_base: Path, tmp_path: Path) -> None:
    base = copied_base(untied_base, tmp_path / "base")
    (base / "tokenizer_config.json").write_text('{"chat_template":   "{{ x }}"}')
    assert write_companions(base, tmp_path / "out", (), "{{ x }}") == ()
    assert (tmp_path / "out/tokenizer_config.json").read_text() == '{"chat_template":   "{{ x }}"}'


def test_licences_and_named_templates_travel_along(untied_base: Path, tmp_path: Path) -> None:
    base = copied_base(untied_base, tmp_path / "base")
    (base / "LICENSE.txt").write_text("licence")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates/rag.jinja").write_text("rag")
    (base / "modeling_evil.py").write_text("raise SystemExit")
    write_companions(base, tmp_path / "out", (), None)
    assert (tmp_path / "out/LICENSE.txt").read_text() == "licence"
    assert (tmp_path / "out/additional_chat_templates/rag.jinja").read_text() == "rag"
    assert not (tmp_path / "out/modeling_evil.py").exists()


def test_unchanged_json_is_the_same_text() -> None:
    assert changed_json('{"a":1.0}', {}) == '{"a":1.0}'


def test_the_newline_at_the_end_of_a_template_file_is_not_the_templates(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("a\n\n")
    assert read_chat_template(tmp_path / "t.jinja") == "a\n"


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"\n", "is empty"), (b"\xff", "cannot be read")]
)
def test_a_template_file_that_is_none_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_chat_template(path)


def test_the_digest_covers_names_and_content(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a").write_text("one")
    first = digest(manifest(tmp_path))
    assert manifest(tmp_path)[0].path == "sub/a"
    assert manifest(tmp_path)[0].bytes == 3
    (tmp_path / "sub/a").write_text("two")
    assert digest(manifest(tmp_path)) != first
    (tmp_path / "sub/a").write_text("one")
    assert digest(manifest(tmp_path)) == first
    (tmp_path / "sub/a").rename(tmp_path / "sub/b")
    assert digest(manifest(tmp_path)) != first


def card_parts(text: str) -> tuple[dict[str, object], str]:
    _, head, body = text.split("---\n", 2)
    return yaml.safe_load(head), body


def test_the_card_names_base_recipe_data_and_checks(untied_base: Path) -> None:
    data = ModelCardData(
        base="weblab-GENIAC/Tanuki-8B-dpo-v1.0", recipe="tanuki-8b-sft", steps=100, dataset="s3://x/y.jsonl"
    )
    checks = [("names", "passed", "21")]
    head, body = card_parts(render_card(data, "out", base_front_matter(untied_base), checks, "bfloat16"))
    assert head["base_model"] == "weblab-GENIAC/Tanuki-8B-dpo-v1.0"
    assert head["license"] == "apache-2.0"
    assert head["language"] == ["ja"]
    assert "| recipe | tanuki-8b-sft |" in body
    assert "| steps | 100 |" in body
    assert "| names | passed | 21 |" in body
    assert "rehearsal" not in body.lower()


def test_only_a_repository_of_the_hub_is_named_as_base_in_the_metadata() -> None:
    head, body = card_parts(render_card(ModelCardData(base="rehearsal"), "out", {}, [], "bfloat16"))
    assert "base_model" not in head
    assert "| base | rehearsal |" in body


def test_a_rehearsal_says_so_at_the_top() -> None:
    head, body = card_parts(render_card(ModelCardData(rehearsal=True), "out", {}, [], "bfloat16"))
    assert "rehearsal" in head["tags"]  # type: ignore[operator]
    assert body.index("**Rehearsal.**") < body.index("## Training")


def test_hostile_values_stay_in_their_place() -> None:
    data = ModelCardData(base="x\nlicense: other", dataset="a | b\n# <script>", run="`$(id)`")
    head, body = card_parts(render_card(data, "out", {}, [], "bfloat16"))
    assert "license" not in head
    assert "<script>" not in body
    assert "a \\| b # &lt;script>" in body


@pytest.mark.parametrize("text", ["# no front matter", "---\n[1, 2\n---\n", "---\n- a\n---\n", ""])
def test_a_base_readme_without_front_matter_gives_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(text)
    assert base_front_matter(tmp_path) == {}


def test_card_data_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text('{"steps": "many", "colour": "red"}')
    with pytest.raises(UserError, match=r"steps: .*colour: .*Known keys: base"):
        load_card_data(path)
    path.write_text("not json")
    with pytest.raises(UserError, match=r"card\.json"):
        load_card_data(path)
