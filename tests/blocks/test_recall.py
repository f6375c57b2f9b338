"""Where a run's jobs are, read back from a file that a disk may have damaged."""

from pathlib import Path

import pytest

from blocks import recall
from blocks.clusters import BrokenClusterFile


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"[]", b"{}", b"3", b"\xff\0", b'{"kind": "LocalCluster"}', b'{"kind": "Other", "runs": "/r"}'],
)
def test_a_damaged_file_is_named(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(damage)
    with pytest.raises(BrokenClusterFile, match=r"cluster\.json is damaged"):
        recall(path)
