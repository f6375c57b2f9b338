"""Why a job waits: Slurm's Reason, what it means and what helps."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Explanation:
    """One reason in words. `hopeless`: the job does not start unless somebody acts."""

    reason: str
    meaning: str
    remedy: str
    hopeless: bool = False

    def __str__(self) -> str:
        return (
            f"{self.reason}: {self.meaning} ({'it will not start by itself: ' if self.hopeless else ''}{self.remedy})"
        )


_WAIT = "nothing to do but wait"
# First match wins; patterns are for the whole reason, without the node list that some reasons carry in brackets.
_TABLE: tuple[tuple[str, str, str, bool], ...] = (
    ("None", "the scheduler has not looked at the job yet", "wait; it is looked at within a minute", False),
    (r"Resources", "the job is next in line and waits for nodes or CPUs to become free", _WAIT, False),
    (r"Priority", "jobs with a higher priority are in front of it", _WAIT, False),
    (
        r"DependencyNeverSatisfied",
        "the job that it depends on ended in a way that can never satisfy the dependency",
        "cancel it, mend the earlier job and submit again",
        True,
    ),
    (r"Dependency", "it waits for another job to end", "look at the job that it depends on", False),
    (
        r"QOS\w*",
        "a limit of its quality of service (QOS) is reached",
        "wait for other jobs of this QOS to end, ask for less, or choose another qos",
        False,
    ),
    (
        r"Assoc\w*|AccountingPolicy|InvalidAccount",
        "a limit of the account or user (association) is reached",
        "wait for other jobs of this account, ask for less, or choose another account",
        False,
    ),
    (
        r"InvalidQOS",
        "its quality of service does not exist or may not be used by this account",
        "choose a qos from `sacctmgr show assoc`",
        True,
    ),
    (
        r"PartitionNodeLimit",
        "it asks for more nodes than its partition allows, or for nodes that are down",
        "ask for fewer nodes or another partition; `sinfo` shows what there is",
        True,
    ),
    (
        r"PartitionTimeLimit",
        "its time limit is longer than its partition allows",
        "lower `time` or choose another partition; `sinfo -o '%P %l'` shows the limits",
        True,
    ),
    (r"PartitionDown|PartitionInactive", "its partition takes no jobs now", "ask the administrator", False),
    (
        r"ReqNodeNotAvail.*",
        "a node that it needs is down, drained, reserved or still booting",
        "wait for the node, or drop it from `nodelist`; `sinfo -R` says why nodes are out",
        False,
    ),
    (
        r"NodeDown|NodeNotAvail.*",
        "a node that it needs is down",
        "`sinfo -R` says why; wait or exclude it",
        False,
    ),
    (r"JobHeldUser", "the job is held by its owner", "`scontrol release <job id>` lets it go", True),
    (r"JobHeldAdmin", "the job is held by an administrator", "ask the administrator to release it", True),
    (
        r"launch failed requeued held|JobHoldMaxRequeue",
        "starting it failed on its node, and Slurm put it back and holds it",
        "mend or exclude the node, then `scontrol release <job id>`",
        True,
    ),
    (
        r"BeginTime",
        "it may not start before a set time; after a node failure or requeue this lasts about two minutes",
        _WAIT,
        False,
    ),
    (r"Cleaning", "an earlier run of it is still being cleaned up on its nodes", _WAIT, False),
    (r"ReservationDeleted|ResvDel\w*", "its reservation was deleted", "submit again without it", True),
    (r"Reservation\w*", "its reservation has not started or has ended", "check `scontrol show reservation`", False),
    (r"Licenses", "it waits for licences", _WAIT, False),
    (r"BadConstraints", "no node has what it asks for", "change `constraint`, `memory` or CPUs", True),
    (r"JobArrayTaskLimit", "its array runs as many tasks as it may at a time", _WAIT, False),
    (
        r"FrontEndDown|SystemFailure|Prolog",
        "a prolog or the cluster is not ready",
        "ask the administrator",
        False,
    ),
    (r"JobLaunchFailure", "Slurm could not start the script", "check that the job folder exists on the nodes", False),
)


def explain(reason: str) -> Explanation:
    """What a Reason of squeue means. Never fails: an unlisted reason is shown as it is, and says so.

    >>> explain("Priority").meaning
    'jobs with a higher priority are in front of it'
    """
    inner = re.sub(r"^\((.*)\)$", r"\1", reason.strip())
    shown = "None" if inner in ("", "null") else inner
    bare = re.sub(r"[,(].*", "", shown).strip()
    for pattern, meaning, remedy, hopeless in _TABLE:
        if re.fullmatch(pattern, bare):
            return Explanation(shown, meaning, remedy, hopeless)
    return Explanation(shown, "a reason that this version has no words for", "see `man squeue`, JOB REASON CODES")
