#!/usr/bin/env bash
# The acceptance of shardwise on one card, from a bare checkout:
#   benchmarks/gpu/accept.sh [waits|repeats|verify|tests|fast|memory|prototypes]... [--device cuda|cpu] [--tiny] [--out FOLDER] [--minutes 9]
# Each part takes at most so many minutes and can be run alone.  docs/gpu.md says what they do and what they have found.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
"$PYTHON" -m gpu.accept "$@"
