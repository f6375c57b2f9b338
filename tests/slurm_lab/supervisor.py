"""The parent of a lab's daemons: starts them, and ends every one of their descendants when its standard input closes.

A script of its own (`python supervisor.py FOLDER...`), because the end of a lab must not depend on how the process
that uses the lab ends: a closed pipe is noticed after a failed test, SIGTERM, SIGKILL and `os._exit` alike. As a child
subreaper it also inherits whatever leaves the daemons' process groups (slurmstepd, and jobs that detach), so nothing
can survive it.

Protocol, one JSON object a line, question → answer:
`{"argv": [...], "env": {...}, "log": "..."}` → `{"pid": 1}` or `{"error": "..."}`;
`{"ended": <pid>}` → `{"code": 0}`, minus the signal for a process that was killed, null for one that still runs.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
KILL_SECONDS = 30.0

exit_codes: dict[int, int] = {}  # by pid, of the children that ended


def main(folders: list[str]) -> int:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    try:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        survivors = end_descendants()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if survivors else 0


def answer(request: dict[str, Any]) -> dict[str, Any]:
    if "ended" in request:
        reap()
        return {"code": exit_codes.get(request["ended"])}
    return start(request)


def start(request: dict[str, Any]) -> dict[str, Any]:
    argv = request["argv"]
    files = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    # Python ignores SIGPIPE; a daemon, and with it every job, must not inherit that.
    defaults = [signal.SIGPIPE, signal.SIGINT, signal.SIGHUP]
    try:
        pid = os.posix_spawn(
            argv[0], argv, request["env"], file_actions=files, setsid=True, setsigmask=[], setsigdef=defaults
        )
    except OSError as error:
        return {"error": str(error)}
    return {"pid": pid}


def reap() -> bool:
    """Collect the children that ended; False when there is no child left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            exit_codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def end_descendants() -> bool:
    """Kill until there is no child left; True when some could not be killed (uninterruptible) in time."""
    deadline = time.monotonic() + KILL_SECONDS
    while reap():
        if time.monotonic() > deadline:
            return True
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.01)
    return False


def descendants() -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The command name, in brackets, may hold blanks and brackets itself.
            parent = stat.read_text(errors="replace").rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue  # ended meanwhile
        children.setdefault(int(parent), []).append(int(stat.parent.name))
    found: list[int] = []
    queue = [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
