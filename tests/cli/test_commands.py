"""The commands that need no ranks, and how wrong input is answered."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from shardwise.backend import Backend
from shardwise.cli.common import split_arguments
from shardwise.cli.main import app
from shardwise.cli.show import _within
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.verify import verify as verifier

TINY = [
    "model.width=16",
    "model.layers=2",
    "model.heads=2",
    "data.sequence_length=16",
    "data.batch_size=12",
    "parallel.microbatches=2",
]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("init", "by default a folder of this name"),
        ("convert", "by default told by the keys"),
        ("generate", "default: 100, or what has room"),
        ("encode", "default: one for each GPU, else one"),
        ("launch", "default: one for each device"),
        ("memory", "default: this machine's"),
    ],
)
def test_help_shows_defaults_that_are_words(command: str, words: str) -> None:
    shown = " ".join(re.sub("[│\n]", " ", call(command, "--help").output).split())
    assert all(word in shown for word in words.split())  # in square brackets they would be markup, which is not shown
    assert "default" in shown


@pytest.mark.slow
@pytest.mark.fresh
def test_help_and_wrong_arguments_need_no_torch() -> None:
    for arguments, code in ((["--help"], 0), (["train", "--help"], 0), (["train", "no_such_file"], 2)):
        call = "from shardwise.cli.main import main\ntry: main()\nfinally: assert 'torch' not in sys.modules"
        script = f"import sys; sys.argv[1:] = {arguments}\n{call}"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        assert "AssertionError" not in done.stderr


def test_arguments_come_in_any_order(tmp_path: Path) -> None:
    config = str(tmp_path / "a.toml")
    assert split_arguments(["train.steps=3", config, "model.name=gpt"]) == (
        Path(config),
        ["train.steps=3", "model.name=gpt"],
    )
    assert split_arguments([]) == (None, [])
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "a.toml").touch()
    assert split_arguments([str(tmp_path / "lr=1" / "a.toml")]) == (tmp_path / "lr=1" / "a.toml", [])
    with pytest.raises(ConfigError, match="more than one config file"):
        split_arguments(["a.toml", "b.toml"])
    with pytest.raises(ConfigError, match="neither a config file nor"):
        split_arguments(["trian.steps"])


@pytest.mark.parametrize("command", ["train", "verify", "show"])
def test_wrong_config_is_refused_with_what_is_legal(command: str) -> None:
    wrong = call(command, "train.step=3", "parallel.precision=fp23")
    assert wrong.exit_code == 2
    assert 'Did you mean "steps"?' in wrong.stderr and '"fp32", "fp64", "bf16"' in wrong.stderr
    assert "Traceback" not in wrong.output
    as_json = call(command, "train.step=3", "--json")
    assert as_json.exit_code == 2
    failure = json.loads(as_json.stdout)
    assert failure["cause"] == "config" and "train.step" in failure["error"]


def test_what_the_devices_cannot_do_is_refused_before_ranks_start(tmp_path: Path) -> None:
    result = call("train", f"train.run_dir={tmp_path}/run", "parallel.offload=activations")
    assert result.exit_code == 2 and 'legal: "none", "optimizer"' in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_show() -> None:
    shown = call("show", *TINY, "train.devices=3", "parallel.recompute=full")
    assert shown.exit_code == 0, shown.output
    for words in (
        "dp 3",
        "recompute",
        "12 a step, 6 a microbatch, 2 a rank",
        "blocks.*.mlp.up.weight",
        "64x16",
        "R P R (DDP)",
        "RECOMPUTE u1 m1",
    ):
        assert words in shown.stdout, words
    assert max(len(line) for line in shown.stdout.split("all ranks:")[0].splitlines()) <= 80


@pytest.mark.slow
@pytest.mark.parametrize("tensor", ["1d", "1d-sp"])
def test_show_tells_what_is_sharded_and_what_that_costs(tensor: str) -> None:
    given = [*TINY, "model.heads=4", "parallel.tp=2", "parallel.dp=1", f"parallel.tensor={tensor}"]
    shown = call("show", *given)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.split("all ranks:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.strip()}
    assert rows["mesh"] == ["dp", "1", "x", "tp", "2"] and rows["tensor"] == [tensor]
    assert [rows[f"blocks.*.{name}"][0] for name in ("attention.qkv.weight", "attention.proj.weight", "mlp.up.bias",
    "norm1.bias")] == [
        "3*2:tp*8x16", "16x2:tp*8", "2:tp*32", "16",
    ]  # fmt: skip
    text = "\n".join(" ".join(line.split()) for line in lines)
    forward, backward = ("", "all_reduce") if tensor == "1d" else ("all_gather", "reduce_scatter")
    whole = 6 * 16 * 16 * 4 / 1024
    assert f"linear attention.qkv {forward} {backward} {whole} KiB".replace("  ", " ") in text
    assert "\nu1-u2 " in text and "cross_entropy all_gather" in text  # equal blocks are folded

    found = json.loads(call("show", *given, "--json").stdout)
    layouts = {one["name"]: one["layout"] for one in found["parameters"]}
    assert layouts["blocks.1.mlp.proj.weight"] == [
        [{"size": 16, "axes": [], "parts": []}],
        [{"size": 2, "axes": ["tp"], "parts": []}, {"size": 32, "axes": [], "parts": []}],
    ]  # fmt: skip
    (one,) = [c for c in found["collectives"] if c["path"] == "blocks.1.mlp.up"]
    each = {way: [{"kind": kind, "axes": ["tp"], "nbytes": 1024 * whole}] if kind else [] for way, kind in
            (("forward", forward), ("backward", backward))}  # fmt: skip
    assert one == {
        "unit": 2,
        "op": "aten.linear.default",
        "path": "blocks.1.mlp.up",
        **each,
        "again": [],
        "sent_bytes": 1024 * whole,
    }
    block = sum(c["sent_bytes"] for c in found["collectives"] if c["unit"] == 1)
    assert block == 8 * 1024 * whole * (2 - 1) / 2, "four all-reduces, or their halves"
    summed = {one["name"]: one["summed"] for one in found["parameters"]}
    assert (
        summed["blocks.1.norm1.weight"] == ([] if tensor == "1d" else ["tp"]) and summed["blocks.1.mlp.up.weight"] == []
    )
    assert_sums_of_buckets_are_shown(found, text)


def assert_sums_of_buckets_are_shown(found: dict[str, Any], text: str) -> None:
    """Of partial sums over ``tp`` all_reduces, once a step: of 2 ranks each sends what a bucket holds of the
    parameters, in fp32.
    """
    partial = [one for one in found["parameters"] if one["summed"]]
    (program,) = found["programs"]
    reduced = [i["bucket"] for i in program["instructions"] if i["op"] == "REDUCE" and "bucket" in i]
    every = [one for one in found["collectives_of_step"] if one["buckets"]]
    if not partial:
        assert every == [] and reduced == [] and "gradients b" not in text
        return
    (one,) = every
    assert (one["rank"], one["of"], one["axes"], one["kind"], one["buckets"]) == (
        0,
        "gradients",
        ["tp"],
        "all_reduce",
        sorted(reduced),
    )
    assert {p["bucket"] for p in partial} == set(reduced)
    assert one["sent_bytes"] >= 4 * sum(math.prod(p["shape"]) for p in partial) > 0.8 * one["sent_bytes"], (
        "but for padding"
    )
    assert re.search(rf"\ngradients b\d[b\d, -]* tp all_reduce {len(reduced)} ", text), text


def test_show_keeps_shapes_readable_in_80_columns() -> None:
    """Long names and shapes are broken where a part of them ends."""
    given = [*TINY, "model.heads=4", "parallel.tp=4", "parallel.dp=1", "parallel.tensor=2d"]
    lines = call("show", *given).stdout.split("all ranks:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    at = next(i for i, line in enumerate(lines) if line.startswith("blocks.*.attention.qkv.weight "))
    assert lines[at].split()[1] + lines[at + 1].split()[0] == "3*2:tp_j*8x2:tp_i*8" and lines[at].split()[1].endswith(
        "x"
    )


@pytest.mark.slow
def test_show_says_that_tensor_alone_changes_nothing() -> None:
    shown = " ".join(call("show", *TINY, "parallel.dp=1", "parallel.tensor=2d").stdout.split())
    assert 'tensor parallel.tensor = "2d" changes nothing, for parallel.tp = 1' in shown


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "tp", "rows"), [("1d-sp", 2, 6), ("2d", 4, 3), ("2.5d", 8, 2), ("3d", 8, 2)])
def test_show_says_how_many_rows_a_rank_has(kind: str, tp: int, rows: int) -> None:
    """Of 6 of a microbatch: shared out over no axis, over 2, or over 4, where two ranks have two and two have one."""
    shown = call(
        "show",
        *TINY,
        "model.heads=4",
        f"parallel.tp={tp}",
        "parallel.dp=1",
        f"parallel.tensor={kind}",
        "parallel.microbatches=2",
    )
    assert f"12 a step, 6 a microbatch, {rows} a rank" in shown.stdout, shown.output


def test_show_tells_what_follows_from_pins() -> None:
    pins = 'parallel.pins={"*.qkv.weight" = "column", "*.mlp.up" = "2", "*.mlp" = "1"}'
    given = [*TINY, "model.heads=4", "parallel.tp=2", "parallel.dp=1", "parallel.tensor_plan=propagate", pins]
    shown = call("show", *given)
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.split("all ranks:")[0].splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(" ".join(line.split()) for line in lines)
    assert "\npredicted " in text and " ms a microbatch: computing " in text
    assert "\ntensor propagate\n" in text and "\nblocks.*.mlp.up.weight 2:tp*32x16 " in text
    assert '\nblocks.*.mlp.proj.weight linear blocks.*.mlp.proj, from "*.mlp.up" = "2"\n' in text
    assert "\nnorm.weight whole, for nothing follows\n" in text
    assert "\nlinear mlp.proj reduce_scatter all_gather " in text  # the op that makes what the module returns
    note = (
        'note: pins: linear blocks.*.attention.qkv: "*.mlp" = "1" wants a value in pieces of dim 1, and "*.qkv.weight"'
    )
    assert note in " ".join(text.split())
    found = json.loads(call("show", *given, "--json").stdout)
    assert found["predicted_seconds"] > 0
    decided = {one["name"]: one["decided"] for one in found["parameters"]}
    assert decided["blocks.1.attention.qkv.weight"] == {"tp": '"*.qkv.weight" = "column"'}
    assert decided["blocks.1.attention.proj.weight"] == {
        "tp": 'linear blocks.*.attention.proj, from "*.qkv.weight" = "column"'
    }
    assert any(
        c["path"] == "blocks.1.mlp.proj" and c["forward"][0]["kind"] == "reduce_scatter" for c in found["collectives"]
    )


@pytest.mark.slow
def test_show_says_which_axes_reach_over_hosts() -> None:
    """The ranks that share layers are neighbours, so they are on one host where that has room for them; else there is a
    note.
    """
    given = [*TINY, "model.heads=4", "parallel.tp=4", "parallel.dp=2", "parallel.pp=2", "parallel.recompute=full"]
    alone, large, small = (
        call("show", *given, *more).stdout for more in (("--per-host", "16"), ("--per-host", "4"), ("--per-host", "2"))
    )
    assert "hosts of" not in alone
    assert "pp across, dp across, tp within hosts of 4 ranks" in large and "note: tp" not in large
    assert "pp across, dp across, tp across hosts of 2 ranks" in small
    assert "note: tp across hosts of 2 ranks: all 4 ranks of a group wait for each other" in " ".join(small.split())
    assert max(map(len, small.split("stage 0:")[0].splitlines())) <= 80
    assert json.loads(call("show", *given, "--per-host", "8", "--json").stdout)["links"] == {
        "pp": "host",
        "dp": "device",
        "tp": "device",
    }


OF_DATA = "return torch.linalg.det(super().forward(x)).mean()"
OF_WEIGHTS = """
        whole = torch.linalg.matrix_exp(self.weight.view(3, 3)[None])  # of parameters alone
        scalar = torch.linalg.matrix_exp(self.bias.sum().view(1, 1))
        return (super().forward(x) @ whole[0] * scalar).mean()"""


@pytest.mark.parametrize(
    ("forward", "plan", "op", "least"),
    [
        (
            OF_DATA,
            ["parallel.dp=2"],
            "linalg_det",
            2 * 4 * (9 + 1) * 4,
        ),  # forward and backward read and write at least operands and results
        (OF_DATA, ["parallel.dp=1", "parallel.tp=2"], "linalg_det", 2 * 4 * (9 + 1) * 4),
        (OF_WEIGHTS, ["parallel.dp=1", "parallel.tp=2"], "linalg_matrix_exp", 2 * 2 * 9 * 4),
        (
            OF_WEIGHTS,
            ["parallel.dp=1", "parallel.tp=2", "parallel.tensor_plan=auto"],
            "linalg_matrix_exp",
            2 * 2 * 9 * 4,
        ),
    ],
)
def test_show_lists_ops_without_a_rule(forward: str, plan: list[str], op: str, least: int, tmp_path: Path) -> None:
    """But for those that cost nothing, of a single number."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "class M(torch.nn.Linear):\n"
        f"    def forward(self, x): {forward}\n"
        "def model(): return M(3, 3)\n"
        "def rows(): return [{'x': torch.rand(3, 3)}] * 8\n"
    )
    given = [f"model.factory={file}:model", f"data.factory={file}:rows", "data.batch_size=4", *plan]
    shown = call("show", *given)
    assert shown.exit_code == 0, shown.output
    text, one = (
        " ".join(shown.stdout.split()),
        f"note: computed whole on every rank: aten.{op}.default in the model (1x): of 4 rows ",
    )
    assert (line := re.search(re.escape(one) + r"0 FLOPs and ([\d,]+) bytes of memory traffic", text)), shown.stdout
    assert int(line[1].replace(",", "")) >= least
    found = json.loads(call("show", *given, "--json").stdout)
    assert sum("computed whole on every rank" in note for note in found["notes"]) == 1
    (listed,) = found["without_rule"]
    assert (listed["op"], listed["path"], listed["times"]) == (f"aten.{op}.default", "", 1)
    assert listed["bytes"] == int(line[1].replace(",", "")) and listed["flops"] == 0


def test_show_draws_each_instruction(tmp_path: Path) -> None:
    out = tmp_path / "program.svg"
    shown = call("show", *TINY, "train.devices=2", "--picture", str(out))
    assert shown.exit_code == 0, shown.output
    count = re.search(r"(\d+) instructions drawn in", " ".join(shown.stdout.split()))
    assert count is not None and out.read_text().count("<title>") == 2 * int(count[1]) > 20  # on each of two ranks
    assert call("show", *TINY, "--picture", str(tmp_path / "p.png")).exit_code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert call("show", *TINY, "--picture", "p.gif").exit_code == 2


def test_show_as_json_counts_what_there_is() -> None:
    shown = call("show", *TINY, "train.devices=2", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert Plan.from_toml(found["plan"]).microbatches == 2
    block = found["units"][1]
    weights = 16 * 48 + 16 * 16 + 16 * 64 * 2
    attention = 2 * 2 * 16 * 16 * 16  # a sample's scores and their product with the values
    assert block["parameters"] == weights + 48 + 16 + 64 + 16 + 4 * 16
    assert block["forward_flops"] == 3 * (2 * 16 * weights + attention)  # three rows a rank and microbatch
    assert block["saved_bytes"] > 3 * 16 * 16 * 4
    names = [one["name"] for one in found["parameters"]]
    assert len(names) == len(set(names)) == 2 + 2 * 12 + 2 and found["parameters"][0]["kind"] == "DDP"
    assert sum(one["op"] == "BACKWARD" for one in found["programs"][0]["instructions"]) == 2 * 4


@pytest.mark.slow
def test_verify_passes_and_tells_how_well(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = call("verify", *TINY, "train.devices=3")
    assert passed.exit_code == 0, passed.output
    assert "3 ranks (threads), 2 microbatches" in passed.stdout and "same as one device: largest error" in passed.stdout
    assert "NOT" not in passed.stdout
    layer = call(
        "verify", *TINY, "parallel.tp=2", "parallel.dp=2", "parallel.pp=2", "parallel.zero=3", "parallel.tensor=1d-sp"
    )
    assert layer.exit_code == 0 and "8 ranks (threads), 2 microbatches" in layer.stdout, layer.output

    real, planted = verifier.compare, []

    def wrong(ours, truth):  # type: ignore[no-untyped-def]
        if not planted:  # a later comparison is of one device with itself
            planted.append(ours[1].gradients["blocks.1.mlp.up.weight"].mul_(1 + 1e-6))
        return real(ours, truth)

    monkeypatch.setattr(verifier, "compare", wrong)
    failed = call("verify", *TINY, "train.devices=2")
    assert failed.exit_code == 1
    assert "NOT the same as one device" in failed.stdout and "blocks.1.mlp.up.weight" in failed.stdout
    planted.clear()
    as_json = call("verify", *TINY, "train.devices=1", "--json")
    assert as_json.exit_code == 1
    report = json.loads(as_json.stdout)
    assert report["passed"] is False and report["worst"][0]["name"] == "blocks.1.mlp.up.weight"
    assert report["largest"] == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.slow
def test_verify_with_processes(tmp_path: Path) -> None:
    done = call("verify", *TINY, "train.devices=2", f"train.run_dir={tmp_path}", "--ranks-as", "processes", "--json")
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["passed"] and report["ranks_agree"] and 0 < report["largest"] < 1e-10
    assert call("verify", "--ranks-as", "fibres").exit_code == 2


def test_a_model_that_fails_is_wrong_input(tmp_path: Path) -> None:
    """No traceback: the line of the user's file, before anything starts."""
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "class M(torch.nn.Linear):\n"
        "    def forward(self, x): raise RuntimeError('boom')\n"
        "def model(): return M(3, 1)\n"
        "def rows(): return [{'x': torch.ones(3)}] * 8\n"
    )
    given = [
        f"model.factory={file}:model",
        f"data.factory={file}:rows",
        "data.batch_size=4",
        f"train.run_dir={tmp_path}/run",
    ]
    for command in ("verify", "train"):
        failed = call(command, "--json", *given, "train.devices=1")
        failure = json.loads(failed.stdout)
        assert (failed.exit_code, failure["cause"]) == (2, "config"), failed.output
        assert f"RuntimeError: boom ({file}:3, in forward)" in failure["error"]


@pytest.mark.slow
def test_launch_echoes_rank_0(tmp_path: Path) -> None:
    script = tmp_path / "hello.py"
    script.write_text("import os, sys\nprint('hello from', os.environ['RANK'], *sys.argv[1:])\n")
    command = [
        sys.executable,
        "-m",
        "shardwise",
        "launch",
        "--ranks",
        "2",
        "--run-dir",
        str(tmp_path / "run"),
        str(script),
        "--json",
        "x=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "hello from 0 --json x=1\n"), done.stderr
    assert (tmp_path / "run" / "logs" / "rank_1.log").read_text() == "hello from 1 --json x=1\n"
    missing = call("launch", str(tmp_path / "none.py"))
    assert missing.exit_code == 2 and "there is no such file" in missing.stderr


def test_verify_on_a_device_that_is_not_here() -> None:
    for name in ("cuda", "mps", "standin"):
        result = call("verify", *TINY, "--device", name)
        assert result.exit_code == 2 and f"--device {name}: legal on this machine: cpu" in result.stderr


@pytest.mark.parametrize(
    ("here", "arguments", "words"),
    [
        ("mps", ["--device", "mps"], "--device mps: legal on this machine: cpu: mps computes in no more than float32"),
        ("xpu", ["--device", "xpu", "--ranks-as", "processes"], "legal: ranks as threads, which share one device"),
        ("xpu", ["--device", "cuda"], "--device cuda: legal on this machine: cpu, xpu"),
    ],
)
def test_verify_on_a_device_that_cannot(
    here: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "here", lambda: Backend(here))
    result = call("verify", *TINY, *arguments)
    assert result.exit_code == 2 and words in " ".join(result.stderr.split())


def test_a_program_is_folded_where_a_terminal_is_narrow() -> None:
    text = (
        "stage 0: pp=0, 2 instructions\n1  compute  FORWARD u1 m0    param2 activation0.m0 → activation1.m0 saved1.m0"
    )
    lines = _within(text, 60).split("\n")
    assert max(map(len, lines)) <= 60 and len(lines) == 3 and lines[0] == text.split("\n")[0]
    assert lines[1].startswith("1  compute  FORWARD u1 m0    param2") and lines[2].startswith(" " * 13 + "activ")
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert _within(text, 200) == text
