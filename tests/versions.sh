#!/usr/bin/env bash
# Says which torch and transformers were tried last. Then what README claims, and all tests of checkpoints, weights and compiled
# kernels, with the oldest of both that requirements.txt allows, and with the newest that the package index has, whatever
# requirements.txt says of torch. Each gets a virtual environment of its own under $TMPDIR (up to 6 GB, twenty minutes on 2 cores),
# deleted afterwards. The builds of torch on PyPI are for CUDA: no GPU is needed to import them, and the tests that trace on fake
# tensors of a GPU then run instead of skipping.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="$(for name in python3.12 python3.11 python3; do "$name" -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)"
oldest=($(sed -n 's/^\(torch\|transformers\)>=\([0-9.]*\),.*/\1==\2.0/p' requirements.txt))
newest=(torch "$(grep '^transformers' requirements.txt)")
others=($(grep -v '^#\|^torch\|^transformers' requirements.txt) pytest pytest-xdist)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=
for package in torch transformers; do
    sed -n "s/^TRIED = .*\"$package\": (\"[0-9.]*\", \"\([0-9.]*\)\").*/tried last: $package \1 (common\/ground\/versions.py)/p" common/ground/versions.py
done
failed=0
for which in oldest newest; do
    place="$(mktemp -d)"
    trap 'rm -rf "$place"' EXIT
    declare -n wanted="$which"
    "$python" -m venv "$place/venv"
    "$place/venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "${wanted[@]}" "${others[@]}"
    "$place/venv/bin/python" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__)'
    pytest=("$place/venv/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist loadscope --no-loadscope-reorder)
    PATH="$place/venv/bin:$PATH" "${pytest[@]}" tests -m "not slow" --ignore tests/benchmarks || failed=1
    PATH="$place/venv/bin:$PATH" "${pytest[@]}" tests/test_checkpoint.py tests/model/test_{weights,traces}.py tests/test_fused.py -m slow || failed=1
    rm -rf "$place"
done
exit $failed
