"""The files that travel beside the weights: config.json, tokenizer, chat template, generation config, licence.

They are copied byte for byte. Where a value must change, a JSON file is read and written with that one key changed, as
the tutorial does with jq; no library ever writes them, because transformers 5 would turn `rope_theta` and `torch_dtype`
into spellings that the trainer's transformers 4.52 does not read.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainium.checkpoint.huggingface import read_object
from trainium.errors import UserError
from trainium.files import write_atomic

# Patterns relative to the base folder. Weights, their index, the base's own README and code files stay behind.
COPIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
TEMPLATE_FILE = "chat_template.jinja"


@dataclass(frozen=True)
class Change:
    """One key of one JSON file, before and after; `before` is None when the key was absent."""

    file: str
    key: str
    before: Any
    after: Any


def config_changes(config: Mapping[str, Any], *, untied: bool, dtype: str | None) -> tuple[Change, ...]:
    """What config.json must say differently after training.

    Args:
        config: the base's config.json.
        untied: the export has its own lm_head.weight although the base shares it with the embedding.
        dtype: dtype of the exported weights by torch's name ("bfloat16"), None where it is the base weights' own; the
            base's spelling of the key is kept.
    """
    changes = []
    if untied:
        changes.append(Change("config.json", "tie_word_embeddings", config.get("tie_word_embeddings"), False))
    spellings = [key for key in ("torch_dtype", "dtype") if key in config]
    if dtype is not None:
        keys = spellings or ["torch_dtype"]
        changes += [Change("config.json", key, config.get(key), dtype) for key in keys if config.get(key) != dtype]
    return tuple(changes)


def changed_json(text: str, changes: Mapping[str, Any]) -> str:
    """A JSON object with single keys set, the order of the others kept; without changes the very same text."""
    if not changes:
        return text
    return json.dumps({**json.loads(text), **changes}, indent=2, ensure_ascii=False) + "\n"


def read_chat_template(path: Path) -> str:
    """The template without the newline that editors put at the end of a file.

    Raises UserError if the file is missing, not text or empty; whether it renders is `loading.check_chat_template`'s.
    """
    try:
        template = path.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat template {path} cannot be read: {error}. Give a file with a Jinja template.") from None
    if not template.strip():
        raise UserError(f"chat template {path} is empty. Leave --chat-template out to keep the base model's template.")
    return template


def write_companions(base: Path, out: Path, changes: tuple[Change, ...], template: str | None) -> tuple[Change, ...]:
    """Fill `out` with everything but weights and model card; returns all changes made, the template's included.

    A template goes into tokenizer_config.json (one key, as the tutorial does) and, where the base has a
    chat_template.jinja, into that file too: transformers prefers the file, so both must agree.
    """
    for source in (base / "config.json", *companion_files(base)):
        target = out / source.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    if template is not None:
        changes += _template_changes(base, template)
    for file in dict.fromkeys(change.file for change in changes):
        keys = {change.key: change.after for change in changes if change.file == file}
        write_atomic(out / file, changed_json((base / file).read_text(encoding="utf-8"), keys))
    if template is not None and (base / TEMPLATE_FILE).exists():
        write_atomic(out / TEMPLATE_FILE, template)
    return changes


def companion_files(base: Path) -> tuple[Path, ...]:
    """The base's files that are copied as they are (config.json apart), sorted."""
    found = {path for pattern in COPIED for path in base.glob(pattern) if path.is_file()}
    return tuple(sorted(found))


def _template_changes(base: Path, template: str) -> tuple[Change, ...]:
    tokenizer_config = read_object(base / "tokenizer_config.json")
    before = tokenizer_config.get("chat_template")
    return () if before == template else (Change("tokenizer_config.json", "chat_template", before, template),)
