#!/usr/bin/env bash
# A judge learns to tell right answers from wrong ones; then a fresh policy is trained with that judge as its only reward.
# Expected on 2 CPU cores, in less than 10 minutes after installation: the judge is right in at least 0.95 of the held-out
# judgements, in both orders; then the policy's true accuracy, which the rule only measures, rises from 0.22 to at least 0.85.
# Further flags are passed to train_ppo_vl.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flags=("$@")
set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
source launch/setup.sh
export CUDA_VISIBLE_DEVICES=    # even if there are GPUs, of which there may be fewer than two
[ -f toy/grm_args.json ] || python launch/toy.py --out toy
stamp="$(date +%Y%m%d-%H%M%S)"
judge="runs/judge-$stamp" out="runs/judged-$stamp"
for ((i = 0; i < ${#flags[@]}; i++)); do
    [ "${flags[i]}" != --out ] || out="${flags[i + 1]}"
done
torchrun --standalone --nproc_per_node 2 train_grm_vl.py --config toy/grm_args.json --out "$judge"
torchrun --standalone --nproc_per_node 2 train_ppo_vl.py --config toy/args.json --out "$out" \
    --reward_recipe "{\"*\": [[\"grm:$judge/export/latest\", 1], [\"exact\", 0]]}" -- ${flags[@]+"${flags[@]}"}
echo
python launch/page.py "$judge" "$out" --out "$out/page.html"
echo
python="$(printf %q "$(command -v python)")" quoted="$(printf %q "$out")"
echo "the page again:   $python launch/page.py $judge $quoted --out $quoted/page.html"
echo "judgements:       $judge/eval"
echo "metrics:          $out/metrics.jsonl (eval/grm_reward_mean is what the judge says, eval/exact_reward_mean the truth)"
echo "TensorBoard:      tensorboard --logdir runs"
