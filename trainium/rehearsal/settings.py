"""What the trainer reads from the config, and what the real one does with it before it starts.

The names are the YAML's. Sources: NxDT `training_orchestrator.py` (process_config), `hf_models/llama_model.py`,
`exp_manager.py`, `data/base.py`.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.errors import ArchitectureError
from trainium.checkpoint.layout import Layout, Qkv
from trainium.rehearsal import known_keys
from trainium.rehearsal.devices import Instance
from trainium.rehearsal.lines import say


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """`exp_manager`: where things are written and what is resumed."""

    log_dir: Path
    version: str | None
    resume_if_exists: bool
    resume_ignore_no_checkpoint: bool
    resume_from_checkpoint: Path | None
    weight_init_only: bool
    create_checkpoints: bool
    filename: str
    every_n_train_steps: int
    save_top_k: int
    save_xser: bool
    save_bf16: bool
    show_version: bool

    @property
    def checkpoints(self) -> Path:
        """Folder of the `*.ckpt` folders."""
        return self.log_dir / "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Data:
    """`data` and `model_alignment_strategy.sft`."""

    train_file: Path
    val_file: Path | None
    choose_samples: int | None
    seq_length: int
    encoder_seq_length: int
    tokenizer: str
    packing: bool
    micro_batch: int
    global_batch: int


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """`model.optim`, `trainer.max_steps` and clipping."""

    lr: float
    betas: tuple[float, float]
    eps: float
    warmup_steps: int
    max_steps: int
    max_epochs: int
    decay_norms: bool
    clip: float | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything the trainer needs, checked as the real one checks it."""

    experiment: Experiment
    data: Data
    optimization: Optimization
    layout: Layout
    architecture: Architecture
    model_config: Mapping[str, Any]
    seed: int
    devices: int
    num_nodes: int
    log_every_n_steps: int
    log_parameter_norm: bool
    log_gradient_norm: bool
    graph_inputs: Mapping[str, Any]


def read_settings(config: DictConfig, instance: Instance) -> Settings:
    """The typed settings. Raises what the real trainer raises, early instead of on the device."""
    known_keys.check(config)
    if config.model_source != "hf":
        raise NotImplementedError(f"model_source: {config.model_source}; the rehearsal trains HF-style models only")
    if not OmegaConf.select(config, "model_alignment_strategy.sft"):
        raise NotImplementedError("model_alignment_strategy.sft is missing; the rehearsal trains SFT only")
    seed = 1234 if config.get("seed") is None else int(config.seed)
    if seed <= 0:
        raise ValueError(f"Seed ({seed}) should be a positive integer.")
    model_config = _model_config(config)
    architecture = Architecture.from_config(model_config)
    for reason in architecture.untrainable.values():
        raise ArchitectureError(reason)
    layout = _layout(config, architecture, instance)
    data = _data(config)
    _check_sequence(config, data, instance)
    if config.trainer.get("limit_val_batches", 1.0):
        say("rehearsal: limit_val_batches is not 0, but validation during training is not rehearsed")
    if config.exp_manager.get("async_checkpointing", False):
        say("rehearsal: async_checkpointing is not rehearsed; checkpoints are saved synchronously")
    return Settings(
        experiment=_experiment(config),
        data=data,
        optimization=_optimization(config),
        layout=layout,
        architecture=architecture,
        model_config=model_config,
        seed=seed,
        devices=int(config.trainer.devices),
        num_nodes=int(config.trainer.get("num_nodes", 1)),
        log_every_n_steps=int(config.trainer.get("log_every_n_steps", 50)),
        log_parameter_norm=bool(config.exp_manager.get("log_parameter_norm", False)),
        log_gradient_norm=bool(config.exp_manager.get("log_gradient_norm", False)),
        graph_inputs={
            "precision": config.precision.type,
            "sequence_parallel": bool(config.distributed_strategy.get("sequence_parallel", False)),
            "zero1": bool(config.distributed_strategy.get("zero1", True)),
            "optimizer": config.model.optim.name,
            "recompute": str(config.model.get("activations_checkpoint_granularity")),
        },
    )


def _model_config(config: DictConfig) -> dict[str, Any]:
    """config.json with the keys that the YAML silently overwrites, and head_dim forced to hidden / heads."""
    file = Path(config.model.model_config)
    file = file / "config.json" if file.is_dir() else file
    model: dict[str, Any] = json.loads(file.read_text())
    if model.get("model_type") != "llama":
        say(
            f"You are using a model of type {model.get('model_type')} to instantiate a model of type llama. This is "
            "not supported for all configurations of models and can yield errors."
        )
    for key, name in (("num_layers", "num_hidden_layers"), ("hidden_size", "hidden_size")):
        if config.model.get(key, -1) != -1:
            model[name] = config.model[key]
    if config.model.get("rope_theta", -1) != -1:
        model["rope_theta"] = config.model.rope_theta
        model.get("rope_parameters", {}).pop("rope_theta", None)
    if config.model.get("max_position_embeddings") is not None:
        model["max_position_embeddings"] = config.model.max_position_embeddings
    model["head_dim"] = model["hidden_size"] // model["num_attention_heads"]
    return model


def _layout(config: DictConfig, architecture: Architecture, instance: Instance) -> Layout:
    strategy = config.distributed_strategy
    grouped, fused = bool(config.model.get("qkv_linear", False)), bool(config.model.get("fuse_qkv", True))
    qkv: Qkv = "plain"
    if grouped:
        qkv = "fused" if fused else "split"
    elif fused and architecture.multi_head:
        qkv = "coalesced"
    layout = Layout(
        tp=strategy.get("tensor_model_parallel_size", 1),
        pp=strategy.get("pipeline_model_parallel_size", 1),
        kv_replicator=strategy.get("kv_replicator", 1),
        qkv=qkv,
        virtual_pp=strategy.get("virtual_pipeline_model_parallel_size") or 1,
        instance_family=instance.family,
    )
    layout.check(architecture)
    if architecture.tied and layout.pp > 1:
        raise AssertionError("Found shared weight model.embed_tokens.weight has None grad")
    return layout


def _check_sequence(config: DictConfig, data: Data, instance: Instance) -> None:
    tp = config.distributed_strategy.get("tensor_model_parallel_size", 1)
    if config.distributed_strategy.get("sequence_parallel", False) and data.encoder_seq_length % tp:
        raise AssertionError(
            f"sequence_parallel: sequence length {data.encoder_seq_length} is not divisible by tp {tp}"
        )
    if instance.has_rules and config.model.fusions.flash_attention and data.encoder_seq_length % 2048:
        raise AssertionError(f"flash_attention: sequence length {data.encoder_seq_length} is not a multiple of 2048")


def _data(config: DictConfig) -> Data:
    data = config.data
    return Data(
        train_file=Path(data.train_dir),
        val_file=Path(data.val_dir) if data.get("val_dir") else None,
        choose_samples=data.get("dev_choose_samples"),
        seq_length=int(data.seq_length),
        encoder_seq_length=int(config.model.encoder_seq_length),
        tokenizer=str(data.tokenizer.type),
        packing=bool(config.model_alignment_strategy.sft.get("packing", False)),
        micro_batch=int(data.micro_batch_size),
        global_batch=int(data.global_batch_size),
    )


def _optimization(config: DictConfig) -> Optimization:
    optim = config.model.optim
    if not str(optim.name).startswith("adamw"):
        raise ValueError(
            f"Cannot resolve optimizer '{optim.name}'. Available optimizers are : adamw, adamw_fp32OptState"
        )
    schedule = optim.get("sched")
    if schedule and schedule.name != "LinearAnnealingWithWarmUp":
        raise ValueError(f"Cannot resolve scheduler '{schedule.name}'; the rehearsal knows LinearAnnealingWithWarmUp")
    beta1, beta2 = optim.get("betas", (0.9, 0.999))
    clip = config.trainer.get("gradient_clip_val")
    return Optimization(
        lr=float(optim.lr),
        betas=(float(beta1), float(beta2)),
        eps=float(optim.get("eps", 1e-8)),
        warmup_steps=int(schedule.get("warmup_steps", 0)) if schedule else -1,
        max_steps=int(config.trainer.max_steps),
        max_epochs=int(config.trainer.get("max_epochs", -1) or -1),
        decay_norms=not config.model.get("do_layer_norm_weight_decay", False),
        clip=None if clip is None else float(clip),
    )


def _experiment(config: DictConfig) -> Experiment:
    manager = config.exp_manager
    callback = manager.get("checkpoint_callback_params") or {}
    resume = bool(manager.get("resume_if_exists", False))
    version = manager.get("version") or os.environ.get("NEMO_EXPM_VERSION") or None
    if manager.get("explicit_log_dir"):
        log_dir, version = Path(manager.explicit_log_dir), None
    else:
        log_dir = (
            Path(manager.get("exp_dir") or "nemo_experiments") / (manager.get("name") or "default") / (version or "")
        )
    return Experiment(
        log_dir=log_dir.absolute(),
        version=version,
        resume_if_exists=resume,
        resume_ignore_no_checkpoint=bool(manager.get("resume_ignore_no_checkpoint", False)),
        resume_from_checkpoint=Path(manager.resume_from_checkpoint) if manager.get("resume_from_checkpoint") else None,
        weight_init_only=bool(config.model.get("weight_init_only", False)),
        create_checkpoints=bool(manager.get("create_checkpoint_callback", True)),
        filename=callback.get("filename") or f"{config.name}--{{step}}-{{consumed_samples}}",
        every_n_train_steps=int(callback.get("every_n_train_steps") or 0),
        save_top_k=int(callback.get("save_top_k", 3)),
        save_xser=bool(manager.get("save_xser", True)),
        save_bf16=bool(manager.get("save_bf16", False)),
        show_version=bool(manager.get("create_tensorboard_logger", True)),
    )
