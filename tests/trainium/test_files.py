"""Files that are there whole or not at all, and errors that name them."""

import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm.folder import write_atomic as write_record
from trainium.files import write_atomic


@pytest.mark.parametrize("write", [write_atomic, write_record])
def test_what_does_not_fit_leaves_the_old_file_and_an_error_that_names_it(
    write: Callable[[Path, str], None], tmp_path: Path
) -> None:
    path = tmp_path / "record.json"
    write(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # stands for a full disk
    try:
        with pytest.raises(OSError, match=str(path)):
            write(path, "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
