# Every variable that the tutorial exports (problems 21, 23, 25, 30), in its order.
export HF_MODEL_NAME=weblab-GENIAC/Tanuki-8B-dpo-v1.0
export ORIGINAL_MODEL_PATH=/fsx/models/Tanuki-8B-dpo-v1.0
export MODEL_CONFIG_PATH=$ORIGINAL_MODEL_PATH/config.json
export CHECKPOINT_DIR=/fsx/checkpoints/tanuki-8b/pretrained_model/
export TP_DEGREE=32
export PP_DEGREE=1
export KV_REPLICATOR=4
export DATA_DIR=/fsx/examples_datasets/llama3_8b
export OUTPUT_MODEL_DIR="/fsx/models/Tanuki-8B-dpo-v1.0-sft-step-100/"
