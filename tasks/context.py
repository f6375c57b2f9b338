"""What every stage of a run is given."""

import asyncio
from collections.abc import Iterable
from weakref import WeakKeyDictionary

from blocks import Cluster, HuggingFaceHub, S3Storage
from slurm.snapshot import place
from slurm.watcher import Watcher
from tasks.jobspecs import Site
from tasks.listening import Listener
from trainium.run.lease import Lease

_watchers: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Watcher]] = WeakKeyDictionary()


def watcher_of(cluster: Cluster) -> Watcher:
    """The one watcher of a cluster in this event loop: however many runs, its queue is asked once for all of them."""
    watchers = _watchers.setdefault(asyncio.get_running_loop(), {})
    if cluster.queue not in watchers:
        scheduler = cluster.scheduler()
        watchers[cluster.queue] = Watcher(scheduler, shared=place(cluster.runs, scheduler.identity))
    return watchers[cluster.queue]


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

    @property
    def watcher(self) -> Watcher:
        """Needs a running event loop."""
        return watcher_of(self.site.cluster)

    def progress(self, stage: str, text: str, fraction: float | None = None) -> None:
        """Tell everybody who listens how far a stage is."""
        for listener in self.listeners:
            listener.progress(stage, text, fraction)
