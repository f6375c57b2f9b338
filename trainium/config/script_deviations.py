"""Everything that a run does differently from the tutorial's commands and job scripts, and why.

A test compares them option by option: what differs is listed here, and what is listed here differs. `<run>` stands for
the run folder; ABSENT for what one side leaves out. The values of the configuration file are in deviations.py.
"""

from dataclasses import dataclass
from typing import Literal

from trainium.config.deviations import ABSENT

Step = Literal[
    "every job", "model", "dataset", "convert", "convert and export", "compile and train", "export", "evaluate"
]


@dataclass(frozen=True)
class ScriptDeviation:
    """`key`: the option, variable or program that differs; `tutorial` and `ours`: as written, or in words.

    `engine`: the `convert.engine` with which it differs, None for both.
    """

    step: Step
    key: str
    tutorial: str
    ours: str
    reason: str
    engine: Literal["native", "nxdt"] | None = None


_ONE_FOLDER = "everything of a run is in its run folder"
_NO_SHELL = "the submitter's shell decides nothing: the script activates the environment and exports what it needs"
_NO_PROMPT = "the converter reads no folder, and with a hub name it may ask for a token, which no job can answer"
_ONE_WORD = "read from the base model itself, so that the two cannot differ"
_PROVED = "the tutorial looks at file counts, sizes and names; here every tensor is compared"
_THEIR_CHECKPOINT = (
    "/fsx/experiments/hf_tanuki/28/checkpoints/hf_tanuki_8B_SFT--step=100-consumed_samples=728.0.ckpt/model"
)
_OTHER_CHECKPOINT = "the tutorial's is of a run with another exp_dir and another number of samples"

_SBATCH: tuple[ScriptDeviation, ...] = (
    ScriptDeviation("every job", "--wrap", '"srun ./train.sh"', "<run>/jobs/<job>/script.sh", _ONE_FOLDER),
    ScriptDeviation("every job", "--output", "slurm-<job id>.out", "<run>/jobs/<job>/output.log", _ONE_FOLDER),
    ScriptDeviation("every job", "--job-name", ABSENT, "<id>-<stage>-<attempt>", "finds a job whose id got lost"),
    ScriptDeviation("every job", "--open-mode", ABSENT, "append", "a restarted job must not erase its log"),
    ScriptDeviation("every job", "--export", "ALL, Slurm's default", "NIL", _NO_SHELL),
    ScriptDeviation("every job", "--chdir", ABSENT, "/", "the script goes to its job folder itself, or says it cannot"),
    ScriptDeviation("every job", "--nodes", ABSENT, "resources.nodes", "said, where Slurm would derive it"),
    ScriptDeviation("every job", "--ntasks-per-node", ABSENT, "1", "one task on each of several nodes"),
    ScriptDeviation("every job", "--time", ABSENT, "resources.<stage>.time", "a hanging job ends some day"),
    ScriptDeviation(
        "every job",
        "--no-requeue",
        ABSENT,
        "set, unless resources.requeue",
        "restarted by Slurm, a job reads the same config, which starts from the base; the flow resumes instead",
    ),
    ScriptDeviation("every job", "PYTHONUNBUFFERED", ABSENT, "1", "the log has a line when it is printed, not later"),
    ScriptDeviation(
        "convert and export",
        "--cpus-per-task",
        ABSENT,
        "resources.<stage>.cpus_per_task",
        "Slurm gives a job a single CPU otherwise",
    ),
)

_SOURCES: tuple[ScriptDeviation, ...] = (
    ScriptDeviation(
        "model",
        "huggingface-cli download",
        "whatever is in main at that moment",
        "huggingface_hub, one commit for the whole run, digests compared",
        "a branch moves; a result must say what it was made from",
    ),
    ScriptDeviation(
        "dataset",
        "aws s3 cp",
        "files as they come",
        "boto3, checksums compared, every row checked, only input and output kept",
        "one bad row would break the training hours later, on the cluster",
    ),
)

_CONVERSIONS: tuple[ScriptDeviation, ...] = (
    ScriptDeviation(
        "convert",
        "scripts/checkpoint_converter.py",
        "token = None, edited into the installed package",
        "as installed",
        "nothing asks for a token where no --hf_model_name is given",
        "nxdt",
    ),
    ScriptDeviation("convert", "--hf_model_name", "$HF_MODEL_NAME", ABSENT, _NO_PROMPT, "nxdt"),
    ScriptDeviation(
        "convert", "--input_dir", ABSENT, "<run>/base-single-file/checkpoint.pt, of a job before", _NO_PROMPT, "nxdt"
    ),
    ScriptDeviation("convert", "--output_dir", "$CHECKPOINT_DIR", "<run>/nxd", _ONE_FOLDER, "nxdt"),
    ScriptDeviation("convert and export", "HF_HUB_OFFLINE", ABSENT, "1", "everything it needs is there", "nxdt"),
    ScriptDeviation("convert and export", "TRANSFORMERS_OFFLINE", ABSENT, "1", "everything it needs is there", "nxdt"),
    ScriptDeviation("convert", "verify-nxd", ABSENT, "a job after the converter's", _PROVED, "nxdt"),
    ScriptDeviation("export", "--input_dir", _THEIR_CHECKPOINT, "<run>'s last one", _OTHER_CHECKPOINT, "nxdt"),
    ScriptDeviation(
        "export",
        "--output_dir",
        "$OUTPUT_MODEL_DIR",
        "<run>/export-single-file",
        "only the input of the export",
        "nxdt",
    ),
    ScriptDeviation(
        "convert and export", "--config", "$MODEL_CONFIG_PATH", "<run>/base/config.json", _ONE_FOLDER, "nxdt"
    ),
    ScriptDeviation(
        "convert and export",
        "checkpoint_converter.py",
        "NxDT's",
        "trainium.checkpoint to-nxd, trainium.model.export",
        "run on any node, without torch_xla and without the whole model in memory",
        "native",
    ),
    ScriptDeviation("convert", "--hf_model_name", "$HF_MODEL_NAME", "<run>/base", _ONE_FOLDER, "native"),
    ScriptDeviation("convert", "--output_dir", "$CHECKPOINT_DIR", "<run>/nxd", _ONE_FOLDER, "native"),
    ScriptDeviation(
        "convert",
        "--save_xser",
        "True",
        ABSENT,
        "the shards are the same files; only the empty folders beside them are not made",
        "native",
    ),
    ScriptDeviation("convert", "--verify", ABSENT, "set", _PROVED, "native"),
    ScriptDeviation("export", "--input_dir", _THEIR_CHECKPOINT, "<run>'s last one", _OTHER_CHECKPOINT, "native"),
    ScriptDeviation("export", "--output_dir", "$OUTPUT_MODEL_DIR", "<run>/export", _ONE_FOLDER, "native"),
    ScriptDeviation("export", "--load_xser", "True", ABSENT, "the files show which form they have", "native"),
    ScriptDeviation("convert and export", "--config", "$MODEL_CONFIG_PATH", ABSENT, _ONE_WORD, "native"),
    ScriptDeviation("convert and export", "--n_layers", "32", ABSENT, _ONE_WORD, "native"),
    ScriptDeviation(
        "convert and export", "--model_style", "hf", ABSENT, "the Hugging Face side is one of the two by name", "native"
    ),
)

_LAUNCH: tuple[ScriptDeviation, ...] = (
    ScriptDeviation(
        "compile and train",
        "train.sh",
        "reads ./conf/$CONF_FILE.yaml, and goes on without it",
        "<run>/jobs/<job>/launch.sh, the same torchrun with <run>/config; a missing config ends the job",
        "the tutorial never sets CONF_FILE: its train.sh looks for megatron_gpt_config",
    ),
    ScriptDeviation(
        "compile and train",
        "srun",
        "srun ./train.sh",
        "with the job's nodes, tasks and CPUs again, --export=ALL and --kill-on-bad-exit",
        "since Slurm 22.05 srun takes no --cpus-per-task over from sbatch; one failed node must end the others",
    ),
    ScriptDeviation(
        "compile and train",
        "NEURON_COMPILE_CACHE_URL",
        "$HOME/neuron_cache, set by train_setup.sh",
        "<run>/cache, set after it",
        "train_setup.sh overwrites what anybody else has set",
    ),
    ScriptDeviation(
        "compile and train",
        "EXPLICIT_LOGDIR",
        "null, set by train_setup.sh, on torchrun's command line",
        "<run>/experiment, in the configuration",
        "a resubmitted job has to find its checkpoints",
    ),
    ScriptDeviation(
        "compile and train",
        "NEMO_EXPM_VERSION",
        "$SLURM_JOB_ID, set by train_setup.sh",
        "the run's name",
        "the same for every job of a run",
    ),
    ScriptDeviation(
        "compile and train",
        "NEURON_PARALLEL_COMPILE_DUMP_RESULTS",
        ABSENT,
        "1, in compile",
        "writes the summary, which decides whether compilation succeeded, as JSON",
    ),
    ScriptDeviation(
        "compile and train",
        "tee -a $LOG_PATH/log",
        "a second copy of the log",
        ABSENT,
        "<run>/jobs/<job>/output.log has it already",
    ),
    ScriptDeviation(
        "compile and train",
        "neuron-monitor",
        "the reader's neuron-top, over ssh",
        "beside torchrun, in train",
        "shows what the cores do to those who watch the run",
    ),
)

_HAND_OVER: tuple[ScriptDeviation, ...] = (
    ScriptDeviation(
        "export",
        "checkpoint.pt",
        "alone",
        "beside safetensors with their index, config.json and model card",
        "AutoModelForCausalLM loads the folder as it is",
    ),
    ScriptDeviation(
        "export",
        "curl | jq",
        "tokenizer files of the hub's main branch, chat_template added",
        "<run>/base's tokenizer files, chat_template added",
        "the tokenizer that was trained with, not one that has changed since",
    ),
    ScriptDeviation("evaluate", "evaluate", ABSENT, "a job after the export", "shows that the model has learned"),
)

SCRIPT_DEVIATIONS: tuple[ScriptDeviation, ...] = (*_SBATCH, *_SOURCES, *_CONVERSIONS, *_LAUNCH, *_HAND_OVER)
