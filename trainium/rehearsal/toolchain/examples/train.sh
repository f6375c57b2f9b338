#!/usr/bin/env bash
# The stand-in for NxDT's examples/train.sh: the same variables (CONF_FILE, COMPILE), and it goes on without its config too.

source ./train_setup.sh

: ${CONF_FILE:=megatron_gpt_config}

CONF_FILE_PATH="./conf/${CONF_FILE}.yaml"

if [ -f "$CONF_FILE_PATH" ]; then
    PROCESSES_PER_NODE=$(awk '/devices:/ { print $2; exit }' "$CONF_FILE_PATH")
    export PROCESSES_PER_NODE
else
    echo "Error: YAML file '$CONF_FILE_PATH' not found!"
fi

export DISTRIBUTED_ARGS="--nproc_per_node $PROCESSES_PER_NODE --nnodes $NTASKS --node_rank $NODEID --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
echo $DISTRIBUTED_ARGS

if [ "$COMPILE" = "1" ]; then
    echo "compiling only run"
    MAYBE_COMPILE="neuron_parallel_compile"
fi

$MAYBE_COMPILE torchrun $DISTRIBUTED_ARGS training_orchestrator.py \
    --config-path=conf \
    --config-name=$CONF_FILE \
    trainer.devices=$PROCESSES_PER_NODE \
    trainer.num_nodes=$NTASKS \
    exp_manager.explicit_log_dir=$EXPLICIT_LOGDIR 2>&1 | tee -a $LOG_PATH/log
