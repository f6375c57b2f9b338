"""Host lists as squeue prints them, spelled out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm.errors import BadHostList
from slurm.hostlist import LARGEST, expand


@pytest.mark.parametrize(
    ("hosts", "names"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("localhost", ("localhost",)),
        ("n1,n2", ("n1", "n2")),
        ("n[1-3,7],m5", ("n1", "n2", "n3", "n7", "m5")),
        ("n[08-10]", ("n08", "n09", "n10")),
        ("n[8-10]", ("n8", "n9", "n10")),
        ("n[001,3]", ("n001", "n3")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[1-2]-ib.cluster", ("n1-ib.cluster", "n2-ib.cluster")),
        ("q-dy-trn1-[1-2],q-st-trn1-1", ("q-dy-trn1-1", "q-dy-trn1-2", "q-st-trn1-1")),
        ("n1,n[1-2]", ("n1", "n2")),
        ("[1-2]", ("1", "2")),
        (f"n[1-{LARGEST}]", tuple(f"n{number}" for number in range(1, LARGEST + 1))),
    ],
)
def test_names(hosts: str, names: tuple[str, ...]) -> None:
    assert expand(hosts) == names


@pytest.mark.parametrize(
    "hosts",
    [
        "(null)",
        "None assigned",
        "n[1-3",
        "n1-3]",
        "n[]",
        "n[3-1]",
        "n[1-2-3]",
        "n[a-b]",
        "n[-1]",
        "n1,",
        ",n1",
        "n1,,n2",
        "n1 n2",
        "n[[1]]",
        f"n[0-{LARGEST}]",
        "a[1-9999]b[1-9999]",
        "n[1-99999999999999999999]",
    ],
)
def test_what_is_no_host_list_is_refused_with_its_text(hosts: str) -> None:
    with pytest.raises(BadHostList) as refusal:
        expand(hosts)
    assert repr(hosts) in str(refusal.value)


@given(st.text(st.sampled_from("n1-9[],m0 "), max_size=12))
def test_any_text_is_either_names_or_refused(hosts: str) -> None:
    try:
        names = expand(hosts)
    except BadHostList:
        return
    assert len(set(names)) == len(names)
    assert not any(set(name) & set("[], ") for name in names)
    assert expand(",".join(names)) == names
