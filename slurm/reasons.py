"""Why a job waits: Slurm's Reason, what it means and what helps.

The names are those of `job_state_reason_string` in Slurm 23.11 and of `man squeue`, JOB REASON CODES; a few are whole
sentences that the controller puts in their place.
"""

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
_SHOW_LIMITS = "`sacctmgr show assoc,qos` shows the limits"
# First match wins; patterns are for the whole reason, without the node list that some reasons carry in brackets.
_TABLE: tuple[tuple[str, str, str, bool], ...] = (
    ("None", "the scheduler has not looked at the job yet", "wait; it is looked at within a minute", False),
    (r"Resources", "the job is next in line and waits for nodes or CPUs to become free", _WAIT, False),
    (r"Priority|SchedDefer", "jobs with a higher priority are in front of it", _WAIT, False),
    (
        r"DependencyNeverSatisfied",
        "the job that it depends on ended in a way that can never satisfy the dependency",
        "cancel it, mend the earlier job and submit again",
        True,
    ),
    (r"Dependency", "it waits for another job to end", "look at the job that it depends on", False),
    (
        r"(QOS|Assoc)(Max|Min)\w*Per(Job|Node)\w*|QOSMin\w*|QOSMaxWall\w*|AssocMaxWall\w*|MaxMemPerLimit",
        "one job alone may not ask for that much (or that little) under its QOS, account or partition",
        f"change nodes, CPUs, memory or `time`, or choose another qos, account or partition; {_SHOW_LIMITS}",
        True,
    ),
    (
        r"QOSNotAllowed|InvalidQOS",
        "its quality of service does not exist or may not be used by this account or partition",
        "choose a qos from `sacctmgr show assoc`",
        True,
    ),
    (
        r"AccountNotAllowed|InvalidAccount",
        "its account does not exist or may not be used by this user, QOS or partition",
        "choose an account from `sacctmgr show assoc user=$USER`",
        True,
    ),
    (
        r"QOS\w*",
        "a limit of its quality of service (QOS) is reached",
        f"wait for other jobs of this QOS to end, ask for less, or choose another qos; {_SHOW_LIMITS}",
        False,
    ),
    (
        r"Assoc\w*|AccountingPolicy|Max\w*PerAccount",
        "a limit of the account or user (association) is reached",
        f"wait for other jobs of this account, ask for less, or choose another account; {_SHOW_LIMITS}",
        False,
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
    (
        r"PartitionConfig",
        "it asks for something that its partition does not allow",
        "compare the request with `scontrol show partition`",
        True,
    ),
    (
        r"PartitionDown|PartitionInactive",
        "its partition takes no jobs now",
        "ask the administrator, or choose another partition",
        False,
    ),
    (
        r"Nodes required for job are DOWN.*",
        "the nodes that it could use are down, drained or kept for other jobs; cloud nodes that could not be had "
        "(InsufficientInstanceCapacity) look like this for some minutes",
        "wait; `sinfo -R` says why nodes are out",
        False,
    ),
    (
        r"ReqNodeNotAvail.*|Required node not available.*",
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
    (
        r"JobHeldAdmin|JobHeld",
        "the job is held by an administrator or by the cluster's rules",
        "ask the administrator to release it",
        True,
    ),
    (
        r"launch[ _]failed[ _]requeued[ _]held|JobHoldMaxRequeue",
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
    (
        r"ReservationDeleted|ReservationInvalid|ResvDel\w*",
        "its reservation was deleted or is not valid",
        "submit again without it",
        True,
    ),
    (r"Reservation\w*", "its reservation has not started or has ended", "check `scontrol show reservation`", False),
    (r"Licenses", "it waits for licences", _WAIT, False),
    (
        r"BadConstraints|Constraints",
        "no node has what it asks for",
        "change `constraint`, `memory` or CPUs",
        True,
    ),
    (r"JobArrayTaskLimit", "its array runs as many tasks as it may at a time", _WAIT, False),
    (r"PowerNotAvail|PowerReserved|MaxPoweredUpNodes", "the cluster may not power up more nodes now", _WAIT, False),
    (r"BurstBuffer\w*", "its burst buffer is not ready", _WAIT, False),
    (r"MPIPortsBusy|FedJobLock", "the controller is busy with it", _WAIT, False),
    (
        r"FrontEndDown|SystemFailure|Prolog",
        "a prolog still runs, or the cluster is not ready",
        "wait; ask the administrator if it lasts",
        False,
    ),
    (
        r"JobLaunchFailure",
        "Slurm could not start the script",
        "check that the job folder exists and is writable on the nodes",
        False,
    ),
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
