#!/usr/bin/env bash
# Whether all Python here has one format, and what a linter says of it; settings: .ruff.toml. Where the tool cannot be installed,
# nothing is checked, and the run goes on.
#   bash .ci/format.sh          checks
#   bash .ci/format.sh --fix    writes
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh pytest pytest-xdist
formatter=ruff==0.17.6
if ! has_packages .ci/.venv/bin/python "$formatter"; then
    if ! { python -m venv .ci/.venv && .ci/.venv/bin/python -m pip install --quiet --disable-pip-version-check "$formatter"; }; then
        echo "format: not checked, as $formatter could not be installed (see above)"
        exit 0
    fi
fi
if [ "${1:-}" = --fix ]; then
    .ci/.venv/bin/ruff check --quiet --fix
    exec .ci/.venv/bin/ruff format
fi
.ci/.venv/bin/ruff check --quiet
.ci/.venv/bin/ruff format --check --diff
