# Sourced from the repository's root, by you or by a script that ends on errors (set -e): makes .venv, installs into it, activates it.
# Usage: source launch/setup.sh [further packages]
find_python() {
    for candidate in python3.12 python3.11 python3 python; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "error: no Python 3.11 or 3.12 on the PATH" >&2
    return 1
}
# Without an NVIDIA GPU: the newest build of torch for CPUs, a tenth of the size, if pip is offered one (by an index or a folder of wheels).
find_cpu_build() {
    command -v nvidia-smi >/dev/null && return
    .venv/bin/python -m pip index versions torch 2>/dev/null | grep -o '[0-9.]*+cpu' | head -1 || true
}
# The stamp holds what was installed, so a second run installs nothing and a changed requirements.txt is noticed.
wanted="$(cat requirements.txt) $*"
if [[ "$(cat .venv/installed 2>/dev/null)" != "$wanted"* ]]; then    # further packages of another run do no harm
    python="$(find_python)" || return 1
    echo "installing into .venv with $($python --version): once, some minutes"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || { echo "error: '$python -m venv' failed; install the venv module (Debian: python3-venv)" >&2; return 1; }
    build="$(find_cpu_build)"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -r requirements.txt ${build:+"torch==$build"} "$@" || return 1
    echo "$wanted" > .venv/installed
fi
source .venv/bin/activate
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# On a GPU, segments that grow leave fewer holes. CUDA graphs work with them (pytorch#128068), although torch had turned them
# off for graphs for a while, until August 2026 (pytorch#194767).
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=expandable_segments:True
# In bfloat16 on a CPU, torch keeps a compiled product for each of 1,024 shapes; lengths are never twice the same, and that is
# a gigabyte. 64 are as fast (tests/benchmarks/RESULTS.md).
export LRU_CACHE_CAPACITY="${LRU_CACHE_CAPACITY:-64}" ONEDNN_PRIMITIVE_CACHE_CAPACITY="${ONEDNN_PRIMITIVE_CACHE_CAPACITY:-64}"
