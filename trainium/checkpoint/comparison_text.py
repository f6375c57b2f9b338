"""A comparison as a person reads it: what was asked, each thing that must hold, and the tensors that differ."""

from collections.abc import Iterator, Sequence

from trainium.checkpoint.comparison import Comparison, TensorComparison
from trainium.checkpoint.inventory import TensorProblem

MAX_ROWS = 40  # of each table; JSON has them all


def comparison_text(found: Comparison) -> str:
    """Lines for a terminal or a log."""
    return "\n".join([*_head(found), *_checks(found), *_tensors(found), _verdict(found)])


def _head(found: Comparison) -> Iterator[str]:
    for side, path, form in zip("AB", (found.a, found.b), found.forms, strict=True):
        yield f"{side}  {path}  ({form})"
    yield from (f"note: {note}" for note in found.notes)


def _checks(found: Comparison) -> Iterator[str]:
    common = found.common
    names = [*(f"{n}: only in A" for n in found.only_in_a), *(f"{n}: only in B" for n in found.only_in_b)]
    yield from _check("names", f"the same {common}", names)
    yield from _check(
        "shapes", f"the same in all {common}", [f"{p.tensor} {p.problem}" for p in found.shape_differences]
    )
    yield from _check("dtypes", f"the same in all {common}", _grouped(found.dtype_differences))
    if any(form.startswith("NxD") for form in found.forms):
        yield from _check(
            "ranks", "each has what it should", [f"{p.where}: {p.tensor} {p.problem}" for p in found.problems]
        )
    if found.names_only:
        return
    if found.copies:
        copies = [
            f"{copy.side}: {copy.file}: {copy.tensor} by {copy.max_difference:.3g}" for copy in found.differing_copies
        ]
        yield from _check("copies", f"all {found.copies} equal across ranks", copies)
    bad = [
        f"{t.name}: {count} {what} in {side}"
        for t in found.tensors
        for side, what, count in (
            ("A", "NaN", t.a_nan),
            ("A", "Inf", t.a_inf),
            ("B", "NaN", t.nan),
            ("B", "Inf", t.inf),
        )
        if count
    ]
    yield from _check("finite", f"no NaN, no infinity in {len(found.tensors)} tensors", bad)
    changed = len(found.tensors) - found.unchanged
    yield from _check(
        "values", f"{found.unchanged} tensors equal in every bit", [f"{changed} tensors differ"] * (changed > 0)
    )


def _check(name: str, good: str, wrong: Sequence[str]) -> Iterator[str]:
    yield f"{name:<7} {'differ: ' + str(len(wrong)) if len(wrong) > 1 else wrong[0] if wrong else good}"
    if len(wrong) > 1:
        yield from (f"        {line}" for line in wrong[:MAX_ROWS])
        yield from _more(len(wrong))


def _tensors(found: Comparison) -> Iterator[str]:
    """The tensors that differ, the largest difference first."""
    changed = sorted((t for t in found.tensors if not t.unchanged), key=lambda t: (-t.max_difference, t.name))
    if not changed:
        return
    width = max(len(t.name) for t in changed[:MAX_ROWS])
    yield f"        {'tensor':<{width}}  {'max':>9}  {'mean':>9}  first in"
    yield from (f"        {_row(t, width)}" for t in changed[:MAX_ROWS])
    yield from _more(len(changed))


def _row(tensor: TensorComparison, width: int) -> str:
    numbers = f"{tensor.max_difference:>9.3g}  {tensor.mean_difference:>9.3g}"
    return f"{tensor.name:<{width}}  {numbers}  {tensor.where}".rstrip()


def _grouped(problems: Sequence[TensorProblem]) -> list[str]:
    """One line for what is wrong with many tensors alike."""
    groups: dict[str, list[str]] = {}
    for item in problems:
        groups.setdefault(item.problem, []).append(item.tensor)
    return [
        f"{problem} in {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for problem, names in groups.items()
    ]


def _more(count: int) -> Iterator[str]:
    if count > MAX_ROWS:
        yield f"        … and {count - MAX_ROWS} more (--json has all)"


def _verdict(found: Comparison) -> str:
    asked = "names, shapes and dtypes" if found.names_only else "names, shapes, dtypes and values"
    return f"{'EQUAL' if found.equal else 'DIFFERENT'}: {asked}"
