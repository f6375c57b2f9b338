"""`neuron_parallel_compile`: extract the graphs of a training command in a trial run, then compile them.

Output, exit codes and results file as those of libneuronxla's neuron_parallel_compile. Each call has its own work
directory: the real one shares a directory per user and node, which is why two of them destroy each other.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from trainium.rehearsal import cache
from trainium.rehearsal.cache import CompilationError, Module
from trainium.rehearsal.lines import BANNER, neuron, say

TASK_LIST = "REHEARSAL_HLO_TASKLIST"  # the file to which the trial run appends the folders of its graphs
TAG = "NEURON_PARALLEL_COMPILE"
COMMANDS = (
    "collect-and-compile",
    "collect",
    "compile",
    "clean",
    "clear-locks",
    "clear-neffs",
    "scan",
    "scan-with-failed",
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the number of failed graphs modulo 256, as the real one; 1 for a failed trial run."""
    command, run = _parse(list(sys.argv[1:] if argv is None else argv))
    say(BANNER)
    match command:
        case "clean":
            cache.clean()
            neuron("Cleanup done.", tag=TAG)
        case "clear-locks":
            cache.clear_locks()
            neuron("Cleanup locks done.", tag=TAG)
        case "clear-neffs":
            cache.clear_neffs()
            neuron("Cleanup neffs done.", tag=TAG)
        case "scan" | "scan-with-failed":
            for module in _waiting(failed=command == "scan-with-failed"):
                neuron(str(module.graph), tag=TAG)
        case "compile":
            return _compile(_waiting(failed=True))
        case _:
            found = _collect(run)
            if found is None:
                return 1
            if command == "collect-and-compile":
                return _compile(found)
    return 0


def note_graph(module: Module) -> None:
    """Called by the trial run: this graph is to be compiled."""
    if TASK_LIST in os.environ:
        with Path(os.environ[TASK_LIST]).open("a") as file:
            file.write(f"{module.folder}\n")


def _parse(words: list[str]) -> tuple[str, list[str]]:
    command = "collect-and-compile"
    while words and words[0].startswith("-"):
        name, separator, value = words.pop(0).partition("=")
        if name != "--command":
            _exit(f"neuron_parallel_compile: the rehearsal does not know the option {name}")
        command = value if separator else words.pop(0) if words else ""
        if command not in COMMANDS:
            _exit(f"neuron_parallel_compile: --command {command!r} is none of {', '.join(COMMANDS)}")
    if command.startswith("collect") and not words:
        _exit("neuron_parallel_compile: a training command is needed")
    if any(word.startswith("--redirects") for word in words):
        _exit("neuron_parallel_compile: torchrun's --redirects is not supported here")
    return command, words


def _exit(message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(1)


def _collect(run: Sequence[str]) -> list[Module] | None:
    """The graphs of the trial run that are not compiled yet; None when it failed."""
    neuron(
        "Running trial run (add option to terminate trial run early; also ignore trial run's generated outputs)",
        tag=TAG,
    )
    with tempfile.TemporaryDirectory(prefix="neuron-parallel-compile-") as folder:
        task_list = Path(folder) / "tasks"
        task_list.touch()
        env = os.environ | {"NEURON_EXTRACT_GRAPHS_ONLY": "1", TASK_LIST: str(task_list)}
        try:
            code = subprocess.run(run, env=env, check=False).returncode
        except OSError as error:
            _exit(f"neuron_parallel_compile: {error}")
        folders = list(dict.fromkeys(task_list.read_text().splitlines()))
    if code:
        neuron("There was an error in the training script.", tag=TAG, level="ERROR")
        return None
    neuron(f"New graph list from script: {len(folders)}", tag=TAG)
    return [Module(Path(folder)) for folder in folders]


def _waiting(*, failed: bool) -> list[Module]:
    return [module for module in cache.modules() if not module.is_done and (failed or not module.has_failed)]


def _compile(found: Sequence[Module]) -> int:
    if not found:
        neuron(
            "No todo hlos found in cache or hlo_tasklist, parallel_compile return before spawning workers....", tag=TAG
        )
        return 0
    started = time.time()
    report: dict[str, dict[str, Any]] = {}
    for module in found:
        begin = time.monotonic()
        try:
            cache.compile_module(module)
        except CompilationError as error:
            neuron(str(error), tag="NEURON_CC_WRAPPER", level="ERROR")
        seconds = round(time.monotonic() - begin, 2)
        report[str(module.graph)] = {"status": module.is_done, "retry": 0, "compile_time": seconds}
    failures = sum(not entry["status"] for entry in report.values())
    counts = {"true": len(report) - failures, "false": failures}
    results = {
        "compilation_summary": {key: count for key, count in counts.items() if count},
        "compilation_report": report,
        "start_time": started,
        "compilation_time": round(time.time() - started, 2),
    }
    neuron(json.dumps(results), tag=TAG)
    neuron(f"Total graphs: {len(report)}", tag=TAG)
    neuron(f"Total successful compilations: {len(report) - failures}", tag=TAG)
    neuron(f"Total failed compilations: {failures}", tag=TAG)
    if os.environ.get("NEURON_PARALLEL_COMPILE_DUMP_RESULTS") == "1":
        _dump(results)
    return failures % 256


def _dump(results: dict[str, Any]) -> None:
    """Into the working directory. Two nodes may share it: the process id keeps their files apart."""
    stamp = f"{datetime.now():%Y-%m-%d_%H-%M-%S}-{os.getpid()}"
    for prefix in ("", "total_"):
        Path(f"{prefix}neuron_parallel_compile_results_{stamp}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    sys.exit(main())
