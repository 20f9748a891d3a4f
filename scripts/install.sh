#!/usr/bin/env bash
# Make .venv with pinned dependencies: install.sh run | dev
#   run: what `shardwise train` and `plot` need;  dev: also what the tests need.
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:-run}
python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3.13 python3.12 python3.11 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
[ -n "$python" ] || { echo "shardwise needs Python 3.11 or newer on the PATH (or set PYTHON=/path/to/python3)" >&2; exit 1; }

stamp=.venv/.installed-$kind
want=$(cat pyproject.toml constraints.txt scripts/install.sh src/shardwise/drivers.py | cksum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then "$python" -m venv --clear .venv; fi
pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install --quiet --quiet --constraint constraints.txt"

torch=$(sed -n 's/^torch==//p' constraints.txt)
echo "installing into .venv (torch $torch, about a minute)"
if ! .venv/bin/python -c "import importlib.metadata as m, sys; sys.exit(m.version('torch').split('+')[0] != '$torch')" 2>/dev/null; then
    build=$("$python" -I src/shardwise/drivers.py "$torch")
    index=https://download.pytorch.org/whl/$build
    if [ "$build" != cpu ]; then # beside pip's own sources, which have what torch needs; of torch itself the + takes this build alone
        $pip --extra-index-url "$index" "torch==$torch+$build" || { echo "no torch $torch+$build: taking what pip finds" >&2; $pip "torch==$torch"; }
    elif ! $pip "torch==$torch+cpu" 2>/dev/null; then # not among pip's own sources: ask torch's index of CPU builds
        $pip --index-url "$index" "torch==$torch+cpu" 2>/dev/null || $pip "torch==$torch"
    fi
fi
case $kind in
    run) $pip --editable '.[plots]' ;;
    dev) $pip --editable '.[dev]' ;;
    *) echo "install.sh: run or dev, not $kind" >&2; exit 1 ;;
esac
rm -f .venv/.installed-*
echo "$want" >"$stamp"
if [ "$kind" = dev ]; then echo "$want" >.venv/.installed-run; fi
