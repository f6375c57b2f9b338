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


def order(heads: int, kv_heads: int) -> list[int]:
    """The query heads in the order of the ranks."""
    per_rank = heads // TP
    starts = [(rank % kv_heads) * (TP // kv_heads) + rank // kv_heads for rank in range(TP)]
    return [start * per_rank + head for start in starts for head in range(per_rank)]


def to_nxd(hf: Path, out: Path) -> None:
    config = json.loads((hf / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    state = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    (out / "model").mkdir(parents=True)
    for rank in range(TP):
        shard: State = {}
        for name, tensor in state.items():
            if name.endswith("q_proj.weight"):
                shuffled = tensor.reshape(heads, dim, -1)[order(heads, kv_heads)].reshape(heads * dim, -1)
                shard[name] = shuffled.chunk(TP)[rank].clone()
            elif name.endswith("o_proj.weight"):
                shuffled = tensor.T.reshape(heads, dim, -1)[order(heads, kv_heads)].reshape(heads * dim, -1)
                shard[name] = shuffled.chunk(TP)[rank].clone().T  # saved with its strides, as by the reference
            elif name.endswith(("k_proj.weight", "v_proj.weight")):
                shard[name] = tensor.repeat(COPIES, 1).chunk(TP)[rank].clone()
            elif name.endswith("down_proj.weight"):
                shard[name] = tensor.chunk(TP, 1)[rank].clone()
            elif "norm" in name:
                shard[name] = tensor.clone()
            else:
                shard[name] = tensor.chunk(TP)[rank].clone()
        for layer in range(config["num_hidden_layers"]):
            mlp, attention = f"model.layers.{layer}.mlp.", f"model.layers.{layer}.self_attn."
            parts = [shard.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
            shard[f"{mlp}gate_up_proj.weight"] = torch.cat(parts)
            parts = [shard.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
            shard[f"{attention}qkv_proj.weight_qkv"] = torch.cat(parts)
        torch.save(shard, out / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")


def to_hf(nxd: Path, out: Path) -> None:
    config = json.loads((nxd / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config["hidden_size"] // heads
    shards = [torch.load(nxd / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt") for rank in range(TP)]
    back = torch.tensor(order(heads, kv_heads)).argsort()
    state: State = {}
    for name in shards[0]:
        parts = [shard[name] for shard in shards]
        if name.endswith("weight_qkv"):
            prefix = name.removesuffix("qkv_proj.weight_qkv")
            split = [part.split([heads // TP * dim, dim, dim]) for part in parts]
            queries = torch.cat([q for q, _, _ in split]).reshape(heads, dim, -1)[back]
            state[f"{prefix}q_proj.weight"] = queries.reshape(heads * dim, -1).clone()
            state[f"{prefix}k_proj.weight"] = torch.cat([k for _, k, _ in split])[: kv_heads * dim].clone()
            state[f"{prefix}v_proj.weight"] = torch.cat([v for _, _, v in split])[: kv_heads * dim].clone()
        elif name.endswith("gate_up_proj.weight"):
            for half, part in enumerate(("gate", "up")):
                state[name.replace("gate_up", part)] = torch.cat([gate_up.chunk(2)[half] for gate_up in parts])
        elif name.endswith("o_proj.weight"):
            columns = torch.cat(parts, 1).T.reshape(heads, dim, -1)[back]
            state[name] = columns.reshape(heads * dim, -1).T.contiguous()
        elif name.endswith("down_proj.weight"):
            state[name] = torch.cat(parts, 1)
        elif "norm" in name:
            state[name] = parts[0].clone()
        else:
            state[name] = torch.cat(parts)
    out.mkdir(parents=True)
    torch.save(state, out / "checkpoint.pt")


if __name__ == "__main__":
    {"to-nxd": to_nxd, "to-hf": to_hf}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
