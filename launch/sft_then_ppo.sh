#!/usr/bin/env bash
# Supervised fine-tuning, then PPO: a model first imitates written answers, then improves on them by reward.
#
#   export MODEL=Qwen/Qwen2.5-VL-7B-Instruct SFT_DATA=written.jsonl DATA=train.jsonl EVAL_DATA=held.jsonl
#   bash launch/sft_then_ppo.sh --reward boxed            further flags are passed to train_ppo_vl.py
#
# SFT_DATA has rows {"prompt", "images", "response"}; DATA and EVAL_DATA, for PPO, {"prompt", "images", "answer"}. A row may have
# both. SFT_EVAL are held-out rows for fine-tuning; without it they are EVAL_DATA, whose rows then need a response, too.
# OUT gets sft/ and ppo/. LAUNCH starts a script: under SLURM "sbatch --wait --nodes 2 ... launch/train.slurm", as PPO waits for SFT.
#
# A --system_prompt among the flags reaches only PPO: for both halves, put it into the rows as a message.
#
# Without MODEL: the toy on 2 processes, the answers of 32 of its rows as responses. Run on 2 CPU cores: see launch/README.md.
# Not run: a real model on GPUs. Learning rate and passes of its first half are common for SFT, not results of ours.
# By launch/plan.py, its packs fit a 7B model on 8 GPUs with 80 GB without recomputation.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${OUT:-runs/sft_then_ppo}"
if [ -z "${MODEL:-}" ]; then
    flags=("$@")
    set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
    source launch/setup.sh
    launch=(${LAUNCH:-torchrun --standalone --nproc_per_node 2})
    export CUDA_VISIBLE_DEVICES=
    [ -f toy/args.json ] || python launch/toy.py --out toy
    mkdir -p "$out"
    # The toy's rows become demonstrations: "answer" stays for PPO, and "response" is what SFT learns.
    for split in train eval; do
        sed -E 's/"answer": ("[^"]*")/"answer": \1, "response": \1/; s#"images/#"'"$PWD"'/toy/images/#g' "toy/$split.jsonl" > "$out/$split.jsonl"
    done
    head -n 32 "$out/train.jsonl" > "$out/written.jsonl"
    "${launch[@]}" train_grm_vl.py --model toy/model --data "$out/written.jsonl" --eval_data "$out/eval.jsonl" \
        --steps 8 --prompts_per_step 16 --eval_every 4 --lr 1e-3 --max_prompt_tokens 256 --max_tokens_per_pack 4096 \
        --eval_max_new_tokens 4 --out "$out/sft"
    exec "${launch[@]}" train_ppo_vl.py --config toy/args.json --model "$out/sft/export/latest" --out "$out/ppo" -- ${flags[@]+"${flags[@]}"}
fi
: "${SFT_DATA:?rows of prompt and response, JSONL}" "${DATA:?the training rows of PPO, JSONL}" "${EVAL_DATA:?the held-out rows of PPO, JSONL}"
launch=(${LAUNCH:-torchrun --standalone --nproc_per_node 8})
"${launch[@]}" train_grm_vl.py --model "$MODEL" --data "$SFT_DATA" --eval_data "${SFT_EVAL:-$EVAL_DATA}" --max_epochs 2 --lr 1e-5 --lr_schedule cosine \
    --prompts_per_step 64 --gradient_checkpointing off --max_tokens_per_pack 7168 --out "$out/sft"
exec "${launch[@]}" train_ppo_vl.py --model "$out/sft/export/latest" --data "$DATA" --eval_data "$EVAL_DATA" \
    --gradient_checkpointing off --max_tokens_per_pack 5120 --out "$out/ppo" -- "$@"
