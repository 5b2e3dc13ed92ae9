# Sourced from the repository's root, by you or by a script that ends on errors (set -e): chooses a Python that has all packages.
# Usage: source launch/setup.sh [further packages]
#
# An active environment that has them is used as it is; then .venv, if it was set up before; then the Python on the PATH, if it
# has them. Otherwise they are installed into .venv, which alone needs a package index.
is_supported() {
    command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null
}
# has_packages PYTHON REQUIREMENT...: whether they are installed. Nothing is downloaded or changed. A vendor's torch 2.11 may be
# called 2.11.0a0, which sorts before 2.11. pip must not see a folder of wheels, or it would count these as installed.
has_packages() (
    python="$1" requirements=()
    for requirement in "${@:2}"; do
        [[ "$requirement" != "torch>="* ]] || requirement="${requirement/,/.dev0,}"
        requirements+=("$requirement")
    done
    pip=("$python" -m pip install --disable-pip-version-check)
    "$python" -c 'import pip' 2>/dev/null || pip=(uv pip install --offline --python "$(command -v "$python")")    # uv's environments have none
    unset ${!PIP_*}
    export PIP_CONFIG_FILE=/dev/null PIP_BREAK_SYSTEM_PACKAGES=1
    "${pip[@]}" --quiet --dry-run --no-index --no-deps "${requirements[@]}" >/dev/null 2>&1
)
# Whether .venv has them, by the stamp that `install_packages` left: it notices a changed requirements.txt, and allows packages that
# another run added.
is_installed() {
    [ -x .venv/bin/python ] && [[ "$(cat .venv/installed 2>/dev/null)" == "$wanted"* ]]
}
# Without an NVIDIA GPU: the newest build of torch for CPUs, a tenth of the size, if pip finds one (in an index or a folder of wheels).
find_cpu_build() {
    command -v nvidia-smi >/dev/null && return
    .venv/bin/python -m pip index versions torch 2>/dev/null | grep -o '[0-9.]*+cpu' | head -1 || true
}
# Into .venv, by one process at a time, as nodes may share the folder. (macOS has no flock, some file systems have no locks.)
install_packages() {
    if command -v flock >/dev/null && ! flock -n 9; then
        echo "waiting for another process that installs into .venv"
        flock 9
    fi
    ! is_installed || return 0
    for python in python3.12 python3.11 python3 python none; do
        ! is_supported "$python" || break
    done
    [ "$python" != none ] || { echo "error: no Python 3.11 or 3.12 on the PATH" >&2; return 1; }
    echo "installing into .venv with $("$python" --version): once, some minutes"
    [ -x .venv/bin/python ] || "$python" -m venv .venv || { echo "error: '$python -m venv' failed; install the venv module (Debian: python3-venv)" >&2; return 1; }
    build="$(find_cpu_build)"
    if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r requirements.txt ${build:+"torch==$build"} "$@"; then
        echo "error: pip could not install into .venv, see above. Without a package index, an environment with all packages is needed$(list_missing)" >&2
        return 1
    fi
    echo "$wanted" > .venv/installed
}
list_missing() {
    for python in python python3; do
        if is_supported "$python"; then
            printf "; %s lacks:" "$(command -v "$python")"
            for requirement in "${needed[@]}"; do
                has_packages "$python" "$requirement" || printf " %s" "$requirement"
            done
            return
        fi
    done
}

needed=($(grep -v '^#' requirements.txt) "$@")
wanted="$(cat requirements.txt) $*"
ready=""
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
if [[ -n "$active" && ! "$active" -ef .venv ]] || ! is_installed; then
    for python in python python3; do
        if is_supported "$python" && has_packages "$python" "${needed[@]}"; then
            ready="$python"
            break
        fi
    done
fi
if [ -n "$ready" ]; then
    echo "using $(command -v "$ready"), which has all packages"
    [ "$ready" = python ] || python() { python3 "$@"; }    # if it has no other name
else
    is_installed || ( install_packages "$@" ) 9>.venv.lock || return 1
    source .venv/bin/activate
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
# On a GPU, expandable segments fragment less. CUDA graphs work with them (pytorch#128068), although torch disabled them for
# graphs for a while, until August 2026 (pytorch#194767).
[ -n "${PYTORCH_ALLOC_CONF:-}${PYTORCH_CUDA_ALLOC_CONF:-}" ] || export PYTORCH_ALLOC_CONF=expandable_segments:True
# In bfloat16 on a CPU, torch caches a compiled product for each of 1,024 shapes, a gigabyte, as lengths rarely repeat. 64 are as
# fast.
export LRU_CACHE_CAPACITY="${LRU_CACHE_CAPACITY:-64}" ONEDNN_PRIMITIVE_CACHE_CAPACITY="${ONEDNN_PRIMITIVE_CACHE_CAPACITY:-64}"
