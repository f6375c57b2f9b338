"""The compile cache, laid out as libneuronxla's, and the compiler that fills it.

`<url>/neuronxcc-<version>+<hash>/MODULE_<hlo>+<flags>/{model.hlo_module.pb, compile_flags.json, model.neff, model.done,
model.log, *.lock}`. What stands in for the graph is the list of traced operations; its key is a digest of what decides
the graph (shapes, parallelism, precision, flags) and never of the data.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainium.files import write_atomic
from trainium.rehearsal.faults import faults
from trainium.rehearsal.lines import compiler, neuron

VERSION = "0.0.0.0+rehearsal"
DEFAULT_FOLDER = "/var/tmp/neuron-compile-cache"
GRAPH, NEFF, DONE, LOG = "model.hlo_module.pb", "model.neff", "model.done", "model.log"
_NOT_OF_THE_GRAPH = ("--cache_dir", "--retry_failed_compilation", "--verbose")


class CompilationError(RuntimeError):
    """A graph did not compile."""


@dataclass(frozen=True)
class Module:
    """One entry of the cache."""

    folder: Path

    @property
    def graph(self) -> Path:
        """The traced graph."""
        return self.folder / GRAPH

    @property
    def neff(self) -> Path:
        """What the device would run."""
        return self.folder / NEFF

    @property
    def is_done(self) -> bool:
        """Whether it has been compiled."""
        return (self.folder / DONE).exists() and self.neff.exists()

    @property
    def has_failed(self) -> bool:
        """Whether an earlier compilation failed: the failure is remembered."""
        return (self.folder / LOG).exists() and not self.is_done


def cache_folder() -> Path:
    """`--cache_dir` in NEURON_CC_FLAGS beats NEURON_COMPILE_CACHE_URL; then the default."""
    flags = [flag.partition("=")[2] for flag in cc_flags() if flag.startswith("--cache_dir=")]
    url = flags[-1] if flags else os.environ.get("NEURON_COMPILE_CACHE_URL") or DEFAULT_FOLDER
    return Path(url) / f"neuronxcc-{VERSION}"


def cc_flags() -> list[str]:
    """NEURON_CC_FLAGS as words."""
    return os.environ.get("NEURON_CC_FLAGS", "").split()


def module_for(description: Mapping[str, Any]) -> Module:
    """The entry of the graph that these settings lead to."""
    text = json.dumps(description, sort_keys=True, default=str)
    graph = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) % 10**20
    return Module(cache_folder() / f"MODULE_{graph:020d}+{_flags_hash()}")


def modules() -> list[Module]:
    """All entries."""
    return [Module(graph.parent) for graph in sorted(cache_folder().glob(f"MODULE_*/{GRAPH}"))]


def extract(module: Module, operations: str) -> None:
    """Put a traced graph into the cache, still to be compiled."""
    flags = [flag for flag in cc_flags() if not flag.startswith(_NOT_OF_THE_GRAPH)]
    write_atomic(module.folder / "compile_flags.json", json.dumps(flags))
    write_atomic(module.graph, operations)


def compile_module(module: Module) -> None:
    """Compile one graph. Raises CompilationError; the failure stays in the cache until `--retry_failed_compilation`."""
    with _lock(module):
        if module.is_done:
            neuron(
                f"Using a cached neff at {module.neff}. Exiting with a successfully compiled graph.",
                tag="NEURON_CC_WRAPPER",
            )
            return
        if module.has_failed and "--retry_failed_compilation" not in cc_flags():
            error = (module.folder / LOG).read_text()
            raise CompilationError(
                f"Got a cached failed neff at {module.neff}. Will skip compilation, please set "
                f"--retry_failed_compilation for recompilation: \n {error}"
            )
        command = _command(module)
        neuron(f"Call compiler with cmd: {' '.join(command)}", tag="NEURON_CC_WRAPPER")
        if faults().graph_fails and not any((other.folder / LOG).exists() for other in modules()):
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            error = f"{now} [NLA001]  Unhandled exception with message: rehearsed"
            write_atomic(module.folder / LOG, error)
            raise CompilationError(f"Failed compilation with {command}: {error}")
        digest = hashlib.sha256(module.graph.read_bytes()).hexdigest()
        write_atomic(module.neff, f"rehearsal: no device can load this. graph sha256 {digest}\n")
        write_atomic(module.folder / DONE, "")
        write_atomic(module.folder / LOG, "")
        compiler(f"Compilation Successfully Completed for model.{module.folder.name}.hlo_module.pb")


def ensure(module: Module) -> bool:
    """Whether the graph is in the cache, with the lines that the real cache writes."""
    if module.is_done:
        neuron(f"Using a cached neff at {module.neff}", tag="NEURON_CACHE")
        return True
    neuron(f"No candidate found under {module.folder}.", tag="NEURON_CACHE")
    return False


def clear_locks() -> None:
    """Remove every lock."""
    for lock in cache_folder().parent.glob("neuronxcc-*/MODULE_*/*.lock"):
        lock.unlink(missing_ok=True)


def clear_neffs() -> None:
    """Forget what was compiled, keep the graphs."""
    for module in modules():
        for name in (NEFF, DONE, LOG):
            (module.folder / name).unlink(missing_ok=True)


def clean() -> None:
    """Empty the cache."""
    for folder in cache_folder().parent.glob("neuronxcc-*"):
        shutil.rmtree(folder)


def _flags_hash() -> str:
    flags = sorted(flag for flag in cc_flags() if not flag.startswith(_NOT_OF_THE_GRAPH))
    return hashlib.sha256(" ".join(flags).encode()).hexdigest()[:8]


def _command(module: Module) -> list[str]:
    stem = f"model.{module.folder.name}"
    flags: list[str] = json.loads((module.folder / "compile_flags.json").read_text())
    files = [f"{stem}.hlo_module.pb", "--output", f"{stem}.neff"]
    return ["neuronx-cc", "compile", "--framework=XLA", *files, "--target=trn1", *flags, "--verbose=35"]


@contextmanager
def _lock(module: Module) -> Iterator[None]:
    """One compiler per graph, on all nodes that share the cache. A killed one leaves its lock behind, as really."""
    lock = module.folder / f"{GRAPH}.lock"
    start = told = time.monotonic()
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            if time.monotonic() - told > 1:
                told = time.monotonic()
                waited = f"been waiting for: {(told - start) / 60:.1f} minutes"
                neuron(f"Another process must be compiling {module.folder.name}, {waited}", tag="NEURON_CC_WRAPPER")
            time.sleep(0.05)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
