"""Mixtral's experts go through NxDT's own converter: nobody could check here in which orientation it stacks them.

What is done here is around it: one file for it to read, its command line, its output in the place and form that were
asked for. NxDT's `hf_nxdt_mixtral_ckpt_converter.py` and its options were read, not run.
"""

import os
import subprocess
from pathlib import Path

from trainium.checkpoint.formats import Form
from trainium.checkpoint.huggingface import (
    open_weights,
    plan_files,
    read_config,
    write_index,
    write_object,
    write_safetensors,
)
from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.checkpoint.paths import find_shards, model_folder, tensor_folder
from trainium.checkpoint.replacing import MODEL_FOLDER, WEIGHT_FOLDER, refuse_losses, refuse_training
from trainium.checkpoint.shards import write_shard
from trainium.checkpoint.staging import staged
from trainium.checkpoint.weights import Weights
from trainium.errors import UserError
from trainium.files import sync_file
from trainium.model.nxdt_converter import FULL_STATE, Direction, command_line, converter_env

SCRIPT = Path("checkpoint_converter_scripts") / "hf_nxdt_mixtral_ckpt_converter.py"  # below NxDT's examples folder
_NOTE = "Mixtral: NxDT's own converter did the work; how it stacks the experts was not checked here"


class MixtralError(UserError):
    """The conversion cannot be handed to NxDT's converter, or it failed there."""


def asked_for(config: Path, examples: Path | None, **ours: object) -> bool:
    """Whether the model of this config.json (or its folder) is a Mixtral.

    ours: options that only this project's converter has. Raises MixtralError when they or `examples` do not fit.
    """
    if read_config(config).get("model_type") != "mixtral":
        if examples:
            raise MixtralError("--examples is for a Mixtral only; this project's own converter does this model")
        return False
    if wrong := [f"--{name.replace('_', '-')}" for name, value in ours.items() if value]:
        raise MixtralError(f"a Mixtral is converted by NxDT's own converter, which has no {', '.join(wrong)}")
    return True


def layout(
    tp: int | None,
    pp: int | None,
    kv_replicator: int | None,
    qkv: Qkv,
    virtual_pp: int | None,
    instance_family: InstanceFamily | None,
) -> Layout:
    """What was given, else NxDT's defaults; a Mixtral has grouped queries, so `auto` is fused. Raises MixtralError."""
    if tp is None:
        raise MixtralError("--tp is needed: the layout of a Mixtral is not read from its checkpoint")
    return Layout(
        tp=tp,
        pp=pp or 1,
        kv_replicator=kv_replicator or 1,
        qkv="fused" if qkv == "auto" else qkv,
        virtual_pp=virtual_pp or 1,
        instance_family=instance_family or "trn1",
    )


def to_nxd(hf_dir: Path, out: Path, layout: Layout, examples: Path | None, *, form: Form = "inline") -> None:
    """HF folder → `out/model`, by NxDT's converter with the `python3` that is first in PATH.

    examples: NxDT's examples folder. An earlier `out/model` is replaced in one step. Raises MixtralError, and
    CheckpointError as `convert.to_nxd`.
    """
    script = _script(examples)
    refuse_training(out)
    weights = open_weights(hf_dir)
    needed = 2 * sum(item.bytes for item in weights.info.values())  # the file that is read, and what is made of it
    with staged(out / "model", MODEL_FOLDER, needed) as work:
        full = work / FULL_STATE
        write_shard(full, dict(weights.info), (weights[name] for name in weights.info))
        _run(script, Direction.TO_NXD, full, work, hf_dir, layout, xser=form == "per-tensor")
        full.unlink()
        find_shards(work / "model")
        for path in (work / "model").iterdir():
            path.rename(work / path.name)
        (work / "model").rmdir()
        _sync(work)
    print(f"{out / 'model'}: {_NOTE}")


def to_hf(
    checkpoint: Path,
    out: Path,
    config: Path,
    layout: Layout,
    examples: Path | None,
    *,
    max_shard_bytes: int,
    single_file: bool,
) -> None:
    """NxD checkpoint → safetensors or `checkpoint.pt` in `out`, beside a copy of config.json. As `to_nxd`."""
    script = _script(examples)
    refuse_losses(out, checkpoint, config)
    shards = find_shards(model_folder(checkpoint))
    xser = any(tensor_folder(path).is_dir() for path in shards.files.values())
    needed = 2 * sum(path.stat().st_size for path in shards.folder.rglob("*") if path.is_file())
    with staged(out, WEIGHT_FOLDER, needed) as work:
        _run(script, Direction.TO_HF, shards.folder, work, config, layout, xser=xser)
        full = work / FULL_STATE
        if not full.is_file():
            raise MixtralError(f"NxDT's converter ended well but wrote no {FULL_STATE}; its messages are above")
        write_object(work / "config.json", read_config(config))
        if not single_file:
            _write_safetensors(open_weights(full), work, max_shard_bytes)
            full.unlink()
        _sync(work)
    print(f"{out}: {_NOTE}")


def _script(examples: Path | None) -> Path:
    if examples is None:
        raise MixtralError(
            "a Mixtral is converted by NxDT's own converter: activate NxDT's environment and give --examples, the "
            "folder `examples` of neuronx-distributed-training"
        )
    script = (examples / SCRIPT).absolute()
    if not script.is_file():
        raise MixtralError(f"{script} does not exist; --examples is the folder `examples` of NxDT")
    return script


def _run(
    script: Path, direction: Direction, source: Path, out: Path, config: Path, layout: Layout, *, xser: bool
) -> None:
    """config: config.json, or the folder that has it."""
    layers = read_config(config).get("num_hidden_layers")
    if not isinstance(layers, int):
        raise MixtralError(f"{config}: num_hidden_layers={layers!r} must be a whole number")
    paths = (source.absolute(), out.absolute(), (config / "config.json" if config.is_dir() else config).absolute())
    argv = command_line(script, direction, *paths, layout, layers=layers, xser=xser)
    try:
        code = subprocess.run(argv, env=os.environ | converter_env(), stdin=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise MixtralError(f"{argv[0]} cannot be run ({error}); activate NxDT's environment first") from error
    if code:
        raise MixtralError(
            f"NxDT's converter ended with code {code}; its messages are above. It needs NxDT's environment: "
            "`python3` must import neuronx_distributed"
        )


def _write_safetensors(weights: Weights, out: Path, max_shard_bytes: int) -> None:
    files = plan_files(weights.info, max_shard_bytes)
    for name, tensors in files:
        info = {tensor: weights.info[tensor] for tensor in tensors}
        write_safetensors(out / name, info, weights.__getitem__, lambda size: None)
    if len(files) > 1:
        write_index(out, weights.info, files)


def _sync(folder: Path) -> None:
    """NxDT's converter leaves it to the system when what it wrote reaches the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            sync_file(path)
