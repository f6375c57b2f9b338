"""Which cluster a slurm.conf describes, in a word that is the same on all machines of the cluster and nowhere else."""

import hashlib
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

# Where Slurm looks by itself: the packages' folders, and what a configless node was sent.
_USUAL = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
_KEY = re.compile(
    r"^[ \t]*(ClusterName|SlurmctldHost|ControlMachine|ControlAddr|SlurmctldPort)[ \t]*=[ \t]*(\S+)", re.I | re.M
)
_INCLUDE = re.compile(r"^[ \t]*include[ \t]+(\S+)", re.I | re.M)
_LOOPBACK = re.compile(r"localhost|\b127\.", re.I)


def identity(conf: str | None, bin: Path | None) -> str:
    """A cluster is its name and its controller: names repeat, ParallelCluster once called all its clusters alike.

    `conf`: the file that was chosen, if one was; `bin`: the folder of Slurm's commands, else PATH. Where no file can
    be read, or where the controller is on loopback, the word is of this machine alone.
    """
    places = [Path(conf)] if conf else _usual(bin)
    text = next((text for path in places if (text := "\n".join(_texts(path)))), "")
    found = sorted((key.lower(), value.lower()) for key, value in _KEY.findall(text))
    facts = [f"{key}={value}" for key, value in found]
    controllers = [value for key, value in found if key in ("slurmctldhost", "controlmachine", "controladdr")]
    if not controllers or any(_LOOPBACK.search(controller) for controller in controllers):
        facts += [socket.gethostname(), str(conf or "")]
    name = next((value for key, value in found if key == "clustername"), "slurm")
    return f"{re.sub('[^a-z0-9_-]', '', name)}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}"


def _usual(bin: Path | None) -> list[Path]:
    found = bin or (Path(which).resolve().parent if (which := shutil.which("squeue")) else None)
    return [*([found.parent / "etc" / "slurm.conf"] if found else []), *map(Path, _USUAL)]


def _texts(path: Path, depth: int = 3) -> Iterator[str]:
    """The file and those that it includes, as far as they can be read."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    yield text
    for name in _INCLUDE.findall(text) if depth else ():
        yield from _texts(path.parent / name, depth - 1)
