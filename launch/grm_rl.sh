#!/usr/bin/env bash
# RL of a judge: the rows it was trained on become prompts, the verdict at the end of its judgement earns 1 where it is right.
# The export is a judge again: it can be asked by --reward grm:FOLDER.
#
#   export DATA=pairs.jsonl EVAL_DATA=held_out.jsonl
#   JUDGE=runs/judge/export/latest bash launch/grm_rl.sh                         further flags are passed on
#
# Run: the toy on 2 CPU cores, from a judge of 700 supervised steps, on its right and wrong answers: held-out accuracy
# 0.885 -> 0.922 in 80 steps, 3 minutes on a busy machine. Not run: a real judge on GPUs; its learning rate is a guess.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${JUDGE:?the export of a judge}" \
    --data "${DATA:?the training rows, JSONL}" --eval_data "${EVAL_DATA:?the held-out rows, JSONL}" \
    --out "${OUT:-runs/grm_rl}" \
    --row_kind judgements --reward verdict --advantage grpo \
    --prompts_per_step 64 --samples_per_prompt 8 --minibatches 2 --steps 80 \
    --max_new_tokens 512 --actor_lr 1e-6 "$@"
