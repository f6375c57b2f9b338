"""Model folders of links, as the Hub's cache has them."""

from pathlib import Path

import pytest

from trainium.model.snapshot import SnapshotError, check_snapshot
from trainium.rehearsal.model import write_model


@pytest.fixture(scope="module")
def blobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blobs")
    write_model(folder)
    return folder


def linked(blobs: Path, folder: Path) -> Path:
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_links_are_as_good_as_files(blobs: Path, tmp_path: Path) -> None:
    assert check_snapshot(linked(blobs, tmp_path)).digest == check_snapshot(blobs).digest


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_link_to_nothing_is_called_one(name: str, blobs: Path, tmp_path: Path) -> None:
    folder = linked(blobs, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / name).symlink_to(blobs / "gone")
    with pytest.raises(SnapshotError, match=f"{name} are links to files that are gone"):
        check_snapshot(folder)
