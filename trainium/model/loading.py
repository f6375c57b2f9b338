"""A Hugging Face folder brought to life with transformers: loaded, asked for a few tokens, its chat template rendered.

The only module here that imports transformers, and only inside its functions: the import alone takes seconds.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from trainium.errors import UserError
from trainium.model.host import available_memory, thread_count
from trainium.text import size

# Weights as loaded, plus activations, key/value cache and the interpreter with torch and transformers.
_OVERHEAD_BYTES = 2 * 1024**3
PROMPT = "Hello"


class LoadError(RuntimeError):
    """The folder does not load completely, or what it loads does not compute."""


class NotEnoughMemoryError(RuntimeError):
    """The host cannot hold the model; says how much it needs and has."""


@dataclass(frozen=True)
class Generation:
    """Greedy continuation of a prompt."""

    prompt: str
    text: str
    tokens: int


@cache
def _prepare() -> None:
    """Threads as the job was given them, transformers quiet: the job's log is read by people."""
    from transformers.utils import logging

    torch.set_num_threads(thread_count())
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer. Raises LoadError with the library's reason."""
    from transformers import AutoTokenizer

    _prepare()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises whatever its parsers raise
        raise LoadError(f"the tokenizer in {folder} does not load: {_reason(error)}") from error


def load_model(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """The folder's causal language model in eval mode, every weight from the files and every file's weight used.

    Args:
        dtype: dtype to compute in; None keeps the stored one.

    Raises:
        NotEnoughMemoryError: before anything is read.
        LoadError: transformers refuses the folder, or would fill in or ignore weights.
    """
    from transformers import AutoModelForCausalLM

    _prepare()
    needed, available = memory_needed(folder, dtype), available_memory()
    if needed > available:
        raise NotEnoughMemoryError(f"needs {size(needed)} of memory, has {size(available)}")
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
        )
    except Exception as error:  # as above
        raise LoadError(f"the model in {folder} does not load: {_reason(error)}") from error
    problems = {kind: sorted(map(str, names)) for kind, names in loading.items() if names}
    if problems:
        raise LoadError(f"the model in {folder} loads only in part: {problems}")
    return model.eval()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that transformers would read: safetensors where there are any, else torch's."""
    return tuple(folder.glob("*.safetensors")) or tuple(folder.glob("pytorch_model*.bin"))


def memory_needed(folder: Path, dtype: torch.dtype | None = None) -> int:
    """Bytes of memory that loading the folder's weights and generating takes, a safe estimate from the file sizes.

    With another dtype than the stored one the conversion holds both, at worst of the largest file.
    """
    sizes = [path.stat().st_size for path in weight_files(folder)]
    if dtype is None:
        return sum(sizes) + _OVERHEAD_BYTES
    # Two bytes a value or more are stored, so this never guesses too low.
    return sum(sizes) * dtype.itemsize // 2 + max(sizes, default=0) + _OVERHEAD_BYTES


def generate(model: Any, tokenizer: Any, prompt: str, max_new_tokens: int) -> Generation:
    """Greedy continuation of bos + prompt, the way the trainer renders a row; stops at eos.

    Raises LoadError if the model's logits are not finite or its vocabulary does not hold the prompt.
    """
    ids = prompt_ids(tokenizer, prompt)
    vocabulary = model.get_input_embeddings().num_embeddings
    if max(ids) >= vocabulary:
        raise LoadError(f"the tokenizer gives token {max(ids)}, but the model has {vocabulary} embeddings")
    tokens = torch.tensor([ids])
    with torch.inference_mode():
        if not torch.isfinite(model(tokens).logits).all():
            raise LoadError("the model's logits for a short prompt are not finite")
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    new = output[0, len(ids) :].tolist()
    return Generation(prompt, tokenizer.decode(new, skip_special_tokens=True), len(new))


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """bos (where the tokenizer has one) + text, no other special token."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    return [*bos, *tokenizer(text, add_special_tokens=False)["input_ids"]]


def check_chat_template(tokenizer: Any, template: str) -> str:
    """A user's question rendered with `template`. Raises UserError with Jinja's reason."""
    try:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": PROMPT}], chat_template=template, tokenize=False
        )
    except Exception as error:  # Jinja errors and the template's own raise_exception
        raise UserError(
            f"the chat template does not render one user message: {_reason(error)}. Correct the template file."
        ) from error
    return str(rendered)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip() or 'no message'}"
