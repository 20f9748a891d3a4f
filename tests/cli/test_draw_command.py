"""``shardwise simulate`` and ``shardwise draw``: numbers of schedules, pictures, and a run drawn from what it has
recorded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len
from test_memory_command import RUN, shardwise, text  # noqa: F401 - the fixture
from typer.testing import CliRunner, Result

from shardwise.cli.main import app
from shardwise.estimate.search import auto
from shardwise.estimate.simulate import simulate
from shardwise.parallel.schedule import timetable
from shardwise.report.recorded import of_recorded, read_step
from timetables import uniform


def widest(shown: Result) -> int:
    """Columns of the output, but for the names of files."""
    return max(cell_len(line) for line in shown.stdout.splitlines() if "/" not in line.split(" ")[0])


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (4, 8), (3, 3)])
def test_simulate_has_the_closed_form_of_1f1b(ranks: int, microbatches: int) -> None:
    """(p - 1) / m of ideal time (GPipe, section 2.3; PipeDream-Flush has the same)."""
    given = ("simulate", "--schedule", "1f1b", "--ranks", str(ranks), "--microbatches", str(microbatches))
    (values,) = json.loads(call(*given, "--json").stdout)["simulations"]
    assert values["step_seconds"] == pytest.approx(3e-3 * (microbatches + ranks - 1))
    assert values["bubble_of_ideal"] == pytest.approx((ranks - 1) / microbatches)
    assert values["bubble_of_total"] == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
    assert [one["peak_activations"] for one in values["by_rank"]] == [
        min(ranks - r, microbatches) for r in range(ranks)
    ]
    assert (values["schedule"], values["ranks"], values["microbatches"], values["stages_per_rank"]) == (
        "1f1b",
        ranks,
        microbatches,
        1,
    )
    shown = call(*given)
    assert shown.exit_code == 0 and widest(shown) <= 80
    words = " ".join(shown.stdout.split())
    assert (
        f"{values['bubble_of_total']:.2%} of the total time of all ranks {values['bubble_of_ideal']:.2%} of the ideal "
        "time" in words
    )
    found = re.findall(r"^(\d+) +\d+ ms +[\d.]+% +(\d+)$", shown.stdout, re.M)
    assert found == [(str(r), str(min(ranks - r, microbatches))) for r in range(ranks)]


def test_stages_share_the_times_of_their_rank() -> None:
    """So schedules of one model can be compared: v stages a rank divide the bubble of 1F1B by v (Megatron-LM, section
    2.2.2).
    """
    given = ("--ranks", "3", "--microbatches", "6", "--times", "2,3,1,0.5", "--schedule", "zbv", "--schedule", "1f1b")
    values = json.loads(call("simulate", *given, "--json").stdout)["simulations"]
    for one, name, each in zip(values, ("zbv", "1f1b"), (2, 1), strict=True):
        costs = uniform(3 * each, 2e-3 / each, 3e-3 / each, 1e-3 / each, 0.5e-3)
        truth = simulate(timetable(name, 3, 6), costs)
        assert one["step_seconds"] == pytest.approx(truth.seconds) and one["stages_per_rank"] == each
        assert one["critical"] == [[rank, *truth.timetable[rank][at]] for rank, at in truth.critical]
        assert [r["peak_activations"] for r in one["by_rank"]] == pytest.approx([n / each for n in truth.peak_bytes])
    for each in (2, 3):
        given = (
            "--schedule",
            "interleaved",
            "--stages-per-rank",
            str(each),
            "--ranks",
            "4",
            "--microbatches",
            "8",
            "--json",
        )
        (one,) = json.loads(call("simulate", *given).stdout)["simulations"]
        assert one["bubble_of_ideal"] == pytest.approx(3 / 8 / each)


@pytest.mark.parametrize("memory", [2.0, 3.0, None])
def test_auto_is_the_search_within_its_limit(memory: float | None) -> None:
    given = ["--schedule", "auto", "--ranks", "3", "--microbatches", "5", "--times", "1,1.2,0.8,0.1", "--json"]
    (one,) = json.loads(call("simulate", *given, *([] if memory is None else ["--memory", str(memory)])).stdout)[
        "simulations"
    ]
    costs = uniform(3, 1e-3, 1.2e-3, 0.8e-3, 1e-4)
    truth = auto(3, 5, costs, float("inf") if memory is None else memory)
    assert (
        one["step_seconds"] == pytest.approx(truth.simulation.seconds)
        and truth.name.removeprefix("auto ") in one["title"]
    )
    assert [r["peak_activations"] for r in one["by_rank"]] == list(truth.simulation.peak_bytes)
    assert memory is None or max(truth.simulation.peak_bytes) <= memory


def test_a_config_gives_what_options_leave_open(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[parallel]\nmicrobatches = 4\n")
    (one,) = json.loads(call("simulate", str(config), "--json").stdout)["simulations"]
    assert (one["ranks"], one["microbatches"], one["bubble_of_total"]) == (1, 4, pytest.approx(0.0))
    given = ("parallel.microbatches=8", "data.batch_size=16", "--ranks", "2", "--json")
    (one,) = json.loads(call("simulate", str(config), *given).stdout)["simulations"]
    assert (one["ranks"], one["microbatches"]) == (2, 8)


def test_draw_writes_what_it_prints(tmp_path: Path) -> None:
    picture, trace = tmp_path / "a" / "t.svg", tmp_path / "b" / "t.json"
    shown = call("draw", "--schedule", "zb-h1", "--out", str(picture), "--perfetto", str(trace))
    assert shown.exit_code == 0, shown.output
    assert widest(shown) <= 80
    assert len(re.findall(r"^rank \d \|", shown.stdout, re.M)) == 4 and "zb-h1, 4 ranks, 8 microbatches" in shown.stdout
    assert picture.read_text().count("<title>") == 4 * 8 * 3
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    truth = simulate(timetable("zb-h1", 4, 8), uniform(4, 1e-3, 1e-3, 1e-3))
    assert len(events) == 4 * 8 * 3 and max(e["ts"] + e["dur"] for e in events) == pytest.approx(1e6 * truth.seconds)
    values = json.loads(call("draw", "--schedule", "zb-h1", "--schedule", "gpipe", "--json").stdout)
    assert [one["title"].split(",")[0] for one in values["drawings"]] == ["zb-h1", "gpipe"]
    assert (
        values["drawings"][0]["bubble"] == pytest.approx(truth.bubble_of_total)
        and len(values["drawings"][0]["boxes"]) == 96
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--schedule", "2f2b"], r'schedule: .2f2b. is not legal; legal: "naive"'),
        (["simulate", "--ranks", "0"], "0 is not legal; legal: an integer of at least 1"),
        (["draw", "--schedule", "1f1b", "--stages-per-rank", "3"], r"stages_per_rank: 3 is not legal"),
        (["draw", "--times", "1,2,3"], "--times 1,2,3: legal: four numbers of at least 0 in ms"),
        (["draw", "--times", "1,nan,3,0"], "--times 1,nan,3,0: legal"),
        (["draw", "--times", "1,-1,3,0"], "--times 1,-1,3,0: legal"),
        (["draw", "--times", "0,0,0,1"], "--times 0,0,0,1: legal"),
        (["draw", "--norm", "none"], "norm: 'none' is not legal"),
        (["draw", "--out", "t.gif"], r"--out t.gif: .gif is not legal; legal: .png, .svg, .pdf"),
        (["draw", "--perfetto", "/dev/null/t.json"], "--perfetto /dev/null/t.json: cannot be written"),
        (["draw", "--memory", "3"], "--memory 3: legal: a number of at least 1, with --schedule auto"),
        (["draw", "--schedule", "auto", "--memory", "0.5"], "--memory 0.5: legal: a number of at least 1"),
        (["draw", "--schedule", "auto", "--ranks", "-1"], "ranks: -1 is not legal; legal: an integer of at least 1"),
        (["draw", "parallel.rows=batch", "parallel.microbatches=2"], 'parallel.rows: "batch": only the captured model'),
        (["draw", "--step", "3"], "--step 3: legal: with the folder of a run"),
        (["draw", "/nowhere"], "/nowhere: neither a config file nor section.key=value"),
        (["draw", ".", "--ranks", "3"], "legal: none, for it is the folder of a run"),
        (["draw", "."], "trace/rank_0.jsonl: cannot be read"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = call(*arguments)
    assert shown.exit_code == 2 and re.search(words, shown.output), shown.output


@pytest.mark.slow
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 3])
def test_a_run_is_drawn_beside_its_prediction(tmp_path: Path, text: str, zero: int) -> None:  # noqa: F811
    folder, picture, trace = tmp_path / "run", tmp_path / "t.png", tmp_path / "t.json"
    given = [*RUN, "train.steps=5", f"parallel.zero={zero}", "parallel.microbatches=2", text, f"train.run_dir={folder}"]
    done = shardwise("train", *given, "train.trace_steps=[1,4]", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "memory.json").read_text())["measured"] is not None  # of a step that is not recorded
    steps = [read_step(folder, step) for step in (1, 4)]
    program = (folder / "program.txt").read_text().splitlines()[1:]
    assert all(len(one.events) == len(program) for ranks in steps for one in ranks)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for ranks in steps:  # a step's clock also has reading the batch
        assert all(0 < one.seconds <= 1.05 * metrics[one.step]["step_seconds"] + 0.05 for one in ranks)

    shown = call("draw", str(folder), "--out", str(picture), "--perfetto", str(trace))
    assert shown.exit_code == 0, shown.output
    assert widest(shown) <= 80 and picture.read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"^rank \d \|", shown.stdout, re.M)) == 4  # two ranks, recorded and predicted
    real, simulated = json.loads(call("draw", str(folder), "--json").stdout)["drawings"]
    detailed = of_recorded(folder, whole=False)
    assert simulated["step_seconds"] <= real["step_seconds"] == detailed.step
    lengths = [
        sum(b["stop"] - b["start"] for b in simulated["boxes"] if b["kind"] == kind) for kind in ("F", "B", "STEP")
    ]
    truth = [sum(b.stop - b.start for b in detailed.boxes if b.kind == kind) for kind in ("F", "B", "STEP")]
    assert lengths == pytest.approx(truth)  # the median of two microbatches is their mean
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X" and e["pid"] < 2]
    assert len(events) == len(detailed.boxes) == 2 * len(program)
    assert call("draw", str(folder), "--step", "2").exit_code == 2


@pytest.mark.full
def test_nothing_is_recorded_where_no_step_is_named(tmp_path: Path, text: str) -> None:  # noqa: F811
    folder = tmp_path / "run"
    done = shardwise("train", *RUN, "train.trace_steps=[]", text, f"train.run_dir={folder}", "--json")
    assert done.returncode == 0 and not (folder / "trace").exists()
    refused = shardwise("train", *RUN, "train.trace_steps=[0]", text, f"train.run_dir={folder}", "--json")
    assert refused.returncode == 2 and "train.trace_steps = [0]" in refused.stdout and "[] for none" in refused.stdout
