"""What the command answers when what it is given cannot work: exit code 2, one message, nothing submitted."""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.flows.recorders import without_prefect
from trainium.config.recipe import difference, frozen_part, load_recipe, recipe_yaml
from trainium.run.folder import RunFolder

TRAINIUM = Path(sys.executable).with_name("trainium")
# Importing one of these takes seconds; a typing mistake is answered without them.
POISON = """
import sys
class Poison:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"prefect", "torch", "transformers"}:
            raise ImportError(f"poisoned: {name}")
sys.meta_path.insert(0, Poison())
"""


@dataclass(frozen=True)
class Answer:
    code: int
    out: str
    err: str

    def refused(self, *words: str) -> str:
        """The one message, which holds all these words."""
        assert self.code == 2, self
        assert self.err.count("refused: ") == 1
        assert self.err.startswith("refused: ")
        assert self.without_noise()
        for word in words:
            assert word in self.err
        return self.err

    def without_noise(self) -> bool:
        """No traceback, and no log line of Prefect's (`12:00:00.123 | ERROR | …`)."""
        return not re.search(r"Traceback|\d\d:\d\d:\d\d\.\d+ \||prefect\.", self.out + self.err)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder of the command."""
    work = tmp_path / "work"
    work.mkdir()
    return work


@pytest.fixture
def poison(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "poison").mkdir()
    (tmp_path / "poison" / "sitecustomize.py").write_text(POISON)
    return {"PYTHONPATH": str(tmp_path / "poison")}


def trainium(folder: Path, *argv: str, **variables: str) -> Answer:
    done = subprocess.run(
        [TRAINIUM, *argv],
        cwd=folder,
        env=without_prefect(**variables),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def rows(folder: Path, **columns: str) -> Path:
    folder.mkdir()
    for name in ("train.jsonl", "validation.jsonl"):
        (folder / name).write_text((json.dumps(columns) + "\n") * 20)
    return folder


def test_the_poison_works(folder: Path, poison: dict[str, str]) -> None:
    answer = trainium(folder, "run", "rehearsal", "--dry-run", **poison)
    assert "poisoned: prefect" in answer.err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tanuki"], ["tanuki", "Known recipes: rehearsal, smollm2, tanuki-8b-sft", ".yaml"]),
        (["rehearsal", "training.max_step=3"], ["training.max_step=3", "no such key", "training.max_steps?"]),
        (["rehearsal", "training.max_steps"], ["'training.max_steps'", "key=value"]),
        (["rehearsal", "training.max_steps=many", "resources.partition=$(id)"], ["'many'", "integer", "'$(id)'"]),
        (["smollm2"], ["model.source", "dataset.source", "PATH"]),
        (["broken.yaml"], ["broken.yaml", "line 2"]),
        (["binary.yaml"], ["binary.yaml", "utf-8"]),
        (["list.yaml"], ["list.yaml", "mapping"]),
        (["a [/red] name"], ["a [/red] name", "Known recipes"]),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_at_once(
    argv: list[str], words: list[str], folder: Path, poison: dict[str, str]
) -> None:
    files = {"broken.yaml": b"model:\n  {: [", "binary.yaml": b"\xff\xfe\x00", "list.yaml": b"[1, 2]\n"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    answer = trainium(folder, "run", *argv, **poison)
    answer.refused(*words)
    assert answer.out == ""
    assert {path.name for path in folder.iterdir()} == set(files)


def test_everything_that_is_wrong_is_said_at_once(folder: Path, poison: dict[str, str]) -> None:
    wrong = ["trainingg.max_steps=3", "training.learning_rate=-1", "parallelism.tensor=0", "convert.engine=magic"]
    message = trainium(folder, "run", "tanuki-8b-sft", *wrong, **poison).refused("4 problems", "tanuki-8b-sft")
    lines = message.splitlines()[1:]
    assert len(lines) == 4
    for key in ("trainingg", "training.learning_rate", "parallelism.tensor", "convert.engine"):
        (line,) = [line for line in lines if line.startswith(f"  - {key}=")]
        assert ": " in line  # the rule, and what would work
    assert "native" in message
    assert "nxdt" in message
    assert list(folder.iterdir()) == []


HOSTILE = ["../x", "$(touch pwned)", "a; 'b\"\nc", "-x", ".hidden", "", "ü", "x" * 81]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_run_name_is_refused_at_once(name: str, folder: Path, poison: dict[str, str]) -> None:
    answer = trainium(folder, "run", "rehearsal", f"--run={name}", **poison)
    answer.refused(repr(name), "letters, digits")
    assert list(folder.iterdir()) == []


def test_a_recipe_file_may_be_called_anything(folder: Path) -> None:
    (folder / "my recipe.yaml").write_text("defaults: [rehearsal]\nname: mine\n")
    answer = trainium(folder, "run", "my recipe.yaml", "--dry-run")
    assert answer.code == 0
    assert re.search(r"runs/mine-\d{8}-\d{6}/jobs/train-1/launch\.sh", answer.out)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["model.source=./gone", "dataset.source=./empty", "parallelism.tensor=3"],
            [
                *("model.source=", "/work/gone", "no such folder", "owner/name"),
                *("dataset.train_file=train.jsonl", "dataset.validation_file=validation.jsonl", "dataset.source"),
                *("parallelism.tensor=3", "num_attention_heads=8", "parallelism.tensor=4 parallelism.kv_replicator=1"),
            ],
        ),
        (["model.source=./damaged"], ["damaged/config.json", "JSON", "again"]),
        (["--cluster=cloud"], ["--cluster 'cloud'", "local, slurm, slurm-cluster/NAME"]),
    ],
)
def test_what_the_plan_refuses_leaves_no_folder(argv: list[str], words: list[str], folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text('{"hidden_size": ')
    answer = trainium(folder, "run", "rehearsal", "--run", "r", *argv)
    answer.refused(*words)
    assert answer.out == ""
    assert not (folder / "runs").exists()


def test_a_dry_run_refuses_the_same(folder: Path) -> None:
    answer = trainium(folder, "run", "tanuki-8b-sft", "parallelism.tensor=24", "--dry-run")
    answer.refused("parallelism.tensor=24", "num_attention_heads=32")
    assert answer.out == ""
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value", "others"),
    [("--toolchain", "mine", "rehearsal, installed"), ("--cluster", "slurm-cluster/mine", "local, slurm")],
)
def test_a_block_that_is_not_registered(
    option: str, value: str, others: str, folder: Path, prefect_server: str
) -> None:
    answer = trainium(folder, "run", "rehearsal", option, value, PREFECT_API_URL=prefect_server)
    answer.refused(option, "'mine'", others, "python -m deployments.register")
    assert answer.out == ""
    assert not (folder / "runs").exists()


def test_a_dataset_without_the_columns(folder: Path, prefect_server: str) -> None:
    rows(folder / "data", question="2+2", answer="4")
    argv = ["--run", "r", "dataset.source=data"]
    answer = trainium(folder, "run", "rehearsal", *argv, PREFECT_API_URL=prefect_server)
    answer.refused("no column 'input'", "'question', 'answer'", "dataset.prompt_field", "dataset.response_field")
    assert [line[:11].split() for line in answer.out.splitlines()[1:]] == [
        ["✓", "plan"],
        ["✓", "model"],
        ["✗", "dataset"],
    ]
    run = RunFolder.named(folder / "runs", "r")
    assert run.record("model") is not None
    assert run.record("dataset") is None
    assert not run.jobs.exists()
    assert not (folder / "runs" / ".local-jobs").exists()


def test_a_run_keeps_its_values(folder: Path, prefect_server: str) -> None:
    """Also: a folder whose name looks like the terminal's markup is printed as it is."""
    runs = folder / "a [/red] [bold]folder"
    started = load_recipe("rehearsal", ["training.seed=7"])
    run = RunFolder.named(runs, "r")
    run.start(recipe_yaml(started), frozen_part(started), lambda old: difference(old, frozen_part(started))).release()
    (run.job("convert", 1)).mkdir(parents=True)  # something was submitted
    before = sorted(run.path.rglob("*"))
    argv = ["--run", "r", "--runs", str(runs), "training.seed=8", "training.learning_rate=0.1"]
    answer = trainium(folder, "run", "rehearsal", *argv, PREFECT_API_URL=prefect_server)
    message = answer.refused("training.seed: 7 → 8", "training.learning_rate: 0.005 → 0.1", "another name")
    assert str(runs) in message
    assert answer.out == f"Run r in {run.path}\n"
    assert sorted(run.path.rglob("*")) == before
    assert run.recipe.read_text() == recipe_yaml(started)


def test_a_server_that_is_down_is_named(folder: Path) -> None:
    answer = trainium(folder, "run", "rehearsal", "--run", "r", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert answer.code == 1
    assert answer.err.startswith("failed: Prefect's server at http://127.0.0.1:9/api does not answer")
    assert "PREFECT_API_URL" in answer.err
    assert "Traceback" not in answer.err
    assert not (folder / "runs").exists()


def test_cancelling_a_run_that_is_not_there(folder: Path) -> None:
    RunFolder.named(folder, "other").path.mkdir()
    trainium(folder, "cancel", "r", "--runs", str(folder)).refused("no run 'r'", "other")


@pytest.mark.parametrize("argv", [["run"], ["run", "rehearsal", "--bogus"], ["no-such-command"]])
def test_a_command_line_that_means_nothing(argv: list[str], folder: Path, poison: dict[str, str]) -> None:
    answer = trainium(folder, *argv, **poison)
    assert answer.code == 2
    assert answer.without_noise()
    assert "Usage" in answer.err


GOLDEN = Path(__file__).parents[1] / "golden" / "gqa-trn1-tp8-kv4-fused"
LAYOUT = ["--tp", "8", "--kv-replicator", "4"]


def test_weights_are_converted_and_verified_without_prefect_or_torch(folder: Path, poison: dict[str, str]) -> None:
    source = str(GOLDEN / "hf")
    written = trainium(folder, "convert", "to-nxd", source, "nxd", *LAYOUT, "--workers", "2", **poison)
    assert (written.code, written.err) == (0, "")
    assert "nxd: 8 files, " in written.out
    back = trainium(folder, "convert", "to-hf", "nxd", "hf", "--config", f"{source}/config.json", "--verify", **poison)
    assert (back.code, back.err) == (0, "")
    assert back.out.endswith(", verified\n")
    for pair in (("nxd", "hf"), ("hf", source), (str(GOLDEN / "nxd"), "hf")):
        equal = trainium(folder, "verify", *pair, **poison)
        assert equal.code == 0, equal
        assert equal.out.endswith("EQUAL: names, shapes, dtypes and values\n")


def test_a_model_that_differs_is_exit_code_1_and_a_table(folder: Path, poison: dict[str, str]) -> None:
    other = GOLDEN.with_name("gqa-trn1-tp4-kv2-fused-2q")
    answer = trainium(folder, "verify", str(GOLDEN / "hf"), str(other / "hf"), **poison)
    assert (answer.code, answer.err) == (1, "")
    assert "model.layers.2.mlp.down_proj.weight: only in A" in answer.out
    found = trainium(folder, "verify", str(GOLDEN / "hf"), str(other / "hf"), "--json", "--names-only", **poison)
    assert found.code == 1
    assert len(json.loads(found.out)["only_in_a"]) == 9


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["convert", "to-nxd", "HF", "nxd", "--tp", "5"], ["tp=5 must divide num_attention_heads=8", "tp=8"]),
        (["convert", "to-nxd", "gone", "nxd", *LAYOUT], ["gone does not exist"]),
        (["convert", "to-hf", "NXD", "out", "--config", "HF/config.json", "--tp", "4"], ["tp=4 was given", "tp=8"]),
        (["convert", "to-hf", "HF", "out", "--config", "HF/config.json"], ["holds no shards"]),
        (["verify", "NXD", "NXD"], ["--config"]),
        (["verify", "HF", "gone"], ["gone"]),
    ],
)
def test_weights_that_cannot_be_converted_or_compared(
    argv: list[str], words: list[str], folder: Path, poison: dict[str, str]
) -> None:
    paths = {"HF": str(GOLDEN / "hf"), "NXD": str(GOLDEN / "nxd"), "HF/config.json": str(GOLDEN / "hf" / "config.json")}
    trainium(folder, *(paths.get(argument, argument) for argument in argv), **poison).refused(*words)
    assert list(folder.iterdir()) == []
