"""A Slurm cluster, through its command line."""

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from slurm import commands
from slurm.commands import Completed, Runner
from slurm.errors import SchedulerUnreachable, SlurmError, SubmitUncertain
from slurm.folder import JobFolder
from slurm.identity import identity
from slurm.scheduler import AccountingRow, QueueRow, Timing
from slurm.script import render
from slurm.spec import JobSpec, check_name

_USUAL = ("/usr/bin", "/bin", "/usr/local/bin")  # in every PATH
_SKEW = timedelta(seconds=60)  # how far the clocks of this machine and of the controller may be apart
_TIMING = Timing(exit_scan=2, queue=15, early=5, accounting=60, confirm=10, lost=300, settle=0.5, calls=12)


class SlurmScheduler:
    """sbatch, squeue, sacct and scancel; see `slurm.scheduler.Scheduler`.

    `bin` is the folder of the commands (default: PATH), `conf` the slurm.conf (default: SLURM_CONF, then Slurm's own
    search). `timeout` bounds one command: a controller that does not answer holds squeue up for twice MessageTimeout
    (ParallelCluster: 60 s), and a killed sbatch leaves it open whether there is a job.
    """

    def __init__(
        self,
        *,
        bin: Path | str | None = None,
        conf: Path | str | None = None,
        timeout: timedelta = timedelta(seconds=150),
        timing: Timing | None = None,
        runner: Runner = commands.run,
    ) -> None:
        self._bin = Path(bin) if bin else None
        self._conf = str(conf) if conf else None
        self._timeout = timeout.total_seconds()
        self._timing = timing or _TIMING
        self._runner = runner
        self._user = str(os.getuid())

    @property
    def timing(self) -> Timing:
        return self._timing

    @property
    def identity(self) -> str:
        return identity(self._conf or os.environ.get("SLURM_CONF"), self._bin)

    def render(self, spec: JobSpec, folder: JobFolder, name: str) -> str:
        found = self._bin or (Path(which).parent if (which := shutil.which("srun")) else None)
        unusual = str(found) if found and str(found) not in _USUAL else None
        return render(spec, folder, name, commands=unusual)

    def submit(self, script: Path, name: str) -> str:
        check_name(name)
        try:
            # Slurm before 23.02 would fetch a login environment on the node for NIL, as for NONE: `su -`, seconds on a
            # busy node. Of an environment that holds nothing, all may go along.
            bare = commands.bare_environment(os.environ, self._conf)
            result = self._run("sbatch", "--parsable", "--export=ALL", str(script.absolute()), env=bare)
        except commands.CommandTimeout as error:
            raise SubmitUncertain(f"sbatch may have submitted the job: {error}") from None
        if result.code != 0:
            raise commands.submit_error(result)
        if (job_id := commands.parse_submission(result.stdout)) is None:
            raise SubmitUncertain(f"sbatch succeeded but printed no job id: {result.stdout.strip()[:200]!r}")
        return job_id

    def find(self, name: str, since: datetime) -> list[QueueRow]:
        check_name(name)
        since -= _SKEW
        result = self._ask("squeue", "-h", "-a", "-t", "all", "-u", self._user, "-n", name, "-O", commands.QUEUE_FORMAT)
        found = {row.job_id: row for row in commands.parse_queue(result.stdout) if _is(row, name, since)}
        for account in self._accounting(since, "-u", self._user, "--name", name) or ():
            if account.job_id not in found and _is(account, name, since) and not commands.never_ran(account):
                found[account.job_id] = QueueRow(
                    account.job_id, account.state, None, account.nodes, name, 0, account.submitted
                )
        return list(found.values())

    def queue(self, job_ids: Collection[str] | None) -> dict[str, QueueRow]:
        if job_ids is not None and not job_ids:
            return {}
        which = ("-u", self._user) if job_ids is None else ("-j", ",".join(sorted(job_ids)))
        result = self._run_query("squeue", "-h", "-a", "-t", "all", *which, "-O", commands.QUEUE_FORMAT)
        if result.code != 0:
            # Only when it is asked for a single id does squeue call a purged job an error.
            if "Invalid job id specified" in result.stderr:
                return {}
            raise SchedulerUnreachable(f"squeue failed: {commands.message(result)}")
        return {row.job_id: row for row in commands.parse_queue(result.stdout)}

    def accounting(self, job_ids: Collection[str], since: datetime) -> dict[str, AccountingRow] | None:
        if not job_ids:
            return {}
        rows = self._accounting(since - _SKEW, "-j", ",".join(sorted(job_ids)))
        if rows is None:
            return None
        # Ids start again at 1 when the controller loses its state: an older job of the same id is another job.
        fresh = (row for row in rows if row.submitted is None or row.submitted >= since - _SKEW)
        return {row.job_id: row for row in sorted(fresh, key=lambda row: row.submitted or since)}

    def cancel(self, job_ids: Collection[str]) -> None:
        if not job_ids:
            return
        result = self._run_query("scancel", *sorted(job_ids))
        if result.code == 0 or "Invalid job id" in result.stderr:
            return
        if commands.is_unreachable(result):
            raise SchedulerUnreachable(f"scancel could not reach Slurm: {commands.message(result)}")
        raise SlurmError(f"scancel {' '.join(sorted(job_ids))} failed: {commands.message(result)}")

    def _accounting(self, since: datetime, *which: str) -> Iterable[AccountingRow] | None:
        start = since.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S")
        options = ("-X", "-n", "-P", f"--delimiter={commands.SEPARATOR}", "-S", start, "-o", commands.ACCOUNTING_FIELDS)
        result = self._run_query("sacct", *options, *which)
        if result.code == 0:
            return commands.parse_accounting(result.stdout)
        if commands.has_no_accounting(result):
            return None
        raise SchedulerUnreachable(f"sacct failed: {commands.message(result)}")

    def _ask(self, program: str, *args: str) -> Completed:
        result = self._run_query(program, *args)
        if result.code != 0:
            raise SchedulerUnreachable(f"{program} failed: {commands.message(result)}")
        return result

    def _run_query(self, program: str, *args: str) -> Completed:
        try:
            return self._run(program, *args)
        except commands.CommandTimeout as error:
            raise SchedulerUnreachable(str(error)) from None

    def _run(self, program: str, *args: str, env: Mapping[str, str] | None = None) -> Completed:
        argv = [self._program(program), *args]
        if env:  # its PATH is not the one in which Slurm's commands are
            argv[0] = shutil.which(argv[0]) or argv[0]
        else:
            env = commands.clean_environment(os.environ, self._conf)
        try:
            return self._runner(argv, env=env, timeout=self._timeout)
        except OSError as error:
            where = self._bin or "PATH"
            raise SlurmError(
                f"cannot run {argv[0]} ({error.strerror}): Slurm's commands are not in {where}; "
                "run on a machine that submits to the cluster, or name their folder"
            ) from error

    def _program(self, name: str) -> str:
        return str(self._bin / name) if self._bin else name


def _is(row: QueueRow | AccountingRow, name: str, since: datetime) -> bool:
    return row.name == name and (row.submitted is None or row.submitted >= since)
