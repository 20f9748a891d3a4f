"""A program as a picture: its lanes from top to bottom, its instructions from left to right, and who waits for whom (SVG)."""

from __future__ import annotations

from html import escape

from shardwise.core.instruction import Instruction, Lane, Op
from shardwise.core.program import Program

FILL = {
    Op.FORWARD: "#4c78a8", Op.RECOMPUTE: "#9ecae9", Op.BACKWARD: "#54a24b", Op.BACKWARD_INPUT: "#54a24b",
    Op.BACKWARD_WEIGHT: "#88d27a", Op.COUNT: "#bab0ac", Op.REDUCE: "#f58518",
    Op.NORM: "#e45756", Op.STEP: "#b279a2", Op.SEND: "#eeca3b", Op.RECEIVE: "#eeca3b",
}  # fmt: skip
WEIGHT = {Op.FORWARD: 2, Op.BACKWARD: 4, Op.RECOMPUTE: 2}  # widths of boxes: a backward is two forwards
UNIT, HEIGHT, GAP, LEFT = 17, 34, 22, 74


def place(program: Program) -> list[tuple[float, float]]:
    """(start, stop) of every instruction in units of width, each as early as its lane and its waits allow."""
    free: dict[Lane, float] = {}
    spans: list[tuple[float, float]] = []
    for one in program.instructions:
        issued = spans[-1][0] if spans else 0.0
        ready = [spans[at][1] for at in one.waits]
        start = max([free.get(one.lane, 0.0), issued if one.lane is not Lane.COMPUTE else 0.0, *ready])
        spans.append((start, start + WEIGHT.get(one.op, 2)))
        free[one.lane] = spans[-1][1]
    return spans


def svg(program: Program, title: str = "") -> str:
    """The picture as SVG text; pairs of lanes are joined where one waits for the other."""
    lanes = [lane for lane in Lane if any(one.lane is lane for one in program.instructions)]
    spans = place(program)
    top = {lane: 44 + i * (HEIGHT + GAP) for i, lane in enumerate(lanes)}
    width = LEFT + UNIT * max((stop for _, stop in spans), default=0) + 12
    height = 44 + len(lanes) * (HEIGHT + GAP) + 26
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}" '
        'font-family="Helvetica,Arial,sans-serif">',
        f'<rect width="{width:.0f}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="15" font-weight="bold">{escape(title or program.name)}</text>',
    ]
    for lane in lanes:
        out.append(f'<text x="12" y="{top[lane] + HEIGHT / 2 + 5:.0f}" font-size="13">{lane}</text>')
    for at, one in enumerate(program.instructions):
        out += _arrows(one, at, spans, top, program)
    for one, span in zip(program.instructions, spans, strict=True):
        out += _box(one, span, top[one.lane])
    return "\n".join([*out, *_legend(program, height), "</svg>"]) + "\n"


def _box(one: Instruction, span: tuple[float, float], y: float) -> list[str]:
    x, w = LEFT + UNIT * span[0], UNIT * (span[1] - span[0]) - 1.5
    label = f"u{one.unit}" if one.unit >= 0 else f"b{one.bucket}" if one.bucket >= 0 else "loss" if one.op is Op.REDUCE else ""
    text = [
        f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{HEIGHT}" rx="3" fill="{FILL[one.op]}"><title>{escape(str(one))}</title></rect>'
    ]
    if label:
        text.append(f'<text x="{x + w / 2:.1f}" y="{y + 15}" font-size="11" fill="white" text-anchor="middle">{label}</text>')
    if one.microbatch >= 0:
        text.append(
            f'<text x="{x + w / 2:.1f}" y="{y + 28}" font-size="10" fill="white" text-anchor="middle">m{one.microbatch}</text>'
        )
    return text


def _arrows(one: Instruction, at: int, spans: list[tuple[float, float]], top: dict[Lane, int], program: Program) -> list[str]:
    out = []
    for wait in one.waits:
        source = program.instructions[wait]
        down = top[one.lane] > top[source.lane]
        y1 = top[source.lane] + (HEIGHT if down else 0)
        y2 = top[one.lane] + (0 if down else HEIGHT)
        x1, x2 = LEFT + UNIT * spans[wait][1] - 4, LEFT + UNIT * spans[at][0] + 4
        out.append(f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="#777" stroke-width="1.2"/>')
    return out


def _legend(program: Program, height: int) -> list[str]:
    out, x = [], LEFT
    for op in dict.fromkeys(one.op for one in program.instructions):
        out.append(f'<rect x="{x}" y="{height - 24}" width="12" height="12" rx="2" fill="{FILL[op]}"/>')
        out.append(f'<text x="{x + 16}" y="{height - 14}" font-size="11">{op}</text>')
        x += 34 + 8 * len(op)
    return out
