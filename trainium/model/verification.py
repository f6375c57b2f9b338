"""An exported folder against its base model: one row per thing that must hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainium.checkpoint.compare import compare_models
from trainium.checkpoint.comparison import Comparison, TensorComparison
from trainium.checkpoint.formats import FloatDtype
from trainium.checkpoint.huggingface import read_object
from trainium.checkpoint.layout import Layout
from trainium.checkpoint.merge import CopyDifference
from trainium.checkpoint.placement import HEAD
from trainium.checkpoint.stored_model import open_model
from trainium.checkpoint.verify import verify_nxd
from trainium.model import loading
from trainium.model.companions import TEMPLATE_FILE, Change, companion_files
from trainium.text import some

_NEW_TOKENS = 8


@dataclass(frozen=True)
class Check:
    """One row of the comparison table. `skipped` is neither good nor bad: the detail says what was not looked at."""

    check: str
    result: Literal["passed", "failed", "skipped"]
    detail: str


def check_weights(base: Path, export: Path, *, untied: bool, dtype: str) -> tuple[tuple[Check, ...], Comparison]:
    """Names, shapes, dtypes, finite numbers, and that training changed something; both folders are read once."""
    model = open_model(export)
    comparison = compare_models(open_model(base), model)
    added = compare_models(model, model, names=comparison.only_in_b).tensors
    shapes = [f"{item.tensor} {item.problem}" for item in comparison.shape_differences]
    dtypes = [f"{name} is {info.dtype}" for name, info in model.info.items() if info.dtype != dtype]
    cast = f", cast from the base's in {len(comparison.dtype_differences)}" if comparison.dtype_differences else ""
    return (
        _names(comparison, untied),
        _unless("shapes", shapes, f"the base's in all {len(comparison.tensors)} tensors of the same name"),
        _unless("dtypes", dtypes, f"{dtype} in all {len(model.info)}{cast}"),
        _finite([*comparison.tensors, *added]),
        _changed(comparison),
    ), comparison


def check_copies(differences: Sequence[CopyDifference]) -> Check:
    """Norms and replicated KV heads over the ranks, as compared while they were merged."""
    name = "copies across ranks"
    if not differences:
        return Check(name, "passed", "norms and replicated KV heads are bit for bit the same in all ranks")
    worst = max(differences, key=lambda item: item.max_difference)
    where = f"{worst.tensor} in tp rank {worst.tp_rank}, pp rank {worst.pp_rank}, by {worst.max_difference:.3g}"
    return Check(name, "failed", f"{len(differences)} copies differ between ranks, most of all {where}")


def check_slices(export: Path, checkpoint: Path, layout: Layout, dtype: FloatDtype) -> Check:
    """What the toolchain's converter merged, against every rank's own tensors; equal slices make equal copies."""
    found = verify_nxd(export, checkpoint, layout, dtype=dtype)
    problems = [f"{item.where}: {item.tensor} {item.problem}" for item in found.problems]
    detail = (
        f"every one of {found.tensors} tensors in {found.shards} shards, {found.copies} copies included, is its slice"
    )
    return _unless("copies across ranks", problems, f"{detail} of the merged model")


def check_companions(base: Path, export: Path, changes: Sequence[Change]) -> Check:
    """Everything beside the weights is the base's, the recorded keys apart."""
    wrong = []
    changed_files = {change.file for change in changes}
    for source in (base / "config.json", *companion_files(base)):
        name = source.relative_to(base).as_posix()
        if name in changed_files:
            keys = {change.key: change.after for change in changes if change.file == name}
            same = read_object(export / name) == read_object(source) | keys
        else:
            # The template file repeats a changed tokenizer_config.json; `check_chat_template` looks at both.
            same = name == TEMPLATE_FILE or (export / name).read_bytes() == source.read_bytes()
        if not same:
            wrong.append(name)
    if wrong:
        return Check("config and tokenizer", "failed", f"not as in the base: {', '.join(wrong)}")
    told = [f"{change.file}: {change.key} {_short(change.before)} → {_short(change.after)}" for change in changes]
    detail = f"the base's with single keys changed ({'; '.join(told)})" if told else "byte for byte the base's"
    return Check("config and tokenizer", "passed", detail)


def check_chat_template(export: Path, template: str) -> Check:
    """transformers uses the template that was asked for."""
    name = "chat template"
    try:
        tokenizer = loading.load_tokenizer(export)
    except loading.LoadError as error:
        return Check(name, "failed", str(error))
    if tokenizer.chat_template != template:
        return Check(name, "failed", "transformers finds another template than the one asked for")
    rendered = loading.check_chat_template(tokenizer, template)
    return Check(name, "passed", f"renders {_short(rendered)}")


def check_loads(export: Path) -> Check:
    """transformers loads every weight and generates a few tokens, unless memory clearly cannot hold the model."""
    name = "loads and generates"
    try:
        model, tokenizer = loading.load_model(export), loading.load_tokenizer(export)
        answer = loading.generate(model, tokenizer, loading.PROMPT, _NEW_TOKENS)
    except loading.NotEnoughMemoryError as error:
        return Check(name, "skipped", f"not loaded: {error}")
    except loading.LoadError as error:
        return Check(name, "failed", str(error))
    return Check(name, "passed", f"{answer.tokens} tokens after {answer.prompt!r}: {_short(answer.text)}")


def _names(comparison: Comparison, untied: bool) -> Check:
    added, missing = comparison.only_in_b, comparison.only_in_a
    expected = (HEAD,) if untied else ()
    if missing or added != expected:
        parts = [f"missing: {some(missing, 5)}"] if missing else []
        parts += [f"added: {some(added, 5)}" if added else f"{HEAD} was not added"] if added != expected else []
        return Check("names", "failed", "; ".join(parts))
    count = len(comparison.tensors) + len(comparison.shape_differences)
    return Check("names", "passed", f"the base's {count}" + (f" and {HEAD} (tied embeddings untied)" if untied else ""))


def _finite(tensors: Sequence[TensorComparison]) -> Check:
    bad = [f"{item.name} ({item.nan} NaN, {item.inf} infinite)" for item in tensors if item.nan or item.inf]
    return _unless("finite", bad, f"no NaN, no infinity in {len(tensors)} tensors")


def _unless(name: str, problems: Sequence[str], good: str) -> Check:
    return Check(name, "failed", some(problems, 5)) if problems else Check(name, "passed", good)


def _changed(comparison: Comparison) -> Check:
    changed = [item for item in comparison.tensors if item.max_difference > 0]
    detail = f"{len(changed)} of {len(comparison.tensors)} tensors differ from the base"
    if not changed:
        return Check("changed", "failed", f"{detail}: these are the base's weights, nothing was trained or exported")
    largest = max(changed, key=lambda item: item.max_difference)
    return Check("changed", "passed", f"{detail}, most of all {largest.name} by {largest.max_difference:.3g}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def run_all(checks: Sequence[Callable[[], Check]], say: Callable[[str], None]) -> tuple[Check, ...]:
    """Run checks in order, each said as it is known."""
    results = []
    for check in checks:
        results.append(check())
        say_check(results[-1], say)
    return tuple(results)


def say_check(check: Check, say: Callable[[str], None]) -> None:
    """One line of the job's log."""
    say(f"{check.check}: {check.result}, {check.detail}")
