"""The Neuron devices this host pretends to have, and who is using them.

`REHEARSAL_INSTANCE_TYPE` names an instance type of the table (default `rehearsal`, which has no rules about core counts
or sequence lengths; `none` has no devices). A running trainer leaves a small file in the temporary folder, the stand-in
for the driver, from which `neuron-monitor` and `neuron-ls` know its process.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trainium.checkpoint.layout import InstanceFamily

VARIABLE = "REHEARSAL_INSTANCE_TYPE"
GIB = 2**30


@dataclass(frozen=True)
class Instance:
    """An instance type: Neuron devices, (logical) cores per device, bytes of memory per device."""

    name: str
    devices: int
    cores_per_device: int
    memory_per_device: int
    family: InstanceFamily = "trn1"

    @property
    def cores(self) -> int:
        """All cores of the host."""
        return self.devices * self.cores_per_device

    @property
    def has_rules(self) -> bool:
        """Whether it enforces what only real hardware asks for."""
        return self.name.startswith("trn")


# AWS Neuron architecture pages: trn1 has 2 cores and 32 GiB per device, trn2 at LNC 2 4 logical cores and 96 GiB.
INSTANCES = {
    instance.name: instance
    for instance in (
        Instance("none", 0, 0, 0),
        Instance("rehearsal", 16, 2, 32 * GIB),
        Instance("trn1.2xlarge", 1, 2, 32 * GIB),
        Instance("trn1.32xlarge", 16, 2, 32 * GIB),
        Instance("trn1n.32xlarge", 16, 2, 32 * GIB),
        Instance("trn2.48xlarge", 16, 4, 96 * GIB, "trn2"),
        Instance("trn2u.48xlarge", 16, 4, 96 * GIB, "trn2"),
    )
}


@dataclass(frozen=True)
class Use:
    """A trainer on this host: its process, the cores it stands for, its bytes on host and device, its command."""

    pid: int
    cores: int
    host_bytes: int
    device_bytes: int
    command: str


def this_instance() -> Instance:
    """Raises ValueError naming the known types."""
    name = os.environ.get(VARIABLE) or "rehearsal"
    if name not in INSTANCES:
        raise ValueError(f"{VARIABLE}={name!r} is not known; use one of {', '.join(INSTANCES)}")
    return INSTANCES[name]


def check_cores(instance: Instance, cores: int) -> None:
    """What the runtime says when it cannot give a process the cores it asks for (libnrt's own lines)."""
    if not instance.has_rules:
        return
    if cores > instance.cores:
        raise RuntimeError(
            f"NRT:nrt_allocate_neuron_cores NeuronCore(s) not available - Requested:nc0-nc{cores - 1} "
            f"Available:{instance.cores}"
        )
    if cores not in (1, 2, 8, 16) and cores % 32:
        raise RuntimeError(
            "NRT:nrt_load_collectives  Unsupported topology. Supported number of Neuron Cores is 1, 2, 8, 16 or a "
            "multiple of 32."
        )


@contextmanager
def using(use: Use) -> Iterator[None]:
    """Show up in the monitors while the block runs."""
    file = _folder() / f"{use.pid}.json"
    file.parent.mkdir(mode=0o700, exist_ok=True)
    file.write_text(json.dumps(asdict(use)))
    try:
        yield
    finally:
        file.unlink(missing_ok=True)


def uses() -> list[Use]:
    """The trainers of this user that are alive. Files of dead ones are ignored: kill -9 leaves them behind."""
    found = []
    for file in sorted(_folder().glob("*.json")):
        try:
            use = Use(**json.loads(file.read_text()))
            os.kill(use.pid, 0)
        except (OSError, ValueError, TypeError):
            continue
        found.append(use)
    return found


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"trainium-rehearsal-{os.getuid()}"
