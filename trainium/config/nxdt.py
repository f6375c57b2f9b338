"""The configuration file of neuronx-distributed-training (NxDT), generated from a recipe.

`nxdt_base.yaml` has every key of the tutorial's file; the recipe and the run folder fill in theirs. Keys that would
silently overwrite the model's config.json (`num_layers`, `hidden_size`, `max_position_embeddings`, `rope_theta`;
NxDT, hf_models/llama_model.py) are left out, so that the model stays the one that was converted. What the trainer
must read differently goes into its own copy of config.json (`trainer_model_config`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from trainium.config.recipe import escaped
from trainium.config.rules import Facts, layout_of
from trainium.config.schema import Recipe
from trainium.errors import UserError

BASE_FILE = Path(__file__).with_name("nxdt_base.yaml")
Phase = Literal["compile", "train"]

# How the trainer must be told to build the attention whose tensors the converter wrote: (qkv_linear, fuse_qkv).
QKV_FLAGS: Mapping[str, tuple[bool, bool]] = {
    "fused": (True, True),
    "split": (True, False),
    "coalesced": (False, True),
    "plain": (False, False),
}


class UnknownShapeError(UserError):
    """Without config.json and without `model.expected` nobody knows how q, k and v are stored."""


@dataclass(frozen=True, kw_only=True)
class NxdtPaths:
    """Where the trainer finds and leaves things; absolute, seen from the nodes.

    base: Hugging Face folder with the tokenizer. model_config: the file that `trainer_model_config` was written to.
    train, validation: prepared rows. nxd: folder that holds the converted weights in `model/`. experiment: gets
    `checkpoints/`. cache: compiler cache.
    """

    base: Path
    model_config: Path
    train: Path
    validation: Path
    nxd: Path
    experiment: Path
    cache: Path

    def log_folder(self, phase: Phase) -> Path:
        """NxDT's log folder. The trial steps of a compilation write no checkpoints, but NeMo makes folders: apart."""
        return self.experiment / "compile" if phase == "compile" else self.experiment


@dataclass(frozen=True)
class ResumePoint:
    """A complete training checkpoint (the `….ckpt` folder) to go on from."""

    checkpoint: Path


def nxdt_config(
    recipe: Recipe,
    model_config: Mapping[str, Any] | None,
    paths: NxdtPaths,
    phase: Phase,
    resume: ResumePoint | None = None,
) -> DictConfig:
    """The whole file; interpolations are kept.

    `model_config` is the model's config.json; without it the recipe's `model.expected` decides how q, k and v are
    stored (raises UnknownShapeError when that is missing too). Both phases describe the same graphs. They differ in the
    log folder (the ten trial steps of a compilation stay out of the training's logs) and in that only training
    resumes: a fresh start reads the converted weights alone (`weight_init_only`), a resume reads weights, optimizer
    and step of its checkpoint. `resume_from_checkpoint` beats `resume_if_exists` in NxDT, so it is always set.
    """
    config = OmegaConf.load(BASE_FILE)
    assert isinstance(config, DictConfig)
    for values in (
        _trainer(recipe, Facts(recipe, model_config).cores),
        _experiment(recipe, paths, phase),
        _start(paths, resume if phase == "train" else None),
        _data(recipe, paths),
        _model(recipe, model_config),
        _runtime(recipe, paths),
    ):
        for key, value in values.items():
            OmegaConf.update(config, key, escaped(value), force_add=True)
    return config


def trainer_model_config(model_config: Mapping[str, Any]) -> dict[str, Any]:
    """The base's config.json as the trainer must read it: a copy with single keys changed, never one a library wrote.

    Embeddings are not tied, because the converted weights have an lm_head of their own and NxDT asserts on tied ones
    in a pipeline. Rope settings that transformers 5 writes under `rope_parameters` are repeated where the trainer's
    transformers 4 reads them; it would take its own default otherwise and train with wrong positions, unnoticed.
    """
    changed = dict(model_config)
    if changed.get("tie_word_embeddings"):
        changed["tie_word_embeddings"] = False
    rope = changed.get("rope_parameters")
    if isinstance(rope, Mapping):
        if changed.get("rope_theta") is None and rope.get("rope_theta") is not None:
            changed["rope_theta"] = rope["rope_theta"]
        if changed.get("rope_scaling") is None and rope.get("rope_type", "default") != "default":
            changed["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return changed


def to_yaml(config: DictConfig) -> str:
    """The text to write as `<run>/config/<phase>.yaml`, with the interpolations that NxDT resolves itself."""
    return (
        "# Written by trainium-flows from the run's recipe.yaml; changes here are overwritten.\n"
        + OmegaConf.to_yaml(config)
    )


def _trainer(recipe: Recipe, cores: int) -> dict[str, Any]:
    training = recipe.training
    return {
        "name": recipe.experiment,
        "exp_manager.name": recipe.experiment,
        "seed": training.seed,
        "trainer.devices": cores,
        "trainer.num_nodes": recipe.resources.nodes,
        "trainer.max_steps": training.max_steps,
        "trainer.log_every_n_steps": training.log_every,
        "trainer.gradient_clip_val": training.gradient_clip,
    }


def _experiment(recipe: Recipe, paths: NxdtPaths, phase: Phase) -> dict[str, Any]:
    training = recipe.training
    values = {
        "create_tensorboard_logger": training.tensorboard,
        "explicit_log_dir": str(paths.log_folder(phase)),
        "checkpoint_callback_params.save_top_k": training.keep_checkpoints,
        "checkpoint_callback_params.filename": f"{recipe.checkpoint_name}--{{step}}-{{consumed_samples}}",
        "checkpoint_callback_params.every_n_train_steps": training.checkpoint_every,
        "log_parameter_norm": training.log_norms,
        "log_gradient_norm": training.log_norms,
        "save_bf16": training.save_bf16,
        "async_checkpointing": training.async_checkpointing,
    }
    return {f"exp_manager.{key}": value for key, value in values.items()}


def _start(paths: NxdtPaths, resume: ResumePoint | None) -> dict[str, Any]:
    return {
        "exp_manager.resume_from_checkpoint": str(resume.checkpoint if resume else paths.nxd),
        "model.weight_init_only": resume is None,
    }


def _data(recipe: Recipe, paths: NxdtPaths) -> dict[str, Any]:
    training = recipe.training
    return {
        "data.micro_batch_size": training.micro_batch_size,
        "data.global_batch_size": training.global_batch_size,
        "model.micro_batch_size": training.micro_batch_size,
        "model.global_batch_size": training.global_batch_size,
        "data.train_dir": str(paths.train),
        "data.val_dir": str(paths.validation),
        "data.seq_length": training.seq_length,
        "model.encoder_seq_length": training.seq_length,  # NxDT asserts that the two are equal
        "data.tokenizer.type": str(paths.base),
        "model_alignment_strategy.sft.packing": training.packing,
    }


def _model(recipe: Recipe, model_config: Mapping[str, Any] | None) -> dict[str, Any]:
    training, parallelism = recipe.training, recipe.parallelism
    qkv_linear, fuse_qkv = _qkv(recipe, model_config)
    return {
        "distributed_strategy.tensor_model_parallel_size": parallelism.tensor,
        "distributed_strategy.pipeline_model_parallel_size": parallelism.pipeline,
        "distributed_strategy.virtual_pipeline_model_parallel_size": parallelism.virtual_pipeline,
        "distributed_strategy.zero1": parallelism.zero1,
        "distributed_strategy.sequence_parallel": parallelism.sequence_parallel,
        "distributed_strategy.kv_replicator": parallelism.kv_replicator,
        "model.qkv_linear": qkv_linear,
        "model.fuse_qkv": fuse_qkv,
        "model.activations_checkpoint_granularity": training.activations_checkpoint.granularity,
        "model.activations_checkpoint_recompute": list(training.activations_checkpoint.recompute),
        "model.fusions.flash_attention": training.flash_attention,
        "model.do_layer_norm_weight_decay": training.layer_norm_weight_decay,
        "model.optim.lr": training.learning_rate,
        "model.optim.weight_decay": training.weight_decay,
        "model.optim.betas": list(training.betas),
        "model.optim.sched.warmup_steps": training.warmup_steps,
    }


def _runtime(recipe: Recipe, paths: NxdtPaths) -> dict[str, Any]:
    training, runtime = recipe.training, recipe.training.runtime
    return {
        "model.model_config": str(paths.model_config),
        "precision.type": training.precision,
        "compiler_flags": training.compiler_flags,
        "compiler_cache_url": str(paths.cache),
        "aync_exec_max_inflight_requests": runtime.inflight_requests,
        "bucket_size_collectives": runtime.collectives_bucket_mb,
        "neuron_rt_exec_timeout": runtime.exec_timeout,
        "neuron_experimental_compress_rg": runtime.compress_replica_groups,
    }


def _qkv(recipe: Recipe, model_config: Mapping[str, Any] | None) -> tuple[bool, bool]:
    if recipe.convert.qkv != "auto":
        return QKV_FLAGS[recipe.convert.qkv]
    arch = Facts(recipe, model_config).assumed
    if arch is None:
        raise UnknownShapeError(
            f"how q, k and v of {recipe.model.source} are stored depends on its heads, and there is no usable "
            "config.json yet: give model.expected={layers: …, hidden_size: …, heads: …, kv_heads: …}, or convert.qkv"
        )
    return QKV_FLAGS[layout_of(recipe).resolve(arch).qkv]
