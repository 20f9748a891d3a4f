#!/usr/bin/env bash
# The acceptance of shardwise on the 2 to 8 cards of one host, from a bare checkout:
#   benchmarks/gpu/several.sh [pipeline|zero|tensor|killed|communicators]... [--ranks N] [--device cuda|cpu] [--tiny] [--out FOLDER] [--minutes 9]
# Ranks are by default the cards that there are.  docs/gpu.md says what the parts do and what they have found.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m gpu.several "$@"
