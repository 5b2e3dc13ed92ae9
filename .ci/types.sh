#!/usr/bin/env bash
# Whether the types of the scripts and of common/ fit; settings and what is switched off, with the reason: pyrightconfig.json.
set -euo pipefail
cd "$(dirname "$0")/.."
source .ci/tool.sh basedpyright==1.40.2
.ci/.venv/bin/basedpyright --project .ci/pyrightconfig.json --pythonpath "$(python -c 'import sys; print(sys.executable)')"
