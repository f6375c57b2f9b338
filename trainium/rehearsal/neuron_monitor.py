"""`neuron-monitor`: a JSON object per line about the pretended devices (AWS Neuron Monitor user guide, output)."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainium.rehearsal.devices import Instance, Use, this_instance, uses

DEFAULT_PERIOD = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print until the reader goes away or a signal ends it."""
    parser = argparse.ArgumentParser(prog="neuron-monitor", allow_abbrev=False)
    parser.add_argument("-c", "--config-file", type=Path, help='JSON with the "period", e.g. "1s"')
    config = parser.parse_args(argv).config_file
    period = DEFAULT_PERIOD
    if config:
        period = float(str(json.loads(config.read_text()).get("period", f"{DEFAULT_PERIOD}s")).removesuffix("s"))
    with suppress(BrokenPipeError, KeyboardInterrupt):
        while True:
            print(json.dumps(report(this_instance(), uses(), period)), flush=True)
            time.sleep(period)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing to flush into a closed pipe at exit
    return 0


def report(instance: Instance, running: Sequence[Use], period: float) -> dict[str, Any]:
    """One line's object; `neuron_runtime_data` is empty while nothing runs."""
    return {
        "neuron_runtime_data": [_runtime(use, period) for use in running],
        "system_data": {
            "memory_info": {"period": period, "memory_total_bytes": _total_memory(), "error": ""},
            "neuron_hw_counters": {"period": period, "neuron_devices": None, "error": ""},
            "vcpu_usage": {"period": period, "average_usage": {}, "usage_data": {}, "error": ""},
        },
        "instance_info": {"instance_name": "rehearsal", "instance_type": instance.name, "error": ""},
        "neuron_hardware_info": {
            "neuron_device_count": instance.devices,
            "neuroncore_per_device_count": instance.cores_per_device,
            "neuron_device_memory_size": instance.memory_per_device,
            "error": "",
        },
    }


def _runtime(use: Use, period: float) -> dict[str, Any]:
    cores = [str(core) for core in range(use.cores)]
    share = use.device_bytes // max(1, use.cores)
    breakdown = {"constants": 0, "model_code": 0, "model_shared_scratchpad": 0, "runtime_memory": 0, "tensors": share}
    errors = {"generic": 0, "numerical": 0, "transient": 0, "model": 0, "runtime": 0, "hardware": 0}
    return {
        "pid": use.pid,
        "neuron_runtime_tag": str(use.pid),
        "error": "",
        "report": {
            "execution_stats": {"period": period, "error_summary": errors, "error": ""},
            "memory_used": {
                "period": period,
                "neuron_runtime_used_bytes": {
                    "host": use.host_bytes,
                    "neuron_device": use.device_bytes,
                    "usage_breakdown": {"neuroncore_memory_usage": dict.fromkeys(cores, breakdown)},
                },
                "loaded_models": [],
                "error": "",
            },
            "neuroncore_counters": {
                "period": period,
                "neuroncores_in_use": {core: {"neuroncore_utilization": 99.0, "flops": 0} for core in cores},
                "error": "",
            },
        },
    }


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    sys.exit(main())
