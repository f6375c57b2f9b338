"""`neuronx-cc`: its version. Graphs are compiled inside neuron_parallel_compile and the trainer."""

import argparse
import sys
from collections.abc import Sequence

from trainium.rehearsal.cache import VERSION


def main(argv: Sequence[str] | None = None) -> int:
    """Print the version; anything else is a usage error."""
    parser = argparse.ArgumentParser(prog="neuronx-cc", allow_abbrev=False)
    parser.add_argument("--version", "-V", action="store_true", required=True)
    parser.parse_args(argv)
    print(f"NeuronX Compiler version {VERSION}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
