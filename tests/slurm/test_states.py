"""Slurm's states and reasons in words."""

import logging

import pytest

from slurm.reasons import explain
from slurm.states import JobState, parse_state


@pytest.mark.parametrize("state", [state for state in JobState if state is not JobState.UNKNOWN])
def test_every_state_is_either_live_or_final(state: JobState) -> None:
    assert state.is_live != state.is_final
    assert not state.is_waiting or state.is_live
    assert parse_state(state.value) is state


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("PD", JobState.PENDING),
        ("CF", JobState.CONFIGURING),
        ("R", JobState.RUNNING),
        ("CG", JobState.COMPLETING),
        ("CD", JobState.COMPLETED),
        ("TO", JobState.TIMEOUT),
        ("NF", JobState.NODE_FAIL),
        ("OOM", JobState.OUT_OF_MEMORY),
        ("CANCELLED by 1000", JobState.CANCELLED),
        ("CANCELLED+", JobState.CANCELLED),
        ("OUT_OF_ME+", JobState.OUT_OF_MEMORY),
        ("CONFIGURI+", JobState.CONFIGURING),
        ("completed", JobState.COMPLETED),
    ],
)
def test_short_names_and_decorations(text: str, state: JobState) -> None:
    assert parse_state(text) is state


def test_booting_nodes_are_a_normal_wait() -> None:
    assert JobState.CONFIGURING.is_waiting
    assert not JobState.CONFIGURING.is_final


@pytest.mark.parametrize("text", ["TELEPORTING", "", "UNKNOWN", "XY", "RE+", "+"])
def test_an_unknown_state_is_unknown_and_loud(text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        state = parse_state(text)
    assert state is JobState.UNKNOWN
    assert not state.is_live
    assert not state.is_final
    assert "does not know" in caplog.text


@pytest.mark.parametrize(
    ("reason", "word", "hopeless"),
    [
        ("Resources", "next in line", False),
        ("Priority", "priority", False),
        ("Dependency", "another job", False),
        ("DependencyNeverSatisfied", "never", True),
        ("QOSMaxCpuPerUserLimit", "QOS", False),
        ("QOSGrpNodeLimit", "QOS", False),
        ("AssocGrpCpuLimit", "association", False),
        ("AssocMaxJobsLimit", "association", False),
        ("QOSMaxJobsPerUserLimit", "QOS", False),
        ("QOSGrpCPUMinutesLimit", "QOS", False),
        ("QOSMaxWallDurationPerJobLimit", "one job alone", True),
        ("QOSMaxCpuPerJobLimit", "one job alone", True),
        ("QOSMaxGRESPerNode", "one job alone", True),
        ("QOSMaxNodePerUserLimit", "QOS", False),
        ("QOSMinCpuNotSatisfied", "one job alone", True),
        ("QOSNotAllowed", "may not be used", True),
        ("InvalidQOS", "may not be used", True),
        ("InvalidAccount", "may not be used", True),
        ("AccountNotAllowed", "may not be used", True),
        ("AssocMaxNodePerJobLimit", "one job alone", True),
        ("AssocGrpNodeLimit", "association", False),
        ("AssociationJobLimit", "association", False),
        ("MaxJobsPerAccount", "association", False),
        ("MaxMemPerLimit", "one job alone", True),
        ("PartitionConfig", "does not allow", True),
        ("PartitionInactive", "partition", False),
        (
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions",
            "drained",
            False,
        ),
        ("ReqNodeNotAvail(Unavailable:n1)", "node", False),
        ("(launch failed requeued held)", "failed", True),
        ("launch_failed_requeued_held", "failed", True),
        ("JobHoldMaxRequeue", "failed", True),
        ("BadConstraints", "no node has", True),
        ("Licenses", "licences", False),
        ("Prolog", "prolog", False),
        ("PartitionNodeLimit", "nodes", True),
        ("PartitionTimeLimit", "time limit", True),
        ("PartitionDown", "partition", False),
        ("ReqNodeNotAvail", "node", False),
        ("ReqNodeNotAvail, UnavailableNodes:trn1-[1-4]", "node", False),
        ("(ReqNodeNotAvail, UnavailableNodes:trn1-1)", "node", False),
        ("JobHeldUser", "held by its owner", True),
        ("JobHeldAdmin", "administrator", True),
        ("BeginTime", "set time", False),
        ("launch failed requeued held", "failed", True),
        ("NodeDown", "down", False),
        ("Reservation", "not started", False),
        ("ReservationDeleted", "deleted", True),
        ("None", "not looked", False),
        ("", "not looked", False),
        ("(null)", "not looked", False),
    ],
)
def test_reasons_are_explained(reason: str, word: str, hopeless: bool) -> None:
    explanation = explain(reason)
    assert word in explanation.meaning
    assert explanation.remedy
    assert explanation.hopeless is hopeless


def test_a_reason_is_a_sentence_that_keeps_the_nodes_it_names() -> None:
    away = str(explain("ReqNodeNotAvail, UnavailableNodes:trn1-1"))
    assert away.startswith("ReqNodeNotAvail, UnavailableNodes:trn1-1: a node that it needs is down")
    assert str(explain("PartitionTimeLimit")).endswith(
        "(it will not start by itself: lower `time` or choose another partition; `sinfo -o '%P %l'` shows the limits)"
    )


def test_an_unlisted_reason_is_shown_as_it_is() -> None:
    assert str(explain("Sunspots, 3")).startswith("Sunspots, 3: ")
