"""Register with a Prefect server what the deployments refer to: work pool, block types, block documents.

    python -m deployments.register [--runs runs] [--slurm-runs /fsx/runs --nxdt-examples PATH [--nxdt-activate PATH]]

Safe to repeat: a document that exists is left as it was edited in the UI.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from prefect import get_client
from prefect.blocks.core import Block
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage, SlurmCluster

WORK_POOL = "trainium"
BLOCK_TYPES: tuple[type[Block], ...] = (SlurmCluster, LocalCluster, NeuronToolchain, HuggingFaceHub, S3Storage)


async def register(documents: Sequence[tuple[str, Block]]) -> list[str]:
    """Make work pool and block types, and the documents that are not there yet; returns the slugs that were made."""
    async with get_client() as client:
        with suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=WORK_POOL, type="process"))
    for block_type in BLOCK_TYPES:
        await block_type.aregister_type_and_schema()
    made = []
    for name, block in documents:
        try:
            await block.asave(name)
        except ValueError:  # "… already exists": whoever edited it in the UI keeps it
            continue
        made.append(f"{block.get_block_type_slug()}/{name}")
    return made


def documents(
    runs: Path, *, slurm_runs: Path | None = None, nxdt_examples: Path | None = None, nxdt_activate: Path | None = None
) -> list[tuple[str, Block]]:
    """(name, block) of what the deployments in prefect.yaml refer to, as far as it can be known from the arguments."""
    found: list[tuple[str, Block]] = [
        ("rehearsal", LocalCluster(runs=runs)),
        ("rehearsal", NeuronToolchain.stand_in()),
    ]
    if slurm_runs:
        found.append(("main", SlurmCluster(runs=slurm_runs)))
    if nxdt_examples:
        found.append(("nxdt", NeuronToolchain(examples=nxdt_examples, activate=nxdt_activate)))
    return found


async def _main(arguments: argparse.Namespace) -> None:
    made = await register(documents(**vars(arguments)))
    print(f"work pool {WORK_POOL}, {len(BLOCK_TYPES)} block types; made: {', '.join(made) or 'nothing new'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.register", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="runs folder of the rehearsal")
    parser.add_argument("--slurm-runs", type=Path, help="runs folder on the cluster's shared filesystem")
    parser.add_argument("--nxdt-examples", type=Path, help="folder `examples` of neuronx-distributed-training")
    parser.add_argument("--nxdt-activate", type=Path, help="bin/activate of the NxDT environment")
    asyncio.run(_main(parser.parse_args()))


if __name__ == "__main__":
    main()
