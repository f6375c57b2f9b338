"""`torchrun` with the real arguments; one training process per node stands for all its ranks."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType

from trainium.rehearsal.lines import BANNER, say

GRACE = 30.0  # seconds between the signal to the training process and SIGKILL, as torchrun's default


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 when training failed or a signal ended it, 2 for wrong arguments, as torchrun's."""
    options = _parse(argv)
    ranks, nodes = options.nproc_per_node, options.nnodes
    say(BANNER)
    say(f"REHEARSAL: one process on this node (node {options.node_rank} of {nodes}) stands for {ranks} ranks.")
    child = subprocess.Popen(
        [sys.executable, "-u", options.training_script, *options.training_script_args], env=_environment(options)
    )
    received: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        received.append(number)
        child.send_signal(number)

    # A notice and no end: how long the training takes to heed it is its own affair.
    signal.signal(signal.SIGUSR1, lambda number, _: child.send_signal(number))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    code = _wait(child, received)
    if received:
        name = signal.Signals(received[0]).name
        _log("WARNING", "agent.server.api", f"Received {received[0]} death signal, shutting down workers")
        _log(
            "ERROR", "multiprocessing.api", f"SignalException: Process {os.getpid()} got signal: {received[0]} ({name})"
        )
        return 1
    if code:
        _report(options, child.pid, code)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="torchrun", allow_abbrev=False)
    for name, default in (("nproc", 1), ("nnodes", 1), ("node-rank", 0), ("master-port", 29500)):
        full = f"{name}-per-node" if name == "nproc" else name
        parser.add_argument(f"--{full}", f"--{full.replace('-', '_')}", type=int, default=default)
    parser.add_argument("--master-addr", "--master_addr", default="127.0.0.1")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    if options.nproc_per_node < 1 or options.nnodes < 1:
        parser.error("--nproc_per_node and --nnodes must be at least 1")
    if not 0 <= options.node_rank < options.nnodes:
        parser.error(f"--node_rank {options.node_rank} is none of the {options.nnodes} nodes")
    return options


def _environment(options: argparse.Namespace) -> dict[str, str]:
    first = options.node_rank * options.nproc_per_node
    return os.environ | {
        "RANK": str(first),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(options.nnodes * options.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(options.nproc_per_node),
        "GROUP_RANK": str(options.node_rank),
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": str(options.master_port),
        "TORCHELASTIC_RUN_ID": "none",
        "OMP_NUM_THREADS": "1",
        "REHEARSAL_NODES": str(options.nnodes),
        "REHEARSAL_NODE_RANK": str(options.node_rank),
        "REHEARSAL_RANKS_PER_NODE": str(options.nproc_per_node),
    }


def _wait(child: subprocess.Popen[bytes], received: Sequence[int]) -> int:
    deadline: float | None = None
    while True:
        try:
            return child.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            if received:
                deadline = deadline or time.monotonic() + GRACE
                if time.monotonic() > deadline:
                    child.kill()


def _report(options: argparse.Namespace, pid: int, code: int) -> None:
    """torchrun's own words about a process that failed."""
    local = f"(exitcode: {code}) local_rank: 0 (pid: {pid}) of binary: {sys.executable}"
    _log("ERROR", "multiprocessing.api", f"failed {local}")
    if code < 0:
        reason = f"Signal {-code} ({signal.Signals(-code).name}) received by PID {pid}"
    else:
        reason = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
    rank = options.node_rank * options.nproc_per_node
    print(
        f"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n{'=' * 60}\n"
        f"{Path(options.training_script).name} FAILED\n{'-' * 60}\nFailures:\n  <NO_OTHER_FAILURES>\n{'-' * 60}\n"
        f"Root Cause (first observed failure):\n[0]:\n"
        f"  time      : {datetime.now():%Y-%m-%d_%H:%M:%S}\n  host      : {socket.gethostname()}\n"
        f"  rank      : {rank} (local_rank: 0)\n  exitcode  : {code} (pid: {pid})\n  error_file: <N/A>\n"
        f"  traceback : {reason}\n{'=' * 60}",
        file=sys.stderr,
        flush=True,
    )


def _log(level: str, where: str, message: str) -> None:
    now = datetime.now()
    prefix = f"WARNING:torch.distributed.elastic.{where}:"
    if level == "ERROR":
        stamp = f"{now:%m%d %H:%M:%S}.{now.microsecond // 1000:03d}000 {os.getpid()}"
        prefix = f"E{stamp} torch/distributed/elastic/{where.replace('.', '/')}.py] "
    print(f"{prefix}{message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
