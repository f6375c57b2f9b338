"""What every stage of a run is given."""

from collections.abc import Iterable

from blocks import HuggingFaceHub, S3Storage
from slurm.watcher import Watcher
from tasks.jobspecs import Site
from tasks.listening import Listener
from trainium.run.lease import Lease


class Run:
    """One run in the hands of this process.

    Not a dataclass on purpose: Prefect walks through dataclasses among a task's arguments, looking for futures.
    """

    def __init__(
        self,
        site: Site,
        lease: Lease,
        *,
        hub: HuggingFaceHub | None = None,
        storage: S3Storage | None = None,
        listeners: Iterable[Listener] = (),
    ) -> None:
        self.site = site
        self.recipe = site.recipe
        self.folder = site.folder
        self.places = site.places
        self.lease = lease
        self.hub = hub
        self.storage = storage
        self.listeners = tuple(listeners)
        self.scheduler = site.cluster.scheduler()
        self.watcher = Watcher(self.scheduler)

    def progress(self, stage: str, text: str, fraction: float | None = None) -> None:
        """Tell everybody who listens how far a stage is."""
        for listener in self.listeners:
            listener.progress(stage, text, fraction)
