"""Names and files of one run: `<runs>/<run name>/`."""

import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainium.errors import UserError
from trainium.files import read_json, write_atomic, write_json
from trainium.run.holder import user_name
from trainium.run.lease import STALE_AFTER, Contest, Lease, LeaseLost, holder_of
from trainium.run.records import JobNote, StageRecord

# What every filesystem, Slurm's %-expansion, a shell and a URL leave alone. No leading dot or dash: hidden, an option.
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,79}", re.ASCII)


class RunNameError(UserError):
    """A name that would not be one folder below the runs folder."""


class RunsFolderError(UserError):
    """A folder in which no run can be."""


class RecipeChanged(UserError):
    """The run was started with other values, and they change the result."""


def check_run_name(name: str) -> str:
    """The name itself, or RunNameError saying what works."""
    if not RUN_NAME.fullmatch(name):
        raise RunNameError(
            f"run name {name!r} does not work: it becomes a folder name and part of job names. "
            "Use 1 to 80 letters, digits, '_', '.', '+' or '-' (ASCII), starting with a letter, a digit or '_'."
        )
    return name


class SourceChanged(UserError):
    """The base model or the rows are not the ones that the run's jobs worked with."""


class NotYourRun(UserError):
    """Somebody else started the run: only their look-ups in the queue would find its jobs."""


class BrokenRun(UserError):
    """The file that says what this run is cannot be read."""


def check_runs_folder(runs: Path) -> Path:
    """The folder as an absolute path without `..`, one for all ways to write it, or RunsFolderError."""
    path = Path(os.path.normpath(runs.expanduser().absolute()))
    text = str(path)
    # Job scripts, Slurm and JSON have to carry it: better refused here than after a download of hours.
    if re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", text):
        raise RunsFolderError(
            f"runs folder {text!r} does not work: a job's files would be in it, and Slurm reads a backslash, a control "
            "character or bytes that are no UTF-8 in their paths as something else. Use a folder without them."
        )
    return path


@dataclass(frozen=True)
class RunFolder:
    """Where everything of a run is. Making this object touches nothing; `start` does."""

    path: Path

    @classmethod
    def named(cls, runs: Path, name: str) -> "RunFolder":
        """The run of this name in the folder `runs`. Raises RunNameError and RunsFolderError."""
        return cls(check_runs_folder(runs) / check_run_name(name))

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def cluster(self) -> Path:
        """Where the run's jobs are, for a cancellation that comes after the flow has died."""
        return self.path / "cluster.json"

    @property
    def toolchain(self) -> Path:
        """Versions of what compiled and trained."""
        return self.path / "toolchain.json"

    @property
    def config(self) -> Path:
        return self.path / "config"

    @property
    def jobs(self) -> Path:
        return self.path / "jobs"

    @property
    def report(self) -> Path:
        return self.path / "report.md"

    def job(self, stage: str, attempt: int) -> Path:
        return self.jobs / f"{stage}-{attempt}"

    def check_place(self) -> None:
        """Raise NotYourRun, or RunsFolderError when this folder can neither be entered nor made. Touches nothing."""
        self._check_user()
        there = next(folder for folder in (self.path, *self.path.parents) if os.path.exists(folder))  # noqa: PTH110
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "you may not write there" if there.is_dir() else "it is not a folder"
            raise RunsFolderError(
                f"runs folder {self.path.parent} does not work: {there}: {why}. Use --runs, or the cluster's `runs`."
            )

    def attempts(self, stage: str) -> tuple[int, ...]:
        """Numbers of the attempts there are, in order."""
        pattern = re.compile(rf"{re.escape(stage)}-(\d+)")
        folders = self.jobs.iterdir() if self.jobs.is_dir() else iter(())
        found = (pattern.fullmatch(folder.name) for folder in folders)
        return tuple(sorted(int(match[1]) for match in found if match))

    @property
    def uid(self) -> str:
        """Random, made with the folder: a deleted and remade run of the same name is another run."""
        return str(self._ledger()["uid"])

    def contest(self, stale_after: float = STALE_AFTER, flow_run: str = "") -> Contest:
        """A contender for this run, which remembers what it has seen of the one that has it. `stale_after`: seconds."""
        return Contest(self.path / "lease", stale_after=stale_after, flow_run=flow_run)

    def is_of(self, flow_run: str) -> bool:
        """Whether this flow run of Prefect was the last to work on the run, as far as anybody knows."""
        holder = holder_of(self.path / "lease")
        return holder is None or holder.flow_run in ("", flow_run)

    def start(
        self,
        recipe_yaml: str,
        frozen: Mapping[str, Any],
        difference: Callable[[Mapping[str, Any]], list[str]],
        contest: Contest | None = None,
    ) -> Lease:
        """Make the folder or enter it again, and take its lease.

        `frozen` are the values that decide the result; `difference` compares those of the first start with them and
        names what changed. Once a job was submitted they stay: raises RecipeChanged; RunBusy while another process
        has the run, or may have it: asked again with the same contest, in the end one knows; NotYourRun when another
        user has started it. Nothing is changed then.
        """
        self.check_place()
        self._check_values(difference)
        self.path.mkdir(parents=True, exist_ok=True)
        lease = (contest or self.contest()).take()
        try:
            self._check_user()  # again: two may have started it at once
            self._check_values(difference)
            self._freeze(frozen, difference)
            write_atomic(self.recipe, recipe_yaml)
        except BaseException:
            lease.release()
            raise
        return lease

    def _check_user(self) -> None:
        """Raise NotYourRun when another user has started the run."""
        try:
            owner = self._ledger()["user"]
            if owner["id"] == os.geteuid():
                return
            name = str(owner["name"])
        except (OSError, KeyError, TypeError, BrokenRun, LeaseLost):
            return  # there is no run yet, or another check says what is wrong with it
        raise NotYourRun(
            f"run {self.name!r} in {self.path.parent} belongs to {name}, who started it first. Its jobs are "
            f"{name}'s, and you could not find them in the queue. Give your run another name."
        )

    def _check_values(self, difference: Callable[[Mapping[str, Any]], list[str]]) -> None:
        """Raise RecipeChanged when jobs were submitted with other values. Touches nothing."""
        if not (self.path / "run.json").exists():
            return
        changed = difference(self._ledger()["frozen"])
        if changed and any(self.jobs.glob("*")):
            lines = "\n".join(f"  {line}" for line in changed)
            raise RecipeChanged(
                f"run {self.name!r} in {self.path.parent} was started with other values:\n{lines}\n"
                "They decide the result, so they stay as they are for this run. "
                "Write the old values, or give the new run another name."
            )

    def _freeze(self, frozen: Mapping[str, Any], difference: Callable[[Mapping[str, Any]], list[str]]) -> None:
        path = self.path / "run.json"
        if not path.exists():
            user = {"name": user_name(os.geteuid()), "id": os.geteuid()}
            first = {"uid": secrets.token_hex(5), "created": now(), "name": self.name, "user": user}
            write_json(path, {**first, "frozen": frozen})
        elif difference(self._ledger()["frozen"]):
            # Nothing was submitted with the old values: the first start was refused, and this one has them mended.
            write_json(path, {**self._ledger(), "frozen": frozen})

    def _ledger(self) -> dict[str, Any]:
        """run.json. Raises BrokenRun: without the uid in it nobody can tell this run's jobs from another's.

        LeaseLost when it is gone: `start` wrote it, so somebody has deleted the folder since.
        """
        path = self.path / "run.json"
        try:
            ledger = read_json(path)
            if {"uid", "frozen"} <= ledger.keys():
                return dict(ledger)
        except FileNotFoundError as error:
            raise LeaseLost(f"{path} is gone: the run folder was deleted while this flow was working in it.") from error
        except (ValueError, AttributeError):
            pass
        raise BrokenRun(
            f"{path} is damaged, and only it knows which jobs belong to this run. Restore it, or give the run another "
            f"name (and cancel what `trainium cancel {self.name}` finds)."
        )

    def record(self, stage: str) -> StageRecord | None:
        """What the stage left when it finished last, whatever its inputs were.

        A damaged record is none: the stage finds its jobs by their own folders and writes it again.
        """
        try:
            return StageRecord.from_json(read_json(self.path / "stages" / f"{stage}.json"))
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def finished(self, stage: str, inputs: str) -> StageRecord | None:
        """The record that stands for this work, or None when the work has to be done."""
        record = self.record(stage)
        return record if record and record.inputs == inputs and record.skippable else None

    def end_attempt(
        self, stage: str, note: JobNote, *, succeeded: bool, details: Mapping[str, Any] | None = None
    ) -> None:
        """Add an ended job to the run's ledger of attempts; the same attempt again replaces its entry.

        `details`: of one that did not succeed, how it `ended` (`trainium.run.attempts.Ended`) and what comes `then`.
        """
        run = self._ledger()
        entry = {"stage": stage, "succeeded": succeeded, **asdict(note), **(details or {})}
        others = [e for e in run.get("attempts", []) if (e["stage"], e["attempt"]) != (stage, note.attempt)]
        write_json(self.path / "run.json", {**run, "attempts": [*others, entry]})

    def ended_attempts(self, stage: str | None = None) -> tuple[Mapping[str, Any], ...]:
        """The ledger's entries, of one stage in the order of its attempts or of all in the order of their ends."""
        entries = self._ledger().get("attempts", [])
        if stage is None:
            return tuple(entries)
        return tuple(sorted((e for e in entries if e["stage"] == stage), key=lambda entry: int(entry["attempt"])))

    def retire(self, record: StageRecord) -> None:
        """The record stands for the work no more (its outputs are lost, say): its jobs have to be done again.

        Without this the next start would adopt them, find that they ended well, and record what is left of the work.
        """
        over = {(job.id, job.attempt) for job in record.jobs}
        run = self._ledger()
        entries = [
            {**e, "succeeded": e["succeeded"] and (e["id"], e["attempt"]) not in over} for e in run.get("attempts", [])
        ]
        if entries != run.get("attempts", []):
            write_json(self.path / "run.json", {**run, "attempts": entries})

    def attempt_failed(self, stage: str, attempt: int) -> bool:
        """Whether the ledger knows that this attempt's work is not to be used. False also while nobody knows."""
        ledger = self._ledger().get("attempts", [])
        return any((e["stage"], e["attempt"]) == (stage, attempt) and not e["succeeded"] for e in ledger)

    def finish(self, record: StageRecord) -> None:
        """Write the stage's record. Raises SourceChanged when jobs have worked with other content of the same source.

        Sources (model, dataset) name their content in `facts["digest"]`; their inputs say only where it is from.
        """
        before = self.record(record.stage)
        if before and not record.jobs and before.inputs == record.inputs and any(self.jobs.glob("*")):
            old, new = before.facts.get("digest"), record.facts.get("digest")
            if old != new:
                raise SourceChanged(
                    f"the {record.stage} of run {self.name!r} has changed since its jobs were submitted (digest "
                    f"{str(old)[:12]} → {str(new)[:12]}). What they made belongs to the old content. Put that back, or "
                    "give the new run another name."
                )
        write_json(self.path / "stages" / f"{record.stage}.json", record.to_json())


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
