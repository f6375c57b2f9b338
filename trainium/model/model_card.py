"""README.md of an exported model: where it comes from, how it was trained, what was verified."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from trainium.errors import UserError
from trainium.files import read_json

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_INHERITED = ("license", "license_name", "license_link", "language")


class ModelCardData(BaseModel):
    """What the caller knows about the run (`--model-card-data`, a JSON object of these keys, all optional)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base: str | None = None  # Hub repository of the base, or what else it is
    base_revision: str | None = None
    run: str | None = None
    recipe: str | None = None
    dataset: str | None = None
    rows: int | None = None
    steps: int | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None
    learning_rate: float | None = None
    final_loss: float | None = None
    instance_type: str | None = None
    toolchain: Mapping[str, str] = {}  # package → version
    rehearsal: bool = False


def load_card_data(path: Path) -> ModelCardData:
    """Raises UserError naming the file and every wrong key."""
    try:
        return ModelCardData.model_validate(read_json(path))
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise UserError(f"{path}: {problems}. Known keys: {', '.join(ModelCardData.model_fields)}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"model card data {path} cannot be read: {error}") from None


def render_card(
    data: ModelCardData, name: str, inherited: Mapping[str, Any], checks: Sequence[tuple[str, str, str]], dtype: str
) -> str:
    """The card as the Hub reads it: YAML front matter, then Markdown.

    Args:
        name: title where the data has no run.
        inherited: licence and language of the base (`base_front_matter`).
        checks: rows of check, result, detail.
        dtype: dtype of the weights.
    """
    title = data.run or name
    lines = ["---", yaml.safe_dump(_front_matter(data, inherited), sort_keys=False, allow_unicode=True).rstrip(), "---"]
    lines += ["", f"# {_text(title)}", ""]
    if data.rehearsal:
        lines += [
            "> **Rehearsal.** Made with the rehearsal toolchain on CPUs: the pipeline is real, the training is a short",
            "> exercise of it. Nothing here ran on Trainium.",
            "",
        ]
    base = f"`{_text(data.base)}`" if data.base else "its base model"
    lines += [f"{_text(title)} is {base}, fine-tuned (supervised, all weights, {dtype}).", "", "## Training", ""]
    training = _training_rows(data)
    lines += _table(("", "value"), training) if training else ["Nothing was recorded about it."]
    lines += ["", "## Verified against the base model", ""]
    lines += _table(("check", "result", "detail"), checks)
    lines += [
        "",
        "## Prompts",
        "",
        "Trained on samples of bos + input + output + eos, without a chat template, as NeuronX Distributed Training's",
        "SFT data module renders them. The details of the verification are in `trainium_export.json`.",
        "",
    ]
    return "\n".join(lines)


def base_front_matter(base: Path) -> dict[str, Any]:
    """Licence and language from the base's README.md; empty if it has none that can be read."""
    try:
        text = (base / "README.md").read_text(encoding="utf-8")
        _, head, _ = text.split("---\n", 2)
        values = yaml.safe_load(head)
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return {key: values[key] for key in _INHERITED if key in values} if isinstance(values, dict) else {}


def _front_matter(data: ModelCardData, inherited: Mapping[str, Any]) -> dict[str, Any]:
    tags = ["trainium", "neuron", *(["rehearsal"] if data.rehearsal else [])]
    base = {"base_model": data.base} if data.base and _HUB_NAME.fullmatch(data.base) else {}
    return {"library_name": "transformers", "pipeline_tag": "text-generation", **base, **inherited, "tags": tags}


def _training_rows(data: ModelCardData) -> list[tuple[str, str]]:
    values = data.model_dump(exclude={"toolchain", "rehearsal"}, exclude_none=True)
    rows = [(key.replace("_", " "), str(value)) for key, value in values.items()]
    return rows + list(data.toolchain.items())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[_text(cell) for cell in row] for row in rows]
    return [_row(head), _row(["---"] * len(head)), *map(_row, cells)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(value: str) -> str:
    """One line that cannot break out of a table cell, a heading or into HTML."""
    plain = " ".join(value.split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "'")
