"""`make bench`: the checkpoint converter and the watching of jobs, as tables and as JSON.

The converter runs against `cp` and against a plain converter. Every number is the median of whole processes, start and
fsync included, with the inputs out of the page cache; what is compared with each other runs in turns, so that a busy
machine is busy for all. For the watching of jobs see watching.py.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks import models, watching
from tests.benchmarks.measure import Sample, files, run
from tests.slurm_lab.lab import SlurmLabError

PLAIN = Path(__file__).with_name("plain.py")
OURS = (sys.executable, "-m", "trainium.checkpoint")
_PARTS = ("converter", "watching")


@dataclass(frozen=True)
class Row:
    """One tool at one task; bytes: of what `cp` copies or `cmp` reads; ratio: time against that of `against`."""

    model: str
    task: str
    tool: str
    bytes: int
    seconds: float
    ratio: float
    runs: list[float]
    anonymous: int
    total: int
    together: int


@dataclass(frozen=True)
class Contender:
    """A tool. prepare: what is not timed."""

    tool: str
    command: Sequence[str | Path]
    inputs: tuple[Path, ...]
    output: Path | None = None
    expect: int = 0


def main() -> None:
    options = _parser().parse_args()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    facts = {"machine": platform.platform(), "python": platform.python_version()}
    if "converter" in options.only:
        _convert(work, options, facts)
    if "watching" in options.only:
        _watch(work / "watching", options, facts)


def _convert(work: Path, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    rows: list[Row] = []

    def show(more: list[Row]) -> None:
        rows.extend(more)
        for row in more:
            print(_line(row), flush=True)
        _write(options.json, facts | {"repeat": options.repeat, "rows": [asdict(row) for row in rows]})

    print(_HEADER)
    for name in options.models:
        place = work / name
        for task in (_to_nxd, _to_hf, _verify):
            show(task(name, place, options))
        shutil.rmtree(place)
    print(f"\nwritten to {options.json}\n")


def _watch(work: Path, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    path: Path = options.json.with_name("watching.json")
    rows: list[watching.Watching] = []
    print(watching.HEADER)
    try:
        for row in watching.run(work, options.jobs, options.processes, options.tools):
            rows.append(row)
            missed = [] if row.tool == "loop" else row.missed()
            print(row.line(), "  missed: " + ", ".join(missed) if missed else "", flush=True)
            _write(path, facts | {"targets": watching.TARGETS, "rows": [asdict(row) for row in rows]})
    except SlurmLabError as error:
        raise SystemExit(f"watching needs the Slurm of the tests: {error}") from error
    shutil.rmtree(work)
    print(f"\nwritten to {path}")


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def _to_nxd(name: str, place: Path, options: argparse.Namespace) -> list[Row]:
    source, out = models.make(name, place / "hf"), place / "nxd"
    ours = Contender("trainium", (*OURS, "to-nxd", source, out, *models.LAYOUT), (source,), out)
    plain = Contender("plain", (sys.executable, PLAIN, "to-nxd", source, place / "plain"), (source,), place / "plain")
    return _compete(name, "to NxD", ours, plain if name in options.plain else None, place, options.repeat)


def _to_hf(name: str, place: Path, options: argparse.Namespace) -> list[Row]:
    source, nxd, out = place / "hf", place / "nxd", place / "back"
    shutil.copy(source / "config.json", nxd)
    config = ("--config", source / "config.json")
    ours = Contender("trainium", (*OURS, "to-hf", nxd, out, *config, *models.LAYOUT), (nxd,), out)
    plain = Contender("plain", (sys.executable, PLAIN, "to-hf", nxd, place / "plain"), (nxd,), place / "plain")
    rows = _compete(name, "to HF", ours, plain if name in options.plain else None, place, options.repeat)
    _same_model(source, out)
    return rows


def _compete(name: str, task: str, ours: Contender, plain: Contender | None, place: Path, repeat: int) -> list[Row]:
    """In turns: our converter, cp of what it wrote, the plain converter."""
    assert ours.output is not None
    copy = place / "copy"
    cp = Contender("cp", ("cp", "-r", "--reflink=never", ours.output, copy), (ours.output,), copy)
    contenders = [ours, cp, *([plain] if plain else [])]
    samples: dict[str, list[Sample]] = {contender.tool: [] for contender in contenders}
    for _ in range(repeat):
        for contender in contenders:
            assert contender.output is not None
            shutil.rmtree(contender.output, ignore_errors=True)
            os.sync()  # what was removed is not freed on anybody's time
            samples[contender.tool].append(run(contender.command, contender.inputs, (contender.output,)))
            if contender is not ours:
                shutil.rmtree(contender.output)
    size = sum(path.stat().st_size for path in files([ours.output]))
    return [_row(name, task, tool, size, found, samples["cp"]) for tool, found in samples.items()]


def _verify(name: str, place: Path, options: argparse.Namespace) -> list[Row]:
    """Two folders of the same numbers against `cmp`; then two in which every tensor differs."""
    first, second, other = place / "hf", place / "copy", place / "other"
    shutil.rmtree(place / "nxd")
    shutil.copytree(first, second)
    size = 2 * (first / "model.safetensors").stat().st_size
    command = (*OURS, "verify")
    equal = Contender("trainium", (*command, first, second), (first, second))
    compared = Contender("cmp", ("cmp", *(folder / "model.safetensors" for folder in (first, second))), (first, second))
    rows = _take_turns(name, "verify, equal", [equal, compared], size, options.repeat)
    models.make(name, other, seed=1)
    different = Contender("trainium", (*command, first, other), (first, other), expect=1)
    return rows + _take_turns(name, "verify, all differ", [different, compared], size, options.repeat)


def _take_turns(name: str, task: str, contenders: list[Contender], size: int, repeat: int) -> list[Row]:
    samples: dict[str, list[Sample]] = {contender.tool: [] for contender in contenders}
    for _ in range(repeat):
        for contender in contenders:
            samples[contender.tool].append(run(contender.command, contender.inputs, (), contender.expect))
    return [_row(name, task, tool, size, found, samples["cmp"]) for tool, found in samples.items()]


def _same_model(source: Path, out: Path) -> None:
    """A fast converter that is wrong is no converter."""
    run((*OURS, "verify", source, out), (), ())


def _row(name: str, task: str, tool: str, size: int, samples: list[Sample], against: list[Sample]) -> Row:
    seconds = [sample.seconds for sample in samples]
    median = statistics.median(seconds)
    return Row(
        model=name,
        task=task,
        tool=tool,
        bytes=size,
        seconds=round(median, 3),
        ratio=round(median / statistics.median(sample.seconds for sample in against), 3),
        runs=[round(value, 3) for value in seconds],
        anonymous=max(sample.anonymous for sample in samples),
        total=max(sample.total for sample in samples),
        together=max(sample.together for sample in samples),
    )


_HEADER = (
    f"{'model':6}{'task':20}{'tool':10}{'GB':>6}{'s':>8}{'× cp/cmp':>10}{'MB/s':>7}"
    f"{'anon MB':>9}{'total MB':>10}{'all anon':>10}  runs"
)


def _line(row: Row) -> str:
    memory = f"{row.anonymous / 1e6:9.0f}{row.total / 1e6:10.0f}{row.together / 1e6:10.0f}"
    speed = f"{row.bytes / 1e9:6.2f}{row.seconds:8.2f}{row.ratio:10.2f}{row.bytes / row.seconds / 1e6:7.0f}"
    return f"{row.model:6}{row.task:20}{row.tool:10}{speed}{memory}  {' '.join(f'{s:.2f}' for s in row.runs)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path(".benchmarks/work"), help="on the disk to be measured")
    parser.add_argument("--json", type=Path, default=Path(".benchmarks/result.json"))
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=list(models.SIZES), default=list(models.SIZES))
    parser.add_argument(
        "--plain", nargs="*", choices=list(models.SIZES), default=["1.1B", "4B"], help="also with these"
    )
    parser.add_argument("--only", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--jobs", type=int, default=1000, help="that are watched at a time")
    parser.add_argument("--processes", type=int, default=50, help="that share the watching, besides one alone")
    parser.add_argument("--tools", nargs="+", choices=["watcher", "loop"], default=["watcher", "loop"])
    return parser


if __name__ == "__main__":
    main()
