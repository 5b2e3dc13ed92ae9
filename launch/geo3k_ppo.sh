#!/usr/bin/env bash
# PPO with a critic on Geometry3k, with the settings of LightRFT's example: Qwen2.5-VL 7B or 3B on a node of 8 GPUs with 80 GB.
#
#   (first: data/geo3k, by the commands in launch/data/convert.py; pip install math-verify)
#   bash launch/geo3k_ppo.sh                                                     7B; further flags are passed on
#   MODEL=Qwen/Qwen2.5-VL-3B-Instruct OUT=runs/geo3k-ppo-3b bash launch/geo3k_ppo.sh
#   LAUNCH="sbatch --nodes 2 --gpus-per-node 8 --exclusive --time 24:00:00 launch/train.slurm train_ppo_vl.py" bash launch/geo3k_ppo.sh
#
# Never run: a test checks only that the flags are accepted (tests/launch/test_recipes.py). We have neither time nor score.
# No public score of PPO with a critic on this task is known to us; for GRPO see launch/geo3k_grpo.sh.
#
# From https://github.com/opendilab/LightRFT examples/gsm8k_geo3k/run_ppo_geo3k_qwen2.5_vl_7b.sh: 128 prompts x 2 samples,
# 2 updates of 128 samples, 30 passes, lengths, both learning rates with 3 % warm-up and a cosine to a tenth, weight decay,
# betas, clips 0.2, gamma 1, lambda 0.95, KL 0.01 by k1 in the reward, whitened advantages, frozen vision tower, reward
# 0.9 accuracy + 0.1 format. Different here: the grader and the wording of the instruction are ours, and the format is checked only
# in the response, not in the instruction as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}" \
    --data "${DATA:-data/geo3k}/train.jsonl" --eval_data "${DATA:-data/geo3k}/test.jsonl" \
    --out "${OUT:-runs/geo3k-ppo-7b}" \
    --system_prompt 'First think about the problem between <think> and </think>, then give the final answer in \boxed{}.' \
    --reward launch/reward_math.py:score --reward_timeout 600 --advantage gae --gamma 1 --gae_lambda 0.95 --advantages_norm on \
    --prompts_per_step 128 --samples_per_prompt 2 --minibatches 2 --steps 492 \
    --max_prompt_tokens 1024 --max_new_tokens 2048 \
    --actor_lr 1e-6 --critic_lr 9e-6 --lr_schedule cosine --min_lr_ratio 0.1 --warmup_steps 15 \
    --weight_decay 1e-2 --adam_beta2 0.95 \
    --clip_low 0.2 --clip_high 0.2 --value_clip 0.2 --kl_coef 0.01 --kl_in reward --kl_estimator k1 \
    --gradient_checkpointing off --max_tokens_per_pack 4864 --eval_every 20 --save_every 20 -- "$@"
