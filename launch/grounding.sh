#!/usr/bin/env bash
# GRPO on referring expressions, with the settings of VLM-R1: Qwen2.5-VL-3B on one node of 8 GPUs with 80 GB.
#
#   (first, train2014.zip and rec_jsons_processed.zip of https://huggingface.co/datasets/omlab/VLM-R1, unpacked here)
#   python launch/data/convert.py refcoco_train.jsonl refcocop_train.jsonl refcocog_train.jsonl refcoco_val.jsonl \
#       --boxes corners --image_root FOLDER_OF_TRAIN2014 --out data/refcoco
#   bash launch/grounding.sh                                     further flags are passed on
#   MODEL=Qwen/Qwen3-VL-4B-Instruct OUT=runs/grounding-qwen3 bash launch/grounding.sh     the same rows
#
# Never run, except two steps on a toy (tests/launch/test_recipes.py). We have neither time nor score.
#
# From run_scripts/run_grpo_rec.sh: 8 completions per GPU x 8 GPUs x accumulation 2, 8 per prompt, so 16 prompts a step; KL 0.04,
# 2048 tokens; from grpo_config.py: learning rate 1e-6, clip 0.2, one update per step; from grpo_trainer.py and grpo_jsonl.py: KL by k3
# in the loss, mean of the means of responses, temperature 1, 3136 to 12845056 pixels, vision tower trained. Transformers' defaults: no
# weight decay, beta 2 0.999, gradient norm 1. 500 steps, as for the published checkpoint (the script: 2 passes). Rewards
# by qwen_module.py: IoU + format, weight 1 each.
# Different here: all boxes of the answer are paired, in any spelling (there the first four integers); IoU of edges, not of pixels;
# the KL has the gradient of k2 (k3+); a constant learning rate (there linear over 2 passes); the wording of the instruction.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
data="${DATA:-data/refcoco}"
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${MODEL:-Qwen/Qwen2.5-VL-3B-Instruct}" --out "${OUT:-runs/grounding-3b}" \
    --data "$data/refcoco_train.jsonl,$data/refcocop_train.jsonl,$data/refcocog_train.jsonl" --eval_data "$data/refcoco_val.jsonl" \
    --system_prompt 'First think between <think> and </think>, then give the box in JSON between <answer> and </answer>.' \
    --reward_recipe '{"*": [["box", 1], ["launch/reward_vision.py:form", 1]]}' --advantage grpo \
    --prompts_per_step 16 --samples_per_prompt 8 --minibatches 1 --steps 500 \
    --max_prompt_tokens 2048 --max_new_tokens 2048 --min_pixels 3136 --max_pixels 12845056 --train_vision \
    --actor_lr 1e-6 --adam_beta2 0.999 \
    --clip_low 0.2 --clip_high 0.2 --loss_aggregation seq-mean-token-mean --kl_coef 0.04 --kl_in loss --kl_estimator k3+ \
    --eval_every 50 --save_every 100 -- "$@"
