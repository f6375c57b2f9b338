"""The job script: a pure function of the spec, the folder and the name.

The script itself is the only witness of how the payload ended that needs no accounting database, so most of it is
about that: signals are caught and passed on, `start.json` and `exit.json` are written whole or not at all, and nothing
that the payload or its activation file does can skip them.
"""

import shlex
from collections.abc import Sequence
from datetime import timedelta

from slurm.errors import InvalidJobSpec
from slurm.folder import JobFolder
from slurm.spec import SIGNALS, JobSpec, absolute_path, check_name

CONFIG_EXIT = 78  # EX_CONFIG of sysexits.h: the activation file or the working folder is missing


def render(
    spec: JobSpec,
    folder: JobFolder,
    name: str,
    *,
    launcher: Sequence[str] | None = None,
    commands: str | None = None,
) -> str:
    """The whole script. `launcher` is the argv prefix that starts the payload once per task (default: Slurm's srun).

    `commands`: folder of Slurm's commands to put at the end of PATH. On AWS ParallelCluster (/opt/slurm/bin) only
    login shells have it, and a job is none.
    """
    check_name(name)
    path = absolute_path("folder", str(folder.path))
    if "\\" in path:
        rule = "a backslash turns Slurm's file name patterns off"
        raise InvalidJobSpec("folder", path, rule, "a folder without it")
    lines = [f"#SBATCH --{option}" for option in directives(spec, path, name)]
    command = [*(launcher if launcher is not None else srun(spec)), *spec.payload] if spec.per_task else spec.payload
    parts = {
        "@DIRECTIVES@": "\n".join(lines),
        "@FOLDER@": quote(path),
        "@SIGNALS@": " ".join(SIGNALS),
        "@COMMANDS@": f"PATH=$PATH:{quote(commands)}\n" if commands else "",
        "@EXPORTS@": "".join(f"    export {key}={quote(value)}\n" for key, value in sorted(spec.env.items())),
        "@ACTIVATE@": _activate(spec.activate),
        "@CWD@": quote(spec.cwd or path),
        "@COMMAND@": " ".join(quote(part) for part in command),
    }
    pieces = []
    for line in _TEMPLATE.splitlines(keepends=True):  # line by line: a value may hold another placeholder's name
        mark = next((mark for mark in parts if mark in line), None)
        if mark is None:
            pieces.append(line)
        elif parts[mark]:
            pieces.append(line.replace(mark, parts[mark].rstrip("\n")))
    return "".join(pieces)


def directives(spec: JobSpec, folder: str, name: str) -> list[str]:
    """The `#SBATCH` options, one per item, without the leading dashes."""
    # In an array every task needs a log of its own. `%%` is Slurm's escape for a plain percent sign.
    log = folder.replace("%", "%%") + ("/output-%a.log" if spec.array else "/output.log")
    # NIL: nothing of the caller's environment (tokens!) goes to slurmctld when somebody submits the script by hand.
    # `SlurmScheduler.submit` overrides it, and has no environment to pass on.
    options = [f"job-name={name}", f"output={shlex.quote(log)}", "open-mode=append", "export=NIL"]
    # A missing folder in --chdir would end the job without any log; the script changes folders itself.
    options += ["chdir=/", f"nodes={spec.nodes}"]
    values = {
        "ntasks": spec.ntasks,
        "ntasks-per-node": spec.tasks_per_node,
        "cpus-per-task": spec.cpus_per_task,
        "time": format_time(spec.time_limit) if spec.time_limit else None,
        "mem": spec.memory,
        "partition": spec.partition,
        "nodelist": spec.nodelist,
        "exclude": spec.exclude,
        "dependency": spec.dependency,
        "mail-type": spec.mail_type,
        "mail-user": spec.mail_user,
        "account": spec.account,
        "qos": spec.qos,
        "reservation": spec.reservation,
        "constraint": spec.constraint,
        "signal": spec.signal,
        "array": spec.array,
    }
    options += [f"{option}={value}" for option, value in values.items() if value is not None]
    options += ["exclusive"] * spec.exclusive
    if spec.requeue is not None:
        options.append("requeue" if spec.requeue else "no-requeue")
    return options


def srun(spec: JobSpec) -> tuple[str, ...]:
    """srun for the whole job. CPUs per task are given again: since 22.05 srun no longer inherits them."""
    argv = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--nodes={spec.nodes}", f"--ntasks={spec.task_count}"]
    if spec.tasks_per_node is not None:
        argv.append(f"--ntasks-per-node={spec.tasks_per_node}")
    if spec.cpus_per_task is not None:
        argv.append(f"--cpus-per-task={spec.cpus_per_task}")
    return tuple(argv)


def format_time(limit: timedelta) -> str:
    """`D-HH:MM:SS`, seconds rounded up.

    >>> format_time(timedelta(hours=30))
    '1-06:00:00'
    """
    seconds = limit.days * 86400 + limit.seconds + (limit.microseconds > 0)
    return f"{seconds // 86400}-{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def quote(text: str) -> str:
    """One shell word on one line. Control characters are spelled out: sbatch refuses scripts with CR LF anywhere."""
    if not any(ord(c) < 32 or ord(c) == 127 for c in text):
        return shlex.quote(text)
    escaped = (f"\\{ord(c):03o}" if ord(c) < 32 or ord(c) == 127 or c in "\\'" else c for c in text)
    return "$'" + "".join(escaped) + "'"


def _activate(path: str | None) -> str:
    if path is None:
        return ""
    missing = quote(f"the activation file {path} is not there or not readable on this node")
    return (
        f"    [ -r {quote(path)} ] || {{ say {missing}; exit {CONFIG_EXIT}; }}\n"
        f'    source {quote(path)} || say "the activation file returned $?; going on"\n'
    )


_TEMPLATE = r"""#!/bin/bash
@DIRECTIVES@

job_folder=@FOLDER@
task=${SLURM_ARRAY_TASK_ID:+-$SLURM_ARRAY_TASK_ID}
received='' interrupted='' child='' code=''

say() { printf 'job script: %s\n' "$1"; }
now() { date -u +%Y-%m-%dT%H:%M:%S.%3NZ; }
# A JSON string of printable ASCII, whatever the value holds.
json() {
    local LC_ALL=C value=$1
    value=${value//[^ -~]/?}
    value=${value//\\/\\\\}
    printf '"%s"' "${value//\"/\\\"}"
}
number() { case $1 in '' | *[!0-9]*) printf 0 ;; *) printf '%d' "$((10#$1))" ;; esac; }
# The file is there whole or not at all: a full disk must not leave half a record.
publish() { cat >"$1.tmp" && mv -f -- "$1.tmp" "$1" || say "could not write $1"; }
identity() {
    local node=${SLURMD_NODENAME:-${HOSTNAME:-}}
    printf '{"job_id": %s, "restart_count": %s, "node": %s, "nodes": %s' "$(json "${SLURM_JOB_ID:-}")" \
        "$(number "${SLURM_RESTART_COUNT:-}")" "$(json "$node")" "$(json "${SLURM_JOB_NODELIST:-}")"
}

# The payload has a process group of its own, so the signal reaches all of it, and at once: a shell in front of it
# would not react before its child ends.
on_signal() {
    received=$1 interrupted=1
    [ -z "$child" ] || kill -s "$1" -- "-$child" 2>/dev/null
}
for name in @SIGNALS@; do trap "on_signal $name" "$name"; done

# Nothing of the submitter's environment came along, and with SLURM_EXPORT_ENV left set srun would pass on nothing.
unset SLURM_EXPORT_ENV
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
@COMMANDS@
[ -n "${HOME:-}" ] || { unset HOME; HOME=~; }
export HOME USER="${USER:-$(id -un)}" LANG="${LANG:-C.UTF-8}"

run_payload() {
@EXPORTS@
@ACTIVATE@
    cd -- @CWD@ || { say "the working folder is not there on this node"; exit 78; }
    exec @COMMAND@
}
# A shell that waits in the foreground and outlives the signals: an interrupted `wait` of bash 5.2 can lose the code.
attend() {
    set +m
    trap : @SIGNALS@
    (run_payload)
    code=$?
    printf '%d' "$code" >"$job_folder/code$task.tmp"
    exit "$code"
}

started=$(now)
rm -f -- "$job_folder/code$task.tmp"
if [ -e "$job_folder/exit$task.json" ]; then # of an earlier start of this job: it was requeued
    mv -f -- "$job_folder/exit$task.json" "$job_folder/exit$task.before-$(number "${SLURM_RESTART_COUNT:-}").json"
fi
# The log goes on where an earlier start was ended, last words of slurmstepd included.
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || say "start $(number "$SLURM_RESTART_COUNT") of job ${SLURM_JOB_ID:-}"
{ identity && printf ', "started": "%s"}\n' "$started"; } | publish "$job_folder/start$task.json"

if [ -z "$received" ]; then
    set -m
    attend </dev/null &
    child=$!
    set +m
    # A signal between the test and here found no child yet.
    [ -z "$received" ] || kill -s "$received" -- "-$child" 2>/dev/null
    while :; do
        interrupted=''
        wait "$child"
        code=$?
        [ -n "$interrupted" ] || break # else wait came back for the signal, and the payload may still run
    done
    [ -n "$received" ] && [ -s "$job_folder/code$task.tmp" ] && code=$(<"$job_folder/code$task.tmp")
    rm -f -- "$job_folder/code$task.tmp"
fi

for name in @SIGNALS@; do trap '' "$name"; done
# Told to end, a payload that ends well has still not finished its work.
case "${code:-0} $received" in
'0 TERM') code=143 ;;
'0 INT') code=130 ;;
'0 HUP') code=129 ;;
esac
[ -n "$received" ] && reported=$(json "$received") || reported=null
{
    identity && printf ', "code": %d, "signal": %s, "started": "%s", "ended": "%s"}\n' \
        "$code" "$reported" "$started" "$(now)"
} | publish "$job_folder/exit$task.json"
exit "$code"
"""
