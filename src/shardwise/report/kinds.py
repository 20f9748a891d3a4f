"""Each kind of box in a timetable has words, a letter and colours, the same in every picture."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.core.instruction import OP_INFO, Op


@dataclass(frozen=True)
class Look:
    """How a kind of work is shown: ``letter`` is used where there are no colours, and ``style`` is one of rich."""

    words: str
    letter: str
    colour: str
    style: str


OTHER = Look("other", "o", "#9a948f", "white on bright_black")
LOOKS = {
    "F": Look("forward", "F", "#4c78a8", "white on blue"),
    "B": Look("backward", "B", "#54a24b", "white on green"),
    "I": Look("backward: inputs", "I", "#2fa39a", "black on cyan"),
    "W": Look("backward: weights", "W", "#e3b23c", "black on yellow"),
    "RECOMPUTE": Look("recompute", "R", "#9ecae9", "black on bright_blue"),
    "STEP": Look("step", "S", "#b279a2", "white on magenta"),
    "DIFFER": Look("difference", "-", "#c9a0c0", "black on bright_magenta"),
    "OUTER": Look("outer step", "U", "#7b4f74", "white on magenta"),
    "STASH": Look("stash", "H", "#9d755d", "white on bright_black"),
    "BACKUP": Look("backup", "K", "#8a6d5c", "white on bright_black"),
    "VALIDATE": Look("validate", "V", "#d37295", "white on red"),
    "NORM": Look("norm", "N", "#e45756", "white on red"),
    "DECIDE": Look("decide", "D", "#c23b3b", "white on red"),
    "COUNT": Look("count", "C", "#bab0ac", "black on white"),
    "PUSH": Look("push", "P", "#c46210", "black on yellow"),
    "COMMIT": Look("commit", "T", "#a63603", "white on red"),
    "PULL": Look("pull", "L", "#5f4b8b", "white on magenta"),
    "ROUND": Look("round", "O", "#d8b5a5", "black on white"),
    "ADD": Look("add", "A", "#d8a48f", "black on white"),
    "GATHER": Look("gather", "G", "#7f6aa8", "white on magenta"),
    "REDUCE": Look("reduce", "E", "#f58518", "black on bright_yellow"),
    "SEND": Look("send", "<", "#8c8c8c", "white on bright_black"),
    "RECEIVE": Look("receive", ">", "#b5b5b5", "white on bright_black"),
}


def kind_of(op: Op) -> str:
    """Return the kind of an instruction's box: that of its task, or its own word."""
    return str(op) if op is Op.RECOMPUTE else OP_INFO[op].task or str(op)


def look(kind: str) -> Look:
    """Return how ``kind`` is shown; an unknown kind is shown as :data:`OTHER`."""
    return LOOKS.get(kind, OTHER)


def lighter(colour: str, share: float) -> str:
    """Return the colour ``#rrggbb`` mixed with a fraction ``share`` of white."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def ink(colour: str) -> str:
    """Return black or white, whichever can be read on the colour ``#rrggbb``."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "black"
