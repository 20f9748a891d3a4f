# Sourced by accept.sh and several.sh: which Python runs, and what it imports.  Nothing is installed and no network is used.
# PYTHON in the environment is taken as it is; otherwise the repository's virtual environment, otherwise python3.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x "$root/.venv/bin/python" ]; then PYTHON=$root/.venv/bin/python; fi
fi
if ! missing=$("$PYTHON" - <<'END'
import importlib.util

names = ("torch", "numpy", "safetensors", "tokenizers", "typer", "rich", "psutil", "pytest")
print(*(name for name in names if importlib.util.find_spec(name) is None))
END
); then
    echo "error: $PYTHON cannot run; legal: PYTHON=... of a Python with torch" >&2
    exit 2
elif [ -n "$missing" ]; then
    echo "error: $PYTHON has no ${missing// /, no }; legal: PYTHON=... of one that has" >&2
    exit 2
fi
export PYTHONPATH=$root/src:$root/benchmarks${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export XDG_CACHE_HOME=$scratch/cache # of tokens; not the user's
