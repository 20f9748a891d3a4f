"""What the sweep's general rules do not find for a model type of transformers: its own numbers and fields."""

from __future__ import annotations

from typing import Any

from sweeping.overrides.images import IMAGES
from sweeping.overrides.sound import SOUND
from sweeping.overrides.text import TEXT

OVERRIDES: dict[str, dict[str, Any]] = {**TEXT, **IMAGES, **SOUND}
"""By model type: arguments of its config beside those that :mod:`shrink` finds, numbers of its inputs, and fields."""
