#!/usr/bin/env bash
# Sets up what the tests need and runs them, spread over two processes.
#   bash tests/run.sh             every claim of README once, without the network: 4 to 6 minutes on two idle cores
#   bash tests/run.sh all         everything; what needs a package of its own fetches it, or is skipped with the reason
#   bash tests/run.sh -k name     whatever pytest takes
#   bash tests/run.sh --versions  which torch and transformers were tried last, and the claims of README, checkpoints and weights with
#                                 the oldest and the newest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1:-}" != --versions ] || exec bash tests/versions.sh
arguments=("$@")
set --    # a sourced file without arguments of its own sees ours
source launch/setup.sh pytest pytest-xdist
pytest=(python -m pytest tests -q -rfEs --show-capture=stderr --durations 10)
both=(-n 2 --dist loadscope --no-loadscope-reorder)    # a file stays in one process, where its runs are made once
case "${arguments[*]}" in
    "") "${pytest[@]}" "${both[@]}" -m "not slow" --ignore tests/benchmarks; exit ;;
    all) ;;
    *) "${pytest[@]}" "${arguments[@]}"; exit ;;
esac
code=0
"${pytest[@]}" "${both[@]}" || code=$?
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then    # from the others GPUs are hidden
    "${pytest[@]}" -k gpu || code=$?
fi
exit $code
