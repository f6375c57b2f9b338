"""What a dry run of the tutorial's recipe would do, held against what the tutorial does.

Both sides are run, with recorders in place of every program: the tutorial's commands and scripts (tests/flows/tutorial,
word by word, line breaks restored) and the scripts that the dry run prints. What differs has to be in the two tables of
deviations, and what is in them has to differ. Installing the toolchain (problem 20) is nobody's part here.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from blocks import NeuronToolchain, SlurmCluster
from flows.dry_run import dry_run
from tasks.jobspecs import Site
from tests.flows.recorders import Call, Recorders, differing, without_prefect
from trainium.config.deviations import ABSENT, DEVIATIONS
from trainium.config.nxdt import Phase
from trainium.config.recipe import load_recipe
from trainium.config.rules import Facts, layout_of
from trainium.config.script_deviations import SCRIPT_DEVIATIONS, Step
from trainium.model.companions import COPIED, read_chat_template
from trainium.model.nxdt_converter import FULL_STATE
from trainium.rehearsal.compose import register_resolvers
from trainium.run.folder import RunFolder

TUTORIAL = Path(__file__).parent / "tutorial"
TUTORIAL_CONFIG = Path(__file__).parents[1] / "trainium" / "config" / "tutorial_config.yaml"
REHEARSAL = NeuronToolchain.stand_in().examples  # has train.sh and train_setup.sh with the real ones' assignments
CONFIG_NAME = "hf_tanuki_8B_SFT_config"
ENGINES = ("native", "nxdt")
PHASES: tuple[Phase, ...] = ("compile", "train")
JOB = {"SLURM_JOB_ID": "17", "SLURM_NNODES": "1"}  # what Slurm itself tells every script, as far as they look
ACTIVE = {"VIRTUAL_ENV": "nxdt"}  # the tutorial's shell has the toolchain's environment active; our scripts do it
TO_NXD, TO_HF = "convert_checkpoint_from_hf_to_nxd.sh", "convert_checkpoint_from_nxd_to_hf.sh"

# What differs and is no option, variable or program that the comparisons below could see.
IN_WORDS = {
    *("huggingface-cli download", "aws s3 cp", "curl | jq"),
    *("checkpoint_converter.py", "scripts/checkpoint_converter.py", "verify-nxd", "checkpoint.pt", "evaluate"),
    *("train.sh", "srun", "tee -a $LOG_PATH/log", "neuron-monitor"),
}


@dataclass(frozen=True)
class Tutorial:
    """What the tutorial's reader types, and what the scripts that they submit do."""

    exports: dict[str, str]
    typed: list[Call]
    scripts: dict[str, list[Call]]  # by file name, and `compile`, `train` for the wrapped command

    def submission(self, job: str) -> Call:
        to_be_found = {"convert": TO_NXD, "export": TO_HF}.get(job)
        found = [
            call
            for call in self.typed
            if call.program == "sbatch"
            and (to_be_found in call.argv if to_be_found else "--wrap" in call.options)
            and (call.environment.get("COMPILE") == "1") == (job == "compile")
        ]
        assert len(found) == 1
        return found[0]


@dataclass(frozen=True)
class Dry:
    """The texts of a dry run, written where the run would write them, and what its job scripts do."""

    site: Site
    texts: dict[str, str]
    calls: dict[str, list[Call]]  # by job, without its attempt number

    @property
    def run(self) -> Path:
        return self.site.folder.path

    def sbatch(self, job: str) -> dict[str, str]:
        lines = re.findall(r"^#SBATCH (.*)$", self.texts[f"jobs/{job}-1/script.sh"], re.MULTILINE)
        return Call("sbatch", tuple(word for line in lines for word in shlex.split(line)), {}).options

    def call(self, job: str, program: str) -> Call:
        (found,) = [call for call in self.calls[job] if call.program == program]
        return found


@pytest.fixture(scope="module")
def tutorial(tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    home = tmp_path_factory.mktemp("tutorial")
    programs = ("sbatch", "huggingface-cli", "mkdir", "aws", "python3", "curl", "jq")
    typing = Recorders(home / "typing", *programs)
    reader = "cd() { :; }; . ./environment.sh; "  # goes nowhere: the tutorial's folders are not here
    for source in TUTORIAL.iterdir():
        shutil.copy(source, home)
    typed = typing.bash("-ec", f"{reader} . ./commands.sh", environment={}, cwd=home)
    exports = {name: typed[0].environment[name] for name in re.findall(r"^export (\w+)", _text("environment"), re.M)}
    scripts = {
        name: typing.bash("-ec", f"{reader} . ./{name}", environment={**JOB, **ACTIVE}, cwd=home)
        for name in (TO_NXD, TO_HF)
    }
    reader += f"OUTPUT_MODEL_DIR={home}; "
    scripts["tokenizer.sh"] = typing.bash("-ec", f"{reader} . ./tokenizer.sh", environment={}, cwd=home)
    examples = home / "examples"
    (examples / "conf").mkdir(parents=True)
    shutil.copy(TUTORIAL_CONFIG, examples / "conf" / f"{CONFIG_NAME}.yaml")
    for name in ("train.sh", "train_setup.sh"):
        shutil.copy(REHEARSAL / name, examples)
    training = Recorders(home / "training", "srun", "torchrun", "neuron_parallel_compile", "scontrol")
    made = Tutorial(exports, typed, scripts)
    for phase in PHASES:
        submitted = made.submission(phase)
        compiling = {"COMPILE": "1"} if "COMPILE" in submitted.environment else {}
        environment = {**exports, **JOB, **compiling, **ACTIVE, "CONF_FILE": CONFIG_NAME}
        command = submitted.options["--wrap"]
        scripts[phase] = training.bash("-ec", command, environment=environment, cwd=examples)
    return made


def _text(name: str) -> str:
    return (TUTORIAL / f"{name}.sh").read_text()


@pytest.fixture(scope="module")
def dries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dry]:
    return {engine: _dry(tmp_path_factory.mktemp(engine), engine) for engine in ENGINES}


def _dry(home: Path, engine: str) -> Dry:
    names = ("srun", "torchrun", "neuron_parallel_compile", "scontrol", "python3", "project-python")
    recorders = Recorders(home / "bin", *names)
    (home / "activate").write_text("export VIRTUAL_ENV=nxdt\n")
    site = Site(
        load_recipe("tanuki-8b-sft", [f"convert.engine={engine}"]),
        RunFolder.named(home / "runs", "r"),
        SlurmCluster(runs=home / "runs", python=recorders.program("project-python")),
        NeuronToolchain(examples=REHEARSAL, activate=home / "activate"),
    )
    texts = dict(dry_run(site))
    assert not site.cluster.runs.exists()
    for title, text in texts.items():
        if title.endswith((".sh", ".yaml", ".jinja")):
            path = site.folder.path / title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    scripts = sorted(site.folder.jobs.glob("*-1/script.sh"))
    calls = {
        script.parent.name.removesuffix("-1"): recorders.bash(str(script), environment=JOB, cwd=home)
        for script in scripts
    }
    return Dry(site, texts, calls)


@pytest.fixture(params=ENGINES)
def dry(request: pytest.FixtureRequest, dries: dict[str, Dry]) -> Dry:
    return dries[request.param]


@pytest.fixture
def native(dries: dict[str, Dry]) -> Dry:
    return dries["native"]


@pytest.fixture
def nxdt(dries: dict[str, Dry]) -> Dry:
    return dries["nxdt"]


def listed(*steps: Step, engine: str | None = None) -> set[str]:
    """Keys of the table's entries for these steps: those of one engine, or those that do not depend on it."""
    return {d.key for d in SCRIPT_DEVIATIONS if d.step in steps and d.engine == engine} - IN_WORDS


def test_the_jobs_are_the_tutorials_and_what_is_named(dries: dict[str, Dry]) -> None:
    tutorial = {"convert", "compile", "train", "export"}
    assert set(dries["native"].calls) == tutorial | {"evaluate"}
    assert set(dries["nxdt"].calls) == tutorial | {"evaluate", "convert-prepare", "convert-verify", "export-merge"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_launch_is_submitted_with_the_same_options(phase: Phase, dry: Dry, tutorial: Tutorial) -> None:
    ours, theirs = dry.sbatch(phase), dict(tutorial.submission(phase).options)
    assert theirs.pop("--wrap") == "srun ./train.sh"
    assert theirs == {"--ntasks": "1", "--cpus-per-task": "128"}
    assert {name: ours[name] for name in theirs} == theirs
    every = {key for key in listed("every job") if key.startswith("--")}
    assert set(ours) - set(theirs) == every - {"--wrap"}


@pytest.mark.parametrize("job", ["convert", "export"])
def test_a_conversion_is_submitted_with_the_same_options(job: str, dry: Dry, tutorial: Tutorial) -> None:
    assert tutorial.submission(job).options == {}
    ours = dry.sbatch(job)
    assert ours.pop("--ntasks") == "1"  # as Slurm has it by itself
    every = {key for key in listed("every job", "convert and export") if key.startswith("--")}
    assert set(ours) == every - {"--wrap"}


@pytest.mark.parametrize("phase", PHASES)
def test_srun_starts_one_task_with_all_cpus(phase: Phase, dry: Dry, tutorial: Tutorial) -> None:
    (theirs,) = [call for call in tutorial.scripts[phase] if call.program == "srun"]
    assert theirs.argv == ("./train.sh",)
    ours = dry.call(phase, "srun")
    assert ours.argv[-2:] == ("bash", str(dry.run / "jobs" / f"{phase}-1" / "launch.sh"))
    assert ours.options["--ntasks"] == "1"
    assert ours.options["--cpus-per-task"] == "128"


@pytest.mark.parametrize(("phase", "program"), [("compile", "neuron_parallel_compile"), ("train", "torchrun")])
def test_the_trainer_is_started_with_the_same_command(phase: Phase, program: str, dry: Dry, tutorial: Tutorial) -> None:
    (theirs,) = [call for call in tutorial.scripts[phase] if call.program == program]
    ours = dry.call(phase, program)
    given, generated = list(ours.argv), list(theirs.argv)
    generated.remove("exp_manager.explicit_log_dir=null")  # EXPLICIT_LOGDIR of the table
    given[given.index(str(REHEARSAL / "training_orchestrator.py"))] = "training_orchestrator.py"
    given[given.index(f"--config-path={dry.run / 'config'}")] = "--config-path=conf"
    given[given.index(f"--config-name={phase}")] = f"--config-name={CONFIG_NAME}"
    assert given == generated
    assert (dry.run / "config" / f"{phase}.yaml").is_file()
    assert "32" in given
    assert ("neuron-monitor" in dry.texts[f"jobs/{phase}-1/launch.sh"]) == (phase == "train")


@pytest.mark.parametrize(("phase", "program"), [("compile", "neuron_parallel_compile"), ("train", "torchrun")])
def test_the_trainer_sees_the_same_environment(phase: Phase, program: str, dry: Dry, tutorial: Tutorial) -> None:
    (theirs,) = [call for call in tutorial.scripts[phase] if call.program == program]
    ours = dry.call(phase, program)
    assert theirs.environment.get("COMPILE") == ours.environment.get("COMPILE") == ("1" if phase == "compile" else None)
    named = {key for key in listed("every job", "compile and train") if not key.startswith("--")}
    if phase == "train":
        named -= {"NEURON_PARALLEL_COMPILE_DUMP_RESULTS"}
    not_exported = {*tutorial.exports, "HOME", "PATH"}  # the reader's shell: `--export` of the table
    of_train_sh = {"CONF_FILE", "DISTRIBUTED_ARGS", "PROCESSES_PER_NODE"}
    assert differing(theirs.environment, ours.environment) - not_exported == named | of_train_sh


@pytest.mark.parametrize(("script", "job", "step"), [(TO_NXD, "convert", "convert"), (TO_HF, "export-merge", "export")])
def test_the_converter_is_called_with_the_same_options(
    script: str, job: str, step: Step, nxdt: Dry, tutorial: Tutorial
) -> None:
    (theirs,), ours = tutorial.scripts[script], nxdt.call(job, "python3")
    assert theirs.argv[0] == "checkpoint_converter.py"
    assert ours.argv[0] == str(REHEARSAL / "checkpoint_converter_scripts" / theirs.argv[0])
    named = listed(step, "convert and export", engine="nxdt")
    options = {key for key in named if key.startswith("--")}
    assert differing(theirs.options, ours.options) == options
    assert len(set(theirs.options) & set(ours.options) - options) >= 10
    variables = (named - options) | {"PYTHONUNBUFFERED"}
    assert differing(theirs.environment, ours.environment) - {*tutorial.exports, "HOME", "PATH"} == variables


def test_the_converter_reads_and_writes_what_the_other_jobs_do(nxdt: Dry) -> None:
    to_nxd, to_hf = nxdt.call("convert", "python3").options, nxdt.call("export-merge", "python3").options
    prepared = nxdt.call("convert-prepare", "project-python")
    assert prepared.argv[-2:] == (str(nxdt.run / "base"), to_nxd["--input_dir"])
    assert to_nxd["--output_dir"] == str(nxdt.run / "nxd")
    assert nxdt.call("convert-verify", "project-python").argv[2:5] == (
        "verify-nxd",
        str(nxdt.run / "base"),
        to_nxd["--output_dir"],
    )
    export = nxdt.call("export", "project-python").options
    assert export["--full-state"] == f"{to_hf['--output_dir']}/{FULL_STATE}"
    assert to_hf["--input_dir"] == f"{export['--checkpoint']}/model"


# The tutorial's converter option by ours, where the values are the same.
SAME = {
    "--hw_backend": "--instance-family",
    "--tp_size": "--tp",
    "--pp_size": "--pp",
    "--kv_size_multiplier": "--kv-replicator",
}
QKV = {"--qkv_linear", "--fuse_qkv"}


@pytest.mark.parametrize(("script", "job", "step"), [(TO_NXD, "convert", "convert"), (TO_HF, "export", "export")])
def test_our_converter_is_told_the_same(script: str, job: str, step: Step, native: Dry, tutorial: Tutorial) -> None:
    (call,), ours = tutorial.scripts[script], native.call(job, "project-python")
    theirs = dict(call.options)
    assert {name: ours.options[name] for name in SAME.values()} == {SAME[name]: theirs.pop(name) for name in SAME}
    assert {theirs.pop(name) for name in QKV} == {"True"}
    assert ours.options["--qkv"] == "auto"  # …which for this model is:
    recipe = native.site.recipe
    arch = Facts(recipe, None).assumed
    assert arch is not None
    assert layout_of(recipe).resolve(arch).qkv == "fused"
    assert ours.options["--virtual-pp"] == "1"
    direction = "--convert_from_full_state" if job == "convert" else "--convert_to_full_state"
    assert theirs.pop(direction) == ""
    named = listed(step, "convert and export", engine="native")
    assert set(theirs) == {key for key in named if key in theirs}
    assert set(theirs) | set(ours.options) >= named


def test_our_converter_reads_and_writes_the_runs_folders(native: Dry) -> None:
    convert, export = native.call("convert", "project-python"), native.call("export", "project-python").options
    assert convert.argv[:5] == (
        *("-m", "trainium.checkpoint", "to-nxd"),
        *(str(native.run / "base"), str(native.run / "nxd")),
    )
    assert "--verify" in convert.options
    assert export["--base"] == str(native.run / "base")
    assert export["--out"] == str(native.run / "export")


def test_the_model_has_the_tutorials_layers(dry: Dry, tutorial: Tutorial) -> None:
    expected = dry.site.recipe.model.expected
    assert expected is not None
    assert {tutorial.scripts[script][0].options["--n_layers"] for script in (TO_NXD, TO_HF)} == {str(expected.layers)}


def test_there_are_as_many_shards_as_the_tutorial_counts(dry: Dry) -> None:
    assert "shards: 32" in dry.texts["plan"].splitlines()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _resolved(text: str) -> dict[str, Any]:
    register_resolvers()
    return _flat(OmegaConf.to_container(OmegaConf.create(text), resolve=True, throw_on_missing=True))


@pytest.mark.parametrize("phase", PHASES)
def test_every_key_of_the_configuration_has_the_tutorials_value_or_a_reason(
    phase: Phase, dry: Dry, tutorial: Tutorial, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = _resolved(dry.texts[f"config/{phase}.yaml"])  # the trainer is promised no variables of the reader's shell
    for name, value in tutorial.exports.items():
        monkeypatch.setenv(name, value)
    theirs = _resolved(TUTORIAL_CONFIG.read_text())
    deviations = {d.key: d for when in ("always", phase) for d in DEVIATIONS if d.when == when}
    assert {key for key in theirs | ours if theirs.get(key, ABSENT) != ours.get(key, ABSENT)} == set(deviations)
    for key, deviation in deviations.items():
        expected = deviation.ours
        expected = expected.replace("<run>", str(dry.run)) if isinstance(expected, str) else expected
        assert ours.get(key, ABSENT) == expected


def test_a_checkpoint_is_made_every_50_of_100_steps_and_the_last_one_is_exported(dry: Dry, tutorial: Tutorial) -> None:
    config = _resolved(dry.texts["config/train.yaml"])
    assert config["trainer.max_steps"] == 100
    assert config["exp_manager.checkpoint_callback_params.every_n_train_steps"] == 50
    assert {"steps: 100", "checkpoints: 2"} <= set(dry.texts["plan"].splitlines())
    ours = Path(dry.call("export", "project-python").options["--checkpoint"])
    theirs = Path(tutorial.scripts[TO_HF][0].options["--input_dir"]).parent
    assert ours.name == theirs.name == "hf_tanuki_8B_SFT--step=100-consumed_samples=728.0.ckpt"
    assert ours.parent == Path(config["exp_manager.explicit_log_dir"]) / "checkpoints"


def test_training_starts_from_what_was_converted(dry: Dry) -> None:
    for phase in PHASES:
        config = _resolved(dry.texts[f"config/{phase}.yaml"])
        assert config["exp_manager.resume_from_checkpoint"] == str(dry.run / "nxd")
        assert config["data.tokenizer.type"] == str(dry.run / "base")


def test_model_and_data_come_from_the_same_place(dry: Dry, tutorial: Tutorial) -> None:
    recipe = _flat(OmegaConf.to_container(OmegaConf.create(dry.texts["recipe.yaml"])))
    (download,) = [call for call in tutorial.typed if call.program == "huggingface-cli"]
    assert download.argv[:2] == ("download", recipe["model.source"])
    assert recipe["model.revision"] == "main"
    copies = [call for call in tutorial.typed if call.program == "aws"]
    assert all(call.argv[:2] == ("s3", "cp") and "--no-sign-request" in call.options for call in copies)
    files = [recipe["dataset.source"] + recipe[f"dataset.{name}_file"] for name in ("train", "validation")]
    assert [call.argv[2] for call in copies] == files
    assert recipe["dataset.unsigned"] is True
    assert (recipe["dataset.prompt_field"], recipe["dataset.response_field"]) == ("input", "output")


def test_the_chat_template_is_the_tutorials_to_the_byte(dry: Dry, tutorial: Tutorial) -> None:
    (jq,) = [call for call in tutorial.scripts["tokenizer.sh"] if call.program == "jq"]
    assert jq.argv[:2] == ("--arg", "temp")
    theirs = jq.argv[2]
    assert dry.texts["jobs/export-1/chat_template.jinja"] == theirs
    given = Path(dry.call("export", "project-python").options["--chat-template"])
    assert given == dry.run / "jobs" / "export-1" / "chat_template.jinja"
    assert read_chat_template(given).encode() == theirs.encode()


def test_the_tokenizer_files_are_handed_over(tutorial: Tutorial) -> None:
    fetched = [call.argv[0] for call in tutorial.scripts["tokenizer.sh"] if call.program == "curl"]
    assert len(fetched) == 3
    assert {address.rpartition("/")[2] for address in fetched} <= set(COPIED)


def test_the_weights_are_also_one_file(dry: Dry) -> None:
    assert FULL_STATE == "checkpoint.pt"  # as the tutorial loads it
    assert "--single-file" in dry.call("export", "project-python").options


def test_the_dry_run_ends_with_every_difference_and_its_reason(dry: Dry) -> None:
    *_, (first, config), (second, commands) = dry.texts.items()
    assert (first, second) == (
        "differences from the tutorial's configuration",
        "differences from the tutorial's commands",
    )
    for deviation in DEVIATIONS:
        assert re.search(rf"^{re.escape(deviation.key)}.*: .* → .*\n    {re.escape(deviation.reason)}$", config, re.M)
    assert commands.splitlines() == [
        line
        for entry in SCRIPT_DEVIATIONS
        if entry.engine in (None, dry.site.recipe.convert.engine)
        for line in (f"{entry.step}: {entry.key}: {entry.tutorial} → {entry.ours}", f"    {entry.reason}")
    ]


def test_nothing_is_in_the_table_that_no_test_looks_for() -> None:
    compared = {entry.key for entry in SCRIPT_DEVIATIONS if re.match(r"--[a-z]|[A-Z_]+$", entry.key)}
    assert {entry.key for entry in SCRIPT_DEVIATIONS} - compared == IN_WORDS
    assert all(entry.reason and entry.tutorial != entry.ours for entry in SCRIPT_DEVIATIONS)


def test_it_is_unverified_until_config_json_is_there(tmp_path: Path) -> None:
    site = Site(
        load_recipe("tanuki-8b-sft"),
        RunFolder.named(tmp_path, "r"),
        SlurmCluster(runs=tmp_path),
        NeuronToolchain.installed(),
    )
    before = dict(dry_run(site))
    assert "UNVERIFIED" in before["plan"]
    assert "config/config.json" not in before
    (site.places.base).mkdir(parents=True)
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
    sizes = {"intermediate_size": 14336, "vocab_size": 65024, "max_position_embeddings": 4096}
    config = {"model_type": "llama", "torch_dtype": "bfloat16", "rope_theta": 1e4, **shape, **sizes}
    (site.places.base / "config.json").write_text(json.dumps(config))
    after = dict(dry_run(site))
    assert "UNVERIFIED" not in after["plan"]
    assert json.loads(after["config/config.json"]) == config
    assert {title: text for title, text in after.items() if title not in ("plan", "config/config.json")} == {
        title: text for title, text in before.items() if title != "plan"
    }


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Path]:
    """A working folder, its own home too, in which nothing may appear."""
    folder = tmp_path / "empty"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("engine", ENGINES)
def test_the_command_prints_it_all_without_a_network_and_leaves_nothing(engine: str, empty: Path) -> None:
    poison = empty.parent / "poison"
    poison.mkdir()
    (poison / "sitecustomize.py").write_text(
        "import socket, subprocess\n"
        "def refuse(*_, **__): raise AssertionError('a dry run goes nowhere and starts nothing')\n"
        "socket.socket.connect = socket.socket.connect_ex = subprocess.Popen.__init__ = refuse\n"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("trainium"), "run", "tanuki-8b-sft", f"convert.engine={engine}", "--dry-run"],
        cwd=empty,
        env=without_prefect(PYTHONPATH=str(poison)),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    titles = re.findall(r"^### (.*)$", done.stdout, re.M)
    assert titles[:2] == ["plan", "recipe.yaml"]
    assert [title for title in titles if title.startswith("differences")] == titles[-2:]
    assert "UNVERIFIED" in done.stdout
    assert done.stdout.count("#SBATCH --cpus-per-task=128") == 2
    assert done.stdout.count("export COMPILE=1") == 1
    assert ("checkpoint_converter.py --model_style" in done.stdout) == (engine == "nxdt")
