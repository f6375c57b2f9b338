# What the tutorial has its reader type, from the model to the exported weights (problems 21 to 30).
huggingface-cli download $HF_MODEL_NAME --local-dir $ORIGINAL_MODEL_PATH
sbatch convert_checkpoint_from_hf_to_nxd.sh
mkdir -p ${DATA_DIR} && cd ${DATA_DIR}
aws s3 cp s3://neuron-s3/training_datasets/llama/sft/training.jsonl . --no-sign-request
aws s3 cp s3://neuron-s3/training_datasets/llama/sft/validation.jsonl . --no-sign-request
cd ~/neuronx-distributed-training/examples
COMPILE=1 sbatch --ntasks=1 --cpus-per-task=128 --wrap="srun ./train.sh"
sbatch --ntasks=1 --cpus-per-task=128 --wrap="srun ./train.sh"
sbatch convert_checkpoint_from_nxd_to_hf.sh
