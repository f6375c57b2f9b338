"""`python -m tests.slurm_lab`: a lab to play with, until Ctrl-C."""

import argparse
import contextlib
import signal
import sys

from .lab import SlurmLabError, slurm_lab


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_lab", description="A real Slurm until Ctrl-C.")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=128, help="CPUs declared per node")
    parser.add_argument("--accounting", action="store_true", help="with slurmdbd and mariadb")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT too: a shell's background job starts with it ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with (
            contextlib.suppress(KeyboardInterrupt),
            slurm_lab(nodes=arguments.nodes, cpus=arguments.cpus, accounting=arguments.accounting) as lab,
        ):
            print(f"export SLURM_CONF={lab.conf}", flush=True)
            signal.pause()
    except SlurmLabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
