"""One loop, with Accelerate's object and with ours: the same losses, rates and weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerated import Rows, criterion_loop, loop, net, plain_loop
from torch.utils.data import DataLoader

from processes import run_processes
from shardwise import Mesh, Plan
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.integrations.accelerate import Accelerator


@pytest.mark.quick(1)
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_loop_of_accelerate(accumulated: int) -> None:
    expected = loop(accelerate.Accelerator(gradient_accumulation_steps=accumulated, cpu=True), accumulated)
    found = loop(Accelerator(gradient_accumulation_steps=accumulated), accumulated)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
    assert found["rates"] == pytest.approx(expected["rates"], rel=1e-12)
    assert found["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-10)
    for name, value in expected["state"].items():
        torch.testing.assert_close(found["state"][name], value, rtol=1e-9, atol=1e-11)


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys() and len(found["losses"]) == 4  # of five batches, three and two a step
    for name in ("losses", "errors", "norms", "outputs"):
        assert found[name] == pytest.approx(expected[name], rel=1e-9, abs=1e-11), name
    for name, value in expected["state"].items():
        torch.testing.assert_close(torch.tensor(found["state"][name]), torch.tensor(value), rtol=1e-9, atol=1e-11)


@pytest.mark.quick(1)
@pytest.mark.parametrize("clip", ["all", "part", "largest", "value"])
def test_a_criterion_of_the_loop(clip: str) -> None:
    """``loss = criterion(model(x), y)``, of batches that add up, the last step of fewer."""
    expected = criterion_loop(accelerate.Accelerator(gradient_accumulation_steps=3, cpu=True), 4, clip)
    compare(criterion_loop(Accelerator(gradient_accumulation_steps=3), 4, clip), expected)


@pytest.mark.slow
@pytest.mark.parametrize("clip", ["all", "part"])
def test_a_criterion_of_the_loop_on_two_ranks(clip: str) -> None:
    here = Path(__file__).parent / "accelerated.py"
    expected = criterion_loop(accelerate.Accelerator(gradient_accumulation_steps=3, cpu=True), 4, clip)
    for output in run_processes(2, [str(here), "criterion", clip], 200):
        compare(json.loads(output.splitlines()[-1]), expected)


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    here = Path(__file__).parent / "accelerated.py"
    outputs = [json.loads(one.splitlines()[-1]) for one in run_processes(2, [str(here), str(tmp_path)], 200)]
    expected = plain_loop(rows=8)
    for found in outputs:
        assert found["losses"] == pytest.approx(expected, rel=1e-10)
        assert found["resumed"] == pytest.approx(expected[3:], rel=1e-10)
        assert found["main"] == (found is outputs[0])


def test_a_state_is_loaded_before_the_first_batch(tmp_path: Path) -> None:
    whole = loop(Accelerator(), 1, save=tmp_path / "state")
    again = loop(Accelerator(), 1, load=tmp_path / "state")
    assert again["losses"] == whole["losses"][3:]
    for name, value in whole["state"].items():
        torch.testing.assert_close(again["state"][name], value, rtol=0, atol=0)


def test_a_state_is_saved_with_writes_and_loaded_for_evaluations(tmp_path: Path) -> None:
    """The loop writes to a parameter between a step and the save, and evaluates before the first step."""
    batch = next(iter(DataLoader(Rows(), batch_size=4)))
    found = []
    for load in (False, True):
        accelerator, module = Accelerator(plan=Plan.of(precision="fp64")), net()
        model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
        if load:
            accelerator.load_state(tmp_path)
        else:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                next(model.parameters()).clamp_(-0.1, 0.1)
            accelerator.save_state(tmp_path)
        model.eval()
        found.append([accelerator.gather(model(**batch)["loss"]).item()])
        model.train()
        for _ in range(2):  # with the momentum
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            found[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        accelerator.end_training()
    assert found[0] == found[1] and max(net().first.weight.abs().flatten()) > 0.1


def test_what_is_not_supported_says_so(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with pytest.raises(ShardwiseError, match=r"accelerator.prepare\(\) of an optimizer before its model"):
        accelerator.prepare(torch.optim.SGD(net().parameters()))
    with pytest.raises(ShardwiseError, match=r"accelerator.prepare\(\) of dict is not there under shardwise"):
        accelerator.prepare({})
    with pytest.raises(ShardwiseError, match="accelerator.init_trackers is not there under shardwise"):
        accelerator.init_trackers("mine")
    module = net()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert accelerator.unwrap_model(model) is module
    with pytest.raises(ShardwiseError, match="save_state\\(\\) before a batch"):
        accelerator.save_state(tmp_path)
    with pytest.raises(ConfigError, match="has no state that save_state"):
        accelerator.load_state(tmp_path)
    batch = next(iter(DataLoader(Rows(), batch_size=4)))
    with pytest.raises(ShardwiseError, match="gradients are clipped .*test_accelerate.py.* without a backward"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.backward(model(**batch)["loss"])
    with pytest.raises(ShardwiseError, match="a parameter is given that the prepared model does not have"):
        accelerator.clip_grad_norm_(net().parameters(), 1.0)
    with pytest.raises(ShardwiseError, match="the step computes the norm of its gradients"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0).item()
    with pytest.raises(ShardwiseError, match="a second time for a step"):
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(ShardwiseError, match="optimizer.add_param_group is not there"):
        optimizer.add_param_group({})
    with pytest.raises(ShardwiseError, match="model.first is not there under shardwise"):
        model.first(batch["x"])
    with pytest.raises(ConfigError, match="mixed_precision: 'fp8' is not legal"):
        Accelerator(mixed_precision="fp8")
    accelerator.end_training()


def test_no_accumulation_under_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    plan = Plan.of(Mesh.of(pp=2), microbatches=2)
    assert Accelerator(plan=plan).plan == plan
    with pytest.raises(ConfigError, match="gradient_accumulation_steps: 2 under a pipeline.*; legal: 1, with larger"):
        Accelerator(gradient_accumulation_steps=2, plan=plan)


def test_accelerate_need_not_be_installed() -> None:
    code = "import sys; sys.modules['accelerate'] = None; from shardwise.integrations.accelerate import Accelerator"
    subprocess.run([sys.executable, "-c", f"{code}; Accelerator()"], check=True, timeout=100)
