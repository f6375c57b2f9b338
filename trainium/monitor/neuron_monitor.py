"""`neuron-monitor` as data; whatever key is unknown or missing, the rest is read.

Format: AWS Neuron documentation, "Neuron Monitor User Guide". Numbers that are not there are None or 0, as each field
says; only text that is no JSON at all yields None.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_GIB = 1 << 30


@dataclass(frozen=True)
class Core:
    """One NeuronCore: global index, utilisation in percent, bytes of device memory where they are printed per core."""

    index: int
    utilization: float
    memory_bytes: int | None = None


@dataclass(frozen=True)
class MonitorSample:
    """One line of neuron-monitor, summed over the processes that use the devices.

    Attributes:
        cores: the cores in use, by index; empty on an idle node.
        device_bytes, host_bytes: memory that the Neuron runtime holds.
        errors: executions that failed, by kind (`error_summary`), kinds without errors left out.
        total_cores: of the node, None when the hardware is not described.
        memory_per_core: bytes of device memory, None when the hardware is not described.
        problems: what neuron-monitor itself could not read.
    """

    cores: tuple[Core, ...]
    device_bytes: int
    host_bytes: int
    errors: Mapping[str, int]
    total_cores: int | None
    memory_per_core: int | None
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class CoreUse:
    """How much of a node or of several is at work: the sentence that the tutorial reads from neuron-top."""

    in_use: int
    total: int | None
    busiest_bytes: int | None
    mean_utilization: float | None

    def __str__(self) -> str:
        cores = (
            f"{self.in_use} of {self.total} cores in use" if self.total is not None else f"{self.in_use} cores in use"
        )
        return cores if self.busiest_bytes is None else f"{cores}, {self.busiest_bytes / _GIB:.1f} GiB max"


def parse_neuron_monitor(line: str | bytes) -> MonitorSample | None:
    """One line of output; None for what is no JSON object (a cut line, a message)."""
    report = _mapping(_json(line))
    if report is None:
        return None
    cores: dict[int, Core] = {}
    device = host = 0
    errors: dict[str, int] = {}
    problems: list[str] = []
    for runtime in _mappings(report.get("neuron_runtime_data")):
        if text := runtime.get("error"):
            problems.append(str(text))
        sections = _at(runtime, "report")
        problems += [str(part["error"]) for part in _mappings(sections.values()) if part.get("error")]
        used = _at(sections, "memory_used", "neuron_runtime_used_bytes")
        device += _integer(used.get("neuron_device"))
        host += _integer(used.get("host"))
        per_core = _at(used, "usage_breakdown", "neuroncore_memory_usage")
        for key, counters in _at(sections, "neuroncore_counters", "neuroncores_in_use").items():
            if str(key).isdigit():
                index = int(key)
                cores[index] = Core(index, _float(counters, "neuroncore_utilization"), _core_bytes(per_core.get(key)))
        for kind, count in _at(sections, "execution_stats", "error_summary").items():
            if number := _integer(count):
                errors[kind] = errors.get(kind, 0) + number
    hardware = _at(report, "neuron_hardware_info")
    per_device = _integer(hardware.get("neuroncore_per_device_count"))
    total = _integer(hardware.get("neuron_device_count")) * per_device
    memory = _integer(hardware.get("neuron_device_memory_size"))
    return MonitorSample(
        cores=tuple(cores[index] for index in sorted(cores)),
        device_bytes=device,
        host_bytes=host,
        errors=errors,
        total_cores=total or None,
        memory_per_core=memory // per_device if memory and per_device else None,
        problems=tuple(problems),
    )


def core_use(samples: Iterable[MonitorSample]) -> CoreUse:
    """What the newest samples of all nodes say together; one sample per node."""
    listed = list(samples)
    cores = [core for sample in listed for core in sample.cores]
    totals = [sample.total_cores for sample in listed if sample.total_cores is not None]
    memories = [core.memory_bytes for core in cores if core.memory_bytes is not None]
    if not memories:
        # Without a breakdown, the mean per core stands for the busiest one.
        memories = [
            sample.device_bytes // len(sample.cores) for sample in listed if sample.cores and sample.device_bytes
        ]
    return CoreUse(
        in_use=len(cores),
        total=sum(totals) if totals and len(totals) == len(listed) else None,
        busiest_bytes=max(memories, default=None),
        mean_utilization=sum(core.utilization for core in cores) / len(cores) if cores else None,
    )


def _core_bytes(breakdown: Any) -> int | None:
    parts = _mapping(breakdown)
    if parts is None:
        return None
    return sum(_integer(value) for value in parts.values())


def _json(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None


def _mapping(value: Any) -> Mapping[str, Any] | None:
    return value if isinstance(value, Mapping) else None


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        return []
    return [entry for entry in value if isinstance(entry, Mapping)]


def _at(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    current: Mapping[str, Any] = value
    for key in keys:
        current = _mapping(current.get(key)) or {}
    return current


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value == value else 0


def _float(counters: Any, key: str) -> float:
    value = (_mapping(counters) or {}).get(key)
    return float(value) if isinstance(value, int | float) else 0.0
