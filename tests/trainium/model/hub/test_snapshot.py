"""Model folders, whole and broken in one way each."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainium.model.snapshot import HeaderEntry, SnapshotError, check_snapshot


@pytest.fixture
def folder(tmp_path: Path, model_files: dict[str, bytes]) -> Path:
    for name, content in model_files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_facts_of_a_sharded_folder(folder: Path, model_files: dict[str, bytes]) -> None:
    model = check_snapshot(folder)
    assert model.config["model_type"] == "llama"
    assert model.format == "safetensors"
    assert model.tensors["lm_head.weight"] == HeaderEntry("BF16", (4, 2), "model-00002-of-00002.safetensors")
    assert model.total_bytes == sum(
        len(content) for name, content in model_files.items() if name.endswith("safetensors")
    )
    assert model.tokenizer == ("tokenizer.json", "tokenizer_config.json")


def test_a_folder_that_safetensors_wrote_is_read(tmp_path: Path) -> None:
    tensors = {"b": torch.zeros(3, 2, dtype=torch.bfloat16), "a": torch.ones(()), "empty": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.model").write_bytes(b"sp")
    model = check_snapshot(tmp_path)
    assert {name: tensor.shape for name, tensor in model.tensors.items()} == {"a": (), "b": (3, 2), "empty": (0, 4)}


def test_pytorch_weights_are_taken_unless_truncated(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(100)}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    model = check_snapshot(tmp_path)
    assert (model.format, dict(model.tensors)) == ("pytorch", {})
    content = (tmp_path / "pytorch_model.bin").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(content[:-50])
    with pytest.raises(SnapshotError, match=r"pytorch_model.bin .* is truncated"):
        check_snapshot(tmp_path)


def test_the_digest_follows_config_tokenizer_and_headers(folder: Path) -> None:
    before = check_snapshot(folder).digest
    assert check_snapshot(folder).digest == before
    (folder / "README.md").write_text("words")
    assert check_snapshot(folder).digest == before
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    after = check_snapshot(folder).digest
    assert after != before
    (folder / "config.json").write_text('{"model_type": "llama", "vocab_size": 5}')
    assert check_snapshot(folder).digest not in {before, after}


def _truncate(folder: Path) -> None:
    file = folder / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def _lengthen(folder: Path) -> None:
    with (folder / "model-00001-of-00002.safetensors").open("ab") as file:
        file.write(b"tail")


def _cut_header(folder: Path) -> None:
    file = folder / "model-00001-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:20])


def _pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (folder / "model-00001-of-00002.safetensors").write_text(pointer)


def _lie(folder: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}).encode()
    (folder / "model-00001-of-00002.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))


def _rename_in_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"lm_head.weight"', '"lm_head.bias"'))


def _drop_from_index(folder: Path) -> None:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("breaks", "message"),
    [
        (_truncate, r"model-00002-of-00002.safetensors is truncated: its header promises \d+ bytes, it has \d+"),
        (_lengthen, r"model-00001-of-00002.safetensors is too long"),
        (_cut_header, r"model-00001-of-00002.safetensors is truncated: it ends inside its header"),
        (_pointer, r"model-00001-of-00002.safetensors is a Git LFS pointer.*git lfs pull"),
        (_lie, r"tensor w \(F32 \[4\]\) does not lie where its header says"),
        (_rename_in_index, "index names 1 tensors that are not in their file, for example lm_head.bias"),
        (_drop_from_index, "1 tensors are missing in the index, for example model.norm.weight"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b""), "is no safetensors file"),
        (lambda f: (f / "model-00001-of-00002.safetensors").write_bytes(b"<html>" * 9), "is no safetensors file"),
        (lambda f: (f / "model-00001-of-00002.safetensors").unlink(), r"lacks model-00001-of-00002.* \(1 of 2 shards"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "but neither model.safetensors nor"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (lambda f: (f / "config.json").unlink(), "has no config.json.*There are: model-00001"),
        (lambda f: (f / "config.json").write_text('{"a": '), "config.json cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON object"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer"),
    ],
)  # fmt: skip
def test_a_broken_folder_is_refused_by_name(folder: Path, breaks: Callable[[Path], object], message: str) -> None:
    breaks(folder)
    with pytest.raises(SnapshotError, match=message):
        check_snapshot(folder)


def test_a_folder_without_weights_or_without_itself(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="does not exist"):
        check_snapshot(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SnapshotError, match=r"has no weights.*There are: config.json, tokenizer.json"):
        check_snapshot(tmp_path)
