"""Stands in for slurmd: runs one job script of `slurm.local` to its end, detached from whoever submitted it.

Started by path as `python -I -S local_supervisor.py <staging folder> <job folder>`, so only the standard library, and
little of it. The first process returns 0 once the job is registered; its child stays. The rename of the staging folder
is the moment at which the job exists.

`job.json` (from the submitter): id, name, script, log, environment, time_limit, signal, kill_wait.
`state.json` (written here): state, pid, start (ticks since boot), host, script_pid, started, ended, status (raw).
`cancel` (from the submitter): its presence makes SIGTERM mean "cancelled".
"""
# ruff: noqa: PTH104, PTH110, PTH118, PTH123, PTH208
# pathlib would be a third of the start time.

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def main(staging: str, folder: str) -> int:
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        return 0 if os.read(ready, 1) == b"1" else 1
    os.close(ready)
    os.setsid()
    # Orphans of the job become children of this process, so none outlives the job.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with open(os.path.join(staging, "job.json"), encoding="utf-8") as file:
        job = json.load(file)
    me, began = os.getpid(), time.time()
    host = os.uname().nodename
    state = {"state": "RUNNING", "pid": me, "start": start_ticks(me), "host": host, "started": began}
    save(staging, state)
    # Blocked from here on: a cancel that comes before the script runs is found pending by the loop.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.rename(staging, folder)
    os.write(told, b"1")
    os.close(told)
    script = start(job)
    if script is None:
        save(folder, state | {"state": "FAILED", "status": 53, "ended": time.time()})
        return 0
    state["script_pid"] = script
    save(folder, state)
    status, verdict = supervise(folder, job, script, began)
    kill_descendants()
    reap()
    save(folder, state | {"state": verdict or end_state(status), "status": status, "ended": time.time()})
    return 0


def start(job: dict[str, Any]) -> int | None:
    """The pid of the script, or None when its log cannot be opened (Slurm ends such a job with 0:53 and no log)."""
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return None
    pid = os.fork()
    if pid:
        os.close(log)
        return pid
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir("/")
        # bash cannot trap what was ignored when it started
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execve("/bin/bash", ["/bin/bash", job["script"]], job["environment"])
    finally:
        os._exit(127)


def supervise(folder: str, job: dict[str, Any], script: int, started: float) -> tuple[int, str | None]:
    """The script's raw wait status, and what ended it (CANCELLED, TIMEOUT) if it did not end by itself."""
    limit, warn = job["time_limit"], job["signal"]
    deadline = started + limit if limit else None
    warning = deadline - warn["before"] if deadline and warn else None
    verdict: str | None = None
    kill_at: float | None = None
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == script:
            return status, verdict
        if pid:
            continue
        now = time.time()
        moments = [moment for moment in (deadline, warning, kill_at) if moment]
        wait = max(0.0, min(moments) - now) if moments else 3600.0
        got = signal.sigtimedwait({signal.SIGTERM, signal.SIGCHLD}, wait)
        now = time.time()
        if got and got.si_signo == signal.SIGTERM and verdict is None:
            verdict = "CANCELLED" if os.path.exists(os.path.join(folder, "cancel")) else "FAILED"
        elif deadline and now >= deadline and verdict is None:
            verdict = "TIMEOUT"
        elif warning and now >= warning and verdict is None:
            os.kill(script, warn["number"])
            warning = None
        if verdict and kill_at is None:
            os.kill(script, signal.SIGTERM)
            kill_at, deadline, warning = now + job["kill_wait"], None, None
        elif kill_at and now >= kill_at:
            kill_descendants()
            kill_at = now + 1


def end_state(status: int) -> str:
    return "COMPLETED" if status == 0 else "FAILED"


def kill_descendants() -> None:
    """SIGKILL to all that is left of the job, whatever sessions it made. Their zombies remain."""
    me = os.getpid()
    for _ in range(100):
        parents = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                fields = stat(int(name))
                if fields and fields[0] != "Z":
                    parents[int(name)] = int(fields[1])
        doomed, grown = {me}, True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in doomed} - doomed
            doomed |= more
            grown = bool(more)
        doomed.discard(me)
        if not doomed:
            return
        for pid in doomed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)


def reap() -> None:
    """Take leave of the dead: some containers have no init that would."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state on, or None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot: with the pid it names one process for good."""
    fields = stat(pid)
    return int(fields[19]) if fields else None


def save(folder: str, state: dict[str, Any]) -> None:
    path = os.path.join(folder, "state.json")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        json.dump(state, file)
    os.rename(path + ".tmp", path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
