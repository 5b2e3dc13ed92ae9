#!/usr/bin/env bash
# Sets up what the tests need and runs them; arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch/setup.sh pytest
exec python -m pytest tests --durations 10 -q "$@"
