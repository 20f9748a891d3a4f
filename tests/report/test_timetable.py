"""Timetables in the terminal, as pictures and as traces: what is drawn has the times of the boxes."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.cells import cell_len
from rich.console import Console

from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.schedules import SCHEDULES
from shardwise.estimate.simulate import Costs, simulate
from shardwise.parallel.schedule import timetable
from shardwise.report.kinds import LOOKS
from shardwise.report.simulated import drawing
from shardwise.report.timetable import LANES, Drawing, TimeBox, mark_critical, perfetto
from shardwise.report.timetable_chart import chart
from shardwise.report.timetable_picture import CRITICAL, IDLE, LEFT, fill, picture, round_step
from timetables import uniform

PIPELINES = [
    ("1f1b", 4, 8),
    ("zb-h1", 4, 8),
    ("interleaved", 3, 7),
    ("zbv", 4, 9),
    ("dualpipe-v", 2, 5),
    ("gpipe", 1, 3),
    ("1f1b", 16, 64),
]


def simulated(name: str, ranks: int, microbatches: int, step: float = 0.0, norm: str = "barrier") -> Drawing:
    """Stages that are not alike, in ms."""
    tasks = timetable(name, ranks, microbatches)
    stages = ranks * SCHEDULES[name].stages_per_rank
    times = [[1e-3 * (a + 0.1 * (s % 3)) for s in range(stages)] for a in (1.0, 1.2, 0.7)]
    costs = Costs(*times, transfer=[1e-4] * (stages - 1), step=[step] * stages, norm=step / 2)
    return drawing(f"{name} <{ranks}>", simulate(tasks, costs, norm), costs, norm)


def recorded() -> Drawing:
    """Two ranks with lanes that communicate, in a message from one to the other."""
    boxes = [
        TimeBox(0, 0.0, 0.02, "F", 0, 0), TimeBox(0, 0.02, 0.03, "SEND", 0, 0, "send", flow="0 to 1: 0"),
        TimeBox(1, 0.01, 0.031, "RECEIVE", 1, 0, "receive", flow="0 to 1: 0"), TimeBox(1, 0.031, 0.06, "F", 1, 0),
        TimeBox(1, 0.06, 0.1, "B", 1, 0),
        TimeBox(1, 0.1, 0.12, "REDUCE", -1, -1, "reduce"), TimeBox(1, 0.12, 0.13, "STEP", name="STEP b0"),
        TimeBox(0, 0.12, 0.14, "STEP"),
    ]  # fmt: skip
    return Drawing("recorded", tuple(boxes), 2, 0.15, 0.6, (3 << 30, 5 << 20))


def text(one: Drawing, width: int = 80, colours: bool = False, *others: Drawing) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(chart([one, *others], width, colours))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def rectangles(svg: str) -> list[dict[str, str]]:
    """Their attributes and, under "tip", what a browser says."""
    root = ET.fromstring(svg)
    return [{**r.attrib, "tip": r.findtext("{*}title") or ""} for r in root.iter() if r.tag.endswith("rect")]


# ---- pictures --------------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", PIPELINES, ids=str)
def test_every_box_is_drawn_where_its_times_are_and_none_overlaps(name: tuple[str, int, int]) -> None:
    one = simulated(*name, step=1e-3)
    sheet = picture([one])
    found = [r for r in rectangles(sheet.svg()) if r["tip"]]
    assert len(found) == len(one.boxes)
    backgrounds = [r for r in rectangles(sheet.svg()) if r["fill"] == IDLE and not r["tip"]][: one.ranks]
    pixels = float(backgrounds[0]["width"]) / one.step
    assert {float(r["x"]) for r in backgrounds} == {LEFT} and len({r["y"] for r in backgrounds}) == one.ranks
    chunks = one.chunks()
    edges: dict[int, list[tuple[float, float]]] = {}
    for box in one.boxes:
        tip = next(r for r in found if r["tip"].startswith(f"{box.title}, rank {box.rank}:"))
        row = backgrounds[box.rank]
        x, width, line = float(tip["x"]), float(tip["width"]), float(tip.get("stroke-width", 0))
        left, right = LEFT + pixels * box.start, LEFT + pixels * box.stop
        assert left - 0.02 <= x - line / 2 <= left + 0.42 and right - 0.42 <= x + width + line / 2 <= right + 0.02
        assert float(row["y"]) <= float(tip["y"]) and float(tip["height"]) <= float(row["height"])
        assert tip["fill"] == fill(box, chunks[box.rank]) and (tip.get("stroke") == CRITICAL) == box.critical
        edges.setdefault(box.rank, []).append((x - line / 2, x + width + line / 2))
    for row_edges in edges.values():
        assert all(before[1] <= after[0] + 0.02 for before, after in pairwise(sorted(row_edges)))


def test_microbatches_are_written_into_boxes_that_have_room() -> None:
    small, large = simulated("1f1b", 4, 8), simulated("1f1b", 16, 64)
    for one, kinds in ((small, {"F", "B"}), (large, {"B"})):
        words = [
            e
            for e in ET.fromstring(picture([one]).svg()).iter()
            if e.tag.endswith("text") and e.get("text-anchor") == "middle"
        ]
        rows = sorted(
            {float(w.attrib["y"]) for w in words if float(w.attrib["y"]) < max(float(v.attrib["y"]) for v in words)}
        )
        numbers = Counter(w.text for w in words if float(w.attrib["y"]) in rows)
        wanted = Counter(str(box.microbatch) for box in one.boxes if box.kind in kinds)
        assert len(rows) == one.ranks and numbers == wanted
    assert "<title>F 63 of stage 15, rank 15:" in picture([large]).svg()


def test_stages_of_a_rank_have_shades_and_the_legend_all_kinds() -> None:
    one = simulated("zbv", 4, 9)
    svg = picture([one]).svg()
    assert len({fill(b, one.chunks()[b.rank]) for b in one.boxes if b.kind == "F"}) == 2
    for kind in "FIW":
        assert f">{LOOKS[kind].words}</text>" in svg
    for words in (
        "idle",
        "critical path",
        "lighter: the later stages of a rank",
        "zbv &lt;4&gt;",
        "peak activations",
        f"{one.bubble:.1%}",
    ):
        assert words in svg
    assert "lighter" not in picture([simulated("1f1b", 2, 3)]).svg()


def test_drawings_one_above_the_other_share_their_axis() -> None:
    first, second = simulated("gpipe", 2, 4), simulated("1f1b", 2, 9)
    rows = [r for r in rectangles(picture([first, second]).svg()) if r["fill"] == IDLE][:4]
    widths = [float(r["width"]) for r in rows]
    assert widths[0] == widths[1] and widths[2] == widths[3]
    assert widths[0] / widths[2] == pytest.approx(first.step / second.step, rel=1e-4)
    assert float(rows[1]["y"]) + float(rows[1]["height"]) < float(rows[2]["y"])


def test_lanes_that_communicate_are_strips_below_the_rank() -> None:
    one = recorded()
    assert one.lanes() == [["compute", "send"], ["compute", "reduce", "receive"]]
    found = {r["tip"].split(",")[0]: r for r in rectangles(picture([one]).svg()) if r["tip"]}
    rank1 = [found[name] for name in ("F 0 of stage 1", "REDUCE", "RECEIVE 0 of stage 1")]
    ys = [float(r["y"]) for r in rank1]
    assert ys == sorted(ys) and len(set(ys)) == 3
    assert "STEP b0" in found and "3.0 GiB" in picture([one]).svg() and "peak memory" in picture([one]).svg()


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", PIPELINES, ids=str)
def test_what_is_written_lies_inside_the_picture(name: tuple[str, int, int]) -> None:
    sheet = picture([simulated(*name)])
    figure = sheet.figure()
    FigureCanvasAgg(figure).draw()
    width, height = figure.canvas.get_width_height()
    for words in figure.axes[0].texts:
        box = words.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, words.get_text()


def test_formats(tmp_path: Path) -> None:
    sheet = picture([simulated("1f1b", 2, 3)])
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF")):
        sheet.write(tmp_path / "deep" / f"t{ending}", "--out")
        assert (tmp_path / "deep" / f"t{ending}").read_bytes().startswith(magic)
    with pytest.raises(ConfigError, match=r"--out .*t.gif: .gif is not legal; legal: .png, .svg, .pdf"):
        sheet.write(tmp_path / "t.gif", "--out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*: cannot be written: .*; legal: a file in a writable folder"):
        sheet.write(tmp_path / "file" / "t.svg", "--out")


def test_ticks_are_round() -> None:
    assert [round_step(x) for x in (0.9, 1.0, 1.1, 2.0, 4.9, 5.1, 21, 0.0301)] == pytest.approx(
        [1, 1, 2, 2, 5, 10, 50, 0.05]
    )


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("width", [60, 80, 132])
@pytest.mark.parametrize("name", PIPELINES, ids=str)
def test_lines_fit_the_terminal_and_a_rank_has_one(name: tuple[str, int, int], width: int, colours: bool) -> None:
    one = simulated(*name)
    lines = text(one, width, colours)
    assert max(map(cell_len, lines)) <= width
    rows = [line for line in lines if re.match(r" *rank \d+ \|", line)]
    assert len(rows) == one.ranks and len({row.rindex("|") for row in rows}) == 1
    assert [float(row.split("|")[-1]) for row in rows] == [pytest.approx(m) for m in one.memory or ()]
    assert f"bubble {one.bubble:.1%}" in "\n".join(lines) and lines[0] == one.title


def test_letters_say_what_is_where() -> None:
    one = simulated("1f1b", 4, 8)
    for rank, row in enumerate(line for line in text(one) if "rank " in line and "|" in line):
        inner = row.split("|")[1]
        for column, letter in enumerate(inner):
            middle = (column + 0.5) * one.end / len(inner)
            box = next((b for b in one.boxes if b.rank == rank and b.start <= middle < b.stop), None)
            assert (letter == " ") == (box is None)
            if box is not None and letter in "FB":
                assert letter == box.kind
                assert inner[column + 1 : column + 2] in (str(box.microbatch), "F", "B", " ", "")
        assert len(re.findall(r"[FB]\d", inner)) >= 15 and sum(c in "FB" for c in inner) == 16


def test_narrow_boxes_get_their_share_of_columns_without_numbers() -> None:
    one = simulated("1f1b", 16, 64)
    rows = [line.split("|")[1] for line in text(one) if re.match(r" *rank \d+ \|", line)]
    assert not any(c.isdigit() for row in rows for c in row)
    total = Counter("".join(rows))
    cells = sum(total.values())
    for kind in "FB":
        share = sum(b.stop - b.start for b in one.boxes if b.kind == kind) / (one.step * one.ranks)
        assert total[kind] / cells == pytest.approx(share, abs=0.03)
    assert total[" "] / cells == pytest.approx(one.bubble, abs=0.03)


def test_later_stages_are_small_letters_or_bright() -> None:
    one = simulated("zbv", 2, 4)
    assert "small letters" in "\n".join(text(one)) and "f0" in "\n".join(text(one))
    coloured = chart([one], 120, True)
    assert "bright" in coloured.plain and any("on bright_blue" in str(span.style) for span in coloured.spans)
    assert any("underline" in str(span.style) for span in coloured.spans)


def test_a_shared_axis_in_the_terminal() -> None:
    first, second = simulated("1f1b", 2, 4), simulated("1f1b", 2, 12)
    lines = text(first, 80, False, second)
    rows = [line.split("|")[1] for line in lines if re.match(r"rank \d+ \|", line)]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1
    ends = [max(len(row.rstrip()) for row in rows[:2]), max(len(row.rstrip()) for row in rows[2:])]
    assert ends[1] == len(rows[0]) and ends[0] / ends[1] == pytest.approx(first.end / second.end, abs=1 / len(rows[0]))


# ---- data ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["barrier", "post-validate"])
@pytest.mark.parametrize("name", PIPELINES[:5], ids=str)
def test_simulated_boxes_are_the_simulators_times(name: tuple[str, int, int], norm: str) -> None:
    one = simulated(*name, step=2e-3, norm=norm)
    tasks = [
        [(b.kind, b.stage, b.microbatch) for b in one.rows()[rank, "compute"] if b.microbatch >= 0]
        for rank in range(one.ranks)
    ]
    assert tasks == [[tuple(task) for task in row] for row in timetable(*name)]
    last = max(b.stop for b in one.boxes)
    assert one.end == pytest.approx(last) and (norm == "post-validate" or one.step == pytest.approx(last))
    assert Counter(b.kind for b in one.boxes if b.microbatch < 0) == Counter(
        {"STEP": one.ranks, **({"NORM": one.ranks} if norm == "barrier" else {})}
    )
    steps = {b.start for b in one.boxes if b.kind == "STEP"}
    assert (len(steps) == 1) == (norm == "barrier")
    if norm == "barrier":  # the norm is not waited for in vain: nothing computes then
        busy = sum(b.stop - b.start for b in one.boxes if b.kind != "NORM")
        assert one.bubble == pytest.approx(1 - busy / (one.step * one.ranks))


@pytest.mark.parametrize("name", PIPELINES, ids=str)
def test_a_critical_path_has_no_gap(name: tuple[str, int, int]) -> None:
    """Without transfers each box of the path begins as another ends, from 0 to the end of the step."""
    tasks = timetable(*name)
    costs = uniform(name[1] * SCHEDULES[name[0]].stages_per_rank, 1.0, 1.5, 0.7)
    one = drawing("", simulate(tasks, costs), costs)
    for boxes in (
        one.boxes,
        mark_critical([TimeBox(b.rank, b.start, b.stop, b.kind, b.stage, b.microbatch) for b in one.boxes]),
    ):
        path = sorted((b for b in boxes if b.critical), key=lambda b: b.start)
        assert path[0].start == 0 and path[-1].stop == pytest.approx(one.step)
        assert all(before.stop == pytest.approx(after.start) for before, after in pairwise(path))


def test_the_path_stays_in_its_replica_and_passes_through_a_norm() -> None:
    boxes = [
        TimeBox(0, 0, 1, "F", 0, 0),
        TimeBox(0, 1, 4, "B", 0, 0),
        TimeBox(1, 0, 2, "F", 0, 0),
        TimeBox(1, 2, 3, "B", 0, 0),
    ]
    boxes += [TimeBox(1, 4.1, 4.2, "NORM"), TimeBox(0, 4.1, 4.15, "NORM")]
    marked = [b for b in mark_critical(boxes, [0, 1]) if b.critical]
    assert marked == [
        TimeBox(b.rank, b.start, b.stop, b.kind, b.stage, b.microbatch, critical=True)
        for b in (boxes[0], boxes[1], boxes[4])
    ]


def test_perfetto_has_every_box(tmp_path: Path) -> None:
    drawings = [recorded(), simulated("1f1b", 2, 3)]
    values = json.loads(json.dumps(perfetto(drawings)))
    events = values["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    wanted = {
        (
            first + b.rank,
            LANES.index(b.lane),
            round(b.start * 1e9),
            round((b.stop - b.start) * 1e9),
            b.title,
            b.stage,
            b.microbatch,
        )
        for first, one in ((0, drawings[0]), (2, drawings[1]))
        for b in one.boxes
    }
    found = {
        (
            e["pid"],
            e["tid"],
            round(e["ts"] * 1e3),
            round(e["dur"] * 1e3),
            e["name"],
            e["args"]["stage"],
            e["args"]["microbatch"],
        )
        for e in complete
    }
    assert found == wanted and len(complete) == len(drawings[0].boxes) + len(drawings[1].boxes)
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {0: "recorded: rank 0", 1: "recorded: rank 1", 2: "1f1b <2>: rank 0", 3: "1f1b <2>: rank 1"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads[0, LANES.index("send")] == "send" and {(e["pid"], e["tid"]) for e in complete} <= set(threads)
    sent, received = (next(e for e in events if e.get("cat") == "flow" and e["ph"] == phase) for phase in "sf")
    assert (sent["pid"], sent["ts"], sent["id"]) == (0, pytest.approx(2e4), received["id"])
    assert (
        received["pid"] == 1
        and sent["ts"] <= received["ts"] <= 3.1e4
        and sum(e.get("cat") == "flow" for e in events) == 2
    )


def test_a_drawing_refuses_what_cannot_be() -> None:
    with pytest.raises(ShardwiseError, match="rank 0, compute: B 0 of stage 0 begins before F 0 of stage 0 has ended"):
        Drawing("", (TimeBox(0, 0, 2, "F", 0, 0), TimeBox(0, 1, 3, "B", 0, 0)), 1, 3, 0)
    with pytest.raises(ShardwiseError, match="of 1 ranks"):
        Drawing("", (TimeBox(1, 0, 2, "F", 0, 0),), 1, 3, 0)
    with pytest.raises(ShardwiseError, match="has the memory of 1"):
        Drawing("", (), 2, 3, 0, (1,))


def test_json_of_a_drawing() -> None:
    one = simulated("zb-h1", 2, 3)
    values = json.loads(json.dumps(one.to_dict()))
    assert (
        values["bubble"] == one.bubble
        and values["step_seconds"] == one.step
        and values["memory"] == list(one.memory or ())
    )
    assert [b["start"] for b in values["boxes"]] == [b.start for b in one.boxes]
