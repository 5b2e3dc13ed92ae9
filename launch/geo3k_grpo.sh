#!/usr/bin/env bash
# GRPO on Geometry3k, with the settings of EasyR1's baseline: Qwen2.5-VL 7B or 3B on one node of 8 GPUs with 80 GB.
#
#   (first: data/geo3k, by the commands in launch/data/convert.py; pip install math-verify)
#   bash launch/geo3k_grpo.sh                                                    7B; further flags are passed on
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct OUT=runs/geo3k-grpo-3b bash launch/geo3k_grpo.sh
#   LAUNCH="sbatch --nodes 2 --gpus-per-node 8 --exclusive --time 12:00:00 launch/train.slurm train_ppo_vl.py" bash launch/geo3k_grpo.sh
#
# Never run: a test checks only that the flags are accepted (tests/launch/test_recipes.py). We have neither time nor score.
# The source, https://github.com/hiyouga/EasyR1 assets/baselines.md (v0.3.2), has test accuracies of 0.37 -> 0.48 (7B) and
# 0.24 -> 0.38 (3B), and 145 s (7B) or 120 s (3B) per step on 8 H100 with that system.
#
# From its examples/config.yaml and defaults: 512 prompts x 5 samples, 4 updates of 128 prompts, 60 steps (15 passes, each
# without its last incomplete batch), lengths, pixels, learning rate, weight decay, betas, clips 0.2 / 0.3 / dual 3, KL 0.01 by k3 in the
# loss, token mean, reward 0.9 accuracy + 0.1 format. Different here: the vision tower is frozen, held-out answers are
# greedy (there temperature 0.6, top-p 0.95), the KL has the gradient of k2 (k3+), no rows are dropped, and
# the grader and the wording of the instruction are ours.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" \
    --data "${DATA:-data/geo3k}/train.jsonl" --eval_data "${DATA:-data/geo3k}/test.jsonl" \
    --out "${OUT:-runs/geo3k-grpo-7b}" \
    --system_prompt 'First think about the problem between <think> and </think>, then give the final answer in \boxed{}.' \
    --reward launch/reward_math.py:score --reward_timeout 600 --advantage grpo \
    --prompts_per_step 512 --samples_per_prompt 5 --minibatches 4 --steps 60 \
    --max_prompt_tokens 2048 --max_new_tokens 2048 --min_pixels 262144 --max_pixels 4194304 \
    --actor_lr 1e-6 --weight_decay 1e-2 --adam_beta2 0.999 \
    --clip_low 0.2 --clip_high 0.3 --kl_coef 0.01 --kl_in loss --kl_estimator k3+ \
    --gradient_checkpointing off --max_tokens_per_pack 6144 --eval_every 5 --save_every 10 -- "$@"
