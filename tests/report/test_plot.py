"""Runs as curves: what is read, which range is shown, what is smoothed, what the command says and leaves."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.image import imread

from shardwise.cli.plot import run
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.parallel.server import asynchronous_server
from shardwise.report.facts import gathered
from shardwise.report.memory import CATEGORIES, MemoryProfile
from shardwise.report.panels import COLOURS, bars, panels, scale, smooth
from shardwise.report.plot import draw, make_figure
from shardwise.report.runs import covered, names, read_run, summary

GIB = 2**30


def line(step: int, loss: float | None = 2.0, speed: float = 1000.0, memory: int = GIB) -> dict[str, Any]:
    return {
        "step": step, "loss": loss, "grad_norm": 1.0, "lr": 1e-3, "step_seconds": 0.1, "tokens_per_second": speed,
        "peak_memory_bytes": memory,
    }  # fmt: skip


def write(
    folder: Path, lines: list[dict[str, Any]], evaluations: list[dict[str, Any]] | None = None, *, end: str = ""
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + end, encoding="utf-8")
    if evaluations is not None:
        (folder / "evaluations.jsonl").write_text(
            "".join(json.dumps(one) + "\n" for one in evaluations), encoding="utf-8"
        )
    return folder


def noisy(steps: int, start: float = 5.0, seed: int = 0) -> list[dict[str, Any]]:
    r = random.Random(seed)
    return [
        line(s, 1.5 + start * math.exp(-20 * s / steps) + r.gauss(0, 0.1), 1000 * r.gauss(1, 0.05))
        for s in range(steps)
    ]


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_after_a_restart_the_later_lines_count(tmp_path: Path) -> None:
    lines = [line(s, 10.0 + s) for s in range(8)] + [line(s, 100.0 + s) for s in (5, 6)]
    evaluations = [{"step": s, "validation_loss": 3.0, "perplexity": 20.0} for s in (4, 6)] + [
        {"step": 6, "validation_loss": 2.5}
    ]
    found = read_run(write(tmp_path, lines, evaluations))
    steps, losses = found.values("loss")
    assert steps.tolist() == list(range(7))  # what came after the checkpoint has not been done again yet
    assert losses.tolist() == [10, 11, 12, 13, 14, 105, 106]
    assert found.values("validation_loss")[1].tolist() == [3.0, 2.5]


@pytest.mark.parametrize("end", ["", "{", '{"step": 2, "lo', "\n"])
def test_a_line_that_is_being_written_is_left_out(tmp_path: Path, end: str) -> None:
    assert len(read_run(write(tmp_path, [line(0), line(1)], end=end)).metrics) == 2


def test_steps_whose_loss_is_not_finite_stay_gaps(tmp_path: Path) -> None:
    lines = [line(0), line(1, None), line(2, math.inf), {"step": 3}]
    losses = read_run(write(tmp_path, lines)).values("loss")[1]
    assert np.isnan(losses).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 0, "lo{"step": 1}', r'metrics.jsonl:2: damaged line: \{"step": 0, "lo.*; legal: a JSON object'),
        ("[1, 2]", r"metrics.jsonl:2: \[1, 2\] is no JSON object"),
        ('{"loss": 1.0}', r"metrics.jsonl:2: step None is not an integer of at least 0"),
        ('{"step": true}', r"metrics.jsonl:2: step True is not an integer"),
        ('{"step": 1, "loss": "low"}', r"metrics.jsonl:2: loss 'low' is not a number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path, [line(0)], end=text + "\n" + json.dumps(line(2)) + "\n")
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)


def test_a_damaged_evaluation_is_named(tmp_path: Path) -> None:
    write(tmp_path, [line(0)], [{"step": 0, "validation_loss": "?"}, {"step": 1}])
    with pytest.raises(ConfigError, match=r"evaluations.jsonl:1: validation_loss '\?' is not a number"):
        read_run(tmp_path)


def test_folders_that_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("absent", "there is no such folder"),
        ("file", "is a file"),
        ("empty", "there is no metrics.jsonl"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: {what}.*; legal: the folder of a run \(train.run_dir\)"):
            read_run(tmp_path / name)
    nothing: list[tuple[list[dict[str, Any]], str]] = [
        ([], "no step yet"),
        ([{"step": 0}, {"step": 1}], "none of its 2 steps"),
    ]
    for lines, what in nothing:
        with pytest.raises(ConfigError, match=f"metrics.jsonl: nothing to draw, {what}"):
            read_run(write(tmp_path / "nothing", lines))


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    assert names([tmp_path / "a"]) == ["a"]
    assert names([tmp_path / "x" / "run", tmp_path / "y" / "run", tmp_path / "b"]) == ["x/run", "y/run", "b"]
    assert names([tmp_path / "x/c/run", tmp_path / "y/c/run", tmp_path / "y/run"]) == ["x/c/run", "y/c/run", "y/run"]


def test_summary_is_that_of_the_result(tmp_path: Path) -> None:
    lines = [line(0, 5.0, 10.0, 3 * GIB), line(1, None, 100.0), line(2, 4.0, 120.0), line(3, 3.0, 110.0, GIB)]
    evaluations = [
        {"step": 1, "validation_loss": 4.5, "perplexity": 90.0},
        {"step": 3, "validation_loss": 3.5, "perplexity": 33.1},
    ]
    found = summary(read_run(write(tmp_path, lines, evaluations)))
    assert found == {
        "run_dir": str(tmp_path), "steps": 4, "loss_first": 5.0, "loss_last": 3.0, "tokens_per_second": 110.0,
        "peak_memory_bytes": 3 * GIB, "validation_loss": 3.5, "perplexity": 33.1,
    }  # fmt: skip
    assert summary(read_run(write(tmp_path / "one", [line(0)])))["tokens_per_second"] == 1000.0


# ---- numbers of curves -----------------------------------------------------------------------------------------------


def test_a_huge_first_loss_does_not_squash_the_rest() -> None:
    rest = [5.0, 4.0, 3.5, 3.2, 3.0]
    assert scale([np.array([300.0, *rest])]).high < 6
    assert scale([np.array([300.0, 5.2, 4.9])]).high < 6  # nor in a run of three steps
    assert scale([np.array([10.8, 6.0, *rest])]).high > 10.8  # one that is ordinary is seen
    assert scale([np.array([300.0, *rest]), np.array([8.0, *rest])]).high > 8.0


def test_one_step_that_is_much_too_fast_does_not_squash_the_rest() -> None:
    speeds = np.array([100.0, *[1000.0] * 30, 40_000.0])
    found = scale([speeds], from_zero=True)
    assert found.low == 0.0 and 1000 < found.high < 1200 and not found.log


def test_a_loss_that_falls_by_orders_of_magnitude_is_logarithmic() -> None:
    falling = 3 * 0.99 ** np.arange(1000.0)
    found = scale([falling])
    assert found.log and found.low < falling.min() and found.high > falling.max()
    assert not scale([falling], from_zero=True).log
    assert not scale([falling - 0.1]).log  # not all positive


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0, 2.0], [0.0], [-3.0, -4.0, -5.0], [], [math.nan], [math.nan, 1.0]])
def test_every_range_holds_ordinary_values(values: list[float]) -> None:
    for from_zero in (False, True):
        found = scale([np.array(values)], from_zero=from_zero)
        assert found.low < found.high
        assert all(found.low <= v <= found.high for v in values if not math.isnan(v))


def test_smoothing_follows_the_values_without_their_noise_and_spikes() -> None:
    steps = np.arange(2000.0)
    truth = 1.5 + 4 * np.exp(-steps / 150)
    values = truth + np.random.default_rng(0).normal(0, 0.2, 2000)
    values[[0, 700, 701, 1500]] = 300.0, 50.0, math.nan, -50.0
    at, found = smooth(steps, values)
    assert len(at) == 400 and at[0] == 0 and at[-1] == 1999
    assert found[0] == 300.0  # the first point is what was measured
    error = np.abs(found - truth[at.astype(int)])[1:]
    assert error.max() < 0.35 and error[10:].max() < 0.15


def test_few_values_are_not_smoothed() -> None:
    steps, values = np.arange(3.0), np.array([3.0, math.nan, 1.0])
    assert smooth(steps, values)[0].tolist() == [0, 2] and smooth(steps, values)[1].tolist() == [3, 1]


# ---- drawing ---------------------------------------------------------------------------------------------------------


def curves(axes: Axes, **look: object) -> list[Any]:
    return [one for one in axes.lines if all(getattr(one, f"get_{key}")() == value for key, value in look.items())]


def titles(figure: Any) -> list[str]:
    return [axes.get_title("left") for axes in figure.axes if axes.get_title("left")]


def panel(figure: Any, title: str) -> Axes:
    (found,) = [axes for axes in figure.axes if axes.get_title("left") == title]
    return found


def header(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def profile(scale: int) -> dict[str, Any]:
    peaks = {c: [0, 0] for c in CATEGORIES} | {"parameters": [10 * scale] * 2, "activations": [0, 30 * scale]}
    return MemoryProfile(
        0, ("FORWARD u0 m0", "BACKWARD u0 m0"),
        tuple({c: peaks[c][at] for c in CATEGORIES} for at in range(2)),
        {"parameters": 10 * scale}, 1, "backward of head in microbatch 0",
    ).to_dict()  # fmt: skip


def remembered(folder: Path, *, kind: str = "gpu", measured: int | None = 2**20 + 2**18, title: str = "") -> Path:
    values = {
        "title": title or "gpt, 1.9 M parameters, on 2 x H100\nZeRO-1, 16 rows, 2 microbatches, bf16",
        "device": {"name": kind, "kind": kind, "memory": GIB, "budget": GIB, "reserve": None}, "budget_bytes": GIB,
        "predicted": profile(2**20), "measured": None if measured is None else profile(measured),
    }  # fmt: skip
    (folder / "memory.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_every_number_has_a_panel_over_the_same_steps(tmp_path: Path) -> None:
    lines = [line(s, 3.0 - s, 1000.0 + s, (1 + s) * GIB) for s in range(3)]
    figure = make_figure([read_run(write(tmp_path / "a", lines))])
    names_ = ["Loss", "Learning rate", "Gradient norm", "Throughput (tokens/s)"]
    assert titles(figure) == [*names_, "Peak memory of the process, rank 0 (GiB)"]
    loss, rate, norm, speed, memory = (panel(figure, title) for title in titles(figure))
    assert memory.get_xlabel() == "Step" and loss.get_shared_x_axes().joined(loss, memory)
    assert [list(curves(axes)[0].get_ydata()) for axes in (loss, rate, norm, speed, memory)] == [
        [3, 2, 1], [1e-3] * 3, [1.0] * 3, [1000, 1001, 1002], [1, 2, 3],
    ]  # fmt: skip
    assert speed.get_ylim()[0] == memory.get_ylim()[0] == rate.get_ylim()[0] == 0
    assert all(one.get_marker() == "o" for axes in figure.axes for one in axes.lines if len(one.get_xdata()))


def test_samples_are_the_unit_of_data_that_is_no_text(tmp_path: Path) -> None:
    def of_images(step: int) -> dict[str, Any]:
        one = line(step, speed=50.0 + step)
        return {("samples_per_second" if key == "tokens_per_second" else key): value for key, value in one.items()}

    images = read_run(write(tmp_path / "images", [of_images(step) for step in range(3)]))
    found = panel(make_figure([images]), "Throughput (samples/s)")
    assert list(curves(found)[0].get_ydata()) == [50, 51, 52]
    assert summary(images)["samples_per_second"] == 51.5 and "tokens_per_second" not in summary(images)
    text = read_run(write(tmp_path / "text", [line(step) for step in range(3)]))
    assert panel(make_figure([text, images]), "Throughput (tokens/s and samples/s)")


def test_one_run_is_named_with_its_model_ranks_and_plan(tmp_path: Path) -> None:
    figure = make_figure([read_run(remembered(write(tmp_path / "run$a$", [line(0), line(1)])))])
    assert header(figure) == [
        "run$a$",
        "gpt, 1.9 M parameters, on 2 x H100, ZeRO-1, 16 rows, 2 microbatches, bf16",
    ]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "about.json").write_text('{"parameters": 1853760, "ranks": 2, "device": "cpu"}')
    assert header(make_figure([read_run(write(tmp_path / "b", [line(0)]))]))[1] == "1.9 M parameters, 2 ranks on cpu"


def test_each_of_several_runs_is_named_beside_its_colour(tmp_path: Path) -> None:
    folders = [remembered(write(tmp_path / name, [line(0), line(1)]), title=f"model {name}") for name in "ab"]
    figure = make_figure([read_run(folder) for folder in folders])
    assert header(figure) == ["2 runs", "a: model a", "b: model b"]
    assert [one.get_color() for one in figure.axes[0].lines] == list(COLOURS[:2])


def test_memory_is_drawn_beside_its_prediction(tmp_path: Path) -> None:
    run = read_run(remembered(write(tmp_path / "gpu", [line(s, memory=50 * 2**20) for s in range(3)])))
    assert [(one.words, one.total) for one in bars([run])] == [("predicted", 40 * 2**20), ("measured", 50 * 2**20)]
    figure = make_figure([run])
    found = panel(figure, "Memory at the peak of a step, tensors of rank 0 (MiB)")
    assert [text.get_text() for text in found.get_yticklabels()] == ["predicted", "measured"]
    assert [text.get_text() for text in found.texts] == ["40.0 MiB", "50.0 MiB"]
    assert [bar.get_width() for bar in found.patches] == [10, 12.5, 30, 37.5]  # parameters, then activations
    (level,) = [one for one in panel(figure, "Peak memory, rank 0 (MiB)").lines if set(one.get_ydata()) == {40.0}]
    assert list(level.get_xdata()) == [0, 1, 2]
    # On a CPU the process is counted, which the prediction of tensors says nothing about.
    run = read_run(remembered(write(tmp_path / "cpu", [line(s) for s in range(3)]), kind="cpu", measured=None))
    assert [one.words for one in bars([run])] == ["predicted"]
    of_process = panel(make_figure([run]), "Peak memory of the process, rank 0 (GiB)")
    assert [list(one.get_ydata()) for one in of_process.lines if len(one.get_xdata())] == [[1, 1, 1]]


def test_metrics_of_evaluations_and_what_few_runs_have_get_panels(tmp_path: Path) -> None:
    evaluations = [
        {"step": s, "validation_loss": 2.0, "rows": 9, "seconds": 0.1, "perplexity": 7.4, "accuracy": s / 10,
         "books": {"loss": 1.5}, "note": "text", "ok": True}
        for s in (1, 2)
    ]  # fmt: skip
    lines = [{**line(s), "mfu": 0.42, "loss_scale": 65536.0} for s in range(3)]
    figure = make_figure([read_run(write(tmp_path, lines, evaluations))])
    assert titles(figure)[5:] == [
        "MFU (%)", "Loss scale", "Perplexity (validation)", "Accuracy (validation)", "Books.loss (validation)",
    ]  # fmt: skip
    accuracy = panel(figure, "Accuracy (validation)")
    assert [list(one.get_ydata()) for one in curves(accuracy, marker="D")] == [[0.1, 0.2]]
    assert list(curves(panel(figure, "MFU (%)"))[0].get_ydata()) == pytest.approx([42.0] * 3)


def test_a_long_loss_is_smooth_over_a_faint_raw_curve(tmp_path: Path) -> None:
    loss = panel(make_figure([read_run(write(tmp_path, noisy(500)))]), "Loss")
    raw, smoothed = loss.lines[:2]
    assert len(raw.get_xdata()) == 500 and raw.get_alpha() < 0.5 and raw.get_linewidth() < smoothed.get_linewidth()
    rough = [np.abs(np.diff(one.get_ydata()[200:])).mean() for one in (raw, smoothed)]
    assert rough[1] < rough[0] / 5


def test_runs_differ_in_colour_and_then_in_dashes(tmp_path: Path) -> None:
    folders = [write(tmp_path / f"run{i}", noisy(5, seed=i)) for i in range(9)]
    figure = make_figure([read_run(folder) for folder in folders])
    speed = panel(figure, "Throughput (tokens/s)")
    looks = [(one.get_color(), one.get_linestyle()) for one in curves(speed, linewidth=1.8)]
    assert len(set(looks)) == 9 and [colour for colour, _ in looks[:7]] == list(COLOURS)
    assert header(figure) == ["9 runs", *(f"run{i}" for i in range(9))]
    assert [(one.get_color(), one.get_linestyle()) for one in figure.axes[0].lines] == looks


def test_validation_is_apart_from_training(tmp_path: Path) -> None:
    evaluations = [{"step": s, "validation_loss": 4.0 - s / 100} for s in (49, 99)]
    loss = panel(make_figure([read_run(write(tmp_path, noisy(100), evaluations))]), "Loss")
    points = curves(loss, marker="D")
    assert [(list(one.get_xdata()), list(one.get_ydata())) for one in points] == [([49, 99], [3.51, 3.01])]
    trained = curves(loss, linewidth=1.8)
    assert points[0].get_color() != trained[0].get_color()
    legend = loss.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["training, smoothed", "each step", "validation"]
    # Points of training, which a short run has, are of another shape.
    short = panel(make_figure([read_run(write(tmp_path / "short", noisy(9), evaluations[:0]))]), "Loss")
    assert [one.get_marker() for one in curves(short, linewidth=1.8)] == ["o"]


def test_values_out_of_range_are_marked_and_told(tmp_path: Path) -> None:
    lines = noisy(50)
    lines[0]["loss"] = 312.4
    lines[7]["tokens_per_second"] = lines[9]["tokens_per_second"] = 5e6
    figure = make_figure([read_run(write(tmp_path, lines))])
    loss, speed = panel(figure, "Loss"), panel(figure, "Throughput (tokens/s)")
    assert loss.get_title("right") == "▲ 312.4 at step 0"
    assert speed.get_title("right") == "▲ 5,000,000 at step 7; 1 more above"
    assert panel(figure, "Peak memory of the process, rank 0 (GiB)").get_title("right") == ""
    assert [list(one.get_xdata()) for one in curves(speed, marker="^")] == [[7, 9]]


def test_a_gradient_norm_that_falls_by_orders_of_magnitude_is_logarithmic(tmp_path: Path) -> None:
    lines = [{**line(s), "grad_norm": 100 * 0.9**s} for s in range(60)]
    figure = make_figure([read_run(write(tmp_path, lines))])
    assert panel(figure, "Gradient norm").get_yscale() == "log" and panel(figure, "Loss").get_yscale() == "linear"


def test_over_seconds_a_step_is_where_it_ended(tmp_path: Path) -> None:
    lines = [
        {**line(s, 3.0 - s / 100), "step_seconds": 0.5 if s < 40 else None if s == 40 else 1.0} for s in range(2, 50)
    ]
    lines[1]["loss"] = 312.4
    evaluations = [{"step": s, "validation_loss": 2.0} for s in (1, 41)]
    figure = make_figure([read_run(write(tmp_path, lines, evaluations))], "seconds")
    loss, memory = panel(figure, "Loss"), panel(figure, "Peak memory of the process, rank 0 (GiB)")
    assert memory.get_xlabel() == "Training time (s)" and loss.get_title("right") == "▲ 312.4 at 1 s"
    (sizes,) = curves(memory, linewidth=1.8)
    assert list(sizes.get_xdata()) == [*(0.5 * k for k in range(1, 39)), 19.0, *(19.0 + k for k in range(1, 10))]
    assert [list(one.get_xdata()) for one in curves(loss, marker="D")] == [[0.0, 20.0]]
    with pytest.raises(ConfigError, match="--over days: legal: steps, seconds"):
        draw([read_run(tmp_path)], tmp_path / "a.png", "days")


def test_only_the_loss_has_a_panel_without_data(tmp_path: Path) -> None:
    run = read_run(write(tmp_path, [{"step": s, "tokens_per_second": 1.0} for s in range(3)]))
    assert [one.title for one in panels([run])] == ["Loss", "Throughput (tokens/s)"]
    assert [text.get_text() for text in panel(make_figure([run]), "Loss").texts] == ["no data"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["a$b$c", "_hidden", "x" * 100, "50 %"])
@pytest.mark.parametrize("number", [1, 4])
def test_nothing_overlaps_whatever_the_names(tmp_path: Path, name: str, number: int) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    folders = [
        remembered(write(tmp_path / f"{name}{i}", noisy(40 + i), [{"step": 3, "validation_loss": 2.0}]))
        for i in range(number)
    ]
    figure = make_figure([read_run(folder) for folder in folders])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    boxes += [legend.get_window_extent() for part in figure.subfigs for legend in part.legends]
    assert len(boxes) == 1 + 5 + 1 + 1
    for index, box in enumerate(boxes):
        assert box is not None and box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[index + 1 :] if other is not None)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_one_run_has_its_picture_in_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", noisy(40))
    run([folder, folder / ".." / "run"], None, False)
    assert capsys.readouterr().out.strip() == str(folder / "plot.png")
    picture = imread(folder / "plot.png")
    assert picture.shape[1] == 1650 and picture[..., :3].std() > 0.02


def test_several_runs_are_one_picture_here_and_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = [write(tmp_path / name, [line(0, loss)]) for name, loss in (("a", 3.0), ("b", 2.0))]
    run(folders, None, True)
    found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    assert found["plot"] == "plot.png" and (tmp_path / "plot.png").stat().st_size > 10_000
    assert [(one["run"], one["steps"], one["loss_last"], one["validation_loss"]) for one in found["runs"]] == [
        ("a", 1, 3.0, None), ("b", 1, 2.0, None),
    ]  # fmt: skip


@pytest.mark.slow
def test_out_says_where_and_in_which_format(tmp_path: Path) -> None:
    found = read_run(write(tmp_path / "run", [line(0)]))
    draw([found], tmp_path / "new" / "a.svg")
    assert "<svg" in (tmp_path / "new" / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match=r"--out .*a.txt: .txt is not legal; legal: .png, .svg, .pdf"):
        draw([found], tmp_path / "a.txt")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(
        ConfigError, match=r"--out .*folder.png: cannot be written: .*; legal: a file in a writable folder"
    ):
        draw([found], tmp_path / "folder.png")


def test_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_run(write(tmp_path, [line(0)]))
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"plot: .*; legal: pip install matplotlib"):
        draw([found], tmp_path / "plot.png")


@pytest.mark.slow
@pytest.mark.fresh
def test_neither_torch_nor_pyplot_is_imported(tmp_path: Path) -> None:
    write(tmp_path, [line(0)])
    code = (
        "import sys; from pathlib import Path; from shardwise.cli.plot import run; run([Path(sys.argv[1])], None, "
        "False); "
        "print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_steps_of_workers_end_in_any_order(tmp_path: Path) -> None:
    """They do not wait for each other, so no line is that of a restart; a batch that is done again counts once."""
    ends = [(0, 0, 1.0), (2, 1, 1.5), (1, 0, 2.0), (4, 0, 3.0), (3, 1, 4.0), (2, 0, 4.5)]
    lines = [
        {"step": step, "loss": 5.0 - step, "grad_norm": 1.0, "lr": 0.1, "step_seconds": 1.0, "worker": worker,
         "tokens_per_second": 100.0, "staleness": worker, "time": 1000.0 + end}
        for step, worker, end in ends
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    run = read_run(tmp_path)
    assert [one["step"] for one in run.metrics] == [0, 1, 2, 3, 4] and run.workers == [0, 1]
    assert run.seconds == 4.5 and summary(run)["steps"] == 5
    assert summary(run)["tokens_per_second"] == pytest.approx(100 * 5 / 4.5)  # so many work at a time
    ends = np.array([3.0, 4.0, 4.5, 3600.0, 3599.5])  # an hour of nothing does not count
    assert covered(ends, np.array([1.0, 1.0, 2.0, 1.0, 2.0])).tolist() == [1.0, 2.0, 2.5, 5.0, 4.5]
    places, losses = run.along("loss", "seconds")
    assert places.tolist() == [1.0, 2.0, 3.0, 4.0, 4.5] and losses.tolist() == [5.0, 4.0, 1.0, 2.0, 3.0]
    (stale,) = (one for one in panels([run]) if one.title == "Staleness")
    assert stale.curves[0].values.tolist() == [0, 0, 0, 1, 0]
    cards = {name: (number, more) for name, number, more in gathered(tmp_path).cards}
    assert cards["workers"] == ("2", "steps of each: 4, 1") and cards["staleness"][0] == "0.2"
    assert cards["training"][1] == "in 5 steps"
    plan = asynchronous_server(Plan.of(), "stale", 2, 3, staleness=1, push="int8", pull_every=4, rate="staleness")
    (tmp_path / "plan.toml").write_text(plan.to_toml())
    assert gathered(tmp_path).plan.found is not None
    told = " ".join(gathered(tmp_path).plan.found[0])
    for words in (
        "3 workers and 2 servers",
        "at most 1 push ahead",
        "sent as int8",
        "one of 4 pushes",
        "is divided by",
    ):
        assert words in told
    assert "trains alone" not in told
