#!/bin/bash
echo "MODEL_CONFIG_PATH: $MODEL_CONFIG_PATH"
echo "TP_DEGREE: $TP_DEGREE"
echo "PP_DEGREE: $PP_DEGREE"
echo "KV_REPLICATOR: $KV_REPLICATOR"
cd ~/neuronx-distributed-training/examples/checkpoint_converter_scripts
python3 checkpoint_converter.py \
    --model_style hf \
    --hw_backend trn1 \
    --input_dir /fsx/experiments/hf_tanuki/28/checkpoints/hf_tanuki_8B_SFT--step=100-consumed_samples=728.0.ckpt/model \
    --output_dir $OUTPUT_MODEL_DIR \
    --load_xser True \
    --config $MODEL_CONFIG_PATH \
    --tp_size $TP_DEGREE \
    --pp_size $PP_DEGREE \
    --n_layers 32 \
    --kv_size_multiplier $KV_REPLICATOR \
    --qkv_linear True \
    --fuse_qkv True \
    --convert_to_full_state
