"""The other conversion engine: NxDT's own `checkpoint_converter.py`, driven around its traps.

    python -m trainium.model.nxdt_converter prepare BASE OUT_FILE

Without a hub name and with a single-file input it never asks for a token (the tutorial edits the installed package for
that). Its options are those of NxD's scripts/checkpoint_converter.py; what that one converts wrongly, mostly with exit
code 0 (measured, NxD 2.29), is refused here.
"""

import argparse
import sys
from enum import StrEnum
from pathlib import Path

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.huggingface import open_weights, read_config
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.placement import EMBEDDING, source_shapes
from trainium.checkpoint.shards import write_shard
from trainium.errors import UserError
from trainium.text import size

FULL_STATE = "checkpoint.pt"  # what the converter writes into --output_dir on the way back
SCRIPT = Path("checkpoint_converter_scripts") / "checkpoint_converter.py"  # below the toolchain's examples folder


class Direction(StrEnum):
    """Which way the converter runs; the value is its option without the dashes."""

    TO_NXD = "convert_from_full_state"
    TO_HF = "convert_to_full_state"


class NxdtConverterError(UserError):
    """The toolchain's converter cannot do this, or would do it wrong without saying so."""


def converter_argv(
    script: Path,
    direction: Direction,
    source: Path,
    out: Path,
    config: Path,
    layout: Layout,
    arch: Architecture,
    *,
    python: str = "python3",
) -> tuple[str, ...]:
    """The converter's command line, in the tutorial's order.

    Args:
        script: the toolchain's checkpoint_converter.py, absolute.
        source: TO_NXD: the single file that `prepare` made. TO_HF: the checkpoint's `model` folder.
        out: gets `model/*.pt` (TO_NXD) or `checkpoint.pt` (TO_HF).
        config: the base model's config.json; the converter reads heads and hidden size from it.
        layout: with `qkv` resolved.
        python: interpreter of the toolchain, found through the PATH of its activation.

    Raises NxdtConverterError naming what to change.
    """
    for what, path in (("converter", script), ("input", source), ("output", out), ("config", config)):
        if not path.is_absolute():
            # With xser a relative --input_dir fails after the work is done (measured).
            raise NxdtConverterError(f"{what} path {path} is relative: the converter needs absolute paths")
    check_layout(layout, arch, direction)
    return command_line(script, direction, source, out, config, layout, layers=arch.layers, python=python)


def command_line(
    script: Path,
    direction: Direction,
    source: Path,
    out: Path,
    config: Path,
    layout: Layout,
    *,
    layers: int,
    xser: bool = True,
    python: str = "python3",
) -> tuple[str, ...]:
    """As `converter_argv`, for any script with these options and whatever it is given. xser: the per-tensor form."""
    form = ("--save_xser" if direction is Direction.TO_NXD else "--load_xser", "True") if xser else ()
    virtual = ("--virtual_pp_size", str(layout.virtual_pp)) if layout.virtual_pp > 1 else ()
    return (
        python,
        str(script),
        *("--model_style", "hf"),
        *("--hw_backend", layout.instance_family),
        *("--input_dir", str(source)),
        *("--output_dir", str(out)),
        *form,
        *("--config", str(config)),
        *("--tp_size", str(layout.tp)),
        *("--pp_size", str(layout.pp)),
        *virtual,
        *("--n_layers", str(layers)),
        *("--kv_size_multiplier", str(layout.kv_replicator)),
        *_qkv_flags(layout, direction),
        f"--{direction}",
    )


def converter_env() -> dict[str, str]:
    """Environment of the converter's job: offline, so that nothing asks for a token; unbuffered for the log.

    Standard input is closed by the job script (Slurm's batch scripts read /dev/null).
    """
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def check_layout(layout: Layout, arch: Architecture, direction: Direction) -> None:
    """Raise LayoutError for a layout that does not fit, NxdtConverterError for one that the converter gets wrong."""
    layout.check(arch)
    if problem := converter_problem(layout, arch, direction):
        raise NxdtConverterError(
            f"convert.engine=nxdt: the toolchain's converter cannot do {problem}. Use convert.engine=native."
        )


def converter_problem(layout: Layout, arch: Architecture, direction: Direction) -> str | None:
    """What the reference converter gets wrong, most of it with exit code 0 (measured, NxD 2.29); `qkv` is resolved."""
    m, grouped = layout.kv_replicator, arch.heads != arch.kv_heads
    if layout.instance_family == "trn2" and m > 1:
        return f"kv_replicator {m} on trn2: it tiles the KV heads as on trn1, and the model attends wrongly"
    if arch.head_dim * arch.heads != arch.hidden:
        return f"head_dim {arch.head_dim} ≠ hidden_size {arch.hidden} / {arch.heads} heads: it takes them as equal"
    if arch.qkv_bias:
        return "biases of q, k and v: it knows only their weights (KeyError: 'q_proj.bias')"
    if grouped and layout.qkv in ("coalesced", "plain"):
        return f"qkv '{layout.qkv}' with {arch.heads} query and {arch.kv_heads} KV heads: it needs qkv_linear"
    if layout.qkv == "plain" and direction is Direction.TO_HF:
        return "qkv 'plain': it cannot merge plain q_proj, k_proj and v_proj back (KeyError)"
    if layout.qkv == "fused" and direction is Direction.TO_HF and arch.heads != arch.kv_heads * m:
        per_rank = f"{arch.heads // layout.tp} query and {arch.kv_heads * m // layout.tp} KV heads per rank"
        return f"qkv 'fused' with {per_rank}: it cuts the fused tensor into three equal parts"
    return None


def prepare(base: Path, out: Path) -> int:
    """Merge the base's weight files into the one torch file that the converter reads; returns the number of tensors.

    Tied embeddings are untied: the converter writes no lm_head by itself, and the trainer needs one. One tensor in
    memory at a time; the file appears whole or not at all. Raises UserError when the base is no whole Llama.
    """
    config = read_config(base)
    if "num_key_value_heads" not in config:
        raise NxdtConverterError(
            f"{base / 'config.json'} has no num_key_value_heads, which the toolchain's converter reads. "
            "Use convert.engine: native, or add the key (num_attention_heads for multi-head attention)."
        )
    weights = open_weights(base)
    names = source_shapes(weights.shapes, Architecture.from_config(config), str(base))
    sources = {name: name if name in weights else EMBEDDING for name in names}  # only a tied lm_head is absent
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.part")
    try:
        info = {name: weights.info[source] for name, source in sources.items()}
        write_shard(partial, info, (weights[source] for source in sources.values()))
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return len(sources)


def _qkv_flags(layout: Layout, direction: Direction) -> tuple[str, ...]:
    """Flags that are on. One that is off is left out: argparse reads `--flag False` as True (`type=bool`)."""
    match layout.qkv:
        case "fused":
            return ("--qkv_linear", "True", "--fuse_qkv", "True")
        case "split":
            return ("--qkv_linear", "True")
        case "coalesced" if direction is Direction.TO_NXD:
            return ("--coalesce_qkv", "True")
        case _:
            return ()


def main(argv: list[str] | None = None) -> int:
    """Command line; 0 done, 1 the file system failed, 2 the user must change something."""
    parser = argparse.ArgumentParser(prog="python -m trainium.model.nxdt_converter", description=__doc__.split("\n")[0])
    command = parser.add_subparsers(dest="command", required=True).add_parser("prepare", help=prepare.__doc__)
    command.add_argument("base", type=Path, help="Hugging Face folder")
    command.add_argument("out", type=Path, help="file to write")
    arguments = parser.parse_args(argv)
    try:
        count = prepare(arguments.base, arguments.out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {count} tensors, {size(arguments.out.stat().st_size)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
