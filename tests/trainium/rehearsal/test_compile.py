"""neuron_parallel_compile: trial run, cache, summary, exit codes."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from trainium.rehearsal import cache, parallel_compile

if TYPE_CHECKING:
    from tests.trainium.rehearsal.conftest import Toolchain, Workspace


def test_fills_the_cache_once(
    workspace: Workspace,
    toolchain: Toolchain,
    tmp_path: Path,
    trainer_environment: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = workspace.write_config(tmp_path)
    env = {
        "COMPILE": "1",
        "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache"),
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS": "1",
    }
    command = ["neuron_parallel_compile", *toolchain.training(config)]
    first = toolchain.run(*command, cwd=tmp_path, **env)
    assert first.returncode == 0, first.stdout
    assert first.stdout.startswith("REHEARSAL: ")
    assert "10/10 [" in first.stdout  # ten steps whatever max_steps says
    assert "Call compiler with cmd: neuronx-cc compile --framework=XLA" in first.stdout
    assert "[INFO]: Compilation Successfully Completed for model.MODULE_" in first.stdout
    assert re.search(r"INFO \|\|NEURON_PARALLEL_COMPILE\|\|: Total graphs: 2\n", first.stdout)
    assert re.search(r"INFO \|\|NEURON_PARALLEL_COMPILE\|\|: Total failed compilations: 0\n", first.stdout)
    modules = list((tmp_path / "cache").glob("neuronxcc-*+*/MODULE_*+*"))
    assert len(modules) == 2
    for module in modules:
        names = sorted(path.name for path in module.iterdir())
        assert names == ["compile_flags.json", "model.done", "model.hlo_module.pb", "model.log", "model.neff"]
        assert "aten." in (module / "model.hlo_module.pb").read_text()
    (results,) = tmp_path.glob("total_neuron_parallel_compile_results_*.json")
    parsed = json.loads(results.read_text())
    assert parsed["compilation_summary"] == {"true": 2}
    assert {Path(graph).parent for graph in parsed["compilation_report"]} == set(modules)
    assert not workspace.checkpoints(tmp_path)

    again = toolchain.run(*command, cwd=tmp_path, **env)
    assert again.returncode == 0
    assert "No todo hlos found in cache or hlo_tasklist" in again.stdout
    assert "Total graphs" not in again.stdout

    workspace.train(config, "trainer.max_steps=1")
    assert capfd.readouterr().out.count("Using a cached neff at") == 2


def test_a_wrong_config_fails_in_the_trial_run(workspace: Workspace, toolchain: Toolchain, tmp_path: Path) -> None:
    config = workspace.write_config(tmp_path, model__encoder_seq_length=256)
    env = {"COMPILE": "1", "NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}
    result = toolchain.run("neuron_parallel_compile", *toolchain.training(config), cwd=tmp_path, **env)
    assert result.returncode == 1
    assert "Mismatch in input data 128 and sequence length 256" in result.stdout
    assert "ERROR ||NEURON_PARALLEL_COMPILE||: There was an error in the training script." in result.stdout


@pytest.fixture
def graph(tmp_path: Path, trainer_environment: None) -> cache.Module:
    os.environ["NEURON_COMPILE_CACHE_URL"] = str(tmp_path / "cache")
    module = cache.module_for({"sequence": 128})
    cache.extract(module, "aten.mm")
    return module


def test_a_failed_graph_stays_in_the_cache(graph: cache.Module, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["REHEARSAL_FAULT"] = "compile:graph-fails"
    assert parallel_compile.main(["--command", "compile"]) == 1
    output = capsys.readouterr().out
    assert "ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile'" in output
    assert "Total failed compilations: 1" in output
    del os.environ["REHEARSAL_FAULT"]
    assert parallel_compile.main(["--command=compile"]) == 1
    assert "Got a cached failed neff at" in capsys.readouterr().out
    os.environ["NEURON_CC_FLAGS"] = "--retry_failed_compilation"
    assert parallel_compile.main(["--command=compile"]) == 0
    assert graph.is_done


def test_commands_that_clean(graph: cache.Module, capsys: pytest.CaptureFixture[str]) -> None:
    lock = graph.folder / "model.hlo_module.pb.lock"
    lock.touch()
    assert parallel_compile.main(["--command", "clear-locks"]) == 0
    assert not lock.exists()
    assert parallel_compile.main(["--command", "clean"]) == 0
    assert not graph.folder.exists()
    output = capsys.readouterr().out
    assert "Cleanup locks done." in output
    assert "Cleanup done." in output


def test_cache_dir_in_the_flags_beats_the_url(tmp_path: Path, trainer_environment: None) -> None:
    os.environ["NEURON_CC_FLAGS"] = f"--model-type transformer --cache_dir={tmp_path / 'other'}"
    assert cache.cache_folder().parent == tmp_path / "other"


def test_the_key_is_that_of_the_graph(trainer_environment: None) -> None:
    module = cache.module_for({"sequence": 128, "tp": 4})
    assert cache.module_for({"tp": 4, "sequence": 128}) == module
    assert cache.module_for({"tp": 4, "sequence": 256}) != module
    os.environ["NEURON_CC_FLAGS"] = "--retry_failed_compilation"
    assert cache.module_for({"tp": 4, "sequence": 128}) == module
    os.environ["NEURON_CC_FLAGS"] = "-O1"
    assert cache.module_for({"tp": 4, "sequence": 128}) != module


@pytest.mark.parametrize(
    "words", [["--command", "polish"], ["--fast", "torchrun"], [], ["torchrun", "--redirects", "3", "x.py"]]
)
def test_refuses_what_it_does_not_know(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parallel_compile.main(words)
    assert stop.value.code == 1
    assert "neuron_parallel_compile: " in capsys.readouterr().err
