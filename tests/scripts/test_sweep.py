"""The sweep over libraries' models: small configs, results that survive, workers that die, and the page."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

from sweeping import condensed, serve  # noqa: E402
from sweeping.case import LABELS, ROWS, Case, Draws, Entry, batches  # noqa: E402
from sweeping.narrow import narrowed  # noqa: E402
from sweeping.of_transformers import LEFT_OUT  # noqa: E402
from sweeping.outcome import CRASH, PASSES, PLAIN, REFUSED, TIMEOUT, TRAINS, UNTRAINED, WRONG, Outcome  # noqa: E402
from sweeping.page import (  # noqa: E402
    PLANS,
    SHARDED,
    SHARDED_MODELS,
    TARGETS,
    TITLES,
    largest_error,
    longest_capture,
    page,
    passed,
    percent,
)
from sweeping.plans import plans  # noqa: E402
from sweeping.results import Results  # noqa: E402
from sweeping.shrink import completed, shrunk  # noqa: E402
from sweeping.torchvision_ops import nms  # noqa: E402
from sweeping.trial import trial  # noqa: E402
from sweeping.wrappers import Assistant, Packed, Picked, Regression, Strip  # noqa: E402


def squares(output: torch.Tensor, fields: Any) -> torch.Tensor:
    return (output - fields["y"]).square().mean()


def regression(loss: Any = squares) -> Case:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    return Case(module, batches(lambda draws: {"input": draws.numbers(6), "y": draws.numbers(2)}), loss)


# ---- a trial ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_model_passes_under_every_plan() -> None:
    found = list(trial(Entry("own", "net", "regression", regression)))
    assert [one.plan for one in found] == [PLAIN, *plans()]
    assert [one.outcome for one in found] == [TRAINS] + [PASSES] * len(plans())
    assert all(one.error is not None and one.error <= 1e-10 for one in found[1:])
    shares = {one.plan: one.sharded for one in found}
    assert shares["dp"] is None and shares["tp"] is not None and shares["tp"] > 0.7  # all but the last bias


def test_what_does_not_train_in_plain_torch_is_not_held_against_a_plan() -> None:
    found = list(trial(Entry("own", "net", "nan", lambda: regression(lambda o, f: squares(o, f) * float("nan")))))
    assert [(one.plan, one.outcome) for one in found] == [(PLAIN, UNTRAINED)] and "nan" in found[0].text
    found = list(trial(Entry("own", "net", "none", lambda: regression(lambda o, f: f["y"].mean()))))
    assert found[0].outcome == UNTRAINED and "depends on no parameter" in found[0].text


def test_a_refusal_is_a_sentence_and_a_crash_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    case = regression()
    case.module = nn.Linear(6, 2)  # one unit, which cannot be two stages
    found = {one.plan: one for one in trial(Entry("own", "net", "small", lambda: case), "pp".__eq__)}
    assert found["pp"].outcome == REFUSED and found["pp"].text.startswith("pp: ") and "legal:" in found["pp"].text
    monkeypatch.setattr("sweeping.trial.verify", lambda *args, **kwargs: {}["missing"])
    found = {one.plan: one for one in trial(Entry("own", "net", "regression", regression), "dp".__eq__)}
    assert found["dp"].outcome == CRASH and found["dp"].text.startswith("KeyError: 'missing' (")


# ---- batches and models ----------------------------------------------------------------------------------------------


def test_batches_are_padded_at_the_right_and_ignore_unequal_numbers_of_targets() -> None:
    draws = Draws(0, ROWS[0])
    mask = draws.padding(12)
    assert bool((mask.diff(dim=1) <= 0).all()) and len(set(mask.sum(1).tolist())) > 2 and int(mask.sum(1).min()) > 0
    ignored = (draws.targets(9, 12, mask) == -100).sum(1)
    assert len(set(ignored.tolist())) > 2 and bool((draws.targets(9, 12, mask)[mask == 0] == -100).all())
    assert torch.equal(Draws(3, 4).numbers(2), Draws(3, 4).numbers(2))


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3MoeConfig", "CLIPConfig", "SwinConfig", "WhisperConfig"])
def test_configs_become_tiny(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, kind)
    small = config(**shrunk(config()))
    for inner in [small, *(getattr(small, name) for name in small.sub_configs)]:
        numbers = {k: v for k, v in vars(inner).items() if isinstance(v, int) and not k.startswith("_")}
        assert all(v <= 120 for v in numbers.values()), numbers
    if kind == "Qwen3MoeConfig":
        assert (small.num_experts, small.num_experts_per_tok, small.num_hidden_layers) == (4, 2, 2)


def test_special_tokens_stay_apart_and_kinds_of_layers_are_all_there() -> None:
    transformers = pytest.importorskip("transformers")
    small = transformers.Gemma3Config(**shrunk(transformers.Gemma3Config()))
    assert set(small.text_config.layer_types) == {"sliding_attention", "full_attention"}
    ids = {small.image_token_index, small.boi_token_index, small.eoi_token_index}
    assert len(ids) == 3 and max(ids) < small.text_config.vocab_size


def test_backbones_keep_as_many_stages_and_their_channels_fit() -> None:
    transformers = pytest.importorskip("transformers")
    small = completed(transformers.RTDetrConfig(**shrunk(transformers.RTDetrConfig())))
    assert small.backbone_config.out_features == ["stage2", "stage3", "stage4"]
    assert small.encoder_in_channels == small.backbone_config.hidden_sizes[1:]
    deep = transformers.DepthAnythingConfig(**shrunk(transformers.DepthAnythingConfig())).backbone_config
    assert len(deep.out_features) == 4 and deep.num_hidden_layers == 4


def test_rows_that_a_model_wants_one_after_the_other_are_apart_in_its_batches() -> None:
    module = Packed(nn.Linear(6, 2), "input")
    fields = Draws(0, 7).numbers(4, 6)
    output = module(input=fields, wanted=fields)
    assert output.shape == (28, 2) and Regression.wanted(output, 7) == (4, 2)
    wanted = output.detach().reshape(7, 4, 2)
    assert Regression()(output, {"wanted": wanted}).item() == 0
    assert Regression.wanted(output.unflatten(0, (7, 4)), 7) == (4, 2)
    with pytest.raises(ValueError, match="an output of shape \\(28, 2\\) for 5 rows"):
        Regression.wanted(output, 5)


def test_models_are_fed_as_they_want_it() -> None:
    class Sums(nn.Module):
        def forward(self, **fields: Any) -> Any:
            self.fields = fields
            return types.SimpleNamespace(last_hidden_state=fields["pixel_values"].sum(1, keepdim=True), logits=0)

    model, images = Sums(), Draws(0, 7).numbers(3, 2, 8)
    strip = Strip(model)(pixel_values=images, target_sizes=torch.full((7, 2), 2))
    assert torch.equal(strip.view(1, 2, 7, 8)[0, :, 4], images[4].sum(0))  # the fifth image is in the fifth place
    pair = Draws(0, 7).numbers(2, 4, 3, 8)
    Assistant(model)(pixel_values=images, full=pair, sliding=pair + 1)
    keys, values = model.fields["shared_kv_states"]["sliding_attention"]
    assert torch.equal(keys, pair[:, 0] + 1) and torch.equal(values, pair[:, 1] + 1)
    both = Picked(nn.Identity(), "b", "a")
    both.model.forward = lambda **fields: fields
    assert both(a=torch.ones(2, 1), b=torch.zeros(2, 1, 2)).tolist() == [[0, 0, 1]] * 2


def test_narrow_nets_have_fewer_channels_and_the_same_images_and_classes() -> None:
    with narrowed(8):
        first = nn.Conv2d(3, 32, 3)
        depthwise = nn.Conv2d(in_channels=32, out_channels=64, kernel_size=3, groups=32)
        grouped, head = nn.Conv2d(64, 64, 1, groups=32), nn.Linear(64, LABELS)
        norm = nn.BatchNorm2d(32)
    assert (first.in_channels, first.out_channels, norm.num_features) == (3, 4, 4)
    assert (depthwise.groups, depthwise.out_channels, grouped.groups) == (4, 8, 8)
    assert (head.in_features, head.out_features) == (8, LABELS)
    assert nn.Conv2d(8, 16, 1).out_channels == 16


def test_of_boxes_that_overlap_the_best_stays() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [0, 0, 10, 9]])
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.1, 0.8]), 0.5).tolist() == [1, 2]
    assert nms(boxes, torch.tensor([0.5, 0.9, 0.1, 0.8]), 0.95).tolist() == [1, 3, 0, 2]


# ---- results ---------------------------------------------------------------------------------------------------------


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "results.jsonl"
    results = Results(path)
    for one in (Outcome("a/b/c", PLAIN, TRAINS), Outcome("a/b/c", "dp", REFUSED, "no"), Outcome("a/b/c", "tp", PASSES)):
        results.add(one)
    results.add(Outcome("a/x/c", PLAIN, UNTRAINED, "no loss"))
    with path.open("a") as file:
        file.write(json.dumps(asdict(Outcome("a/b/c", "pp", PASSES)))[:-9])  # a process was killed while it wrote
    again = Results(path)
    assert again.found == results.found
    assert again.open("a/b/c", ["dp", "pp", "tp"]) == ["pp"]
    assert again.open("a/b/c", ["dp", "pp", "tp"], ["failed"]) == ["dp", "pp"]
    assert again.open("a/b/c", ["dp", "pp", "tp"], ["passes"]) == ["pp", "tp"]
    assert again.open("a/x/c", ["dp"]) == [] and again.open("a/x/c", ["dp"], ["failed"]) == ["dp"]
    again.add(Outcome("a/b/c", "dp", PASSES))
    assert Results(path).found["a/b/c", "dp"].outcome == PASSES


WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    kind = asked["model"].split("/")[1]
    def say(plan, outcome):
        print(json.dumps({"model": asked["model"], "plan": plan, "outcome": outcome}), flush=True)
    if kind == "unbuilt":
        os._exit(3)
    say("plain torch", "trains")
    for plan in asked["plans"]:
        if kind == "dies" and plan == "dp":
            print("a bad pointer", file=sys.stderr, flush=True)
            time.sleep(0.1)
            os._exit(3)
        if kind == "hangs" and plan == "tp":
            time.sleep(60)
        say(plan, "passes")
    say(None, "")
"""


@pytest.mark.fresh
def test_workers_that_die_or_hang_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(serve, "WORKER", worker)
    results = Results(tmp_path / "results.jsonl")
    names = ["a/fine/x", "a/dies/x", "a/hangs/x", "a/unbuilt/x", "a/last/x"]
    serve.sweep(names, results, workers=2, limit=1.0, only=("dp", "tp"))
    found = {name: {plan: one.outcome for (n, plan), one in results.found.items() if n == name} for name in names}
    good = {PLAIN: TRAINS, "dp": PASSES, "tp": PASSES}
    assert found["a/fine/x"] == found["a/last/x"] == good
    assert found["a/dies/x"] == {**good, "dp": CRASH} and found["a/hangs/x"] == {**good, "tp": TIMEOUT}
    assert found["a/unbuilt/x"] == {PLAIN: UNTRAINED}
    assert "a bad pointer" in results.found["a/dies/x", "dp"].text


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_is_that_of_the_results() -> None:
    records = list(condensed.read(ROOT / "scripts" / "sweep.json").values())
    assert (ROOT / "docs" / "models.md").read_text() == page(records)
    assert PLANS == tuple(plans()) == tuple(TITLES) == tuple(TARGETS)


def test_the_results_reach_what_the_page_names() -> None:
    ran = [one for one in condensed.read(ROOT / "scripts" / "sweep.json").values() if one.trains]
    for plan, target in TARGETS.items():
        good, tried = passed(ran, plan)
        assert tried == len(ran) and 100 * good / tried >= target, (plan, good, tried)
    shares = [one.sharded for one in ran if one.sharded is not None]
    assert 100 * sum(one >= SHARDED for one in shares) / len(shares) >= SHARDED_MODELS


def test_records_keep_the_newest_and_the_page_counts_what_trains(tmp_path: Path) -> None:
    outcomes = [
        Outcome("transformers/a/x", PLAIN, TRAINS, parameters=9),
        Outcome("transformers/a/x", "dp", REFUSED, "dp: not <this>; legal: that"),
        Outcome("transformers/a/x", "tp", PASSES, error=1e-16, sharded=0.5, whole={"aten.eye.default": 2}, capture=1.0),
        Outcome("transformers/b/x", PLAIN, TRAINS), Outcome("transformers/b/x", "dp", PASSES),
        Outcome("transformers/c/x", PLAIN, UNTRAINED, "ValueError: there is no loss"),
        Outcome("transformers/vits/x", PLAIN, UNTRAINED, "IndexError: index out of range in self (torch.py:9)"),
    ]  # fmt: skip
    records = condensed.merged({}, outcomes)
    path = tmp_path / "sweep.json"
    condensed.write(path, records)
    assert list(condensed.read(path).values()) == records
    text = page(records)
    assert "| transformers | 2 | 2 | 1 of 2 | - | - | 1 of 1 |" in text
    assert "dp: not &lt;this>; legal: that" in text and "ValueError: there is no loss" in text
    assert f"| {LEFT_OUT['vits']} | transformers/vits/x |" in text and "IndexError" not in text
    assert "In 0 of 1 models (0 %" in text and "| transformers/a/x | 50% |" in text
    assert "| a | x | **0 of 1** | - | - | 1 | - | - | 50% | 1e-16 | 1.0 s |" in text
    assert "| b | x | 1 | - | - | - | - | - | - | - | - |" in text
    (newer,) = condensed.merged({one.model: one for one in records}, [Outcome("transformers/a/x", "dp", PASSES)])[:1]
    assert newer.plans["dp"] == PASSES and not newer.texts and newer.sharded == 0.5
    (one,) = condensed.merged(
        {},
        [
            Outcome("transformers/a/x", PLAIN, TRAINS), Outcome("transformers/a/x", "dp", PASSES, error=3.4e-14),
            Outcome("transformers/a/x", "pp", PASSES, error=0.0, capture=2.06),
            Outcome("transformers/a/x", "tp", WRONG, "loss", error=0.5),
        ],
    )  # fmt: skip
    assert (largest_error([one]), longest_capture([one])) == ("3e-14", "2.1 s")
    one.errors.pop("dp")
    assert largest_error([one]) == "0"
    assert percent(999, 1000) == "99.9 %" and percent(9999, 10000) == "99.9 %" and percent(5, 5) == "100 %"
