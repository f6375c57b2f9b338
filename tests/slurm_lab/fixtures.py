"""pytest plugin: a real Slurm for a test session, started when the first test asks for it."""

from collections.abc import Iterator

import pytest

from .lab import SlurmLab, slurm_lab


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmLab]:
    """Two nodes, no accounting, like a ParallelCluster without a database. Shared: leave its daemons alone."""
    with slurm_lab() as lab:
        yield lab


@pytest.fixture(scope="session")
def slurm_with_accounting() -> Iterator[SlurmLab]:
    """Two nodes with slurmdbd and mariadb. Shared: leave its daemons alone."""
    with slurm_lab(accounting=True) as lab:
        yield lab
