"""Slurm's host lists, such as `n[1-3,7],m5`, as the names in them (the form of squeue's and sbatch's node lists)."""

import re
from collections.abc import Iterator
from itertools import product

from slurm.errors import BadHostList

LARGEST = 1 << 16  # Slurm's own limit of hosts in one list (MAX_RANGE of slurm/src/common/hostlist.c)

# Commas separate hosts, but not inside of brackets.
_ITEM = re.compile(r"(?:[A-Za-z0-9_.-]|\[[0-9,-]+\])+")
_PART = re.compile(r"\[([0-9,-]+)\]|([A-Za-z0-9_.-]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def expand(hosts: str) -> tuple[str, ...]:
    """The names in their order, each once; `""` has none. Leading zeros are kept: `n[08-10]` is n08, n09, n10.

    Raises BadHostList for anything else, and for lists of more than 65,536 hosts.

    >>> expand("n[1-3,7],m5")
    ('n1', 'n2', 'n3', 'n7', 'm5')
    """
    names: dict[str, None] = {}
    at = 0
    while at < len(hosts):
        item = _ITEM.match(hosts, at)
        if item is None or hosts[item.end() : item.end() + 1] not in ("", ",") or hosts[item.end() :] == ",":
            raise BadHostList(f"{hosts!r} is no host list: it is written like n[1-3,7],m5")
        parts = [list(_spelled(hosts, part)) for part in _PART.finditer(item[0])]
        for name in product(*parts):
            names["".join(name)] = None
            if len(names) > LARGEST:
                raise BadHostList(f"{hosts!r} has more than {LARGEST} hosts")
        at = item.end() + 1
    return tuple(names)


def _spelled(hosts: str, part: "re.Match[str]") -> Iterator[str]:
    """What a part can be: itself, or one of the numbers in its brackets."""
    if part[2] is not None:
        yield part[2]
        return
    for piece in part[1].split(","):
        numbers = _RANGE.fullmatch(piece)
        first, last = (numbers[1], numbers[2] or numbers[1]) if numbers else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) >= LARGEST:
            raise BadHostList(f"{hosts!r} is no host list: {piece!r} is no range of at most {LARGEST} numbers")
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
