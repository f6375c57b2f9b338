"""neuron-monitor, complete, idle, odd and broken."""

import json

from hypothesis import given
from hypothesis import strategies as st

from trainium.monitor.neuron_monitor import CoreUse, core_use, parse_neuron_monitor

GIB = 1 << 30


def report(cores: int = 32, breakdown: bool = True) -> dict[str, object]:
    used: dict[str, object] = {"host": 5 * GIB, "neuron_device": 300 * GIB}
    if breakdown:
        usage = {str(i): {"constants": GIB, "model_code": 0, "tensors": 10 * GIB + i * 1000} for i in range(cores)}
        used["usage_breakdown"] = {"neuroncore_memory_usage": usage}
    return {
        "neuron_runtime_data": [
            {
                "pid": 9,
                "error": "",
                "report": {
                    "neuroncore_counters": {
                        "period": 5.0,
                        "neuroncores_in_use": {str(i): {"neuroncore_utilization": 50.0 + i} for i in range(cores)},
                        "error": "",
                    },
                    "memory_used": {"neuron_runtime_used_bytes": used, "error": ""},
                    "execution_stats": {"error_summary": {"generic": 0, "numerical": 2, "hardware": 0}, "error": ""},
                },
            }
        ],
        "system_data": {"vcpu_usage": {}},
        "neuron_hardware_info": {
            "neuron_device_count": 16,
            "neuroncore_per_device_count": 2,
            "neuron_device_memory_size": 32 * GIB,
            "error": "",
        },
        "a_key_of_next_year": [1],
    }


def test_a_busy_node() -> None:
    sample = parse_neuron_monitor(json.dumps(report()))
    assert sample is not None
    assert (len(sample.cores), sample.total_cores, sample.memory_per_core) == (32, 32, 16 * GIB)
    assert (sample.cores[3].index, sample.cores[3].utilization) == (3, 53.0)
    assert sample.cores[3].memory_bytes == 11 * GIB + 3000
    assert (sample.device_bytes, sample.host_bytes, dict(sample.errors)) == (300 * GIB, 5 * GIB, {"numerical": 2})
    use = core_use([sample])
    assert str(use) == "32 of 32 cores in use, 11.0 GiB max"
    assert use.mean_utilization == 65.5


def test_without_a_breakdown_the_mean_per_core_is_shown() -> None:
    sample = parse_neuron_monitor(json.dumps(report(breakdown=False)))
    assert sample is not None
    assert str(core_use([sample])) == "32 of 32 cores in use, 9.4 GiB max"


def test_several_nodes_add_up() -> None:
    sample = parse_neuron_monitor(json.dumps(report(cores=8)))
    assert sample is not None
    assert str(core_use([sample, sample])) == "16 of 64 cores in use, 11.0 GiB max"


def test_an_idle_node() -> None:
    idle = report() | {"neuron_runtime_data": []}
    sample = parse_neuron_monitor(json.dumps(idle).encode())
    assert sample is not None
    assert (sample.cores, sample.device_bytes) == ((), 0)
    assert str(core_use([sample])) == "0 of 32 cores in use"


def test_errors_of_the_tool_are_told() -> None:
    odd = report() | {"neuron_runtime_data": [{"error": "cannot read", "report": {"memory_used": {"error": "denied"}}}]}
    sample = parse_neuron_monitor(json.dumps(odd))
    assert sample is not None
    assert sample.problems == ("cannot read", "denied")


def test_lines_that_are_no_report() -> None:
    assert parse_neuron_monitor("neuron-monitor: no device") is None
    assert parse_neuron_monitor('{"neuron_runtime_data": [') is None
    assert parse_neuron_monitor("[]") is None
    sample = parse_neuron_monitor("{}")
    assert sample is not None
    assert (sample.cores, sample.total_cores) == ((), None)
    assert str(CoreUse(3, None, None, None)) == "3 cores in use"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "neuron_runtime_data",
    "report",
    "neuroncore_counters",
    "memory_used",
    "neuron_hardware_info",
    "neuroncores_in_use",
]


@given(st.dictionaries(st.sampled_from(KEYS), JSON | st.dictionaries(st.sampled_from(KEYS), JSON), max_size=4))
def test_odd_values_never_raise(odd: dict[str, object]) -> None:
    sample = parse_neuron_monitor(json.dumps(odd))
    assert sample is not None
    core_use([sample])
    inner = {"neuron_runtime_data": [{"report": odd}]}
    assert parse_neuron_monitor(json.dumps(inner)) is not None
