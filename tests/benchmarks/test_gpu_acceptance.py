"""The acceptance of GPUs on a CPU at a tiny size: its judgements and every part; with `full` the whole scripts."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from alternate import Contender  # noqa: E402
from gpu import accept, fast, memory, on_ranks, parts, profiles, prototypes, report, right, runs, several  # noqa: E402
from gpu.contenders import TINY, Turn  # noqa: E402
from gpu.parts import Options, Part  # noqa: E402
from task import plain  # noqa: E402


def options(tmp_path: Path, **changes: Any) -> Options:
    return Options(**{"device": "cpu", "tiny": True, "out": tmp_path, **changes})


def verdicts(found: dict[str, Any]) -> dict[str, bool | None]:
    return {one["what"]: one["right"] for one in found["verdicts"]}


# ---- how parts judge -------------------------------------------------------------------------------------------------


def test_a_part_tells_right_from_wrong_from_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def body(part: Part) -> None:
        part.check("one", True, "as it should be")
        part.leave_out("two", "no card")
        assert not part.wrong
        with part.guarded("three"):
            raise ValueError("broken")
        part.check("four", True)

    found = parts.run("sample", options(tmp_path), body)
    assert found.wrong
    written = json.loads((tmp_path / "sample.json").read_text())
    assert verdicts(written) == {"one": True, "two": None, "three": False, "four": True}
    assert written["machine"]["torch"] == torch.__version__ and written["machine"]["card"] is None
    out = capsys.readouterr().out
    assert (
        "right: one: as it should be" in out
        and "unknown: two: no card" in out
        and "WRONG: three: ValueError: broken" in out
    )


def test_a_part_whose_time_is_over_leaves_out_and_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "GRACE", 0.2)

    def body(part: Part) -> None:
        assert part.time_for("short", 0.001) and not part.time_for("long", 100.0)
        with part.guarded("hangs"):
            time.sleep(30)
        assert part.left < 0
        assert not part.time_for("after", 0.001)

    begun = time.monotonic()
    found = parts.run("sample", options(tmp_path, minutes=0.005), body)
    assert time.monotonic() - begun < 10
    judged = verdicts(json.loads((tmp_path / "sample.json").read_text()))
    assert judged == {"long": None, "hangs": False, "after": None} and found.wrong


@pytest.mark.slow
def test_a_child_answers_or_says_why_not() -> None:
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{BENCHMARKS}"}
    assert parts.in_child("gpu.parts:machine", 60.0, environment, device="cpu") == parts.machine("cpu")
    with pytest.raises(parts.ChildFailed, match=r"(?s)ended with code 1.*no_such"):
        parts.in_child("math:no_such", 60.0, environment)
    slow = "import time; print(1, flush=True); time.sleep(60)"
    assert parts.call([sys.executable, "-c", slow], 1.0) == (None, "1\n")


def test_options_that_are_not_legal(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["fats"], ["--minutes", "0"], ["--device", "no such"], ["--ranks", "1"]):
        with pytest.raises(SystemExit):
            parts.parse(
                "", ["fast"], [*arguments, *(["--device", "cpu"] if "--device" not in arguments else [])], ranks=True
            )
        assert "is not legal" in capsys.readouterr().err
    chosen, found = parts.parse("", ["verify", "fast"], ["--device", "cpu", "--tiny"])
    assert chosen == ["verify", "fast"] and found.tiny and not found.gpu


# ---- profiles --------------------------------------------------------------------------------------------------------

KERNELS = {
    "products": (
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64",
        "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16>", "aten::mm", "aten::addmm", "aten::bmm",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ),
    "loss": (
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float, float, float>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>", "aten::_log_softmax",
    ),
    "norm and optimizer": (
        "void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>",
        "void multi_tensor_apply_kernel<LpNormFunctor>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::NormTwoOps<float, float>>>",
        "aten::linalg_vector_norm",
    ),
    "communication": ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "ncclDevKernel_SendRecv"),
    "copies": ("Memcpy DtoD (Device -> Device)", "Memset (Device)",
    "void at::native::CatArrayBatchedCopy<c10::BFloat16>", "aten::copy_", "aten::cat"),
    "element-wise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor<float>>",
        "triton_poi_fused_add_mul_3",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>", "aten::mul",
        "aten::silu_backward",
    ),
    "other": ("some_kernel_of_somebody",),
}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
def test_kernels_by_class(kind: str) -> None:
    assert {name: profiles.kernel_class(name) for name in KERNELS[kind]} == dict.fromkeys(KERNELS[kind], kind)


def test_idle_and_hidden_shares() -> None:
    assert profiles.union([(3, 4), (0, 2), (1, 2.5)]) == [(0, 2.5), (3, 4)]
    assert profiles.hidden_share([(0, 4)], [(1, 2), (3, 5)]) == 0.5
    assert profiles.hidden_share([(0, 4)], []) == 0 and profiles.hidden_share([], [(0, 1)]) is None
    kernels = [
        ("aten::mm", 0.0, 1.0),
        ("aten::mul", 2.0, 3.0),
        ("ncclDevKernel_AllReduce", 2.5, 4.0),
        ("odd", 9.0, 10.0),
    ]
    found = profiles.summary(kernels, steps=2)
    assert found["step_seconds"] == 5.0 and found["idle"] == 0.6 and found["kernels"] == 2
    assert found["hidden"] == pytest.approx(1 / 3) and found["other"] == {"odd": 1}
    assert found["classes"]["products"] == {"seconds": 0.5, "launches": 0.5}
    found = profiles.summary(kernels, steps=2, seconds=20.0)
    assert found["step_seconds"] == 10.0 and found["idle"] == 0.8 and found["profiled_step_seconds"] == 5.0
    assert sum(one["seconds"] for one in found["classes"].values()) == pytest.approx(4.5 / 2)


def test_a_profile_of_a_step() -> None:
    model = torch.nn.Linear(64, 64)
    x = torch.randn(256, 64)
    found = profiles.profile(lambda: model(x).sum().backward(), torch.device("cpu"), warmup=1)
    assert 0 <= found["idle"] < 1 and found["classes"]["products"]["launches"] >= 2 and found["step_seconds"] > 0


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_rows_are_chosen_by_what_fits() -> None:
    gib = 2**30
    predicted = {rows: (20 * gib, (20 + 12 * rows) * gib) for rows in fast.ROWS}
    assert fast.choose_rows(predicted, 140 * gib) == (2, True)  # 80 of states, 34 of activations
    assert fast.choose_rows(predicted, 80 * gib) == (2, False)
    assert fast.choose_rows(predicted, 250 * gib) == (4, True)
    assert fast.choose_rows(predicted, 30 * gib) == (1, False)


@pytest.mark.slow
def test_a_turn_and_its_figures() -> None:
    """MFU has no value on a CPU; the FLOPs are those of the products and of attention."""
    facts = fast.facts("cpu", True)
    weights = facts["parameters"] - TINY.vocabulary * TINY.width  # the embedding multiplies nothing
    attention = 6 * 2 * TINY.layers * TINY.sequence * TINY.width
    assert facts["peak_flops"] is None and facts["rows"] == TINY.rows and facts["together"]
    assert facts["flops_per_row"] == pytest.approx((6 * weights + attention) * TINY.sequence, rel=0.02)
    turn = Turn(plain(0, 1, task=TINY), torch.device("cpu"), settle=1, steps=3)
    last = turn()
    assert turn() < last and len(turn.measured) == 2
    one = Contender("ordinary loop", plain, seconds=[1.0, 1.0], losses=[last], measured=[turn.measured])
    row = fast.row(one, TINY, facts, 2)
    assert row["mfu"] is None and row["peak_gib"] is None and row["clean_steps"] == 6
    assert row["fastest"] <= row["step_seconds"] <= row["slowest"]
    assert row["tokens_per_second"] == pytest.approx(TINY.tokens / row["step_seconds"])


def test_who_trains_otherwise_is_wrong(tmp_path: Path) -> None:
    part = Part("fast", options(tmp_path))
    row = {"mfu": None, "tokens_per_second": 1.0, "clean_steps": 1}
    rows = [{**row, "name": fast.PLAIN, "losses": [4.0]}, {**row, "name": fast.OURS, "losses": [4.1]}]
    fast._judge(part, rows, {})
    assert [one["right"] for one in part.verdicts] == [True, False]


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prediction_that_is_off_is_wrong(tmp_path: Path) -> None:
    found = memory.one_step("cpu", True, {})
    part = Part("memory", options(tmp_path))
    memory._judge(part, "none", found)
    assert len(part.verdicts) == 2 and not part.wrong
    found["measured"]["peak"] *= 1.01
    memory._judge(part, "none", found)
    assert part.wrong


@pytest.mark.slow
def test_rows_of_which_none_ran_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = {"budget": 1, "predicted": 0, "fitted": 0, "refused": None, "peak": 2}
    found = memory.one_step("cpu", True, {})
    monkeypatch.setattr(memory, "in_child", lambda function, *_, **__: none if "rows" in function else found)
    part = Part("memory", options(tmp_path))
    memory.memory(part)
    assert part.verdicts[-1]["what"].endswith("rows that are predicted to fit do, none")
    assert part.verdicts[-1]["right"] is None


def test_the_largest_number_that_fits() -> None:
    for limit in (0, 1, 2, 3, 17, 64):
        assert memory.most(lambda n, limit=limit: n <= limit) == limit


# ---- right -----------------------------------------------------------------------------------------------------------


def test_steps_in_which_waits_are_counted() -> None:
    assert right.waits_of_steps("cpu", True) == {"none": {"warnings": None, "steps": 3, "places": {}}}


def test_how_far_runs_are_apart() -> None:
    curve = [(0, 4.0, 1.0), (1, 3.0, 2.0)]
    assert runs.apart(curve, list(curve)) == 0
    assert runs.apart(curve, [(0, 4.0, 1.0), (1, 3.0, 1.0)]) == 0.5
    for other in ([], curve[:1], [(0, 4.0, 1.0), (2, 3.0, 2.0)], [(0, 4.0, 1.0), (1, math.nan, 2.0)]):
        assert runs.apart(curve, other) == math.inf


def test_plans_that_are_verified_are_legal(tmp_path: Path) -> None:
    from shardwise.config import build_plan
    from shardwise.launch.subject import load_anywhere

    source = runs.text_file(tmp_path)
    plans = [build_plan(load_anywhere(None, [*keys, source])) for keys in right.COVERING.values()]
    assert {plan.memory.recompute for plan in plans} == {"none", "selective", "full"}
    assert {"bf16", "fp16"} <= {plan.numeric.precision for plan in plans} and max(plan.mesh.size for plan in plans) == 8
    assert set(right.TINY_COVERING) <= set(right.COVERING)


# ---- several ranks ---------------------------------------------------------------------------------------------------


def test_too_few_ranks_are_unknown(tmp_path: Path) -> None:
    part = Part("zero", options(tmp_path, ranks=1))
    assert several.enough(part, "ZeRO-3", 1.0) == 0 and part.verdicts[0]["right"] is None
    assert several.enough(Part("zero", options(tmp_path)), "ZeRO-3", 1.0) == 2


def test_a_recorded_step_says_how_much_is_hidden() -> None:
    step = on_ranks.recorded(0, 1, task=TINY, zero=0)
    assert math.isfinite(step())
    (found,) = step.measured  # type: ignore[attr-defined]
    assert 0 <= found["hidden"] <= 1 and 0 < found["communication_seconds"] < found["step_seconds"]


# ---- the document ----------------------------------------------------------------------------------------------------


def test_the_document_keeps_its_text_and_shows_what_was_found(tmp_path: Path) -> None:
    before = report.DOC.read_text(encoding="utf-8")
    kept, mark, rest = before.partition(report.MARK)
    assert mark and "## Found" in rest
    assert all(f"`{name}`" in kept for name in report.PARTS)
    part = Part("memory", options(tmp_path))
    part.figures["plans"] = {"none": memory.one_step("cpu", True, {})}
    part.check("memory | of none", True, "as predicted")
    part.leave_out("rows", "no time")
    found = report.read(tmp_path)
    text = report.document(before, found)
    assert text.startswith(kept.rstrip()) and report.document(text, found) == text
    assert "No card has run shardwise at full size" in text
    assert (
        "| memory | memory \\| of none | right | as predicted |" in text
        and "| memory | rows | unknown | no time |" in text
    )
    assert "### Memory" in text and "+0.00%" in text.replace("-0.00%", "+0.00%")
    assert text.count("not run yet") == len(report.PARTS) - 1
    with pytest.raises(ValueError, match="is not there"):
        report.document("no mark", {})
    assert report.rewrite(options(tmp_path)) == tmp_path / "gpu.md" and report.DOC.read_text(encoding="utf-8") == before


def test_figures_of_a_card() -> None:
    """As the parts write them there; on a CPU some are missing."""
    machine = {
        "card": "NVIDIA H100 80GB HBM3", "cards": 1, "memory_gib": 79.1, "driver": "580.1", "cores": 16,
        "python": "3.12.3",
        "torch": "2.11.0", "cuda": "13.0", "cudnn": 9, "system": "Linux",
    }  # fmt: skip
    profile = profiles.summary([("nvjet_a", 0.0, 0.08), ("ncclDevKernel_x", 0.07, 0.09)], 1, 0.1)
    row = {
        "name": fast.OURS,
        "step_seconds": 0.2,
        "tokens_per_second": 40960.0,
        "mfu": 0.41,
        "peak_gib": 33.3,
        "clean_steps": 48,
        "off": 2e-5,
    }
    states = {"parameters": 2**30, "gradients": 0, "optimizer": 0}
    measured = {"states": states, "peak": 2**32, "reserve": 2**28, "beside_the_allocator": 2**29}
    figures: dict[str, dict[str, Any]] = {
        "verify": {},
        "fast": {
            "facts": {"parameters": 1.1e9, "sequence": 4096, "precision": "bf16", "rows": 2, "together": True},
            "rows": [row],
            "profiles": {fast.OURS: profile},
        },
        "memory": {
            "plans": {"none": {"predicted": {"states": states, "peak": 2**32}, "measured": measured}},
            "rows": {"none": {"predicted": 30, "fitted": 31, "refused": 33}},
        },
        "prototypes": {"prototypes": {"a": {"what": "dW",
        "ways": {"old": {"milliseconds": 2.0, "bytes": 2**20}, "new": {"unknown": "no kernel"}}}}},
        "zero": {
            "speed": {"ranks": 8, "contenders": {"ZeRO-3": {"step_seconds": 0.1, "tokens_per_second": 3e5}}},
            "overlap": [{"hidden": 0.87, "communication_seconds": 0.03},
            {"hidden": None, "communication_seconds": 0.0}],
        },
        "communicators": {"communicators": {"ranks": 1, "bytes": [[2**28, 2**25]]}},
    }  # fmt: skip
    about = {
        "device": "cuda",
        "tiny": False,
        "machine": machine,
        "seconds": 300.0,
        "verdicts": [{"what": "x", "right": False, "detail": "y"}],
    }
    text = "\n".join(report.figures({part: {**about, "figures": one} for part, one in figures.items()}))
    assert "no card" not in text.lower() and "| verify | x | **wrong** | y |" in text
    for line in (
        "| verify | NVIDIA H100 80GB HBM3 | 1 | 79.1 GiB | 580.1 | 2.11.0 | 13.0 | 3.12.3 | 300 |",
        "| shardwise | 200.0 | 40,960 | 41.0% | 33.300 | 48 | 2e-05 |",
        "idle 10.0% of 100.0 ms (90.0 ms under the profiler), 2 kernels.",
        "| products | 80.00 | 80.0% | 1 |",
        "| none | 1.000 | 1.000 | 4.000 | 4.000 | +0.00% | 0.250 | 0.500 |",
        "| none | 30 | 31 | 33 |",
        "| dW | old | 2.000 | 1.00 | 1 |  |",
        "| dW | new | unknown | no kernel |  |  |",
        "| ZeRO-3 | 100.0 | 300,000 |",
        "| 0 | 87% | 30.0 |",
        "| 0 | 256, 32 |",
    ):
        assert line in text, line


def test_nothing_found_is_unknown() -> None:
    lines = "\n".join(report.figures({}))
    assert "no card has run shardwise so far" in lines and lines.count("| unknown |") == len(report.PARTS)


# ---- the scripts -----------------------------------------------------------------------------------------------------


def script(name: str, *arguments: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BENCHMARKS / "gpu" / name), *arguments], env={**os.environ, "PYTHON": sys.executable, **environment},
        cwd="/",
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip


def test_a_bare_checkout_is_enough(tmp_path: Path) -> None:
    """A Python in which shardwise is not installed runs a checkout; one without torch is refused."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{Path(torch.__file__).parents[1]} exec {sys.executable} -S "$@"\n'
    )
    python.chmod(0o755)
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    command = (
        f'. {BENCHMARKS}/gpu/environment.sh; exec 3>&1; "$PYTHON" -c \'import shardwise; '
        "print(shardwise.__file__)'; ls $scratch"
    )
    found = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, timeout=60
    )
    assert found.returncode == 0 and str(ROOT / "src") in found.stdout, found.stderr
    refused = script("accept.sh", seconds=60, PYTHON=str(bare))
    assert refused.returncode == 2 and "has no torch" in refused.stderr


# ---- all parts, and the scripts as a whole ---------------------------------------------------------------------------

EVERY = {**accept.PARTS, **several.PARTS}
ON_CARDS = ("waits", "tests")  # these find out nothing where there is no card


def here(function: str, seconds: float, environment: Any = None, **arguments: Any) -> Any:
    """What a child process would answer, without the seconds that it takes to start; arguments and answers are JSON all
    the same.
    """
    module, _, name = function.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(json.dumps(arguments)))
    return json.loads(json.dumps(found))


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("name", EVERY)
def test_every_part_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (right, fast, memory, prototypes):
        monkeypatch.setattr(module, "in_child", here)
    found = parts.run(name, options(tmp_path, minutes=3.0), EVERY[name])
    assert not found.wrong and any(one["right"] for one in found.verdicts) == (name not in ON_CARDS), found.verdicts
    as_it_should_be(name, report.read(tmp_path)[name]["figures"])


def as_it_should_be(name: str, figures: dict[str, Any]) -> None:
    """Of a part's figures what is known at tiny size."""
    if name == "waits":
        assert figures["waits"]["none"]["steps"] == 3
    elif name == "tests":
        assert not figures
    elif name == "repeats":
        assert figures["blocking"]["apart"] == figures["killed"]["apart"] == 0
    elif name == "verify":
        assert figures["verify"]["gpt, zero 3, selective"]["largest"] <= 1e-10
    elif name == "fast":
        rows = {row["name"]: row for row in figures["rows"]}
        assert list(rows) == list(fast.NAMES) and all(
            row["mfu"] is None and row["off"] <= 5e-3 for row in rows.values()
        )
    elif name == "memory":
        assert list(figures["plans"]) == list(memory.PLANS)
        for one in figures["plans"].values():
            assert one["predicted"]["states"] == one["measured"]["states"]
            assert abs(one["measured"]["peak"] - one["predicted"]["peak"]) <= 64
        rows = figures["rows"]["none"]
        assert 1 < rows["predicted"] == rows["fitted"] < rows["refused"] and rows["peak"] <= rows["budget"]
    elif name == "prototypes":
        found = {question: one["ways"] for question, one in figures["prototypes"].items()}
        assert list(found) == list(prototypes.QUESTIONS)
        ours = [values for ways in found.values() for way, values in ways.items() if way.startswith("shardwise")]
        assert len(ours) == 3 and all("milliseconds" in values for values in ours)
        for ways in found.values():
            timed = [values for values in ways.values() if "unknown" not in values]
            assert len(timed) >= 2 and all(values["milliseconds"] > 0 and values["bytes"] is None for values in timed)
        assert all(values.get("error", 0) < 0.01 for values in found["weight_gradient"].values())
        assert found["optimizer"]["all together"]["kernels"] < found["optimizer"]["a bucket at a time"]["kernels"]
    elif name == "pipeline":
        assert figures["pipeline"]["apart"] <= several.SAME_LOSSES
    elif name == "killed":
        assert figures["killed"]["apart"] == 0
    elif name == "communicators":
        assert len(figures["communicators"]["bytes"]) == 2
    else:
        assert figures["parity"]["off"] <= 5e-3 and len(figures.get("overlap", "zz")) == 2


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "expected"), [("accept.sh", accept.PARTS), ("several.sh", several.PARTS)])
def test_a_script(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    done = script(name, "--device", "cpu", "--tiny", "--out", str(tmp_path), "--minutes", "3", seconds=850)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = report.read(tmp_path)
    assert list(found) == list(expected)
    for part in expected:
        as_it_should_be(part, found[part]["figures"])
    assert "at full size so far" in (tmp_path / "gpu.md").read_text()
