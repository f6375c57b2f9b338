"""A cluster is recognised on all its machines, and never taken for another one."""

from pathlib import Path

import pytest

from slurm.cluster import SlurmScheduler
from slurm.snapshot import place


def conf(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def word(path: Path) -> str:
    return SlurmScheduler(conf=path).identity


def machine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: name)


HEAD = "ClusterName=Lab 1\nSlurmctldHost=ip-10-0-0-1(10.0.0.1)\n"


def test_one_cluster_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, "head")
    here = word(conf(tmp_path / "head/slurm.conf", HEAD))
    machine(monkeypatch, "login")
    assert word(conf(tmp_path / "login/slurm.conf", f"# ours\nMessageTimeout=60\n{HEAD}")) == here
    assert here.startswith("lab-")


def test_clusters_of_one_name_are_two(tmp_path: Path) -> None:
    """ParallelCluster has the controller in a file of its own."""
    words = set()
    for number in (1, 2):
        conf(tmp_path / f"{number}/part/host.conf", f"SlurmctldHost=ip-10-0-0-{number}\n")
        text = "ClusterName=parallelcluster\ninclude part/host.conf\n"
        words.add(word(conf(tmp_path / f"{number}/slurm.conf", text)))
    assert len(words) == 2


@pytest.mark.parametrize("text", [None, "", "ClusterName=c\n", "ClusterName=c\nSlurmctldHost=localhost\n"])
def test_a_cluster_that_cannot_be_known_is_this_machines(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "slurm.conf"
    if text is not None:
        conf(path, text)
    machine(monkeypatch, "one")
    here = word(path)
    assert word(path) == here
    machine(monkeypatch, "two")
    assert word(path) != here


def test_no_two_users_and_no_two_clusters_share_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = set()
    for user in (1000, 1001):
        monkeypatch.setattr("os.getuid", lambda user=user: user)
        places |= {place(tmp_path, "a-1"), place(tmp_path, "b-1")}
    assert len(places) == 4
    assert place(tmp_path, None) is None
