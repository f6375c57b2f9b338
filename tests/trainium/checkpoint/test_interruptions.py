"""Conversions that are killed, run out of disk, are shared between processes, or meet damaged input."""

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainium.checkpoint.archive_writer import ArchiveImage, tensors_image
from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.formats import Form
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.shards import read_shard
from trainium.checkpoint.verify import verify_nxd
from trainium.checkpoint.weights import TensorInfo
from trainium.checkpoint.workers import Moved, Work, spread
from trainium.checkpoint.workspace import Share

MakeModel = Callable[..., Path]
ROOT = Path(__file__).parents[3]
KILLING = "tests/trainium/checkpoint/killing.py"
LAYOUT = Layout(tp=4, kv_replicator=2)
SIZES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4096, "num_hidden_layers": 6}


def test_sixty_killed_conversions_never_leave_anything_wrong(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model(**SIZES)
    to_nxd(source, tmp_path / "input", LAYOUT)
    seed = int.from_bytes(os.urandom(4), "little")
    done = subprocess.run(
        [sys.executable, ROOT / KILLING, source, tmp_path / "input", tmp_path / "work", str(seed)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}{done.stderr}"
    assert done.stdout.count("killed 30 times") == 2


FULL_DISK = """
import os, sys
from pathlib import Path
from trainium.checkpoint.convert import to_nxd
from trainium.checkpoint.errors import CheckpointError
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.verify import verify_nxd

source, disk = Path(sys.argv[1]), Path(sys.argv[2])
out, filler, layout = disk / "nxd", disk / "filler", Layout(tp=4, kv_replicator=2)
to_nxd(source, out, layout, workers=2)
os.truncate(filler, 0) if filler.exists() else filler.touch()

def fill(done, total):
    if done and not filler.stat().st_size:
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(bytes(1 << 16)); file.flush()
            except OSError:
                pass

try:
    to_nxd(source, out, Layout(tp=2), workers=int(sys.argv[3]), progress=fill)
except CheckpointError as error:
    print(error)
filler.unlink()
assert verify_nxd(source, out, layout).ok
to_nxd(source, out, Layout(tp=2), workers=2)
assert verify_nxd(source, out, Layout(tp=2)).ok
assert [path.name for path in out.iterdir()] == ["model"]
print("and went on")
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_told_loses_nothing_and_the_conversion_goes_on_later(
    make_model: MakeModel, tmp_path: Path, workers: int
) -> None:
    source, disk = make_model(**SIZES), tmp_path / "disk"
    disk.mkdir()
    size = 2 * (source / "model.safetensors").stat().st_size + 2_000_000
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("needs a user namespace to mount a small disk in")
    script = f'mount -t tmpfs -o size={size} tmpfs "$1" && exec "$2" -c "$3" "$4" "$1" {workers}'
    done = subprocess.run(
        [*namespace, "sh", "-c", script, "sh", disk, sys.executable, FULL_DISK, source],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    message, rest = done.stdout.splitlines()
    assert "nxd/model could not be written: No space left on device" in message
    assert rest == "and went on"


def test_shares_are_written_apart_and_published_by_the_call_that_comes_last(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source, out = make_model(), tmp_path / "nxd"
    to_nxd(source, tmp_path / "whole", LAYOUT)
    for number in (3, 1, 2):
        report = to_nxd(source, out, LAYOUT, share=Share(number, 3), workers=2)
        assert not (out / "model").exists()
    assert [Path(file).name for file in report.files] == ["dp_rank_00_tp_rank_01_pp_rank_00.pt"]
    written = {path.name: path.stat().st_mtime_ns for path in (out / ".model.partial" / "files").iterdir()}
    assert len(written) == 4
    to_nxd(source, out, LAYOUT)
    assert [path.name for path in out.iterdir()] == ["model"]
    for path in (out / "model").iterdir():
        assert path.stat().st_mtime_ns == written[path.name]
        assert path.read_bytes() == (tmp_path / "whole" / "model" / path.name).read_bytes()


@pytest.mark.parametrize("harm", ["lost", "truncated", "frame lost", "flipped"])
def test_what_was_complete_is_looked_at_again(make_model: MakeModel, tmp_path: Path, harm: str) -> None:
    source, out = make_model(), tmp_path / "nxd"
    to_nxd(source, out, LAYOUT, share=Share(1, 2))
    path = out / ".model.partial" / "files" / "dp_rank_00_tp_rank_01_pp_rank_00.pt"
    content = bytearray(path.read_bytes())
    norm = read_shard(path)["model.norm.weight"].view(torch.uint8).numpy().tobytes()
    content[content.index(norm)] ^= 1
    path.write_bytes(content if harm == "flipped" else content[: -10 if harm == "frame lost" else -2000])
    if harm == "lost":
        path.unlink()
    to_nxd(source, out, LAYOUT, workers=2)
    assert verify_nxd(source, out, LAYOUT).ok


def test_parts_of_another_conversion_are_not_taken_over(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "nxd"
    to_nxd(source, out, Layout(tp=2), share=Share(1, 2))
    to_nxd(source, out, LAYOUT, share=Share(1, 2))
    to_nxd(make_model("other", extra=True), out, LAYOUT)
    assert verify_nxd(tmp_path / "other", out, LAYOUT).ok
    with pytest.raises(CheckpointError, match="1 ≤ I ≤ N"):
        Share(3, 2)
    with pytest.raises(CheckpointError, match="must be I/N"):
        Share.parse("half")


@pytest.mark.parametrize("form", ["inline", "per-tensor"])
def test_any_number_of_workers_makes_the_same_files(make_model: MakeModel, tmp_path: Path, form: Form) -> None:
    source = make_model(extra=True)
    trees = []
    for workers in (1, 3):
        nxd, back = tmp_path / f"nxd{workers}", tmp_path / f"back{workers}"
        to_nxd(source, nxd, LAYOUT, form=form, workers=workers)
        to_hf(nxd, back, source / "config.json", LAYOUT, max_shard_bytes=2000, workers=workers)
        to_hf(nxd, back / "one", source / "config.json", LAYOUT, single_file=True, workers=workers)
        files = [path for folder in (nxd, back) for path in folder.rglob("*") if path.is_file()]
        trees.append(
            {str(path.relative_to(tmp_path)).replace(str(workers), "", 1): path.read_bytes() for path in files}
        )
    assert trees[0] == trees[1]


@pytest.mark.parametrize("form", ["inline", "per-tensor"])
@pytest.mark.parametrize("workers", [1, 2])
def test_corrupted_and_truncated_shards_are_named(
    make_model: MakeModel, tmp_path: Path, form: Form, workers: int
) -> None:
    source, nxd, back = make_model(), tmp_path / "nxd", tmp_path / "back"
    to_nxd(source, nxd, LAYOUT, form=form)
    tensors = read_shard(nxd / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt")
    index = list(tensors).index("model.layers.1.mlp.gate_up_proj.weight")
    path = nxd / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt"
    if form == "per-tensor":
        path = path.with_name(f"{path.name}.tensors") / f"tensor_{index}.pt"
    good = path.read_bytes()
    data = tensors["model.layers.1.mlp.gate_up_proj.weight"].view(torch.uint8).numpy().tobytes()
    bad = bytearray(good)
    bad[good.index(data) + len(data) // 2] ^= 4
    path.write_bytes(bad)
    with pytest.raises(CheckpointError, match=rf"{path.name} cannot be read: record data/\d+ is corrupted"):
        to_hf(nxd, back, source / "config.json", LAYOUT, workers=workers)
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match=f"{path.name} cannot be read: it is truncated"):
        to_hf(nxd, back, source / "config.json", LAYOUT, workers=workers)
    assert not back.exists()


def test_files_that_torch_wrote_without_checksums_are_read(make_model: MakeModel, tmp_path: Path) -> None:
    source, nxd = make_model(), tmp_path / "nxd"
    to_nxd(source, nxd, LAYOUT)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        for path in (nxd / "model").iterdir():
            torch.save(read_shard(path), path)
    finally:
        torch.serialization.set_crc32_options(before)
    to_hf(nxd, tmp_path / "back", source / "config.json", LAYOUT)
    assert verify_nxd(tmp_path / "back", nxd, LAYOUT).ok


def test_a_worker_that_is_killed_is_an_error_that_says_so() -> None:
    def die(item: int, moved: Moved) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(CheckpointError, match=r"killed \(signal 9\).*fewer --workers"):
        spread(Work(die, lambda item: None), [1, 2, 3], 2, moved=lambda size: None, finished=lambda item, result: None)


def test_checksums_are_true(make_model: MakeModel, tmp_path: Path) -> None:
    to_nxd(make_model(), tmp_path / "nxd", LAYOUT)
    for path in (tmp_path / "nxd" / "model").iterdir():
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None


def test_archives_and_tensors_beyond_4_gib_are_zip64(tmp_path: Path) -> None:
    """Sparse on the disk; mapped, so that nothing of it is read."""
    info = {
        "small": TensorInfo("float32", (2,)),
        "huge": TensorInfo("bfloat16", (5 << 15, 1 << 15)),
        "last": TensorInfo("float32", (2,)),
    }
    image: ArchiveImage = tensors_image("big", info)
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        for index, offset in enumerate(image.offsets):
            header = image.header(index, 0)
            os.pwrite(file.fileno(), header, offset - len(header))
        os.pwrite(file.fileno(), torch.tensor([3.0, 4.0]).numpy().tobytes(), image.offsets[2])
        for offset, content in image.frame([0, 0, 0]):
            os.pwrite(file.fileno(), content, offset)
    assert path.stat().st_size == image.size
    loaded = torch.load(path, mmap=True)
    assert loaded["huge"].shape == (5 << 15, 1 << 15)
    assert loaded["last"].tolist() == [3.0, 4.0]
    with zipfile.ZipFile(path) as archive:
        assert archive.getinfo("big/data/1").file_size == 10 << 30
        assert archive.getinfo("big/data/2").header_offset > 10 << 30


def test_another_input_of_the_same_size_and_time_is_another_conversion(make_model: MakeModel, tmp_path: Path) -> None:
    source, out = make_model(), tmp_path / "nxd"
    other = tmp_path / "other"
    shutil.copytree(source, other)
    weights = other / "model.safetensors"
    before, content = weights.stat(), bytearray(weights.read_bytes())
    content[-1000:] = bytes(byte ^ 1 for byte in content[-1000:])
    weights.write_bytes(content)
    for path in (source / weights.name, weights):
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    to_nxd(source, out, LAYOUT, share=Share(1, 2))
    to_nxd(other, out, LAYOUT)
    assert verify_nxd(other, out, LAYOUT).ok
