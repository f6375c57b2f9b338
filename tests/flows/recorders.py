"""Programs that only write down how they are called: two scripts can then be compared by what they do."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

_RECORDER = """#!{python} -IS
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps([{name!r}, sys.argv[1:], dict(os.environ)]) + "\\n")
"""
# srun starts what follows its own options, as the first of one task.
_SRUN = """
command = sys.argv[1:]
while command[0].startswith("-"):
    del command[0]
os.environ |= {"SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
os.execvp(command[0], command)
"""


@dataclass(frozen=True)
class Call:
    """One call of one program."""

    program: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]

    @cached_property
    def options(self) -> dict[str, str]:
        """`--name=value`, `--name value` and `--name` alone (an empty value)."""
        found, words = {}, [*self.argv, "--"]
        for word, following in pairwise(words):
            if word.startswith("--"):
                name, equals, value = word.partition("=")
                found[name] = value if equals or following.startswith("--") else following
        return found


class Recorders:
    """A folder of such programs, to be found before all others."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.folder = folder
        self._log = folder / "calls.jsonl"
        folder.mkdir()
        for name in names:
            text = _RECORDER.format(python=sys.executable, log=str(self._log), name=name)
            self.program(name).write_text(text + (_SRUN if name == "srun" else ""))
            self.program(name).chmod(0o755)

    def program(self, name: str) -> Path:
        return self.folder / name

    def bash(self, *argv: str, environment: Mapping[str, str], cwd: Path) -> list[Call]:
        """The calls that a script makes. It sees no other variables than these, and HOME is where it starts."""
        self._log.write_text("")
        basic = {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": str(cwd), "USER": "tester", "LANG": "C.UTF-8"}
        done = subprocess.run(
            ["bash", *argv], env={**basic, **environment}, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{argv} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        calls = map(json.loads, self._log.read_text().splitlines())
        return [Call(program, tuple(arguments), variables) for program, arguments, variables in calls]


def differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    """Names whose values differ or that only one side has, without what every shell makes up."""
    names = {name for name in {**one, **other} if one.get(name) != other.get(name)}
    return names - {"PWD", "OLDPWD", "SHLVL", "_"}


def without_prefect(**variables: str) -> dict[str, str]:
    """The test's environment, but with no server to talk to."""
    return {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"} | variables
