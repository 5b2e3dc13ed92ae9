#!/usr/bin/env bash
# GSPO on six kinds of visual reasoning, with the settings of Vero: Qwen3-VL-8B on one node of 8 GPUs with 80 GB.
#
#   (first make vero_600k_train.verl.jsonl and vero_600k_val.verl.jsonl by scripts/download_and_format_vero_600k.py of
#   https://github.com/zlab-princeton/vero, then:)
#   python launch/data/convert.py vero_600k_train.verl.jsonl vero_600k_val.verl.jsonl --out data/vero
#   JUDGE=grm:FOLDER bash launch/vero.sh                         or http://host:port/path; further flags are passed on
#   MODEL=Qwen/Qwen2.5-VL-7B-Instruct OUT=runs/vero-7b JUDGE=... bash launch/vero.sh --max_prompt_tokens 14336 \
#       --max_new_tokens 10240 --max_pixels 9437184
#
# Never run, except two steps on a toy (tests/launch/test_recipes.py). We have neither time nor score; the authors report
# +5.3 on the mean of 30 benchmarks for Qwen3-VL-8B (arXiv 2604.04917).
#
# From vero-rl's gspo_llmjudge_shared.yaml and gspo_qwen3vl.yaml: 256 prompts x 8, two updates, a sixth of every step from each category,
# clips 0.0003 / 0.0004, no KL, no entropy, learning rate 1e-6 after 40 steps of warm-up, 4000 steps, lengths, pixels, temperature 1,
# length penalty over the last 2048 tokens, vision tower trained, verl's AdamW, 0.8 for the answer + 0.2 for the form. The label, which convert.py takes
# from reward_type, selects one of the rules below; open questions (llm_judge, instruction_following, web_action) go to JUDGE.
# Different here: bfloat16 (there float16); the mean IoU of the best pairing for boxes, which does not saturate; the order of a list is
# right or wrong as a whole; an answer without the form keeps its 0.8; the judge, and the wording of the instruction.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
: "${JUDGE:?what rewards open answers: grm:FOLDER, or http://host:port/path}"
data="${DATA:-data/vero}" files="" recipe=""
for category in chart_ocr knowledge_recognition spatial_action counting_grounding_search stem visual_alignment; do
    grep "\"ability\": \"$category\"" "$data/vero_600k_train.verl.jsonl" > "$data/$category.jsonl"
    files+="${files:+,}$data/$category.jsonl:1"
done
vision=launch/reward_vision.py
for rule in multiple_choice=$vision:choice numeric=$vision:number counting=$vision:count search=$vision:words string_match=$vision:words \
    list_string_match=$vision:words number_list=$vision:order grounding=boxes clicking=point "*=$JUDGE"; do
    recipe+="${recipe:+, }\"${rule%%=*}\": [[\"${rule#*=}\", 0.8], [\"$vision:form\", 0.2]]"
done
${LAUNCH:-torchrun --standalone --nproc_per_node 8 train_ppo_vl.py} \
    --model "${MODEL:-Qwen/Qwen3-VL-8B-Instruct}" --out "${OUT:-runs/vero-8b}" \
    --data "$files" --eval_data "$data/vero_600k_val.verl.jsonl" --reward_recipe "{$recipe}" --on_bad_row skip \
    --system_prompt 'Think between <think> and </think>, then answer between <answer> and </answer>, with a short result in \boxed{}.' \
    --advantage grpo --policy_loss gspo --clip_low 0.0003 --clip_high 0.0004 \
    --prompts_per_step 256 --samples_per_prompt 8 --minibatches 2 --steps 4000 \
    --max_prompt_tokens 18432 --max_new_tokens 18432 --max_tokens_per_pack 36864 --max_pixels 16777216 --train_vision \
    --actor_lr 1e-6 --warmup_steps 40 --weight_decay 1e-2 --adam_beta2 0.999 --overlong_buffer 2048 --eval_every 40 --save_every 40 -- "$@"
