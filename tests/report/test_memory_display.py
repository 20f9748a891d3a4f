"""A rank's memory as people see it: tables, the chart of a terminal, the picture."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.cells import cell_len
from rich.console import Console

from shardwise.core.errors import ConfigError
from shardwise.report.memory import (
    CATEGORIES,
    HEIGHT,
    SHADES,
    MemoryProfile,
    chart,
    comparison,
    draw,
    make_figure,
    table,
)
from shardwise.report.tables import size

GIB = 2**30


def account(number: int = 40, scale: int = GIB, highest: int | None = None) -> MemoryProfile:
    """States of 6, activations that rise to ``highest`` and fall again, a little that is temporary."""
    top = number // 2 if highest is None else highest
    names = tuple(f"{'FORWARD' if i <= top else 'BACKWARD'} u{i} m0" for i in range(number - 1)) + ("STEP b0",)
    states = {"optimizer": 3 * scale, "parameters": 2 * scale, "gradients": scale}
    rising = [
        6 * scale * (i + 1) // (top + 1) if i <= top else 6 * scale * (number - i) // (number - top)
        for i in range(number)
    ]
    peaks = tuple({**states, "activations": n, "temporary": 4 * scale if i == top else 0} for i, n in enumerate(rising))
    return MemoryProfile(
        3, names, peaks, {**states, "temporary": 16}, top, "forward of the unit in the middle in microbatch 0"
    )


def printed(*parts: Any) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    for part in parts:
        console.print(part)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_table_has_every_category_and_their_sums() -> None:
    one = account()
    text = printed(table("rank 3", one))
    for category in CATEGORIES[:-1]:
        row = next(line for line in text.splitlines() if line.startswith(category))
        assert row.split("  ")[-1].strip() == size(one.peak[category])
        assert size(one.between.get(category, 0)) in row
    assert "reserve" not in text
    assert re.search(r"total +6\.0 GiB +16\.0 GiB", text)
    assert max(map(cell_len, text.splitlines())) <= 80


def test_comparison_says_how_far_off_the_prediction_is() -> None:
    one = account()
    more = MemoryProfile(3, one.instructions,
    tuple({**p, "activations": p["activations"] * 2, "reserve": GIB} for p in one.peaks),
                   one.between, one.at, one.where)  # fmt: skip
    text = printed(comparison("rank 3", one, more))
    assert re.search(r"activations +6\.0 GiB +12\.0 GiB +\+6\.0 GiB +\+100\.0%", text)
    assert re.search(r"optimizer +3\.0 GiB +3\.0 GiB +0 ", text)
    assert re.search(r"reserve +0 B +1\.0 GiB +\+1\.0 GiB", text)
    assert re.search(r"total +16\.0 GiB +23\.0 GiB +\+7\.0 GiB +\+43\.8%", text)
    assert "-7.0 GiB" in printed(comparison("", more, one))
    assert max(map(cell_len, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [40, 80])
@pytest.mark.parametrize("number", [1, 3, 40, 4000])
def test_chart_is_to_scale(number: int, width: int) -> None:
    one = account(number)
    text = printed(chart(one, width))
    head, *rows, axis, legend = text.rstrip().splitlines()
    assert len(rows) == HEIGHT and max(map(cell_len, (head, *rows, axis))) <= width
    columns = [row.split("|")[1] for row in rows]
    peak = (head.index("v") if "v peak" in head else head.rindex("v")) - rows[0].index("|") - 1
    stack = "".join(row[peak] if peak < len(row) else " " for row in reversed(columns))
    spans = {c: stack.count(SHADES[c]) for c in CATEGORIES}
    for category in CATEGORIES:  # each row is a twelfth of the peak
        share = one.peak.get(category, 0) / one.peak_bytes
        assert abs(spans[category] - share * HEIGHT) <= 1, category
    assert stack.startswith(SHADES["optimizer"]) and not stack.endswith(" ")
    assert rows[0].strip().startswith("16.0") and axis.strip().startswith("GiB")
    assert "activations" in legend


@pytest.mark.parametrize("width", [1, 4, 7])
def test_a_chart_has_a_column_in_any_terminal(width: int) -> None:
    rows = printed(chart(account(), width, 18 * GIB)).splitlines()[1 : HEIGHT + 1]
    assert all(len(row.split("|")[1]) <= 1 for row in rows) and SHADES["optimizer"] in rows[-1]


def test_chart_shows_the_budget_where_it_is_near() -> None:
    one = account()
    assert "budget" not in printed(chart(one, 80)) and "budget" not in printed(chart(one, 80, 100 * GIB))
    above = printed(chart(one, 80, 18 * GIB))
    assert "budget" in above and "----------" in above.splitlines()[1]
    assert max(map(cell_len, above.splitlines())) <= 80
    below = printed(chart(one, 80, 12 * GIB)).splitlines()
    assert [row for row in below[1:-2] if "--" in row] == [below[1 + HEIGHT - 1 - 12 * HEIGHT // 16]]


@pytest.mark.quick(5)
@pytest.mark.parametrize("highest", [0, 1, 20, 37, 38])
@pytest.mark.parametrize("limit", [None, 10 * GIB, 20 * GIB, 100 * GIB])
def test_all_that_is_written_lies_inside_the_picture(highest: int, limit: int | None) -> None:
    one = account(highest=highest)
    figure = make_figure(
        one, f"gpt, {'many ' * 8}parameters\nZeRO-3, {'and so on, ' * 6}", limit, account(highest=highest)
    )
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    axes, width, height = figure.axes[0], *canvas.get_width_height()
    texts = [
        t for t in (axes.title, axes.get_xaxis().label, *axes.texts, *figure.legends[0].get_texts()) if t.get_text()
    ]
    title = axes.get_title("left")
    assert title.startswith("gpt, many") and any(t.get_text().startswith("ZeRO-3") for t in texts)
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text.get_text()
    label = next(t for t in texts if t.get_text().startswith("peak"))
    assert label.get_text() == "peak 16.0 GiB\nforward of the unit in the middle in microbatch 0"
    inside = axes.get_window_extent()
    box = label.get_window_extent()
    assert inside.x0 - 1 <= box.x0 and box.x1 <= inside.x1 + 1 and box.y1 <= inside.y1
    legend = [t.get_text() for t in figure.legends[0].get_texts()]
    assert ("budget" in " ".join(legend)) == (limit is not None and limit < 1.6 * 16 * GIB)
    assert [x for x in legend if "budget" not in x] == [
        "measured",
        "temporary",
        "activations",
        "gradients",
        "parameters",
        "optimizer",
    ]


@pytest.mark.parametrize("microbatches", [1, 2, 4, 7, 12, 100])
def test_names_of_phases_do_not_overlap(microbatches: int) -> None:
    """Forwards are short beside backwards with their sums over ranks."""
    names = [n for m in range(microbatches) for n in [f"FORWARD u0 m{m}"] * 5 + [f"BACKWARD u0 m{m}"] * 11] + [
        "STEP b0"
    ] * 9
    peaks = tuple({"parameters": GIB} for _ in names)
    figure = make_figure(MemoryProfile(0, tuple(names), peaks, peaks[0], 0, "forward"), "a\nb")
    FigureCanvasAgg(figure).draw()
    phases = [t for t in figure.axes[0].texts if t.get_fontsize() == 7.5]
    boxes = sorted((t.get_window_extent().x0, t.get_window_extent().x1) for t in phases)
    assert all(before[1] <= after[0] for before, after in zip(boxes, boxes[1:], strict=False))
    shown = {t.get_text().strip() for t in phases}
    assert (
        {"forward 0", "backward 0", "update"} <= shown
        if microbatches < 3
        else len(shown) >= (4 if microbatches < 8 else 0)
    )


def test_the_parts_of_a_backward_are_phases() -> None:
    names = [
        name
        for op in ("FORWARD", "BACKWARD_INPUT", "GATHER", "BACKWARD_WEIGHT", "STEP")
        for name in [f"{op} u0 m1"] * 20
    ]
    peaks = tuple({"parameters": GIB} for _ in names)
    figure = make_figure(MemoryProfile(0, tuple(names), peaks, peaks[0], 0, "forward"), "a\nb")
    shown = [t.get_text().strip() for t in figure.axes[0].texts if t.get_fontsize() == 7.5]
    assert shown == ["forward 1", "backward 1", "weights 1", "update 1"]


def test_the_areas_are_the_bytes() -> None:
    one = account(number=8, scale=2**20)
    axes = make_figure(one, "a\nb").axes[0]
    assert axes.get_ylabel() == "MiB"
    tops = [max(v for path in area.get_paths() for v in path.vertices[:, 1]) for area in axes.collections]
    assert tops == [3, 5, 6, 12, 16]  # top edges of the optimizer, parameters, gradients, activations, temporary


def test_formats(tmp_path: Path) -> None:
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")):
        draw(account(), tmp_path / "deep" / f"m{ending}", "title")
        assert (tmp_path / "deep" / f"m{ending}").read_bytes().startswith(magic)
    with pytest.raises(ConfigError, match=r"--picture .*m.gif: .gif is not legal; legal: .png, .svg, .pdf"):
        draw(account(), tmp_path / "m.gif", "title")


def test_json_and_back() -> None:
    one = account(number=5)
    again = MemoryProfile.from_dict(one.to_dict())
    assert again.to_dict() == one.to_dict() and again.peak_bytes == one.peak_bytes == one.to_dict()["peak_bytes"]
