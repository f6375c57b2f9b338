"""Kills conversions at random moments, and looks at what is left each time. Run by test_interruptions.py.

    python killing.py HF_DIR NXD_DIR WORK SEED

In a process of its own without threads, so that a conversion is a fork and not a new interpreter.
"""

import filecmp
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainium.checkpoint.convert import to_hf, to_nxd
from trainium.checkpoint.layout import Layout

KILLS = 30  # of each direction
LAYOUT = Layout(tp=4, kv_replicator=2)


def main(hf: Path, nxd: Path, work: Path, seed: int) -> None:
    chance = random.Random(seed)
    reference = work / "reference"
    to_nxd(hf, reference / "nxd", LAYOUT)
    to_hf(nxd, reference / "hf", hf / "config.json", LAYOUT, max_shard_bytes=4_000_000)

    def convert_to_nxd(out: Path) -> None:
        to_nxd(hf, out, LAYOUT, workers=2)

    def convert_to_hf(out: Path) -> None:
        to_hf(nxd, out, hf / "config.json", LAYOUT, max_shard_bytes=4_000_000, workers=2)

    for name, wanted, convert in (
        ("nxd", reference / "nxd" / "model", convert_to_nxd),
        ("hf", reference / "hf", convert_to_hf),
    ):
        out = work / name
        target = out / "model" if name == "nxd" else out
        started = time.monotonic()
        os.waitpid(start(convert, work / f"timed-{name}"), 0)
        usual = time.monotonic() - started
        killed = complete = 0
        while killed < KILLS:
            process = start(convert, out)
            time.sleep(chance.uniform(0, 1.1 * usual))
            everyone = chance.random() < 0.5  # or the parent alone, whose workers must notice
            (os.killpg if everyone else os.kill)(process, signal.SIGKILL)
            _, status = os.waitpid(process, 0)
            killed += os.WIFSIGNALED(status)
            if target.exists():
                check(target, wanted)
                complete += 1
                if chance.random() < 0.5:
                    shutil.rmtree(target)
        convert(out)
        check(target, wanted)
        assert not any(path.name.startswith(".") for path in target.parent.iterdir() if target.name in path.name)
        print(f"{name}: killed {killed} times, complete {complete} times")


def start(convert: Callable[[Path], None], out: Path) -> int:
    """A conversion in a process group of its own."""
    process = os.fork()
    if process == 0:
        with suppress(PermissionError):
            os.setpgid(0, 0)
        try:
            convert(out)
        except BaseException as error:
            print(f"conversion failed: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    with suppress(PermissionError, ProcessLookupError):
        os.setpgid(process, process)  # whoever of the two comes first
    return process


def check(found: Path, wanted: Path) -> None:
    """Whatever has the final name is whole and right."""
    names = sorted(path.name for path in wanted.iterdir())
    assert sorted(path.name for path in found.iterdir()) == names, sorted(found.iterdir())
    _, different, unreadable = filecmp.cmpfiles(found, wanted, names, shallow=False)
    assert not different, different
    assert not unreadable, unreadable


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
