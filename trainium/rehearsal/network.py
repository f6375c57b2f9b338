"""The Llama that is trained: transformers' model in fp32, its loss, and its graph on fake tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from trainium.rehearsal.data import IGNORED
from trainium.rehearsal.settings import Optimization


def build(model_config: Mapping[str, Any]) -> torch.nn.Module:
    """A LlamaForCausalLM in fp32 with arbitrary weights. Everything in config.json counts as a Llama's."""
    keys = {key: value for key, value in model_config.items() if key not in ("model_type", "torch_dtype")}
    config = LlamaConfig(**keys | {"dtype": "float32", "use_cache": False})
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.train()


def loss_of(model: torch.nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token over the labelled positions; causal attention only, as in NxDT's Llama."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels[:, 1:].reshape(-1), ignore_index=IGNORED
    )


def optimizer_for(model: torch.nn.Module, options: Optimization) -> torch.optim.AdamW:
    """AdamW with NxDT's two parameter groups.

    Their weight decay is 0.01 and 0 whatever `optim.weight_decay` says, and `do_layer_norm_weight_decay: True` puts
    the norms into the group *without* decay (NxDT `utils/model_utils.py`, `hf_models/base_model.py`).
    """
    undecayed = ["bias"] if options.decay_norms else ["bias", "LayerNorm", "norm"]
    groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.01}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        groups[any(part in name for part in undecayed)]["params"].append(parameter)
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=options.lr, betas=options.betas, eps=options.eps)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operation that passes, with the shapes of its results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        shapes = ", ".join(f"{r.dtype}{list(r.shape)}" for r in results if isinstance(r, torch.Tensor))
        self.lines.append(f"{func} -> {shapes}")
        return result


def trace(model_config: Mapping[str, Any], options: Optimization, micro_batch: int, sequence: int) -> dict[str, str]:
    """Trace forward and backward, and the optimizer's step, without computing anything.

    Returns graph name → its operations, one a line. Raises whatever the model raises for shapes that do not fit.
    """
    with FakeTensorMode():
        model = build(model_config)
        ids = torch.zeros(micro_batch, sequence, dtype=torch.int64)
        with _Recorder() as forward_backward:
            loss_of(model, ids, ids).backward()  # type: ignore[no-untyped-call]
        with _Recorder() as update:
            optimizer_for(model, options).step()
    return {"forward-backward": "\n".join(forward_backward.lines), "optimizer": "\n".join(update.lines)}
