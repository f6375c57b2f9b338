"""Where a run keeps things, and what its jobs are told of it."""

from pathlib import Path

import pytest

from blocks import LocalCluster, NeuronToolchain
from tasks.jobspecs import Site, evaluate_job, export_job, launch_job, nxdt_paths, to_nxd_job
from trainium.config.recipe import load_recipe
from trainium.run.folder import RunFolder


def site(runs: Path, *overrides: str) -> Site:
    folder = RunFolder.named(runs, "r")
    return Site(load_recipe("tanuki-8b-sft", overrides), folder, LocalCluster(runs=runs), NeuronToolchain.installed())


def test_without_a_place_of_its_own_everything_is_in_the_run_folder(tmp_path: Path) -> None:
    paths = nxdt_paths(site(tmp_path))
    for path in vars(paths).values():
        assert path.is_relative_to(tmp_path / "r")


def test_places_that_the_recipe_names_are_used(tmp_path: Path) -> None:
    named = site(tmp_path, "model.folder=/fsx/m", "dataset.folder=/fsx/d", "compile.cache=/fsx/c")
    paths = nxdt_paths(named)
    assert paths.base == Path("/fsx/m")
    assert paths.cache == Path("/fsx/c")
    assert named.places.source_data == Path("/fsx/d")
    assert paths.train == tmp_path / "r" / "data" / "train.jsonl"  # prepared rows belong to the run


def test_a_local_model_is_read_where_it_is(tmp_path: Path) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    assert site(tmp_path, f"model.source={model}").places.base == model


def test_trial_steps_of_a_compile_stay_out_of_the_experiment(tmp_path: Path) -> None:
    paths = nxdt_paths(site(tmp_path))
    assert paths.log_folder("train") == paths.experiment
    assert paths.log_folder("compile") != paths.experiment


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 1), (4, 4)])
def test_compile_and_train_take_every_node_and_the_other_stages_one(tmp_path: Path, nodes: int, tasks: int) -> None:
    here, job = site(tmp_path, f"resources.nodes={nodes}", "resources.partition=trn1"), tmp_path / "job"
    for phase in ("compile", "train"):
        spec = launch_job(here, job, phase)
        assert (spec.nodes, spec.task_count, spec.cpus_per_task, spec.per_task) == (nodes, tasks, 128, True)
        assert (spec.environment, spec.activate) == ("toolchain", str(Path("~/env/bin/activate").expanduser()))
    for spec in (to_nxd_job(here, job), evaluate_job(here, job)):
        assert (spec.nodes, spec.per_task, spec.environment, spec.activate) == (1, False, "project", None)
        assert spec.payload[0] == str(here.cluster.python)
        assert spec.partition == "trn1"


def test_what_the_recipe_asks_of_the_export_reaches_it(tmp_path: Path) -> None:
    card, template = tmp_path / "card.json", tmp_path / "template"
    plain = export_job(
        site(tmp_path, "export.single_file=false"), tmp_path, tmp_path / "x.ckpt", template=None, card=card
    )
    assert not {"--single-file", "--chat-template", "--dtype"} & set(plain.payload)
    asked = site(tmp_path, "export.single_file=true", "export.dtype=float32")
    full = export_job(asked, tmp_path, tmp_path / "x.ckpt", template=template, card=card)
    assert "--single-file" in full.payload
    assert full.payload[full.payload.index("--chat-template") + 1] == str(template)
    assert full.payload[full.payload.index("--dtype") + 1] == "float32"
