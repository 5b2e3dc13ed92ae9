#!/usr/bin/env bash
# A vision-language model learns to describe pictures by PPO with a critic, on 2 CPU cores, in less than 5 minutes after
# installation. Expected: held-out accuracy (all parts of an answer are right) rises from 0 to at least 0.9. Further flags are passed to train_ppo_vl.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flags=("$@")
set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
source launch/setup.sh
export CUDA_VISIBLE_DEVICES=    # even if there are GPUs, of which there may be fewer than two
[ -f toy_describe/args.json ] || python launch/toy.py --task describe --out toy_describe
out="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
for ((i = 0; i < ${#flags[@]}; i++)); do
    [ "${flags[i]}" != --out ] || out="${flags[i + 1]}"
done
torchrun --standalone --nproc_per_node 2 train_ppo_vl.py --config toy_describe/args.json --out "$out" -- ${flags[@]+"${flags[@]}"}
echo
python launch/page.py "$out" --out "$out/page.html"
# as the shell reads them: a folder may have a space in its name
python="$(printf %q "$(command -v python)")" torchrun="$(printf %q "$(command -v torchrun)")" quoted="$(printf %q "$out")"
cat <<END

Next:
  look at it    open $out/page.html in a browser; to write it again:
                $python launch/page.py $quoted --out $quoted/page.html
  talk to it    $python launch/chat.py $quoted/export/latest toy_describe/images/eval-00000.png "list all objects, then say how many."
  your data     $torchrun --nproc_per_node 2 train_ppo_vl.py --model FOLDER --data rows.jsonl --reward my_reward.py:score
                (rows and rewards: README.md, "Your task in ten minutes")
  a fork        git apply tests/experiments/loss_term.diff && $torchrun --nproc_per_node 2 train_ppo_vl.py --imitation_coef 0.1
  the judge     bash launch/quickstart_grm.sh
END
