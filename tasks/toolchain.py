"""What the toolchain is made of, recorded in every run: a result without versions cannot be explained later."""

import json
import shlex
import sys
from contextlib import suppress
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect_shell import ShellOperation

from tasks.context import Run
from tasks.stage import log
from trainium.errors import UserError
from trainium.files import write_json

MARKER = "toolchain-versions:"
PACKAGES = (
    "neuronx-cc",
    "torch-neuronx",
    "neuronx-distributed",
    "neuronx-distributed-training",
    "torch",
    "transformers",
)


class ToolchainError(UserError):
    """The toolchain's environment is not where the block says, or does not start."""


@task(name="toolchain probe", task_run_name="toolchain probe", cache_policy=NO_CACHE)
def probe_toolchain(run: Run) -> dict[str, str | None]:
    """Run the version script in the toolchain's environment on this machine and keep what it says in the run folder.

    The one synchronous task: prefect-shell cuts and mixes lines when it is used asynchronously.
    """
    block = run.site.toolchain
    for what, path in (("examples", block.examples), ("activate", block.activate)):
        if path is not None and not path.exists():
            raise ToolchainError(
                f"toolchain: {what} is {path}, and there is nothing there. Put the right path into the Neuron "
                "Toolchain block (examples: that folder of neuronx-distributed-training; activate: bin/activate of "
                "its environment)."
            )
    versions = _versions(block.activate, block.environment)
    write_json(run.folder.toolchain, {"rehearsal": block.rehearsal, "versions": versions})
    log("toolchain: " + ", ".join(f"{name} {version or 'not installed'}" for name, version in versions.items()))
    return versions


def _versions(activate: Path | None, environment: dict[str, str]) -> dict[str, str | None]:
    source = [f"source {shlex.quote(str(activate))}"] if activate else []
    program = shlex.quote(_PROGRAM)
    python = "python3" if activate else shlex.quote(sys.executable)
    # As a job has it: nothing of the caller's Python, and no folder of his whose json.py or torch.py would be imported.
    clean = ["exec 2>&1", "unset PYTHONHOME PYTHONPATH PYTHONSAFEPATH", "cd /"]
    commands = [*clean, *source, f"{python} -c {program} {' '.join(PACKAGES)}"]
    with ShellOperation(commands=commands, env=environment, shell="bash", stream_output=False) as operation:
        process = operation.trigger()
        with suppress(RuntimeError):  # says only the code; what was printed says more
            process.wait_for_completion()
        lines = process.fetch_result()
    for line in lines:
        if line.startswith(MARKER):
            found: dict[str, str | None] = json.loads(line.removeprefix(MARKER))
            return found
    raise ToolchainError(
        f"toolchain: the interpreter of {activate or 'this machine'} does not start (code {process.return_code}): "
        + ("; ".join(lines[-3:]) or "no output")
    )


# Runs in the toolchain's interpreter, which may be older than ours and has nothing of this project.
_PROGRAM = f"""
import importlib.metadata, json, platform, sys
versions = {{"python": platform.python_version()}}
for name in sys.argv[1:]:
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        versions[name] = None
print("{MARKER}" + json.dumps(versions))
"""
