"""Stands in for srun: runs one command once per task of a local job, with srun's variables and its manners.

Started by path as `python -I -S local_srun.py <command> …` from the job script; the number of tasks and nodes comes
from SLURM_NTASKS and SLURM_NNODES. As with `--kill-on-bad-exit=1`, the first task that fails ends the others, and the
exit code is its. Each task leads a process group; signals are passed on to all of them.
"""

import os
import signal
import sys
import time

_KILL_WAIT = 30.0


def main(command: list[str]) -> int:
    tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ["SLURM_NNODES"])
    per_node = -(-tasks // nodes)
    handled = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, handled | {signal.SIGCHLD})
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running = {launch(command, rank, per_node) for rank in range(tasks)}
    worst, kill_at = 0, None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            running.discard(pid)
            if status and worst == 0:
                worst = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                signal_all(running, signal.SIGTERM)
                kill_at = time.monotonic() + _KILL_WAIT
            continue
        got = signal.sigtimedwait(handled | {signal.SIGCHLD}, 1.0 if kill_at else 3600.0)
        if got and got.si_signo != signal.SIGCHLD:
            signal_all(running, got.si_signo)
        if kill_at and time.monotonic() >= kill_at:
            signal_all(running, signal.SIGKILL)
    return worst


def launch(command: list[str], rank: int, per_node: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        variables = {"SLURM_PROCID": rank, "SLURM_NODEID": rank // per_node, "SLURM_LOCALID": rank % per_node}
        os.environ.update({name: str(value) for name, value in variables.items()})
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"srun: error: {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        for target in (-pid, pid):  # its group, or itself when it has not made its group yet
            try:
                os.kill(target, number)
                break
            except ProcessLookupError:
                continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
