"""The reference converter's own outputs, tensor for tensor, both ways."""

import sys
import types
from pathlib import Path

import pytest
import torch

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.compare import compare_hf
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.errors import CheckpointError, LayoutError
from trainium.checkpoint.formats import Form
from trainium.checkpoint.huggingface import read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.shards import read_shard
from trainium.checkpoint.verify import verify_nxd

CASES = {
    "gqa-trn1-tp8-kv4-fused": Layout(tp=8, kv_replicator=4),
    "gqa-trn1-tp8-kv4-fused-pp3": Layout(tp=8, kv_replicator=4, pp=3),
    "gqa-trn1-tp4-kv2-unfused-fp32": Layout(tp=4, kv_replicator=2, qkv="split"),
    "mha-trn1-tp4-coalesced": Layout(tp=4),
    "gqa-trn2-tp2-kv1-unfused": Layout(tp=2, qkv="split", instance_family="trn2"),
    "gqa-trn1-tp4-kv2-fused-2q": Layout(tp=4, kv_replicator=2),
}


@pytest.mark.parametrize("form", ["inline", "per-tensor"])
@pytest.mark.parametrize("case", CASES)
def test_shards_are_those_of_the_reference(golden: Path, tmp_path: Path, case: str, form: Form) -> None:
    report = to_nxd(golden / case / "hf", tmp_path / "out", CASES[case], form=form)
    references = sorted((golden / case / "nxd" / "model").iterdir())
    written = sorted(path for path in (tmp_path / "out" / "model").glob("dp_rank_00_tp_rank_*_pp_rank_??.pt"))
    assert [path.name for path in written] == [path.name for path in references]
    assert sorted(report.files) == [str(path) for path in written]
    for ours, reference in zip(written, references, strict=True):
        expected = torch.load(reference, weights_only=True)
        found = torch.load(ours, weights_only=True) if form == "inline" else read_shard(ours)
        assert list(found) == list(expected)  # the order as well
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor), name
            assert found[name].untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("case", CASES)
def test_the_reference_comes_back_as_the_original_model(golden: Path, tmp_path: Path, case: str) -> None:
    folder = golden / case
    assert verify_nxd(folder / "hf", folder / "nxd", CASES[case]).ok
    report = to_hf(folder / "nxd", tmp_path / "out", folder / "hf" / "config.json", CASES[case])
    assert compare_hf(folder / "hf", tmp_path / "out").equal
    assert report.layout.qkv in ("fused", "split", "coalesced")
    assert read_config(tmp_path / "out") == read_config(folder / "hf")


def test_the_per_tensor_form_of_training_comes_back(golden: Path, tmp_path: Path) -> None:
    folder = golden / "gqa-trn1-tp8-kv4-fused"
    (trained,) = (folder / "trained").iterdir()
    to_hf(trained, tmp_path / "out", folder / "hf" / "config.json", CASES[folder.name])
    assert compare_hf(folder / "hf", tmp_path / "out").equal


def test_our_per_tensor_form_is_what_the_loader_of_torch_xla_expects(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpickled with a class at torch_xla's place, as on a Neuron node, ours and the reference's are the same."""
    module = types.ModuleType("torch_xla.utils.serialization")
    module.TensorReference = type("TensorReference", (), {"__module__": module.__name__})  # type: ignore[attr-defined]
    for name in ("torch_xla", "torch_xla.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    case = "gqa-trn1-tp8-kv4-fused"
    to_nxd(golden / case / "hf", tmp_path, CASES[case], form="per-tensor")
    (trained,) = (golden / case / "trained").iterdir()
    name = "dp_rank_00_tp_rank_03_pp_rank_00.pt"
    ours, reference = (torch.load(folder / "model" / name, weights_only=False) for folder in (tmp_path, trained))
    assert {key: value.__dict__ for key, value in ours.items()} == {
        key: value.__dict__ for key, value in reference.items()
    }
    info, reference_info = (torch.load(f / "model" / f"{name}.info.pt") for f in (tmp_path, trained))
    assert info == reference_info
    for tid in info:
        tensors = [torch.load(f / "model" / f"{name}.tensors" / f"tensor_{tid}.pt") for f in (tmp_path, trained)]
        assert torch.equal(*tensors)


@pytest.mark.parametrize("case", CASES)
def test_the_predicted_size_is_near_even_for_tiny_models(golden: Path, tmp_path: Path, case: str) -> None:
    arch = Architecture.from_config(read_config(golden / case / "hf"))
    report = to_nxd(golden / case / "hf", tmp_path, CASES[case])
    width = 4 if report.dtypes == ("float32",) else 2
    assert CASES[case].predicted_bytes(arch, width) == pytest.approx(report.file_bytes, rel=0.03)


@pytest.mark.parametrize("old", ["file", "folder"])
def test_older_names_are_read_and_come_first(golden: Path, tmp_path: Path, old: str) -> None:
    case = golden / "gqa-trn1-tp4-kv2-fused-2q"
    model = tmp_path / "nxd" / "model"
    model.mkdir(parents=True)
    for rank in range(4):
        content = (case / "nxd" / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt").read_bytes()
        target = model / f"tp_rank_{rank:02d}_pp_rank_00"
        if old == "folder":
            target.mkdir()
            target /= "checkpoint.pt"
        target.write_bytes(content)
        (model / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt").write_bytes(b"newer, not to be read")
    to_hf(tmp_path / "nxd", tmp_path / "out", case / "hf" / "config.json", CASES[case.name])
    assert compare_hf(case / "hf", tmp_path / "out").equal


@pytest.mark.parametrize(
    ("case", "layout", "message"),
    [
        ("gqa-trn1-tp8-kv4-fused", Layout(tp=4, kv_replicator=2), "tp=4 pp=1 means 4 shards"),
        ("gqa-trn1-tp8-kv4-fused", Layout(tp=8, kv_replicator=4, pp=3), "missing: dp_rank_00_tp_rank_00_pp_rank_01.pt"),
        ("gqa-trn1-tp8-kv4-fused-pp3", Layout(tp=8, kv_replicator=4), "8 shards"),
        ("gqa-trn1-tp4-kv2-fused-2q", Layout(tp=4, kv_replicator=2, qkv="split"), "checkpoint is fused"),
    ],
)
def test_another_layout_than_the_files_have_is_refused(
    golden: Path, tmp_path: Path, case: str, layout: Layout, message: str
) -> None:
    with pytest.raises((LayoutError, CheckpointError), match=message):
        to_hf(golden / case / "nxd", tmp_path / "out", golden / case / "hf" / "config.json", layout)
    assert not list(tmp_path.iterdir())


def test_reading_trn1_copies_as_trn2_is_refused_because_they_differ(golden: Path, tmp_path: Path) -> None:
    case = golden / "gqa-trn1-tp8-kv4-fused"
    wrong = Layout(tp=8, kv_replicator=4, instance_family="trn2")
    with pytest.raises(CheckpointError, match=r"k_proj.*differs between ranks.*kv_replicator=4 on trn2"):
        to_hf(case / "nxd", tmp_path / "out", case / "hf" / "config.json", wrong)
    assert not list(tmp_path.iterdir())
    report = to_hf(case / "nxd", tmp_path / "out", case / "hf" / "config.json", wrong, allow_differing_copies=True)
    assert {copy.tensor.split(".")[-2] for copy in report.differing_copies} == {"k_proj", "v_proj"}


def test_more_layers_or_other_stages_than_the_files_have_are_refused(golden: Path, tmp_path: Path) -> None:
    case = golden / "gqa-trn1-tp8-kv4-fused-pp3"
    config = read_config(case / "hf")
    for layers in (4, 6):
        with pytest.raises(CheckpointError, match="another number of layers"):
            to_hf(case / "nxd", tmp_path / "out", config | {"num_hidden_layers": layers}, CASES[case.name])
