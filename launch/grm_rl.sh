#!/usr/bin/env bash
# RL of a judge: the rows it was trained on become prompts, and a right verdict at the end of its judgement earns 1.
# The export is a judge again, for --reward grm:FOLDER.
#
#   export JUDGE=runs/judge/export/latest DATA=pairs.jsonl EVAL_DATA=held.jsonl
#   bash launch/grm_rl.sh                                                        further flags are passed on
#
# Run: the toy on 2 CPU cores (tests/benchmarks/RESULTS.md). Not run: a real judge on GPUs; its learning rate is a guess.
# By launch/plan.py, packs of 6144 tokens fit a 7B judge on 8 GPUs with 80 GB without recomputation, with a KL too.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${JUDGE:?the folder of the judge}" --row_kind judgements --reward verdict \
    --data "${DATA:?the training rows, JSONL}" --eval_data "${EVAL_DATA:?the held-out rows, JSONL}" \
    --advantage grpo --prompts_per_step 64 --samples_per_prompt 8 --minibatches 2 --max_new_tokens 512 \
    --steps 80 --actor_lr 1e-6 --gradient_checkpointing off --max_tokens_per_pack 6144 --out "${OUT:-runs/grm_rl}" -- "$@"
