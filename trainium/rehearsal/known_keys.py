"""The keys that NxDT and NeMo take in the sections where an unknown key stops the run.

`trainer.*` goes to `NLPTrainer(**cfg.trainer)`, `exp_manager.*` is merged into structured configs (NxDT
`nlp_overrides.py`, `utils/exp_manager.py`; NeMo `utils/exp_manager.py`). The other sections take anything.
"""

import re
from collections.abc import Iterable

from omegaconf import DictConfig
from omegaconf.errors import ConfigKeyError


def _keys(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


TRAINER = _keys("""
    accelerator accumulate_grad_batches auto_lr_find auto_scale_batch_size barebones benchmark callbacks
    check_val_every_n_epoch default_root_dir detect_anomaly deterministic devices enable_checkpointing
    enable_model_summary enable_progress_bar fast_dev_run gradient_clip_algorithm gradient_clip_val inference_mode
    limit_predict_batches limit_test_batches limit_train_batches limit_val_batches lnc log_every_n_steps logger
    max_epochs max_steps max_time min_epochs min_steps move_metrics_to_cpu multiple_trainloader_mode num_nodes
    num_processes num_sanity_val_steps overfit_batches precision profiler reload_dataloaders_every_n_epochs
    sequential_move_factor sync_batchnorm track_grad_norm use_distributed_sampler val_check_interval
""")
EXP_MANAGER = _keys("""
    async_checkpointing checkpoint_callback_params ckpt_ptl_version create_checkpoint_callback create_clearml_logger
    create_dllogger_logger create_early_stopping_callback create_fault_tolerance_callback create_mlflow_logger
    create_neptune_logger create_preemption_callback create_straggler_detection_callback create_tensorboard_logger
    create_wandb_logger clearml_logger_kwargs dllogger_logger_kwargs disable_validation_on_resume
    early_stopping_callback_params ema enable_recovery_time_instrumentation exp_dir explicit_log_dir fault_tolerance
    files_to_copy load_xser log_delta_step_timing log_global_rank_0_only log_gradient_norm log_local_rank_0_only
    log_parameter_norm log_step_timing max_time_per_run mlflow_logger_kwargs name neptune_logger_kwargs
    resume_from_checkpoint resume_if_exists resume_ignore_no_checkpoint resume_past_end save_bf16 save_xser
    seconds_to_sleep step_timing_kwargs straggler_detection_params summary_writer_kwargs use_datetime_version version
    wandb_logger_kwargs
""")
CHECKPOINT_CALLBACK = _keys("""
    always_save_nemo async_save auto_insert_metric_name dirpath enable_version_counter every_n_epochs
    every_n_train_steps filename filepath mode model_parallel_size monitor postfix prefix save_best_model save_last
    save_last_n_optim_states save_nemo_on_train_end save_on_train_epoch_end save_top_k save_weights_only
    train_time_interval use_master_weights_in_ckpt verbose
""")


def check(config: DictConfig) -> None:
    """Raises TypeError or ConfigKeyError with the message of the real run."""
    for key in _unknown(config.trainer, TRAINER):
        raise TypeError(f"NLPTrainer.__init__() got an unexpected keyword argument '{key}'")
    for key in _unknown(config.exp_manager, EXP_MANAGER):
        raise ConfigKeyError(f"Key '{key}' not in 'ExpManagerConfig'\n    full_key: {key}")
    callback = config.exp_manager.get("checkpoint_callback_params") or {}
    for key in _unknown(callback, CHECKPOINT_CALLBACK):
        raise ConfigKeyError(f"Key '{key}' not in 'CallbackParams'\n    full_key: checkpoint_callback_params.{key}")


def _unknown(keys: Iterable[str], known: frozenset[str]) -> list[str]:
    return [key for key in keys if key not in known]
