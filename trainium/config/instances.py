"""The instance types a recipe can name, and what each of them forbids."""

from dataclasses import dataclass
from typing import Literal

from trainium.checkpoint.layout import InstanceFamily

InstanceName = Literal["trn1.2xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge", "rehearsal"]


@dataclass(frozen=True, kw_only=True)
class InstanceType:
    """One kind of node. Memory in GiB; a core is what one training process drives (a logical core on trn2, LNC 2).

    `cores`, `vcpus` and the memories are None for `rehearsal`: a pretended instance has as many cores as the
    parallelism asks for, and none of the rules that come from the device.
    """

    name: InstanceName
    family: InstanceFamily
    devices: int | None
    cores: int | None
    memory_per_core: int | None
    host_memory: int | None
    vcpus: int | None
    flash_multiple: int | None

    @property
    def is_rehearsal(self) -> bool:
        return self.name == "rehearsal"

    def cores_for(self, tensor: int, pipeline: int) -> int:
        """Training processes on one node."""
        return tensor * pipeline if self.cores is None else self.cores


def _device(
    name: InstanceName, family: InstanceFamily, devices: int, cores: int, memory: int, host: int, vcpus: int
) -> InstanceType:
    return InstanceType(
        name=name,
        family=family,
        devices=devices,
        cores=cores,
        memory_per_core=memory,
        host_memory=host,
        vcpus=vcpus,
        flash_multiple=2048,
    )


# Devices, cores and memory per core: AWS Neuron documentation, architecture pages of trn1 and trn2 (LNC 2); vCPUs and
# host memory: the EC2 instance pages.
INSTANCES: dict[InstanceName, InstanceType] = {
    "trn1.2xlarge": _device("trn1.2xlarge", "trn1", 1, 2, 16, 32, 8),
    "trn1.32xlarge": _device("trn1.32xlarge", "trn1", 16, 32, 16, 512, 128),
    "trn1n.32xlarge": _device("trn1n.32xlarge", "trn1", 16, 32, 16, 512, 128),
    "trn2.48xlarge": _device("trn2.48xlarge", "trn2", 16, 64, 24, 2048, 192),
    "rehearsal": InstanceType(
        name="rehearsal",
        family="trn1",
        devices=None,
        cores=None,
        memory_per_core=None,
        host_memory=None,
        vcpus=None,
        flash_multiple=None,
    ),
}
