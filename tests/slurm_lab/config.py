"""The configuration files of a lab, as text."""

from collections.abc import Mapping
from pathlib import Path

# A database made for one test session: durability is given up for speed.
MARIADBD_OPTIONS = (
    "--skip-name-resolve",
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
    "--innodb-buffer-pool-size=128M",
    "--innodb-lock-wait-timeout=900",  # slurmdbd complains about less
)

DATABASE_SQL = """\
CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE USER IF NOT EXISTS 'slurm'@'127.0.0.1' IDENTIFIED BY 'slurm';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
"""

# slurmd initialises a cgroup plugin even when nothing uses cgroups. Its own choice fails where none are mounted and
# where version 2 is not delegated; this one touches nothing (tried with 22.05 and 24.11; 22.05 has no "disabled").
CGROUP_CONF = "CgroupPlugin=cgroup/v1\n"


def slurm_conf(
    *,
    folder: Path,
    host: str,
    ctld_port: int,
    node_ports: Mapping[str, int],
    cpus: int,
    message_timeout: int,
    dbd_port: int | None,
    cloud_ports: Mapping[str, int],
    extra: str,
) -> str:
    """`extra` comes last: Slurm takes the last of several values of one key."""
    names = ",".join(node_ports)
    # Several slurmd on one host: the same NodeHostname, a port each.
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port}"
        f" CPUs={cpus} RealMemory=1000000 State={'CLOUD' if name in cloud_ports else 'UNKNOWN'}"
        for name, port in {**node_ports, **cloud_ports}.items()
    )
    return f"""\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits for cred_expire + 1 seconds.
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
# Listen on the address of the host's name only.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={ctld_port}
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
MailProg=/bin/true
MpiDefault=none
EnforcePartLimits=ALL
# No cgroups: see CGROUP_CONF.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
# Who ran when and how it ended, from slurmctld itself: a witness that needs no database and forgets nothing.
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/completed.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# The declared CPUs and memory count, not the machine's.
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0,default_queue_depth=2000
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MinJobAge=10
KillWait=2
InactiveLimit=0
OverTimeLimit=0
SlurmctldTimeout=10
# Much less, and a stall of a busy machine looks like a dead node.
SlurmdTimeout=30
MessageTimeout={message_timeout}
BatchStartTimeout=10
CompleteWait=0
UnkillableStepTimeout={5 * message_timeout}
MaxJobCount=20000
MaxArraySize=10001
{_accounting(folder, dbd_port)}
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE DefaultTime=01:00:00 State=UP PriorityTier=1
PartitionName=hi Nodes={names} Default=NO MaxTime=INFINITE DefaultTime=01:00:00 State=UP PriorityTier=10
{_cloud(folder, names, cloud_ports)}
{extra}
"""


def _cloud(folder: Path, static: str, ports: Mapping[str, int]) -> str:
    """Nodes that Slurm has to boot: resume.sh only writes down which, and whoever breaks the lab starts them or not."""
    if not ports:
        return ""
    return f"""\
ResumeProgram={folder}/resume.sh
SuspendProgram=/bin/true
SuspendExcNodes={static}
SuspendTime=3600
SuspendTimeout=2
ResumeTimeout=8
# Their addresses are known, other than those of real instances.
SlurmctldParameters=cloud_dns,idle_on_node_suspend
PartitionName=cloud Nodes={",".join(ports)} Default=NO MaxTime=INFINITE DefaultTime=01:00:00 State=UP"""


RESUME_SH = """\
#!/bin/sh
# ResumeProgram: is given a host list. Whether the nodes boot is decided elsewhere.
echo "$1" >>"${0%/*}/to-boot"
"""


def _accounting(folder: Path, dbd_port: int | None) -> str:
    if dbd_port is None:
        return "AccountingStorageType=accounting_storage/none"
    # AccountingStoragePass is the munge socket, when it is not munge's default one.
    return f"""\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={dbd_port}
AccountingStoragePass={folder}/run/munge.socket
AccountingStoreFlags=job_comment,job_env,job_script"""


def slurmdbd_conf(*, folder: Path, host: str, dbd_port: int, sql_port: int) -> str:
    return f"""\
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={dbd_port}
CommunicationParameters=NoInAddrAny
SlurmUser=root
DebugLevel=verbose
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
