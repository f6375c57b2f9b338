"""Rules about the model and the inputs."""

from collections.abc import Iterator
from pathlib import Path

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import ArchitectureError
from trainium.config.rules.facts import Facts, Finding

NXDT_LLAMA = "neuronx-distributed-training, hf_models/llama_model.py"
UNTRAINABLE_FIX = {
    "model-family": "Use a Llama-like model (Llama 2, 3, 3.1 and models with their tensors)",
    "head-dim": "Use a model whose head_dim is hidden_size / num_attention_heads",
}


def family(facts: Facts) -> Iterator[Finding]:
    """NxDT treats everything that is not Mixtral as a Llama, silently; so what cannot be one is refused."""
    if facts.model_config is None:
        return
    try:
        arch = Architecture.from_config(facts.model_config)
    except ArchitectureError as error:
        yield _model_finding(facts, "model-family", str(error), UNTRAINABLE_FIX["model-family"])
        return
    for about, reason in arch.untrainable.items():
        yield _model_finding(facts, about, reason, UNTRAINABLE_FIX[about])
    window = facts.model_config.get("sliding_window")
    if arch.model_type == "mistral" and isinstance(window, int) and window < facts.recipe.training.seq_length:
        yield _model_finding(
            facts,
            "sliding-window",
            f"config.json has sliding_window={window}; NxDT would attend to the whole sequence",
            f"Use training.seq_length={window} or less",
        )
    if arch.tied:
        yield _model_finding(
            facts,
            "tied-embeddings",
            "output projection and embedding are one tensor; the trainer needs both, so lm_head.weight is written as a "
            "copy and the exported model has tie_word_embeddings: false",
            "",
            severity="note",
        )


def positions(facts: Facts) -> Iterator[Finding]:
    """No sample may be longer than the positions the model knows."""
    limit = (facts.model_config or {}).get("max_position_embeddings")
    if isinstance(limit, int) and facts.recipe.training.seq_length > limit:
        yield Finding(
            id="positions",
            severity="error",
            key="training.seq_length",
            value=str(facts.recipe.training.seq_length),
            message=f"the model's config.json has max_position_embeddings={limit}",
            fix=f"Use {limit} or less",
            source=NXDT_LLAMA,
        )


def expected_shape(facts: Facts) -> Iterator[Finding]:
    """The recipe was written for a model of this shape."""
    expected, arch = facts.recipe.model.expected, facts.architecture
    if expected is None:
        return
    if facts.model_config is None:
        yield Finding(
            id="unverified",
            severity="note",
            key="model.expected",
            value="",
            message="the model's shape is the recipe's word; it is compared with config.json as soon as that is there",
            fix="",
            source="",
        )
    elif arch is not None:
        real = {"layers": arch.layers, "hidden_size": arch.hidden, "heads": arch.heads, "kv_heads": arch.kv_heads}
        for name, value in real.items():
            if getattr(expected, name) != value:
                yield Finding(
                    id="expected-shape",
                    severity="error",
                    key=f"model.expected.{name}",
                    value=str(getattr(expected, name)),
                    message=f"config.json of {facts.recipe.model.source} says {value}",
                    fix=f"Use model.expected.{name}={value} if this is the model you mean, or correct model.source",
                    source="",
                )


def inputs(facts: Facts) -> Iterator[Finding]:
    """Folders that the recipe reads from are there."""
    model, dataset = facts.recipe.model, facts.recipe.dataset
    if model.kind == "folder" and not (Path(model.source) / "config.json").is_file():
        there = Path(model.source).is_dir()
        yield Finding(
            id="model-folder",
            severity="error",
            key="model.source",
            value=model.source,
            message="this folder holds no config.json" if there else "there is no such folder",
            fix="Give a folder with config.json, tokenizer and safetensors, or a repository id (owner/name)",
            source="",
        )
    if dataset.kind == "folder":
        for key in ("train_file", "validation_file"):
            path = Path(dataset.source) / str(getattr(dataset, key))
            if not path.is_file():
                yield Finding(
                    id="dataset-folder",
                    severity="error",
                    key=f"dataset.{key}",
                    value=path.name,
                    message=f"there is no {path}",
                    fix=f"Correct dataset.source or dataset.{key}",
                    source="",
                )


def experiment_name(facts: Facts) -> Iterator[Finding]:
    """NxDT chooses the model class by the experiment's name."""
    if "mixtral" in facts.recipe.experiment:
        yield Finding(
            id="experiment-name",
            severity="error",
            key="training.experiment" if facts.recipe.training.experiment else "name",
            value=facts.recipe.experiment,
            message="an experiment with mixtral in its name is trained as a Mixtral, whatever the model is",
            fix="Use another training.experiment",
            source="neuronx-distributed-training, examples/training.py",
        )


def _model_finding(facts: Facts, id: str, message: str, fix: str, severity: str = "error") -> Finding:
    return Finding(
        id=id,
        severity="note" if severity == "note" else "error",
        key="model.source",
        value=facts.recipe.model.source,
        message=message,
        fix=fix,
        source=NXDT_LLAMA,
    )
