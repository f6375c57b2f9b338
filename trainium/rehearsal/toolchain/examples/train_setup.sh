#!/usr/bin/env bash
# The stand-in for NxDT's examples/train_setup.sh. It sets the same variables and overwrites the same ones: whatever a
# launch wants to keep (NEURON_COMPILE_CACHE_URL, EXPLICIT_LOGDIR, NEMO_EXPM_VERSION) it exports again afterwards.

set -o pipefail
set -e

ulimit -n 65535 2>/dev/null || echo "rehearsal: cannot raise the limit of open files to 65535; it stays at $(ulimit -n)"

if [ -v SLURM_NNODES ]; then
    export FI_EFA_USE_DEVICE_RDMA=1
    export FI_PROVIDER=efa
    export FI_EFA_FORK_SAFE=1
    # Nodes of one pretended cluster share this host, and their names need not resolve: the loopback address serves then.
    HOSTS=()
    if command -v scontrol >/dev/null 2>&1; then
        for h in $(scontrol show hostname 2>/dev/null || true); do
            address=$(getent ahostsv4 "$h" 2>/dev/null | awk 'NR == 1 { print $1 }' || true)
            HOSTS+=("${address:-127.0.0.1}")
        done
    fi
    if [ ${#HOSTS[@]} -eq 0 ]; then HOSTS=(localhost); fi
    NODEID=$SLURM_NODEID
    NTASKS=$SLURM_NTASKS

    export NEMO_EXPM_VERSION=$SLURM_JOB_ID
    export EXPLICIT_LOGDIR=null
    : ${SLURM_RESTART_COUNT:=0}
    LOG_PATH=logs/$SLURM_JOB_ID/$SLURM_RESTART_COUNT/$NODEID/
    mkdir -p $LOG_PATH
else
    HOSTS=(localhost)
    NODEID=0
    NTASKS=1
    export NEMO_EXPM_VERSION=$(date "+%Y-%m-%d_%H-%M-%S")
    export EXPLICIT_LOGDIR=null
    LOG_PATH=./nemo_experiments/logs
    mkdir -p $LOG_PATH
fi

export NEURON_COMPILE_CACHE_URL="$HOME/neuron_cache" # in place of anything the caller has set, as some versions do
export XLA_DISABLE_FUNCTIONALIZATION=0
export HYDRA_FULL_ERROR=1
export MASTER_ADDR=${HOSTS[0]}
export MASTER_PORT=41000
export MALLOC_ARENA_MAX=128
export CREATE_TB_LOGGER=True
export CHECKPOINT_CALLBACK=True
