"""The options of a parallel layout, for argparse."""

import argparse
from typing import get_args

from trainium.checkpoint.layout import InstanceFamily, Layout, Qkv


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
