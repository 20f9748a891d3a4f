"""shardwise bench collectives: what it measures, writes and refuses, and what later predictions read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.bench import bytes_of, sizes_between
from shardwise.core.errors import ConfigError
from shardwise.core.links import OWN, LinkProfile, Measured
from shardwise.core.rates import Link, Rates
from shardwise.core.rounds import COLLECTIVES

LIMIT = 150.0  # seconds


def shardwise(*arguments: object, code: int = 0, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(python or ("-m", "shardwise")), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=dict(os.environ))
    assert done.returncode == code, done.stdout + done.stderr
    return done


SMALL = ("bench", "collectives", "--from", "512", "--to", "4KiB")


@pytest.mark.slow
def test_files_and_json(tmp_path: Path) -> None:
    out, picture = tmp_path / "links.json", tmp_path / "links.png"
    done = shardwise(*SMALL, "--backend", "gloo", "--of", "all-reduce", "--of", "gather", "--of", "point-to-point",
                     "--out", out, "--picture", picture, "--json")  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout)
    profile = LinkProfile.of_json(out.read_text(), "x")
    assert (profile.backend, profile.device, profile.host) == ("gloo", "cpu", 2)
    assert picture.read_bytes().startswith(b"\x89PNG")
    cases = [(row["collective"], row["algorithm"], row["nbytes"]) for row in found["rows"]]
    kinds = [(c, a) for c, several in (("gather", ()), ("all-reduce", ("own",)), ("point-to-point", ("own",)))
             for a in (*several, *(("ring", "tree", "server") if c != "point-to-point" else ()))]  # fmt: skip
    assert cases == [(c, a, n) for c, a in kinds for n in (512, 4096)]
    assert all(0 < row["seconds"] < 5 and row["bus_bandwidth"] > 0 for row in found["rows"])
    assert found["links"]["2"]["bandwidth"] > 0
    shardwise(*SMALL, "--out", out, code=2)


@pytest.mark.slow
def test_all_of_it_on_several_ranks_in_common_memory() -> None:
    done = shardwise(*SMALL, "--ranks", 2, "--ranks", 4, "--host", 2)
    for collective in (*COLLECTIVES, "point-to-point"):
        assert f"{collective} of 2 ranks" in done.stdout and f"{collective} of 4 ranks" in done.stdout
    assert done.stdout.count("hierarchical") == 2 * len(COLLECTIVES)
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_under_torchrun() -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "shardwise")
    done = shardwise(*SMALL, "--of", "broadcast", "--by", "tree", "--json", python=launcher)
    assert [row["algorithm"] for row in json.loads(done.stdout)["rows"]] == ["tree", "tree"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "1XB"), "--from: 1XB is not a size"),
        (("--from", "1MiB", "--to", "1KiB"), "at most that"),
        (("--of", "all-redice"), "all-reduce"),
        (("--by", "circle"), "legal: own, ring, tree, hierarchical, server"),
        (("--by", "own", "--of", "gather"), "there is none"),
        (("--by", "hierarchical"), "there is none"),
        (("--picture", "links.gif"), "links.gif"),
        (("--ranks", "1"), "--ranks"),
        (("--backend", "smoke"), "smoke"),
    ],
)
def test_refused(arguments: tuple[str, ...], words: str) -> None:
    done = shardwise("bench", "collectives", *arguments, code=2)
    assert words in done.stderr


def test_sizes() -> None:
    assert sizes_between("1KiB", "32KiB") == (1024, 8192, 32768)
    assert sizes_between("512", "512") == (512,)
    assert bytes_of("--from", "1.5 MiB") == 3 * 2**19
    with pytest.raises(ConfigError, match="64KiB"):
        bytes_of("--to", "-3")


@pytest.mark.slow
def test_predictions_read_it(tmp_path: Path) -> None:
    """A solver that sees slow links takes another plan than with those that are assumed."""
    for name, link in (("fast", Link(1e-9, 1e13)), ("slow", Link(1.0, 1e3))):
        rates = Rates(1.0, 1.0, link)
        rows = [Measured("all-reduce", OWN, 2, n, rates.collective("all_reduce", n, ["x"], 2)) for n in (64, 2**20)]
        (tmp_path / f"{name}.json").write_text(LinkProfile("gloo", "cpu", 2, tuple(rows)).to_json())
    small = ["model.layers=1", "model.width=64", "model.heads=4", "data.source=docs", "data.batch_size=4",
             "data.sequence_length=32", "parallel.tp=2", "parallel.dp=1", "parallel.tensor_plan=auto"]  # fmt: skip
    seconds, sent = {}, {}
    for name in ("fast", "slow"):
        done = shardwise("show", *small, f"parallel.links={tmp_path / name}.json", "--json")
        found = json.loads(done.stdout)
        seconds[name] = found["predicted_seconds"]
        sent[name] = [one["times"] for one in found["collectives_of_step"] if one["of"] in ("forward", "backward")]
    assert seconds["slow"] > seconds["fast"] and sum(sent["slow"]) < sum(sent["fast"])
    done = shardwise("show", *small, f"parallel.links={tmp_path / 'none.json'}", code=2)
    assert "parallel.links: cannot read" in done.stderr and "bench collectives --out" in done.stderr
