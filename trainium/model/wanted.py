"""Which files of a hub repository a fine-tuning run needs."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

# Besides the weights: configuration, tokenizer, chat template, and what the licence asks to be passed on.
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*")
_NOT_SMALL = ("*.index.json", "adapter_*", "*.onnx.json")
# The same weights in the layout of another trainer, which would double the download.
_FOREIGN_WEIGHTS = ("consolidated*", "adapter_*", "*.fp16.*", "*.fp32.*")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.safetensors.index.json", "pytorch_model*.bin.index.json")


def wanted_files(names: Sequence[str]) -> list[str]:
    """Of all files of a repository, those a run needs, sorted.

    Safetensors when there are any, else PyTorch's own format; one file rather than shards when a repository has both,
    as transformers chooses; nothing from sub-folders (`original/`, `onnx/`, …: the same weights for other programs).
    """
    top = [name for name in names if "/" not in name]
    small = [name for name in top if _matches(name, _SMALL) and not _matches(name, _NOT_SMALL)]
    for single, shards, index in (
        ("model.safetensors", "*.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model*.bin", "pytorch_model.bin.index.json"),
    ):
        weights = [name for name in top if _matches(name, (shards,)) and not _matches(name, _FOREIGN_WEIGHTS)]
        if single in weights:
            return sorted([*small, single])
        if weights:
            return sorted([*small, *weights, *(name for name in top if name == index)])
    return sorted(small)


def is_weights(name: str) -> bool:
    """Weights or their index, in either format and of any origin."""
    return _matches(name, _WEIGHTS)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
