#!/bin/bash
#SBATCH --job-name=3fa8-train-1
#SBATCH --output=/fsx/runs/r1/jobs/train-1/output.log
#SBATCH --open-mode=append
#SBATCH --export=NIL
#SBATCH --chdir=/
#SBATCH --nodes=1
#SBATCH --partition=trn1,trn2

job_folder=/fsx/runs/r1/jobs/train-1
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
for name in TERM INT HUP USR1 USR2; do trap "on_signal $name" "$name"; done

# Nothing of the submitter's environment came along, and with SLURM_EXPORT_ENV left set srun would pass on nothing.
unset SLURM_EXPORT_ENV
export PATH="${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}"
[ -n "${HOME:-}" ] || { unset HOME; HOME=~; }
export HOME USER="${USER:-$(id -un)}" LANG="${LANG:-C.UTF-8}"

run_payload() {
    cd -- /fsx/runs/r1/jobs/train-1 || { say "the working folder is not there on this node"; exit 78; }
    exec true
}
# A shell that waits in the foreground and outlives the signals: an interrupted `wait` of bash 5.2 can lose the code.
attend() {
    set +m
    trap : TERM INT HUP USR1 USR2
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

for name in TERM INT HUP USR1 USR2; do trap '' "$name"; done
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
