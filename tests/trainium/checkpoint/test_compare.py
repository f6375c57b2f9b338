"""`trainium verify`: any two forms of a model, and everything that can be different about them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainium.checkpoint.__main__ import main
from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.compare import compare_paths
from trainium.checkpoint.comparison import Comparison
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.formats import Form
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.paths import shard_path
from trainium.checkpoint.placement import rank_targets, source_shapes
from trainium.checkpoint.shards import read_shard, shard_images
from trainium.checkpoint.weights import TensorInfo

MakeModel = Callable[..., Path]
LAYOUT = Layout(tp=4, kv_replicator=2)
FORMS = ["hf", "indexed", "bin", "single", "inline", "per-tensor", "other-layout", "trained"]


def verify(a: Path, b: Path, config: Path | None = None, *, names_only: bool = False) -> Comparison:
    return compare_paths(a, b, config=config, names_only=names_only)


@pytest.fixture
def forms(make_model: MakeModel, tmp_path: Path) -> dict[str, Path]:
    """One model in every form there is; `hf` has rotary buffers, which nobody else knows the place of."""
    source = make_model(extra=True)
    nxd: list[tuple[str, Layout, Form]] = [
        ("inline", LAYOUT, "inline"),
        ("per-tensor", LAYOUT, "per-tensor"),
        ("other-layout", Layout(tp=2, pp=2, qkv="split"), "inline"),
        ("trained.ckpt", Layout(tp=4, kv_replicator=2, instance_family="trn2"), "per-tensor"),
    ]
    for name, layout, form in nxd:
        to_nxd(source, tmp_path / name, layout, form=form)
    to_hf(tmp_path / "inline", tmp_path / "indexed", source / "config.json", LAYOUT, max_shard_bytes=4000)
    to_hf(tmp_path / "inline", tmp_path / "single", source / "config.json", LAYOUT, single_file=True)
    state = load_file(source / "model.safetensors")
    names = sorted(state)
    (tmp_path / "bin").mkdir()
    for number, part in enumerate((names[::2], names[1::2])):
        torch.save({name: state[name] for name in part}, tmp_path / "bin" / f"pytorch_model-{number}.bin")
    index = {"weight_map": {name: f"pytorch_model-{n % 2}.bin" for n, name in enumerate(names)}}
    (tmp_path / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    named = {name: tmp_path / name for name in FORMS}
    return named | {"single": tmp_path / "single" / "checkpoint.pt", "trained": tmp_path / "trained.ckpt"}


@pytest.mark.parametrize("names_only", [False, True])
def test_a_model_is_equal_to_itself_in_every_pair_of_forms(forms: dict[str, Path], names_only: bool) -> None:
    config = forms["hf"] / "config.json"
    for a in FORMS:
        for b in FORMS:
            found = verify(forms[a], forms[b], config, names_only=names_only)
            assert found.equal, (a, b, found)
            assert found.common == 24
            assert found.names_only == names_only
            assert len(found.tensors) == (0 if names_only else 24)


def test_the_config_beside_either_side_is_enough(forms: dict[str, Path]) -> None:
    assert verify(forms["inline"], forms["single"]).equal
    assert verify(forms["hf"], forms["trained"]).equal


@pytest.mark.parametrize("form", ["inline", "per-tensor", "other-layout", "trained"])
def test_a_changed_number_is_found_with_the_file_that_holds_it(
    make_model: MakeModel, forms: dict[str, Path], form: str
) -> None:
    """The same number changed in a source: every pair says by how much, and no other tensor is named."""
    changed = make_model("changed", extra=True)
    state = load_file(changed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    state[name][3, 13] += 2
    save_file(state, changed / "model.safetensors")
    found = verify(forms[form], changed, forms["hf"] / "config.json")
    assert not found.equal
    (tensor,) = (tensor for tensor in found.tensors if not tensor.unchanged)
    assert tensor.name == name
    assert tensor.max_difference == pytest.approx(2, abs=0.02)
    assert tensor.mean_difference == pytest.approx(2 / (16 * 24), rel=0.01)
    rank = "01" if form == "other-layout" else "02"  # column 13 of 24
    assert tensor.where == f"dp_rank_00_tp_rank_{rank}_pp_rank_0{1 if form == 'other-layout' else 0}.pt"


def _rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    shard = read_shard(path)
    change(shard)
    torch.save(shard, path)


def test_copies_that_differ_are_named(forms: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A norm in one rank, and the replicated key head of another."""

    def drift(shard: dict[str, Tensor]) -> None:
        shard["model.norm.weight"] += 0.5
        shard["model.layers.0.self_attn.qkv_proj.weight_qkv"][5] = 3  # the first key row after four query rows

    _rewrite(shard_path(forms["inline"] / "model", 3, 0), drift)
    found = verify(forms["hf"], forms["inline"])
    copies = {(copy.side, copy.tensor, copy.tp_rank, copy.pp_rank) for copy in found.differing_copies}
    assert copies == {("B", "model.layers.0.self_attn.k_proj.weight", 3, 0), ("B", "model.norm.weight", 3, 0)}
    assert all(tensor.unchanged for tensor in found.tensors)  # of copies the first counts
    assert not found.equal
    assert main(["verify", str(forms["hf"]), str(forms["inline"])]) == 1
    out = capsys.readouterr().out
    assert "copies  differ: 2" in out
    assert "B: dp_rank_00_tp_rank_03_pp_rank_00.pt: model.norm.weight by 0.5" in out
    assert out.endswith("DIFFERENT: names, shapes, dtypes and values\n")


def test_what_single_ranks_lack_is_named(forms: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def lose(shard: dict[str, Tensor]) -> None:
        del shard["lm_head.weight"]
        shard["model.layers.0.mlp.gate_up_proj.weight"] = torch.ones(3, 16, dtype=torch.bfloat16)
        shard["model.norm.weight"] = shard["model.norm.weight"].float()

    _rewrite(shard_path(forms["inline"] / "model", 1, 0), lose)
    found = verify(forms["hf"], forms["inline"], names_only=True)
    wrong = {(problem.tensor, problem.problem) for problem in found.problems}
    gate_up = "is [3, 16] (model.layers.0.mlp.gate_up_proj.weight) instead of [12, 16]"
    assert wrong == {
        ("lm_head.weight", "is missing (lm_head.weight)"),
        ("model.layers.0.mlp.gate_proj.weight", gate_up),
        ("model.layers.0.mlp.up_proj.weight", gate_up),
        ("model.norm.weight", "is float32 [16] here and bfloat16 [16] in an earlier rank"),
    }
    assert {problem.where for problem in found.problems} == {"B: dp_rank_00_tp_rank_01_pp_rank_00.pt"}
    assert found.only_in_a == ()
    assert main(["verify", str(forms["hf"]), str(forms["inline"]), "--names-only"]) == 1
    assert "ranks   differ: 4" in capsys.readouterr().out


def test_a_name_that_no_rank_has_is_only_on_the_other_side(forms: dict[str, Path]) -> None:
    for rank in range(4):
        _rewrite(shard_path(forms["inline"] / "model", rank, 0), lambda shard: shard.pop("model.norm.weight"))
    found = verify(forms["single"], forms["inline"], names_only=True)
    assert found.only_in_a == ("model.norm.weight",)
    assert found.problems == ()


def test_tied_embeddings_are_one_tensor_or_two(make_model: MakeModel, tmp_path: Path) -> None:
    tied = make_model(tie_word_embeddings=True)
    to_nxd(tied, tmp_path / "nxd", LAYOUT)
    found = verify(tied, tmp_path / "nxd")
    assert found.equal
    assert found.notes == (f"{tied} ties lm_head.weight to its embedding, which was compared in its place",)
    _rewrite(shard_path(tmp_path / "nxd" / "model", 0, 0), lambda shard: shard["lm_head.weight"].add_(1))
    (changed,) = (tensor for tensor in verify(tied, tmp_path / "nxd").tensors if not tensor.unchanged)
    assert changed.name == "lm_head.weight"


def test_numbers_that_are_none_are_counted_on_both_sides(
    make_model: MakeModel, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_model("a"), make_model("b")
    for folder, value in ((a, "nan"), (b, "inf")):
        state = load_file(folder / "model.safetensors")
        state["model.norm.weight"][:2] = float(value)
        state["lm_head.weight"][0, 0] = float("nan")
        save_file(state, folder / "model.safetensors")
    assert main(["verify", str(a), str(b), "--json"]) == 1
    found = {tensor["name"]: tensor for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    norm, head = found["model.norm.weight"], found["lm_head.weight"]
    assert (norm["a_nan"], norm["a_inf"], norm["nan"], norm["inf"]) == (2, 0, 0, 2)
    assert (head["unchanged"], head["a_nan"], head["nan"]) == (True, 1, 1)  # NaN is equal to itself, and still said
    assert main(["verify", str(a), str(a)]) == 0
    assert "lm_head.weight: 1 NaN in B" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_message_and_exit_code_2(
    forms: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut, lost = tmp_path / "cut.safetensors", forms["per-tensor"] / "model" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    cut.write_bytes((forms["hf"] / "model.safetensors").read_bytes()[:-1])
    (lost.with_name(f"{lost.name}.tensors") / "tensor_3.pt").unlink()
    evil = tmp_path / "evil.pt"
    torch.save({"a": os.system}, evil)
    for arguments, message in (
        ([tmp_path / "nowhere", forms["hf"]], "nowhere"),
        ([forms["inline"], forms["per-tensor"]], "give the base model's config.json with --config"),
        ([forms["hf"], cut], "cut.safetensors cannot be read"),
        ([forms["hf"], forms["per-tensor"]], "tensor_3.pt does not exist"),
        ([forms["hf"], forms["per-tensor"], "--names-only"], "tensor_3.pt does not exist"),
        ([forms["hf"], evil], "evil.pt is refused"),
    ):
        assert main(["verify", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error


def test_names_of_a_large_model_take_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8B parameters in files that are nearly all hole: reading all 32 GB would take minutes."""
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 65024,
    }  # fmt: skip
    hf, nxd = tmp_path / "hf", tmp_path / "nxd"
    _sparse_hf(hf, config)
    _sparse_nxd(nxd, config, Layout(tp=32, kv_replicator=4, qkv="fused", instance_family="trn2"))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*")) > 30e9
    assert main(["verify", str(hf), str(nxd), "--names-only"]) == 0
    assert capsys.readouterr().out.endswith("EQUAL: names, shapes and dtypes\n")


def _sparse_hf(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in Architecture.from_config(config).tensor_shapes().items():
        size = TensorInfo("bfloat16", shape).bytes
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _sparse_nxd(folder: Path, config: dict[str, Any], layout: Layout) -> None:
    arch = Architecture.from_config(config)
    sources = source_shapes(arch.tensor_shapes(), arch, "the model")
    (folder / "model").mkdir(parents=True)
    for rank in layout.ranks:
        targets = rank_targets(sources, arch, layout, *rank)
        info = {target.name: TensorInfo("bfloat16", target.shape(sources)) for target in targets}
        path = shard_path(folder / "model", *rank)
        for name, image in shard_images(path.name, info, "inline").items():
            with path.with_name(name).open("wb") as file:
                for index, offset in enumerate(image.offsets):
                    header = image.header(index, 0)
                    file.seek(offset - len(header))
                    file.write(header)
                for offset, content in image.frame([0] * len(image.offsets)):
                    file.seek(offset)
                    file.write(content)


@pytest.mark.parametrize("case", ["gqa-trn1-tp8-kv4-fused-pp3", "gqa-trn1-tp4-kv2-fused-2q", "mha-trn1-tp4-coalesced"])
def test_the_reference_files_are_equal_to_their_source(golden: Path, case: str) -> None:
    """o_proj lies there column by column."""
    found = verify(golden / case / "nxd", golden / case / "hf")
    assert found.equal
    assert found.copies > 0
    assert read_config(golden / case / "hf")["num_hidden_layers"] * 9 + 3 == found.common
