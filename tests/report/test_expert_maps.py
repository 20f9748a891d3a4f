"""The load of experts as heat maps: what is read, what a terminal and a picture show, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from matplotlib.image import imread
from test_plot import line, write

from shardwise.cli.plot import run_experts
from shardwise.core.errors import ConfigError
from shardwise.report.expert_maps import MOST, SHADES, colour, expert_maps, lines, sheet
from shardwise.report.facts import gathered
from shardwise.report.panels import panels
from shardwise.report.runs import read_run


def loaded(step: int, loads: dict[str, list[int]]) -> dict[str, Any]:
    more = {"expert_entropy": 0.5 + step / 100, "expert_load_highest": 1.5, "expert_dropped": 0.25}
    return {**line(step), **more, "expert_load": loads}


def a_run(folder: Path, steps: int = 6, experts: int = 4, layers: int = 2) -> Path:
    """Every second step has loads; the last expert gets nothing, the first as much as two."""
    load = [2, *[1] * (experts - 2), 0]
    rows = [
        loaded(s, {f"blocks.{i}.mlp": load for i in range(layers)}) if s % 2 == 0 else line(s) for s in range(steps)
    ]
    return write(folder, rows)


def test_what_is_read(tmp_path: Path) -> None:
    first, second = expert_maps(read_run(a_run(tmp_path)))
    assert (first.name, second.name) == ("blocks.0.mlp", "blocks.1.mlp")
    assert first.steps.tolist() == [0, 2, 4] and first.loads.tolist() == [[2, 1, 1, 0]] * 3
    assert expert_maps(read_run(write(tmp_path / "dense", [line(0)]))) == []
    (nobody,) = expert_maps(read_run(write(tmp_path / "none", [loaded(0, {"a": [0, 0]})])))
    assert nobody.loads.tolist() == [[1, 1]]


def test_columns_are_means_over_steps(tmp_path: Path) -> None:
    rows = [loaded(s, {"a": [s + 1, 11 - s - 1]}) for s in range(10)]
    (one,) = expert_maps(read_run(write(tmp_path, rows)))
    columns = one.columns(3)
    assert [column[:2] for column in columns] == [(0, 2), (3, 6), (7, 9)]
    assert columns[0][2].tolist() == pytest.approx([2 / 5.5, 9 / 5.5])
    assert len(one.columns(100)) == 10


def test_a_terminal(tmp_path: Path) -> None:
    found = lines(expert_maps(read_run(a_run(tmp_path, steps=400, experts=12))), 80)
    assert max(map(len, found)) == 80
    assert found[2] == "blocks.0.mlp, steps 0 to 398"
    assert found[3] == " 0 " + "█" * 77 and found[4] == " 1 " + "▒" * 77 and found[14].strip() == "11"
    assert len(found) == 1 + 2 * (2 + 12)
    shades = [shade for _, shade in SHADES]
    assert all(shade in found[0] for shade in shades)


def test_a_picture(tmp_path: Path) -> None:
    maps = expert_maps(read_run(a_run(tmp_path)))
    svg = sheet(maps, "a").svg()
    tips = [one.text for one in ET.fromstring(svg).iter() if one.tag.endswith("title")]
    assert len(tips) == 2 * 4 * 3 and "expert 3, step 4: 0 means" in tips
    assert svg.count(colour(2.0)) == 2 * 3 + 1 and svg.count(colour(0.0)) == 2 * 3 + 1  # and the legend
    many = sheet(expert_maps(read_run(a_run(tmp_path / "deep", experts=300, layers=40))), "deep")
    assert f"{MOST} of 40 layers" in many.svg() and many.height < MOST * 700


def test_colours() -> None:
    assert colour(1.0) == "#f7f7f7" and colour(4.0) == colour(9.0) == "#d55e00" and colour(0.0) == "#0072b2"
    assert len({colour(load) for load in (0.3, 0.5, 0.9, 1.1, 2.0, 3.9)}) == 6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = a_run(tmp_path / "one")
    run_experts([folder], None, False)
    out = capsys.readouterr().out
    assert "blocks.1.mlp, steps 0 to 4" in out and out.splitlines()[-1] == str(folder / "experts.png")
    assert imread(folder / "experts.png").shape[1] > 800
    run_experts([folder], tmp_path / "x.svg", True)
    found = json.loads(capsys.readouterr().out)
    assert found["layers"]["blocks.0.mlp"] == {"steps": [0, 2, 4], "load": [[2, 1, 1, 0]] * 3}
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_what_is_refused(tmp_path: Path) -> None:
    dense = write(tmp_path / "dense", [line(0)])
    with pytest.raises(ConfigError, match=r"no load of experts; legal: .*train.expert_load_every"):
        run_experts([dense], None, False)
    with pytest.raises(ConfigError, match="--experts of 2 runs: legal: one run"):
        run_experts([dense, a_run(tmp_path / "one")], None, False)
    for damaged in ([1], {"a": []}, {"a": ["x"]}, {"a": 3}):
        folder = write(tmp_path / "damaged", [{**line(0), "expert_load": damaged}])
        with pytest.raises(ConfigError, match="expert_load of step 0 is damaged; legal: counts by layer"):
            expert_maps(read_run(folder))
    changed = write(tmp_path / "changed", [loaded(0, {"a": [1, 1]}), loaded(1, {"a": [1, 1, 1]})])
    with pytest.raises(ConfigError, match="the number of experts of a changes"):
        expert_maps(read_run(changed))


def test_curves_and_the_report(tmp_path: Path) -> None:
    """Curves go from one measured step to the next."""
    folder = a_run(tmp_path / "one")
    found = {panel.title: panel for panel in panels([read_run(folder)])}
    (entropy,) = found["Entropy of the load of experts (1: even)"].curves
    assert entropy.places.tolist() == [0, 2, 4] and entropy.values.tolist() == pytest.approx([0.5, 0.52, 0.54])
    assert found["Choices dropped (%)"].curves[0].values.tolist() == [25] * 3
    assert "expert 3, step 4" in str(gathered(folder).experts.found)
    dense = write(tmp_path / "dense", [line(0)])
    assert not any("expert" in panel.title for panel in panels([read_run(dense)]))
    assert gathered(dense).experts.found == ""
