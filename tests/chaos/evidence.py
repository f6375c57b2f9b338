"""What really happened, from Slurm's own memory and the files; never from what the flows say of themselves."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from slurm.folder import JobFolder
from tests.chaos.cases import STAGES
from tests.slurm_lab.faults import EndedJob, QueuedJob
from trainium.files import read_json
from trainium.run.folder import RunFolder


@dataclass(frozen=True)
class Job:
    """One job id of a run: every start of it together."""

    job_id: str
    name: str
    submitted: datetime | None
    ended: datetime | None  # None: it has not
    state: str
    exit_code: str

    @property
    def stage(self) -> str:
        """The stage's part of `uid-stage-attempt`."""
        return self.name.partition("-")[2].rpartition("-")[0]


@dataclass(frozen=True)
class Outcome:
    """What a run made: the digest of its final checkpoint's shards and its export, and its loss by step."""

    weights: str
    losses: tuple[tuple[int, float], ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr((self.weights, self.losses)).encode()).hexdigest()


def jobs_of(uids: Iterable[str], ended: Sequence[EndedJob], queued: Sequence[QueuedJob]) -> list[Job]:
    """The jobs of a run. `uids`: more than one when the run folder was made anew.

    By id and name: a controller that lost its memory gives an id again.
    """
    beginnings = tuple(f"{uid}-" for uid in uids)
    alive = {(job.job_id, job.name): job for job in queued if job.name.startswith(beginnings)}
    found: dict[tuple[str, str], Job] = {}
    for row in ended:
        key = row.job_id, row.name
        if row.name.startswith(beginnings):
            submitted = found[key].submitted if key in found else row.submitted
            found[key] = Job(row.job_id, row.name, submitted, row.ended, row.state, row.exit_code)
    for key, job in alive.items():
        submitted = found[key].submitted if key in found else None
        found[key] = Job(job.job_id, job.name, submitted, None, job.state, "")
    return sorted(found.values(), key=lambda job: (int(job.job_id), job.name))


def orphans(run: RunFolder, jobs: Sequence[Job]) -> list[str]:
    """Jobs that the run has left behind: in the queue, and their script has not ended."""
    told = []
    for job in jobs:
        ended = JobFolder(run.jobs / job.name.partition("-")[2]).read_exit()
        if job.ended is None and (ended is None or ended.job_id != job.job_id):
            told.append(f"job {job.job_id} {job.name} is {job.state}")
    return told


def duplicates(jobs: Sequence[Job]) -> list[str]:
    """Two jobs of one name, or two of one stage that were in the queue at the same time."""
    told = []
    for first, second in ((a, b) for index, a in enumerate(jobs) for b in jobs[index + 1 :]):
        if first.name == second.name:
            told.append(f"jobs {first.job_id} and {second.job_id} are both called {first.name}")
        elif first.stage == second.stage and _overlap(first, second):
            told.append(f"jobs {first.job_id} and {second.job_id} of {first.stage} were alive together")
    return told


def outcome(run: RunFolder) -> Outcome | None:
    """None while the run is not finished."""
    train = run.record("train")
    if train is None or any(run.record(stage) is None for stage in STAGES) or not run.report.exists():
        return None
    checkpoint = Path(train.facts["checkpoint"])
    digest = hashlib.sha256()
    shards = [file for part in ("model", "optim") for file in (checkpoint / part).rglob("*") if file.is_file()]
    weights = [file for file in (run.path / "export").iterdir() if file.suffix in (".safetensors", ".sha256")]
    for folder, files in ((checkpoint, shards), (run.path, weights)):
        for file in sorted(files):
            digest.update(f"{file.relative_to(folder)}\n".encode())
            digest.update(file.read_bytes())
    return Outcome(digest.hexdigest(), tuple((int(step), float(loss)) for step, loss in train.facts["losses"]))


def wrong_verdicts(run: RunFolder, jobs: Sequence[Job]) -> list[str]:
    """Where the run's ledger and records say of a job what Slurm does not."""
    by_name = {job.name.partition("-")[2]: job for job in jobs}
    told = []
    for entry in read_json(run.path / "run.json").get("attempts", []):
        name = f"{entry['stage']}-{entry['attempt']}"
        job = by_name.get(name)
        if job is None:  # forgotten by a controller that was killed; the script is a witness too
            if entry["state"] == "COMPLETED" and not _ended_well(run, name, str(entry["id"])):
                told.append(f"nobody knows that job {entry['id']} of {name} has ended as the ledger says")
        elif job.ended is None:
            told.append(f"job {job.job_id} is in the ledger as {entry['state']} and is not ended: {job.state}")
        elif (entry["state"] == "COMPLETED") != (job.state == "COMPLETED"):
            told.append(f"job {job.job_id} is in the ledger as {entry['state']} and was {job.state} {job.exit_code}")
    for stage in STAGES:
        record = run.record(stage)
        for note in record.jobs if record else ():
            name = f"{stage}-{note.attempt}"
            job = by_name.get(name)
            if (job is None or (job.job_id, job.state) != (note.id, "COMPLETED")) and not (
                job is None and _ended_well(run, name, note.id)
            ):
                told.append(f"stage {stage} counts on job {note.id}, which was {job.state if job else 'never there'}")
    return told


def _ended_well(run: RunFolder, name: str, job_id: str) -> bool:
    """By the job's own script."""
    ended = JobFolder(run.jobs / name).read_exit()
    return ended is not None and (ended.job_id, ended.code) == (job_id, 0)


def _overlap(first: Job, second: Job) -> bool:
    """Slurm's times are whole seconds, cut off: a job submitted in the second of the other's end came after it."""
    if first.submitted is None or second.submitted is None:
        return first.ended is None and second.ended is None
    earlier, later = sorted((first, second), key=lambda job: (job.submitted, int(job.job_id)))
    return earlier.ended is None or (later.submitted is not None and later.submitted < earlier.ended)
