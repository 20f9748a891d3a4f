"""Run the parts of the acceptance of shardwise on one card, one after the other.  ``accept.sh`` starts this."""

from __future__ import annotations

import sys

from . import fast, memory, prototypes, report, right
from .parts import main

PARTS = {
    "waits": right.waits,
    "repeats": right.repeats,
    "verify": right.verified,
    "tests": right.marked_tests,
    "fast": fast.fast,
    "memory": memory.memory,
    "prototypes": prototypes.prototypes,
}

if __name__ == "__main__":
    sys.exit(main(__doc__ or "", PARTS, report.rewrite))
