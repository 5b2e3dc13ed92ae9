#!/usr/bin/env bash
# A generative reward model from Qwen2.5-VL 7B, with the settings of LightRFT's example, on one node of 8 GPUs with 80 GB.
#
#   export DATA=pairs.jsonl EVAL_DATA=held_out.jsonl      rows as in train_grm_vl.py; several files may have weights
#   bash launch/grm_7b.sh                                                        further flags are passed on
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct OUT=runs/grm-3b bash launch/grm_7b.sh
#   LAUNCH="sbatch --nodes 2 --gpus-per-node 8 --exclusive --time 24:00:00 launch/train.slurm train_grm_vl.py" bash launch/grm_7b.sh
#
# Never run: a test checks only that the flags are accepted (tests/launch/test_recipes.py). We have neither time nor score.
# https://opendilab.github.io/LightRFT/best_practice/reward_model.html has 71.88 % on HPDv3 for 3B after 8,000 steps.
#
# From https://github.com/opendilab/LightRFT examples/grm_training/run_grm_vl.sh: 8 examples a step, 5 passes, learning rate
# 1e-5 without warm-up and with a cosine to a tenth, weight decay, lengths, evaluation and checkpoint every 500 steps.
# Different here: the vision tower is frozen, pairs are shown in both orders, held-out verdicts are greedy (there sampled),
# the templates are ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_grm_vl.py} \
    --model "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" \
    --data "${DATA:?the training rows, JSONL}" --eval_data "${EVAL_DATA:?the held-out rows, JSONL}" \
    --out "${OUT:-runs/grm-7b}" \
    --prompts_per_step 8 --max_epochs 5 --max_prompt_tokens 8192 --eval_max_new_tokens 512 \
    --lr 1e-5 --lr_schedule cosine --min_lr_ratio 0.1 --weight_decay 1e-4 --adam_beta2 0.95 \
    --gradient_checkpointing --eval_every 500 --save_every 500 -- "$@"
