"""What the command lines that read or write shards have in common."""

import argparse
import time
from collections.abc import Callable
from typing import get_args

from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv
from trainium.text import duration, size


def add_layout_options(parser: argparse.ArgumentParser) -> None:
    """The options of a parallel layout; only --tp has no default."""
    parser.add_argument("--tp", type=int, required=True, help="tensor parallel degree")
    parser.add_argument("--pp", type=int, default=1, help="pipeline parallel degree")
    parser.add_argument("--kv-replicator", type=int, default=1, help="copies of each key/value head")
    parser.add_argument("--virtual-pp", type=int, default=1, help="pipeline stages per pipeline rank")
    parser.add_argument("--qkv", choices=get_args(Qkv), default="auto", help="how q, k and v are stored")
    parser.add_argument(
        "--instance-family", choices=get_args(InstanceFamily), default="trn1", help="decides the order of copied heads"
    )


def layout_from(options: argparse.Namespace) -> Layout:
    """The layout that `add_layout_options` parsed. Raises LayoutError for degrees below 1."""
    return Layout(
        tp=options.tp,
        pp=options.pp,
        kv_replicator=options.kv_replicator,
        qkv=options.qkv,
        virtual_pp=options.virtual_pp,
        instance_family=options.instance_family,
    )


def say(line: str) -> None:
    """One line of a job's log, at once."""
    print(line, flush=True)


class Meter:
    """Progress in bytes: a line at most every second."""

    def __init__(self, verb: str, tell: Callable[[str], None] = say) -> None:
        self._verb, self._tell, self._start = verb, tell, time.monotonic()
        self._next = self._start + 1

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 1
        rate = done / (now - self._start)
        left = f", {duration((total - done) / rate)} left" if rate else ""
        self._tell(f"{self._verb} {size(done)} of {size(total)}, {size(rate)}/s{left}")
