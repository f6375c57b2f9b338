"""What NxDT does to its environment and its config first of all (`training_orchestrator.py`, process_config)."""

import os

from omegaconf import DictConfig


def apply_environment(config: DictConfig) -> None:
    """Set the environment variables that NxDT derives from the config, and the compile-only changes to the config."""
    defaults = {
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": config.aync_exec_max_inflight_requests,
        "BUCKET_CAP_MB": config.bucket_size_collectives,
        "NEURON_COMPILE_CACHE_URL": config.compiler_cache_url,
        "NEURON_RT_EXEC_TIMEOUT": config.neuron_rt_exec_timeout,
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, str(value))
    flags = [os.environ.get("NEURON_CC_FLAGS", ""), str(config.compiler_flags), _precision_flags(config)]
    os.environ["NEURON_CC_FLAGS"] = " ".join(filter(None, flags))
    if os.environ.get("COMPILE") == "1":
        config.trainer.max_steps = 10
        config.exp_manager.create_tensorboard_logger = False
        config.exp_manager.create_checkpoint_callback = False


def _precision_flags(config: DictConfig) -> str:
    kinds = {
        "bf16SR": "--enable-mixed-precision-accumulation",
        "mixed_precision": "--enable-mixed-precision-accumulation",
        "mixed_precision_SR": "--enable-mixed-precision-accumulation",
        "fp32": "--auto-cast none",
        "manual": "",
        "autocast": "--enable-mixed-precision-accumulation --auto-cast none",
    }
    if config.precision.get("type") not in kinds:
        raise ValueError(
            "Invalid option given for precision type. Must be one of bf16SR, fp32, autocast, mixed_precision, "
            "mixed_precisionSR, or manual."
        )
    return kinds[config.precision.type]
