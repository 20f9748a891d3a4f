"""Run one function in a process of its own: ``python -m gpu.child MODULE:FUNCTION ARGUMENTS``.  The arguments and the
result are JSON.
"""

from __future__ import annotations

import importlib
import json
import sys

from .parts import FOUND


def main() -> None:
    """Call the function and print its result as the last line."""
    place, arguments = sys.argv[1:]
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    print(f"\n{FOUND}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
