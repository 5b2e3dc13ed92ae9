#!/usr/bin/env bash
# Sets up what the tests need and runs them, in two halves at the same time. Arguments go to pytest, which runs once then;
# "real" alone are the tests on real weights, which need a package of 93 MB and are skipped where it cannot be had.
# With --versions: three quarters of them, with the oldest and the newest torch and transformers (tests/versions.sh).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ "${1:-}" != --versions ] || exec bash tests/versions.sh
arguments=("$@")
set --    # a sourced file without arguments of its own sees ours
source launch/setup.sh pytest
pytest=(python -m pytest --durations 10 -q)
[ "${arguments[*]-}" != real ] || exec "${pytest[@]}" -rs tests/test_real.py
[ ${#arguments[@]} -eq 0 ] || exec "${pytest[@]}" tests "${arguments[@]}"

# About half of the CPU seconds; the other half is all other files, new ones too.
half=(tests/test_{training,checkpoint,slurm}.py)
pytest+=(-p no:cacheprovider)                                       # one cache, which two processes would write
log="$(mktemp)"
trap 'kill $(jobs -p) 2>/dev/null || true; cat "$log"; rm -f "$log"' EXIT
"${pytest[@]}" "${half[@]}" >"$log" 2>&1 &
"${pytest[@]}" tests "${half[@]/#/--ignore=}" &
code=0
wait %2 || code=$?
wait %1 || code=$?
if python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then    # from the others GPUs are hidden
    "${pytest[@]}" tests -k gpu || code=$?
fi
exit $code
