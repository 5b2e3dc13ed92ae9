#!/usr/bin/env bash
# Whether the types of the scripts and of common/ fit, by a checker with an environment of its own. Where that cannot be installed,
# nothing is checked, and the run goes on.
#   bash .ci/types.sh    settings and what is switched off, with the reason: pyrightconfig.json
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh pytest pytest-xdist
checker=basedpyright==1.40.2
if ! has_packages .ci/.venv/bin/python "$checker"; then
    if ! { python -m venv .ci/.venv && .ci/.venv/bin/python -m pip install --quiet --disable-pip-version-check "$checker"; }; then
        echo "types: not checked, as $checker could not be installed (see above)"
        exit 0
    fi
fi
.ci/.venv/bin/basedpyright --project .ci/pyrightconfig.json --pythonpath "$(python -c 'import sys; print(sys.executable)')"
