"""`python -m tests.chaos`: many runs through real Slurm, one fault each; see the Makefile's target `chaos`."""

import os
import tempfile

# Before anything imports Prefect: nothing of the developer's own profile, database or server takes part.
_HOME = tempfile.TemporaryDirectory(prefix="prefect-", ignore_cleanup_errors=True)
for _name in [name for name in os.environ if name.startswith("PREFECT_")]:
    del os.environ[_name]
os.environ["PREFECT_HOME"] = _HOME.name

import argparse  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from concurrent.futures import ThreadPoolExecutor, as_completed  # noqa: E402
from dataclasses import asdict  # noqa: E402
from pathlib import Path  # noqa: E402
from random import Random  # noqa: E402

from blocks import NeuronToolchain  # noqa: E402
from tests.chaos import rehearsals  # noqa: E402
from tests.chaos.acts_on_clusters import nothing  # noqa: E402
from tests.chaos.cases import Case, Event, Kind, Moment, Then, draw  # noqa: E402
from tests.chaos.ground import Ground, Kit, leftovers  # noqa: E402
from tests.chaos.kinds import KINDS  # noqa: E402
from tests.chaos.results import Result, summary  # noqa: E402
from tests.chaos.settings import Settings  # noqa: E402
from tests.chaos.sources import RECIPE, interpreter, light_toolchain, write_sources  # noqa: E402

UNDISTURBED = Kind("undisturbed", nothing, Then.GOES_ON, (Moment(Event.STARTED),))


def main() -> int:
    arguments = _parse()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job starts with it ignored
        signal.signal(number, signal.default_int_handler)
    settings = Settings()
    print(f"seed {arguments.seed}. Time constants, in seconds unless it says otherwise:", flush=True)
    print("\n".join(f"  {line}" for line in settings.lines()), flush=True)
    work = Path(tempfile.mkdtemp(prefix="chaos-", dir=arguments.work))
    results: list[Result] = []
    try:
        if arguments.runs:
            kinds = [kind for kind in KINDS if not arguments.only or kind.name in arguments.only]
            kit = _light_kit(work / "sources", settings)
            cases = draw(kinds, arguments.runs, arguments.seed)
            results += perform(work / "light", settings, kit, cases, arguments.at_once)
        if arguments.rehearsals:
            kit = Kit("rehearsal", rehearsals.OVERRIDES, NeuronToolchain.stand_in(), Path(sys.executable))
            cases = draw(rehearsals.KINDS, arguments.rehearsals, arguments.seed, first=arguments.runs + 1)
            results += perform(work / "rehearsals", settings, kit, cases, arguments.at_once)
    finally:
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
        if results and all(result.good for result in results):
            shutil.rmtree(work, ignore_errors=True)
        else:
            print(f"what the runs left is in {work}")
    if late := sum(not result.struck for result in results):
        print(f"{late} runs were done before their fault's moment")
    text, code = summary(results)
    print(text)
    return code


def perform(folder: Path, settings: Settings, kit: Kit, cases: Sequence[Case], at_once: int) -> list[Result]:
    """An undisturbed run, which says what is right, and then all cases, several at once."""
    folder.mkdir(parents=True)
    results: list[Result] = []
    began = time.monotonic()
    with Ground(folder, settings, kit) as ground:
        first, ground.reference = ground.undisturbed(Case(0, UNDISTURBED, UNDISTURBED.moments[0], Random(0)))
        print(first.line(), flush=True)
        if ground.reference is None:
            return [first]
        pool = ThreadPoolExecutor(at_once)
        try:
            for future in as_completed([pool.submit(ground.run, case) for case in cases]):
                results.append(future.result())
                print(results[-1].line(), flush=True)
        except KeyboardInterrupt:
            ground.stopped.set()  # each run ends at its next step, and those that wait do not begin
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    print(f"{len(results)} runs in {time.monotonic() - began:.0f} s", flush=True)
    for text in leftovers(folder):
        print(f"left behind: {text}", flush=True)
    return sorted(results, key=lambda result: result.number)


def _light_kit(folder: Path, settings: Settings) -> Kit:
    overrides = write_sources(folder)
    return Kit(str(RECIPE), overrides, light_toolchain(settings.step, settings.save), interpreter(folder))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Many runs, one fault each.")
    parser.add_argument("--runs", type=int, default=110, help="runs on the light toolchain")
    parser.add_argument("--rehearsals", type=int, default=10, help="full rehearsals interrupted during training")
    parser.add_argument("--seed", type=int, default=1, help="decides faults and moments")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of faults, comma-separated")
    parser.add_argument("--at-once", type=int, default=3, help="runs at the same time")
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--work", type=Path, default=_memory(), help="folder for everything the runs need")
    arguments = parser.parse_args()
    known = {kind.name for kind in KINDS}
    if unknown := set(arguments.only or ()) - known:
        parser.error(f"--only: {', '.join(sorted(unknown))}: not among {', '.join(sorted(known))}")
    return arguments


def _memory() -> Path:
    """In memory where there is room: thousands of small files are synced."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30 else Path(tempfile.gettempdir())


if __name__ == "__main__":
    sys.exit(main())
