"""Files that are damaged or hostile."""

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from trainium.checkpoint.archive import open_archive
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import Form
from trainium.checkpoint.shards import open_shard, read_shard, write_shard
from trainium.checkpoint.weights import TensorInfo

_STORAGE = object()  # pickled as the storage of the two numbers in good.pt


class _Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def test_a_pickle_that_wants_more_than_tensors_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model.norm.weight": torch.ones(2), "x": _Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt is refused: its pickle asks for (posix|nt)\.system"):
        open_shard(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch._utils", "__builtins__"),
        ("torch_xla.utils.serialization", "os"),
    ],
)
def test_names_beside_the_allowed_ones_are_refused(tmp_path: Path, module: str, name: str) -> None:
    path = tmp_path / "shard.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("shard/data.pkl", pickle.PROTO + b"\x02" + f"c{module}\n{name}\n.".encode())
    with pytest.raises(CheckpointError, match=f"{module}.{name}"):
        open_archive(path)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": [torch.ones(1)]}, {"a": 1}, {1: torch.ones(1)}])
def test_anything_but_a_flat_dict_of_tensors_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "shard.pt")
    with pytest.raises(CheckpointError, match=r"shard\.pt"):
        open_shard(tmp_path / "shard.pt")


def test_truncation_at_any_place_names_the_file(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(999.0), "b": torch.ones(3, 4)}, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    cut = tmp_path / "cut.pt"
    for size in range(0, len(data), 97):
        cut.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            read_shard(cut)


def test_damaged_structure_is_an_error_and_never_a_crash(tmp_path: Path) -> None:
    """Every byte of the pickle flipped in turn: our error, or tensors all the same."""
    torch.save({"a": torch.arange(8.0).reshape(2, 4), "b": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    name = next(record for record in records if record.endswith("data.pkl"))
    for index in range(len(records[name])):
        damaged = bytearray(records[name])
        damaged[index] ^= 0x11
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for record, content in (records | {name: bytes(damaged)}).items():
                archive.writestr(record, content)
        (tmp_path / "damaged.pt").write_bytes(buffer.getvalue())
        with suppress(CheckpointError):
            read_shard(tmp_path / "damaged.pt")


def test_parameters_views_and_empty_tensors_of_torch_save_are_read(tmp_path: Path) -> None:
    base = torch.randn(6, 8)
    content = {
        "transposed": base.T,
        "slice": base[1:3, 2:5],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "scalar": torch.tensor(5),
        "empty": torch.empty(0, 4),
        "shared": base[0],
    }
    torch.save(content, tmp_path / "shard.pt")
    found = read_shard(tmp_path / "shard.pt")
    assert found.keys() == content.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in content.items())


@pytest.mark.parametrize("form", ["inline", "per-tensor"])
def test_every_dtype_and_shape_goes_through_both_forms(tmp_path: Path, form: Form) -> None:
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.bool]
    tensors = {f"t{n}.{dtype}": torch.arange(12).reshape(3, 4).to(dtype) for n, dtype in enumerate(dtypes)}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "columns": torch.arange(12.0).reshape(3, 4)[:, 1:3],
    }
    info = {name: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    sizes: list[int] = []
    write_shard(tmp_path / "shard.pt", info, tensors.values(), form, sizes.append)
    assert sum(sizes) == sum(tensor.nbytes for tensor in tensors.values())
    for found in (
        read_shard(tmp_path / "shard.pt"),
        *([torch.load(tmp_path / "shard.pt")] if form == "inline" else []),
    ):
        assert list(found) == list(tensors)
        assert all(found[name].dtype == t.dtype and torch.equal(found[name], t) for name, t in tensors.items())
    if form == "inline":
        mapped = torch.load(tmp_path / "shard.pt", mmap=True)
        assert torch.equal(mapped["columns"], tensors["columns"])


@pytest.mark.parametrize(
    "arguments",
    [
        ("data", 0, (2,), (1,)),
        (_STORAGE, -1, (2,), (1,)),
        (_STORAGE, 0, ("2",), (1,)),
        (_STORAGE, 0, (2, 2), (1,)),
        (_STORAGE, 1, (2,), (1,)),
        (_STORAGE, 0, (2,), (-1,)),
        (_STORAGE, 0, (2**40,), (1,)),
    ],
)
def test_impossible_tensors_are_refused(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    """A pickle may call the tensor constructor with anything."""
    torch.save({"a": torch.ones(2)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", 2) if value is _STORAGE else None

    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            return torch._utils._rebuild_tensor_v2, (*arguments, False, {})

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump({"a": Call()})
    with zipfile.ZipFile(tmp_path / "bad.pt", "w") as archive:
        for name, content in records.items():
            archive.writestr(name, buffer.getvalue() if name.endswith("data.pkl") else content)
    with pytest.raises(CheckpointError, match=r"bad\.pt"):
        read_shard(tmp_path / "bad.pt")


def test_a_lost_tensor_file_is_named(tmp_path: Path) -> None:
    info = {"a": TensorInfo("float32", (2,)), "b": TensorInfo("float32", (2,))}
    write_shard(tmp_path / "shard.pt", info, [torch.ones(2), torch.ones(2)], "per-tensor")
    (tmp_path / "shard.pt.tensors" / "tensor_1.pt").unlink()
    with pytest.raises(CheckpointError, match=r"tensor_1\.pt does not exist"):
        open_shard(tmp_path / "shard.pt")
