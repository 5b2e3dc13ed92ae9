# `source .ci/tool.sh PACKAGE==VERSION` installs a tool that checks this code into an environment of its own, .ci/.venv. Where that
# cannot be, without a network, it says so and ends the script well: nothing is checked, and the run goes on. With CI=true it fails.
source launch/setup.sh pytest pytest-xdist
if ! has_packages .ci/.venv/bin/python "$1"; then
    if ! { python -m venv .ci/.venv && .ci/.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$1"; }; then
        echo "$(basename "$0"): nothing checked, as $1 could not be installed (see above)"
        [ "${CI:-}" != true ] || exit 1
        exit 0
    fi
fi
