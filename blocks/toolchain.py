"""The software that compiles and trains: AWS's own on a cluster, the stand-in of the rehearsal elsewhere."""

import sys
from pathlib import Path

from prefect.blocks.core import Block
from pydantic import Field

import trainium
from blocks.paths import AbsolutePath


class NeuronToolchain(Block):
    """Paths of an environment with NxDT in it. The flows do not know which one it is."""

    _block_type_name = "Neuron Toolchain"
    _description = "The environment in which graphs are compiled and models are trained."

    examples: AbsolutePath = Field(
        description="The folder `examples` of neuronx-distributed-training, with train_setup.sh, "
        "training_orchestrator.py and checkpoint_converter_scripts, on a path that the compute nodes see."
    )
    activate: AbsolutePath | None = Field(
        default=None, description="Script to source first, such as ~/env/bin/activate of the NxDT environment."
    )
    environment: dict[str, str] = Field(
        default_factory=dict,
        description="Variables to export in the jobs that compile and train, as a JSON object such as "
        '{"NEURON_RT_LOG_LEVEL": "INFO"}. No secrets.',
    )
    rehearsal: bool = Field(
        default=False, description="Whether this is the stand-in for CPUs; every report then says so."
    )

    @classmethod
    def installed(cls) -> "NeuronToolchain":
        """NxDT where the tutorial installs it: its repository and an environment `env` in the home folder."""
        return cls(
            examples=Path("~/neuronx-distributed-training/examples"),
            activate=Path("~/env/bin/activate"),
        )

    @classmethod
    def stand_in(cls) -> "NeuronToolchain":
        """The rehearsal's toolchain, which ships with this project and trains on CPUs."""
        folder = Path(trainium.__file__ or "").parent / "rehearsal" / "toolchain"
        return cls(
            examples=folder / "examples",
            activate=folder / "activate",
            environment={"REHEARSAL_PYTHON": sys.executable},
            rehearsal=True,
        )
