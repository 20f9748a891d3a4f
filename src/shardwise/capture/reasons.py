"""Why a model could not be captured, or not for any number of rows: what torch.export says, in words for its users."""

from __future__ import annotations

import re

from torch import nn

from shardwise.capture.running import raised_in
from shardwise.graph.captured import Uncapturable

LENGTH = 300  # the most characters of what torch says
_SYMBOL = re.compile(r"\bs\d+\b")  # torch's name for the number of rows
_ROWS = re.compile(r"L\['\w+'\](\['\w+'\])*\.size\(\)\[0\]")
_ANY = re.compile(r" and rows <= \d+")  # the bound that a capture gives to the number of rows


def not_captured(error: BaseException, model: nn.Module) -> str:
    """Return what stopped the capture of ``model``, with the module and the line that it was in, if it was in one."""
    place = raised_in(error, model)
    if "data-dependent" in str(error):
        return f"it reads values of tensors in Python, as a number, a size or a branch{place}"
    if "of ints" in str(error) and "FakeTensor" in str(error):
        return f"it reads values of tensors as sizes, as a recurrent network does of a packed sequence{place}"
    if "fake tensor in the exported program" in str(error):
        return f"it does what no graph holds: autograd inside forward, or a write to data of a tensor{place}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = _SYMBOL.sub("rows", lines[0]) if lines else ""
    kind = "" if isinstance(error, Uncapturable) else f"{type(error).__name__}: "
    return f"{kind}{said}"[:LENGTH] + place


def fixed_rows(error: BaseException, model: nn.Module) -> str:
    """Return why the number of rows could not stay open while ``model`` was captured, in a line."""
    text = str(error)
    if "specialized it to be a constant" in text:
        return "forward uses their number as a number of Python (in a loop, a comparison, int() or a fixed size)"
    guards = re.findall(r"satisfy the generated guard (.*)", text)
    if guards:
        asked = _ANY.sub("", _ROWS.sub("rows", guards[0])).rstrip(".")
        return f"forward does not take all numbers of rows in the same way: it depends on whether {asked}"
    return not_captured(error, model)
