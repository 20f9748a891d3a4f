"""The page of a run: one file with all that the folder has, escaped, and readable in a browser at any width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from test_plot import line, noisy, remembered
from test_plot import write as write_metrics
from test_recorded import pipeline
from test_recorded import write as write_trace
from typer.testing import CliRunner

from shardwise.cli.main import app
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.parallel.data import data_parallel
from shardwise.report import facts, happened, plan_words
from shardwise.report.facts import gathered
from shardwise.report.html import page, write_page

PARTS = ("curves", "plan", "memory", "step", "evaluations", "samples", "events", "environment", "config")
VOID = {"meta", "br", "img", "hr", "input", "link"}
EVIL = "<script>alert('x')</script>\"'&\x1b[31m"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOG = """14:52:21 starting the ranks
14:52:42 rank 1 was killed (SIGKILL, by the system if memory ran out) at NORM of step 41
14:52:42 the end of logs/rank_1.log:
14:52:42   14:52:33 rank 1: ready after 12.7 s
its second line
14:52:42 all ranks had ended 0.8 s after the first sign of it
14:52:42 starting again from step_00000040 (restart 1 of 2)
14:52:43 starting the ranks
14:53:09 the ranks ended after 27.0 s
"""


class Strict(HTMLParser):
    """Reads a page, and notes every tag that is not closed in its order."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: Counter[str] = Counter()
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names)
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name == "href"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> within {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def read(text: str) -> Strict:
    """Parse a page, and check what is true of every page."""
    found = Strict()
    found.feed(text)
    found.close()
    assert found.open == [] and text.startswith("<!DOCTYPE html>")
    assert sorted(found.ids) == sorted(PARTS)
    assert [link[1:] for link in found.links] == list(PARTS) and all(link.startswith("#") for link in found.links)
    # Nothing is fetched, and nothing runs but the page's own script.
    assert found.tags["script"] == found.tags["style"] == 1
    assert not {"link", "img", "iframe", "object", "embed", "base", "form", "use", "image"} & set(found.tags)
    assert not [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "srcset", "style")]
    outside = re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r'xmlns="[^"]*"|"http://www.w3.org/2000/svg"', "", text))
    assert [one for one in outside if "." in one] == []
    assert "url(" not in text and "@import" not in text
    return found


def whole(folder: Path, evil: str = "") -> Path:
    """Write the folder of a finished run with all of its files; ``evil`` is in everything that users can name."""
    evaluations = [
        {
            "step": s,
            "validation_loss": 3.0 - s / 50,
            "rows": 8,
            "perplexity": 9.5,
            f"metric{evil}": 0.25,
            "seconds": 0.5,
        }
        for s in (20, 40)
    ]
    remembered(write_metrics(folder, noisy(60), evaluations), title=f"gpt{evil}, 2 ranks\nreplicated")
    write_trace(folder, *pipeline())
    plan = data_parallel(Plan.of(Mesh.of(pp=2), microbatches=4), 2, zero=1)
    (folder / "plan.toml").write_text(plan.to_toml(), encoding="utf-8")
    config = {"model": {"name": f"gpt{evil}"}, "data": {"source": f"a{evil}.txt"}, "train": {"steps": 60}}
    text = "".join(
        f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in t.items()) for name, t in config.items()
    )
    (folder / "config.toml").write_text(text, encoding="utf-8")
    about = {
        "ranks": 4, "device": "cpu", "parameters": 124672, "staging_bytes": 748096, "phases": f"starting 1 s{evil}",
        "float32_matmul": {"precision": "highest", "fast_error": 1e-3}, "notes": [f"a note{evil}"], "first_step": 0,
    }  # fmt: skip
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")
    (folder / "samples.jsonl").write_text(
        json.dumps({"step": 30, "text": f"def f{evil}\ud800"}) + "\n", encoding="utf-8"
    )
    (folder / "sample.txt").write_text(f"the last{evil}", encoding="utf-8")
    (folder / "result.json").write_text("{}", encoding="utf-8")
    (folder / "program.txt").write_text(f"all ranks{evil}", encoding="utf-8")
    (folder / "logs").mkdir()
    (folder / "logs" / "launcher.log").write_text(LOG + f"14:53:10 something{evil}\n", encoding="utf-8")
    (folder / "logs" / "rank_0.log").write_text(f"line 1\nan error{evil}\n", encoding="utf-8")
    (folder / "checkpoints" / "step_00000040").mkdir(parents=True)
    return folder


def test_a_page_has_everything_that_the_folder_has(tmp_path: Path) -> None:
    folder = whole(tmp_path / "my run")
    out = folder / "report.html"
    shown = CliRunner().invoke(app, ["report", str(folder)])
    assert shown.exit_code == 0 and shown.stdout.strip() == str(out), shown.output
    found = read(out.read_text(encoding="utf-8"))
    for words in (
        "my run", "gpt, 2 ranks, replicated", "finished: 60 of 60 steps", "Learning rate", "Gradient norm",
        "Throughput (tokens/s)", "Perplexity (validation)", "Metric (validation)",
        "4 ranks train as one device (pp 2 x dp 2).", "in the order 1f1b",
        "The optimizer's state is sharded over the ranks of dp (ZeRO-1).", "step 3 of 2 ranks, recorded",
        "simulated from the medians", "validation loss rows perplexity", "the last", "after step 30", "def f",
        "rank 1 was killed", "starting again from step_00000040", "an error", "124,672", "730.6 KiB", "a note",
        "checkpoints kept 40", "the number of steps", "faults 1 started again 1 time",
        "after a fault (step 40)", "backward of head in microbatch 0", "40.0 MiB 50.0 MiB +25.0%",
    ):  # fmt: skip
        assert words in found.text, words


def test_nothing_of_a_users_is_markup(tmp_path: Path) -> None:
    folder = whole(tmp_path / "a <b>run</b> & more", EVIL)
    text = page(gathered(folder))
    found = read(text)  # one script, and tags that match
    assert "<b>run" not in text and "alert('x')</script>" not in text
    for words in ("a <b>run</b> & more", "def f<script>alert('x')</script>", "the last<script>", "an error<script>",
                  "a note<script>", "something<script>", "all ranks<script>", "gpt<script>"):  # fmt: skip
        assert words in found.text, words
    assert "\x1b" not in text and text.encode("utf-8")


@pytest.mark.parametrize("name", [
    "metrics.jsonl", "evaluations.jsonl", "memory.json", "plan.toml", "about.json", "config.toml", "samples.jsonl",
    "sample.txt", "result.json", "program.txt", "logs", "trace", "checkpoints",
])  # fmt: skip
def test_a_file_that_is_missing_costs_only_its_part(tmp_path: Path, name: str) -> None:
    folder = whole(tmp_path / "run")
    before = gathered(folder)
    shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()
    after = gathered(folder)
    read(page(after))
    lost = {
        part for part in
        ("charts", "plan", "memory", "step", "evaluations", "samples", "environment", "config", "program")
        if getattr(before, part).found is not None and getattr(after, part).found is None
    }  # fmt: skip
    assert lost == {
        "metrics.jsonl": {"charts"}, "evaluations.jsonl": {"evaluations"}, "memory.json": {"memory"},
        "plan.toml": {"plan"}, "about.json": {"environment"}, "config.toml": {"config"}, "program.txt": {"program"},
        "trace": {"step"},
    }.get(name, set())  # fmt: skip
    assert all(getattr(after, part).note for part in lost)
    if name == "logs":
        assert before.events and not after.events and not after.logs
    if name == "result.json":
        assert (before.state, after.state) == ("finished", "unfinished")


@pytest.mark.parametrize("name", [
    "metrics.jsonl", "evaluations.jsonl", "memory.json", "plan.toml", "about.json", "config.toml", "trace/rank_1.jsonl",
])  # fmt: skip
def test_a_damaged_file_is_named_in_its_part(tmp_path: Path, name: str) -> None:
    folder = whole(tmp_path / "run")
    (folder / name).write_bytes(b'\xff{"step": "<i>"}\n{"rank": 0}\n')
    found = gathered(folder)
    assert name in read(page(found)).text and found.state == "finished"


def test_runs_that_have_not_come_far(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    for text, state, words in (
        ("14:00:00 starting the ranks\n", "unfinished", "not finished: 0 steps"),
        ("14:00:00 starting the ranks\n14:00:09 rank 0: KeyError: 'x'\n", "failed", "failed: 0 steps"),
        ("14:00:00 starting the ranks\n14:00:09 the ranks ended after 9 s, as they were asked to\n", "stopped",
         "stopped as asked: 0 steps; the same command goes on from there"),
    ):  # fmt: skip
        (folder / "logs" / "launcher.log").write_text(text)
        found = gathered(folder)
        read(page(found))
        assert (found.state, found.state_words) == (state, words)
        assert found.charts.note == "no step has been written yet" and found.plan.found is None
    write_metrics(folder, [line(0), line(1, None)])
    (folder / "config.toml").write_text("[train]\nsteps = 10\n")
    found = gathered(folder)
    text = page(found)
    assert "stopped as asked: 2 of 10 steps" in read(text).text and found.cards[0][:2] == ("loss", "not finite")


def test_folders_and_files_that_are_not_legal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, what in (
        ("absent", "there is no such folder"),
        ("file", "is a file"),
        ("empty", "none of metrics.jsonl, "),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: {what}.*; legal: the folder of a run \(train.run_dir\)"):
            gathered(tmp_path / name)
    folder = write_metrics(tmp_path / "run", [line(0)])
    with pytest.raises(ConfigError, match=r"--out .*a.pdf: .pdf is not legal; legal: .html, .htm"):
        write_page(folder, tmp_path / "a.pdf")
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(ConfigError, match=r"--out .*folder.html: cannot be written: .*; legal: a file in a writable"):
        write_page(folder, tmp_path / "folder.html")
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "absent"), "--json"])
    assert refused.exit_code == 2 and json.loads(refused.stdout)["cause"] == "config"


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_events_have_their_kinds_and_details(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "launcher.log").write_text(LOG)
    found = happened.events(tmp_path)
    assert [one.kind for one in found] == ["start", "fault", "restart", "start", "end"]
    assert found[1].time == "14:52:42" and found[1].text.startswith("rank 1 was killed")
    assert found[1].details[-1].startswith("all ranks had ended 0.8 s") and "its second line" in found[1].details
    assert (
        happened.restarts(found) == 1
        and happened.went_on_from(found) == [40]
        and happened.events(tmp_path / "nowhere") == []
    )


def test_charts_are_svg_that_has_every_value(tmp_path: Path) -> None:
    lines = [line(s, 3.0 - s / 10, memory=2**30) for s in range(10)]
    folder = write_metrics(tmp_path, lines, [{"step": 5, "validation_loss": 2.0}])
    (tmp_path / "config.toml").write_text("")
    charts = gathered(folder).charts.found
    assert charts is not None
    loss = ET.fromstring(charts[0])
    hovered = json.loads(loss.attrib["data-chart"])
    assert [one["name"] for one in hovered["series"]] == ["training", "validation"]
    assert [point[2:] for point in hovered["series"][0]["points"]] == [[str(s), f"{3 - s / 10:.5g}"] for s in range(10)]
    assert [point[2:] for point in hovered["series"][1]["points"]] == [["5", "2"]]
    assert loss.attrib["aria-label"] == "Loss: 3 at first, 2.1 at last"
    words = [text.text for text in loss.iter("text")]
    assert {"Loss", "step", "training", "validation", "0", "8", "3"} <= set(words)
    heights = [point[1] for point in hovered["series"][0]["points"]]
    assert heights == sorted(heights) and len(set(heights)) == 10  # a loss that falls goes down
    pixels = [float(v) for chart in charts for one in ET.fromstring(chart).iter("path")
              for v in re.findall(r"[\d.]+", one.attrib["d"])]  # fmt: skip
    assert pixels and min(pixels) >= 0 and max(pixels) <= 420


@pytest.mark.slow
def test_long_runs_stay_small(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path, noisy(20_000))
    text = page(gathered(folder))
    assert len(text) < 600_000
    spike = noisy(20_000)
    spike[12_345]["loss"] = 4.5  # within the range, and higher than all around it
    charts = gathered(write_metrics(tmp_path, spike)).charts.found
    assert charts is not None
    series = json.loads(ET.fromstring(charts[0]).attrib["data-chart"])["series"][0]["points"]
    assert len(series) <= 800 and ["12,345", "4.5"] in [point[2:] for point in series]


@pytest.mark.parametrize(("plan", "words"), [
    (Plan.of(), ["One rank trains alone.", "The model computes in fp32."]),
    (data_parallel(Plan.of(precision="bf16", recompute="full", offload="optimizer"), 2, zero=3), [
        "2 ranks train as one device (dp 2).", "rows of each step are divided over 2 ranks", "(ZeRO-3)",
        "computes in bf16, with masters", "forward again", "on the host"]),
    (Plan.of(Mesh.of(pp=2), microbatches=4, schedule="pipedream-2bw"), [
        "cut into 2 stages on 2 ranks, 1 stage each", "order pipedream-2bw", "weights that are one step old",
        "in 4 microbatches"]),
    (Plan.of(Mesh.of(tp=2), tensor="1d-sp"), ["Each layer is shared by 2 ranks, by the recipe 1d-sp."]),
])  # fmt: skip
def test_a_plan_in_words(plan: Plan, words: list[str]) -> None:
    text = " ".join(plan_words.sentences(plan))
    for one in words:
        assert one in text, text
    table = dict(plan_words.options(plan))
    assert table["microbatches"] == str(plan.microbatches) and table["precision"] == plan.numeric.precision


def test_a_program_that_is_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "LONGEST_PROGRAM", 5)
    found = gathered(whole(tmp_path / "run"))
    assert found.program.found is None and "too long" in read(page(found)).text


# ---- in a browser ----------------------------------------------------------------------------------------------------

PROBE = """<script>
const tips = [];
for (const svg of document.querySelectorAll("svg[data-chart]")) {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2, clientY: box.top + 20}));
  tips.push(svg.parentNode.querySelector(".tip").innerText);
}
const root = document.documentElement;
const charts = [...document.querySelectorAll(".charts svg")].map((svg) => svg.getBoundingClientRect());
const small = [...document.querySelectorAll(".charts text")].map((t) => t.getBoundingClientRect().height);
parent.postMessage(JSON.stringify({
  width: innerWidth, scroll: root.scrollWidth, tips, smallest: Math.min(...small),
  inside: charts.every((box) => box.left >= 0 && box.right <= innerWidth),
}), "*");
</script></body>"""


FRAME = """<script>onmessage = (event) => { document.title = event.data; };</script>
<iframe src="probe.html" width="WIDTH" height="900" style="border: 0"></iframe>"""  # a window is at least 500 wide


@pytest.mark.quick(1)
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_it_without_overflow_and_tells_values(tmp_path: Path, width: int) -> None:
    text = page(gathered(whole(tmp_path / "run", EVIL)))
    (tmp_path / "probe.html").write_text(text.replace("</body>", PROBE), encoding="utf-8")
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)), encoding="utf-8")
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--window-size=1400,1000", "--virtual-time-budget=2000", "--dump-dom", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(title[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))
    assert found["scroll"] <= found["width"] == width and found["inside"]
    assert found["smallest"] >= 9  # pixels of a line of the smallest text
    assert len(found["tips"]) >= 6 and re.search(r"training, step \d+: \d", found["tips"][0])
