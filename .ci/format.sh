#!/usr/bin/env bash
# Whether all Python here has one format, and what a linter says of it; settings: .ruff.toml.
#   bash .ci/format.sh          checks
#   bash .ci/format.sh --fix    writes
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/tool.sh ruff==0.17.6
if [ "${1:-}" = --fix ]; then
    .ci/.venv/bin/ruff check --quiet --fix
    exec .ci/.venv/bin/ruff format
fi
.ci/.venv/bin/ruff check --quiet
.ci/.venv/bin/ruff format --check --diff
