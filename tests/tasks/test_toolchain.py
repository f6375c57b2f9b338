"""The probe of the toolchain: what it finds does not depend on where and how the flow was started."""

from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain
from tasks.context import Run
from tasks.jobspecs import Site
from tasks.toolchain import ToolchainError, probe_toolchain
from trainium.config.recipe import load_recipe
from trainium.run.folder import RunFolder


def run(runs: Path, toolchain: NeuronToolchain) -> Run:
    folder = RunFolder.named(runs, "r")
    lease = folder.start("", {}, lambda _: [])
    return Run(Site(load_recipe("rehearsal"), folder, LocalCluster(runs=runs), toolchain), lease)


def test_nothing_of_the_callers_folder_or_python_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "platform", "torch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHOME", "/nowhere")
    versions = probe_toolchain.fn(run(tmp_path / "runs", NeuronToolchain.stand_in()))
    assert versions["torch"] is not None


@pytest.mark.parametrize("activation", ["exit 3", "echo 'no such module' >&2; exit 3", "python3() { return 3; }"])
def test_an_environment_that_does_not_start_is_named(tmp_path: Path, activation: str) -> None:
    activate = tmp_path / "bin" / "activate"
    activate.parent.mkdir()
    activate.write_text(activation + "\n")
    with pytest.raises(ToolchainError, match=r"bin/activate does not start \(code 3\): (no|.*module)"):
        probe_toolchain.fn(run(tmp_path / "runs", NeuronToolchain(examples=tmp_path, activate=activate)))
