"""`neuron-ls -j`: the pretended devices as JSON (AWS Neuron LS user guide)."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from trainium.rehearsal.devices import Instance, Use, this_instance, uses


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 and no output when there is no device."""
    parser = argparse.ArgumentParser(prog="neuron-ls", allow_abbrev=False)
    parser.add_argument(
        "-j", "--json-output", action="store_true", required=True, help="the rehearsal has only this form"
    )
    parser.parse_args(argv)
    found = devices(this_instance(), uses())
    if not found:
        return 1
    print(json.dumps(found))
    return 0


def devices(instance: Instance, running: Sequence[Use]) -> list[dict[str, Any]]:
    """One object per device, with the processes that hold its cores."""
    found = []
    for device in range(instance.devices):
        cores = list(range(device * instance.cores_per_device, (device + 1) * instance.cores_per_device))
        holders = [use for use in running if cores[0] < use.cores]
        found.append(
            {
                "neuron_device": device,
                "bdf": f"{16 + device:02x}:1e.0",
                "connected_to": [(device + step) % instance.devices for step in (-1, 1)]
                if instance.devices > 1
                else [],
                "nc_count": instance.cores_per_device,
                "memory_size": instance.memory_per_device,
                "neuroncore_ids": cores,
                "neuron_processes": [
                    {"pid": use.pid, "command": use.command, "neuron_runtime_version": "rehearsal"} for use in holders
                ],
            }
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
