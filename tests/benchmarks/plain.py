"""A plain converter, to measure against: the whole model in memory, and all of q, k, v, o shuffled again for each rank.

    python plain.py to-nxd HF_DIR OUT | to-hf OUT_OF_TO_NXD OUT

This is how the reference works (AWS's checkpoint_converter.py, read): the model through transformers, a loop over ranks
in which every tensor is cut anew, `torch.load` of all shards and one `checkpoint.pt` on the way back. Written anew in a
few lines, for the one layout that is measured: fused, tp 32, KV replicator 4. `trainium verify` finds its output equal.
"""

import json
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TP, COPIES = 32, 4
State = dict[str, Tensor]


def shuffled(groups: Tensor, kv_heads: int) -> Tensor:
    """The query heads of each rank, (ranks, heads per rank, ...), in the order of the ranks."""
    every = torch.arange(kv_heads) * TP // kv_heads
    return torch.cat([groups[every + first] for first in range(TP // kv_heads)])


def to_nxd(hf: Path, out: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    by_rank = (TP, heads // TP, config["hidden_size"] // heads, -1)
    state = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    (out / "model").mkdir(parents=True)
    for rank in range(TP):
        shard: State = {}
        for name, tensor in state.items():
            if name.endswith("q_proj.weight"):
                shard[name] = shuffled(tensor.reshape(by_rank), kv_heads)[rank].reshape(-1, tensor.shape[1]).clone()
            elif name.endswith("o_proj.weight"):
                columns = shuffled(tensor.T.reshape(by_rank), kv_heads)[rank]
                shard[name] = columns.reshape(-1, len(tensor)).T.clone()  # saved with its strides, as by the reference
            elif name.endswith(("k_proj.weight", "v_proj.weight")):
                shard[name] = tensor.repeat(COPIES, 1).chunk(TP)[rank].clone().clone()
            elif name.endswith(("gate_proj.weight", "up_proj.weight")):
                part, both = tensor.chunk(TP)[rank].clone(), name.replace("gate_proj", "gate_up_proj")
                both = both.replace(".up_proj", ".gate_up_proj")
                shard[both] = torch.cat([shard[both], part]).clone() if both in shard else part.clone()
            elif name.endswith("down_proj.weight"):
                shard[name] = tensor.chunk(TP, 1)[rank].clone()
            elif "norm" in name:
                shard[name] = tensor
            else:
                shard[name] = tensor.chunk(TP)[rank].clone()
        for layer in range(config["num_hidden_layers"]):
            attention = f"model.layers.{layer}.self_attn."
            shard[f"{attention}qkv_proj.weight_qkv"] = torch.cat(
                [shard.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
            )
        torch.save(shard, out / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")


def to_hf(nxd: Path, out: Path) -> None:
    config = json.loads((nxd / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    parts: dict[str, list[Tensor]] = {}
    for rank in range(TP):
        for name, tensor in torch.load(nxd / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt").items():
            if name.endswith("weight_qkv"):
                for part, held in zip("qkv", tensor.split([heads // TP * dim, dim, dim]), strict=True):
                    parts.setdefault(name.replace("qkv_proj.weight_qkv", f"{part}_proj.weight"), []).append(held)
            elif name.endswith("gate_up_proj.weight"):
                for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True):
                    parts.setdefault(name.replace("gate_up", part), []).append(torch.cat([half.clone()]))
            elif name.endswith("down_proj.weight"):
                parts.setdefault(name, []).append(torch.cat([tensor]).clone())
            else:
                parts.setdefault(name, []).append(tensor)
    state: State = {}
    for name, held in parts.items():
        if name.endswith("q_proj.weight"):
            state[name] = in_order(torch.cat(held), kv_heads, dim).clone()
        elif name.endswith("o_proj.weight"):
            state[name] = in_order(torch.cat(held, 1).T, kv_heads, dim).T.clone()
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            state[name] = torch.cat(held).chunk(COPIES)[0].clone()
        elif "norm" in name:
            state[name] = held[0]
        elif name.endswith(("gate_proj.weight", "up_proj.weight")):
            state[name] = torch.cat(held)
        else:
            state[name] = torch.cat(held, 1 if name.endswith("down_proj.weight") else 0)
    out.mkdir(parents=True)
    torch.save(state, out / "checkpoint.pt")


def in_order(rows: Tensor, kv_heads: int, dim: int) -> Tensor:
    """`shuffled` undone, for the rows of all ranks."""
    groups = rows.reshape(TP, len(rows) // TP // dim, dim, -1)
    every = torch.arange(TP // kv_heads) * kv_heads
    return torch.cat([groups[every + head].reshape(-1, groups.shape[-1]) for head in range(kv_heads)])


if __name__ == "__main__":
    {"to-nxd": to_nxd, "to-hf": to_hf}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
