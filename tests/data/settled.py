"""Files that nobody has written to for long."""

from __future__ import annotations

import os
from pathlib import Path


def settle(*paths: Path) -> None:
    """Make files look as if they had been written long ago."""
    for path in paths:
        os.utime(path, ns=(10**18, 10**18))
