#!/usr/bin/env bash
# A judge in four stages: a cold start on a few written judgements, K judgements of every training pair, fine-tuning on
# the right ones, RL on the pairs with a wrong one. The tables on held-out pairs, before and after each stage, are OUT/*.txt
#
#   export MODEL=Qwen/Qwen2.5-VL-7B-Instruct COLD=written.jsonl DATA=pairs.jsonl EVAL_DATA=benchmark.jsonl
#   bash launch/judges/judge_loop.sh                      further flags, such as --seed 1, go to every stage
#
# COLD: pairs with a critique. DATA: pairs with only their verdicts. EVAL_DATA: pairs such as launch/data/convert.py --benchmark writes.
# OUT gets a folder per stage; LAUNCH is the command that starts a script; K (4) judgements are sampled per pair and order.
# The same command continues an interrupted stage: each has its --out.
#
# Without MODEL, the toy judges which of two noisy pictures shows more, on 2 processes. Run on 2 CPU cores, with figures:
# tests/benchmarks/RESULTS.md.
# Not run: a real model on GPUs. Fine-tuning (2.5e-6 with a cosine, 128 rows a step, 3 passes) and the use of right and wrong
# judgements are those of UnifiedReward-Think (github.com/CodeGoat24/UnifiedReward), as are 8 samples and 1e-6 in RL; its KL is
# 0.04, LightRFT's and R1-Reward's 1e-3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
out="${OUT:-runs/judge_loop}" flags=("$@")
mkdir -p "$out"
if [ -z "${MODEL:-}" ]; then
    set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
    source launch/setup.sh
    launch=(${LAUNCH:-torchrun --standalone --nproc_per_node 2})
    export CUDA_VISIBLE_DEVICES=
    [ -f "$out/toy/grm_args.json" ] || python launch/toy.py --out "$out/toy" --eval 1024
    [ -f "$out/pairs/eval.jsonl" ] || python tests/benchmarks/judge_toy.py "$out/toy" "$out/pairs"
    MODEL="$out/toy/model" COLD="$out/pairs/cold.jsonl" DATA="$out/pairs/train.jsonl" EVAL_DATA="$out/pairs/eval.jsonl"
    flags=(--max_prompt_tokens 256 --max_tokens_per_pack 4096 ${flags[@]+"${flags[@]}"})
    tune=(--prompts_per_step 32 --lr_schedule linear --warmup_steps 10 --templates '{"pictures": "A<image>B<image>\n{prompt}\n"}')
    cold=(--orders given --lr 1e-3 --steps 200) right=(--lr 5e-4 --steps 100)
    judge=(--max_new_tokens 40)
    rl=(--prompts_per_step 32 --minibatches 2 --actor_lr 3e-4 --steps 80)
else
    : "${COLD:?pairs with critiques, JSONL}" "${DATA:?training pairs, JSONL}" "${EVAL_DATA:?held-out pairs, JSONL}"
    launch=(${LAUNCH:-torchrun --standalone --nproc_per_node 8})
    flags=(--max_prompt_tokens 8192 --gradient_checkpointing ${flags[@]+"${flags[@]}"})
    tune=(--prompts_per_step 128 --max_epochs 3 --lr 2.5e-6 --lr_schedule cosine) cold=() right=()
    judge=(--max_new_tokens 2048)
    rl=(--prompts_per_step 64 --minibatches 2 --actor_lr 1e-6 --kl_coef 1e-3 --kl_in loss --kl_estimator k3+ --steps 200)
fi
judge+=(--row_kind judgements --reward verdict)

fine_tune() {    # stage, model, rows, flags
    "${launch[@]}" train_grm_vl.py "${tune[@]}" --model "$2" --data "$3" --out "$out/$1" "${@:4}" -- "${flags[@]}"
}
judge_pairs() {  # name, model, pairs, how often in each order
    "${launch[@]}" train_ppo_vl.py --eval_only "${judge[@]}" --model "$2" --eval_data "$3" --eval_samples "$4" --out "$out/$1" -- "${flags[@]}"
}
table() {        # stage, model
    judge_pairs "$1-table" "$2" "$EVAL_DATA" 5
    python launch/judges/judge_table.py "$out/$1-table" | tee "$out/$1.txt"
}
table start "$MODEL"
fine_tune cold "$MODEL" "$COLD" ${cold[@]+"${cold[@]}"}
table cold "$out/cold/export/latest"
judge_pairs judged "$out/cold/export/latest" "$DATA" "${K:-4}"
python launch/judges/judge_filter.py "$out/judged" --right "$out/right.jsonl" --wrong "$out/wrong.jsonl"
# a right judgement that contains a special token is not one to imitate
fine_tune right "$out/cold/export/latest" "$out/right.jsonl" --on_bad_row skip ${right[@]+"${right[@]}"}
table right "$out/right/export/latest"
"${launch[@]}" train_ppo_vl.py "${judge[@]}" "${rl[@]}" --model "$out/right/export/latest" --data "$out/wrong.jsonl" --advantage grpo \
    --samples_per_prompt 8 --out "$out/rl" -- "${flags[@]}"
table rl "$out/rl/export/latest"
