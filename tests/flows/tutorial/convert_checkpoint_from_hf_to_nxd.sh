#!/bin/bash
echo "HF_MODEL_NAME: $HF_MODEL_NAME"
echo "MODEL_CONFIG_PATH: $MODEL_CONFIG_PATH"
echo "CHECKPOINT_DIR: $CHECKPOINT_DIR"
echo "TP_DEGREE: $TP_DEGREE"
echo "PP_DEGREE: $PP_DEGREE"
echo "KV_REPLICATOR: $KV_REPLICATOR"
cd ~/neuronx-distributed-training/examples/checkpoint_converter_scripts
python3 checkpoint_converter.py \
    --model_style hf \
    --hw_backend trn1 \
    --hf_model_name $HF_MODEL_NAME \
    --output_dir $CHECKPOINT_DIR \
    --save_xser True \
    --config $MODEL_CONFIG_PATH \
    --tp_size $TP_DEGREE \
    --pp_size $PP_DEGREE \
    --n_layers 32 \
    --kv_size_multiplier $KV_REPLICATOR \
    --qkv_linear True \
    --fuse_qkv True \
    --convert_from_full_state
