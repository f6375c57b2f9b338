"""Mixtral's experts go through NxDT's own converter: nobody could check here in which orientation it stacks them.

What is done here is around it: one file for it to read, its command line, its output in the place and form that were
asked for. NxDT's `hf_nxdt_mixtral_ckpt_converter.py` and its options were read, not run.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from trainium.checkpoint.shards import write_shard
from trainium.checkpoint.weights import Weights
from trainium.errors import UserError
from trainium.model.nxdt_converter import FULL_STATE, Direction, converter_env, qkv_flags

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

    examples: NxDT's examples folder. Raises MixtralError; `out/model` is as it was before then.
    """
    script = _script(examples)
    config = hf_dir / "config.json"
    with _work(out) as work:
        full = work / FULL_STATE
        weights = open_weights(hf_dir)
        write_shard(full, dict(weights.info), (weights[name] for name in weights.info))
        xser = ("--save_xser", "True") if form == "per-tensor" else ()
        _run(_argv(script, Direction.TO_NXD, full, work / "out", config, layout, xser))
        find_shards(work / "out" / "model")
        out.mkdir(parents=True, exist_ok=True)
        if (out / "model").exists():
            (out / "model").rename(work / "replaced")
        (work / "out" / "model").rename(out / "model")
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
    shards = find_shards(model_folder(checkpoint))
    xser = ("--load_xser", "True") if any(tensor_folder(path).is_dir() for path in shards.files.values()) else ()
    with _work(out) as work:
        _run(_argv(script, Direction.TO_HF, shards.folder, work, config, layout, xser))
        if not (work / FULL_STATE).is_file():
            raise MixtralError(f"NxDT's converter ended well but wrote no {FULL_STATE}; its messages are above")
        out.mkdir(parents=True, exist_ok=True)
        write_object(out / "config.json", read_config(config))
        if single_file:
            (work / FULL_STATE).rename(out / FULL_STATE)
        else:
            _write_safetensors(open_weights(work / FULL_STATE), out, max_shard_bytes)
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


def _argv(
    script: Path, direction: Direction, source: Path, out: Path, config: Path, layout: Layout, xser: tuple[str, ...]
) -> tuple[str, ...]:
    virtual = ("--virtual_pp_size", str(layout.virtual_pp)) if layout.virtual_pp > 1 else ()
    return (
        "python3",
        str(script),
        *("--model_style", "hf"),
        *("--hw_backend", layout.instance_family),
        *("--input_dir", str(source.absolute())),
        *("--output_dir", str(out.absolute())),
        *xser,
        *("--config", str(config.absolute())),
        *("--tp_size", str(layout.tp)),
        *("--pp_size", str(layout.pp)),
        *virtual,
        *("--n_layers", str(read_config(config)["num_hidden_layers"])),
        *("--kv_size_multiplier", str(layout.kv_replicator)),
        *qkv_flags(layout, direction),
        f"--{direction}",
    )


def _run(argv: tuple[str, ...]) -> None:
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


@contextmanager
def _work(out: Path) -> Iterator[Path]:
    """A folder beside what is written; it goes whatever happens."""
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)
