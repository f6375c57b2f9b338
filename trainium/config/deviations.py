"""Every value of the tutorial's configuration file that the generated one changes, and why.

A test compares the two files key by key: what differs is listed here, and what is listed here differs. `<run>` stands
for the run folder; ABSENT for a key that is left out. The commands have their own table: script_deviations.py.
"""

from dataclasses import dataclass
from typing import Any, Literal

ABSENT = "(left out)"
When = Literal["always", "compile", "resume"]


@dataclass(frozen=True)
class Deviation:
    """`key` as OmegaConf selects it; `tutorial` and `ours` as written; `when`: in which generated files."""

    key: str
    tutorial: Any
    ours: Any
    reason: str
    when: When = "always"


_OVERWRITES = "would silently overwrite the model's config.json; a value of another model trains it wrongly, unnoticed"
_ONE_FOLDER = "everything of a run is in its run folder, so that it can be found, checked and resumed"

DEVIATIONS: tuple[Deviation, ...] = (
    Deviation(
        "exp_manager.explicit_log_dir",
        None,
        "<run>/experiment",
        "without it the folder is named after the Slurm job, and a resubmitted job does not find its checkpoints",
    ),
    Deviation(
        "exp_manager.explicit_log_dir",
        None,
        "<run>/experiment/compile",
        "the ten trial steps of a compilation stay out of the training's logs",
        when="compile",
    ),
    Deviation(
        "exp_manager.exp_dir", "/fsx/nemo_experiments/", None, "ignored by NeMo as soon as explicit_log_dir is set"
    ),
    Deviation(
        "exp_manager.checkpoint_callback_params.save_top_k",
        1,
        2,
        "with a single checkpoint an interrupted save leaves nothing complete to resume from",
    ),
    Deviation("exp_manager.resume_from_checkpoint", "${oc.env:CHECKPOINT_DIR}", "<run>/nxd", _ONE_FOLDER),
    Deviation(
        "exp_manager.resume_from_checkpoint",
        "${oc.env:CHECKPOINT_DIR}",
        "<run>/experiment/checkpoints/<checkpoint>",
        "NxDT prefers this key to resume_if_exists: left as it is, an interrupted run starts from the base again",
        when="resume",
    ),
    Deviation(
        "model.weight_init_only",
        True,
        False,
        "a resume needs the optimizer state and the step as well as the weights",
        when="resume",
    ),
    Deviation("data.train_dir", "${oc.env:DATA_DIR}/training.jsonl", "<run>/data/train.jsonl", _ONE_FOLDER),
    Deviation("data.val_dir", "${oc.env:DATA_DIR}/validation.jsonl", "<run>/data/validation.jsonl", _ONE_FOLDER),
    Deviation("data.tokenizer.type", "${oc.env:ORIGINAL_MODEL_PATH}", "<run>/base", _ONE_FOLDER),
    Deviation(
        "model.model_config",
        "${oc.env:MODEL_CONFIG_PATH}",
        "<run>/config/config.json",
        "a copy of the base's for the trainer: embeddings untied as in the converted weights, rope where it reads it",
    ),
    Deviation(
        "model.encoder_seq_length",
        8192,
        4096,
        "NxDT asserts that it equals data.seq_length, which the tutorial sets to 4096",
    ),
    Deviation("model.max_position_embeddings", 8192, ABSENT, _OVERWRITES),
    Deviation("model.num_layers", 32, ABSENT, _OVERWRITES),
    Deviation("model.hidden_size", 4096, ABSENT, _OVERWRITES),
    Deviation("model.rope_theta", 500000.0, ABSENT, f"{_OVERWRITES} (this one is Llama 3's)"),
    Deviation("compiler_cache_url", "/home/ubuntu/neuron_cache", "<run>/cache", f"{_ONE_FOLDER}; see compile.cache"),
)
