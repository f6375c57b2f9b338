"""NxDT's `checkpoint_converter.py`: the reference's options, on this project's own converter.

Options and refusals from NxD `scripts/checkpoint_converter.py`. Kept from it: `--flag False` counts as True (argparse's
`type=bool`), `--input_dir` on the way in is one torch file, the output on the way back is one `checkpoint.pt`. Not
kept: layouts that the reference converts wrongly without a word are converted right or refused.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch

from trainium.checkpoint.architecture import Architecture
from trainium.checkpoint.layout import Layout, Qkv
from trainium.checkpoint.merge import merge
from trainium.checkpoint.paths import find_shards, shard_path
from trainium.checkpoint.shards import open_shard, write_shard
from trainium.checkpoint.split import split
from trainium.checkpoint.weights import TensorInfo
from trainium.rehearsal.lines import BANNER, say


def main(argv: Sequence[str] | None = None) -> None:
    """The command line. Failures are exceptions and exit code 1, as the reference's."""
    options = _parser().parse_args(argv)
    say(BANNER)
    if options.convert_from_full_state == options.convert_to_full_state:
        raise AssertionError("Exactly one '--convert_*' flag must be specified")
    if options.model_style != "hf":
        raise NotImplementedError("--model_style megatron is not rehearsed")
    arch = Architecture.from_config(json.loads(Path(options.config).read_text()))
    if arch.qkv_bias:
        raise KeyError("q_proj.bias")  # as the reference, which knows only the weights
    layout = _layout(options, arch)
    layout.check(arch)
    if options.convert_from_full_state:
        _from_full_state(options, arch, layout)
    else:
        _to_full_state(options, arch, layout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="checkpoint_converter.py", allow_abbrev=False)
    parser.add_argument("--input_dir", help="Path to input model/weights (merged checkpoint file)")
    parser.add_argument("--hf_model_name", help="HuggingFace model identifier")
    parser.add_argument("--output_dir", required=True, help="Path to save converted model/weights")
    parser.add_argument("--hw_backend", required=True, choices=["trn1", "trn2"], help="Specify the hardware backend")
    parser.add_argument("--config", required=True, help="Config.json")
    parser.add_argument("--model_style", choices=["hf", "megatron"], default="hf")
    for name in ("tp_size", "pp_size", "virtual_pp_size", "kv_size_multiplier"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--n_layers", type=int, default=0, help="Number of Layers")
    for name in ("coalesce_qkv", "qkv_linear", "fuse_qkv", "load_xser", "save_xser"):
        parser.add_argument(f"--{name}", type=bool, default=False)
    parser.add_argument("--convert_from_full_state", action="store_true", help="Convert full model to sharded model")
    parser.add_argument("--convert_to_full_state", action="store_true", help="Convert sharded model to full model")
    return parser


def _layout(options: argparse.Namespace, arch: Architecture) -> Layout:
    if options.n_layers not in (0, arch.layers):
        raise ValueError(f"--n_layers {options.n_layers}, but the config says num_hidden_layers={arch.layers}")
    qkv: Qkv = "plain"
    if options.coalesce_qkv:
        qkv = "coalesced"
    elif options.qkv_linear:
        qkv = "fused" if options.fuse_qkv else "split"
    return Layout(
        tp=options.tp_size,
        pp=options.pp_size,
        kv_replicator=options.kv_size_multiplier,
        qkv="auto" if options.convert_to_full_state and qkv == "plain" else qkv,
        virtual_pp=options.virtual_pp_size,
        instance_family=options.hw_backend,
    )


def _from_full_state(options: argparse.Namespace, arch: Architecture, layout: Layout) -> None:
    if not options.input_dir:
        if options.hf_model_name:
            raise EOFError(
                "the reference asks for a Hugging Face token here; the rehearsal has no hub: give --input_dir a file"
            )
        raise ValueError("Error: Please provide either HuggingFace model name or input path to consolidated statedict")
    full = torch.load(options.input_dir, map_location="cpu", weights_only=True)
    folder = Path(options.output_dir) / "model"
    folder.mkdir(parents=True, exist_ok=True)
    for tp_rank, pp_rank in layout.ranks:
        tensors = split(full, arch, layout, tp_rank, pp_rank)
        info = {n: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
        file = shard_path(folder, tp_rank, pp_rank)
        say(f"Saving to {file}")
        write_shard(file, info, tensors.values())
        if options.save_xser:
            file.with_name(f"{file.name}.tensors").mkdir(exist_ok=True)


def _to_full_state(options: argparse.Namespace, arch: Architecture, layout: Layout) -> None:
    if not options.input_dir:
        raise ValueError("--input_dir is missing: the folder with the shards")
    files = find_shards(Path(options.input_dir)).files
    absent = [rank for rank in layout.ranks if rank not in files]
    if absent:
        raise RuntimeError(f"Error: {shard_path(Path(options.input_dir), *absent[0])} does not exist")
    shards = {rank: open_shard(files[rank]) for rank in layout.ranks}
    state = merge(lambda tp_rank, pp_rank: shards[tp_rank, pp_rank], arch, layout)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    say(f"Saving full checkpoint to {folder / 'checkpoint.pt'}")
    torch.save(state, folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
