"""Register with a Prefect server what the deployments refer to: work pool, block types, block documents, automations.

    python -m deployments.register [--runs runs] [--slurm-runs /fsx/runs --nxdt-examples PATH [--nxdt-activate PATH]]
                                   [--silent-after 90]

Safe to repeat: a document or an automation that exists is left as it was edited in the UI.
"""

import argparse
import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from prefect import get_client
from prefect.blocks.core import Block
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from blocks import HuggingFaceHub, LocalCluster, NeuronToolchain, S3Storage, SlurmCluster
from deployments.automations import SILENT_AFTER, automations, deploy_maintenance, register_automations

WORK_POOL = "trainium"
BLOCK_TYPES: tuple[type[Block], ...] = (SlurmCluster, LocalCluster, NeuronToolchain, HuggingFaceHub, S3Storage)


async def register(documents: Sequence[tuple[str, Block]], silent_after: timedelta = SILENT_AFTER) -> list[str]:
    """Make work pool, block types and maintenance deployments, and the documents and automations that are not there.

    Returns the slugs and names of those that were made.
    """
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
    async with get_client() as client:
        reap_id, recover_id = await deploy_maintenance(client, WORK_POOL)
        made += await register_automations(client, automations(reap_id, recover_id, silent_after))
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
    given = vars(arguments)
    silent_after = timedelta(seconds=given.pop("silent_after"))
    made = await register(documents(**given), silent_after)
    print(f"work pool {WORK_POOL}, {len(BLOCK_TYPES)} block types; made: {', '.join(made) or 'nothing new'}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m deployments.register", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="runs folder of the rehearsal")
    parser.add_argument("--slurm-runs", type=Path, help="runs folder on the cluster's shared filesystem")
    parser.add_argument("--nxdt-examples", type=Path, help="folder `examples` of neuronx-distributed-training")
    parser.add_argument("--nxdt-activate", type=Path, help="bin/activate of the NxDT environment")
    parser.add_argument(
        "--silent-after",
        type=_window,
        default=SILENT_AFTER.total_seconds(),
        metavar="SECONDS",
        help="without a heartbeat for so long a run counts as crashed (default %(default).0f; one is sent every 30)",
    )
    asyncio.run(_main(parser.parse_args()))


def _window(text: str) -> float:
    with suppress(ValueError):
        if 10 <= float(text) <= 86_400:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 10 (Prefect's own least) to 86400")


if __name__ == "__main__":
    main()
