"""Comparisons: relative to the right thing, and never blind to a NaN."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.verify.compare import Comparison, Difference, relative_error, relative_errors, total_norm
from total_error import total_error


def test_error_is_relative_to_the_truth() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(truth + torch.tensor([0.0, 5e-3]), truth) == pytest.approx(1e-3)
    assert relative_error(truth, truth) == 0
    assert relative_error(truth * 1e-3, truth * 1e-6, floor=1.0) == pytest.approx(5e-3, rel=1e-2)


def test_fp32_and_bf16_are_compared_in_fp64() -> None:
    truth = torch.full((100,), 1 / 3, dtype=torch.float64)
    assert 1e-9 < relative_error(truth.float(), truth) < 1e-7
    assert 1e-4 < relative_error(truth.bfloat16(), truth) < 1e-2


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_infinitely_wrong(bad: float) -> None:
    good, wrong = torch.ones(4), torch.tensor([1.0, bad, 1.0, 1.0])
    assert relative_error(wrong, good) == relative_error(good, wrong) == relative_error(wrong, wrong) == math.inf
    comparison = Comparison()
    comparison.add(0, "gradient", {"a": good, "b": good, "c": good}, {"a": good, "b": wrong, "c": good})
    assert comparison.largest == math.inf and not comparison.passes(1e9)
    assert [d.name for d in comparison.worst(1)] == ["b"]
    comparison = Comparison()
    comparison.add_number(0, "loss", bad, 1.0)
    assert not comparison.passes(1e9)


def test_buffers_may_hold_equal_infinities() -> None:
    mask = torch.tensor([0.0, -math.inf, 1.0])
    other = torch.tensor([0.0, math.inf, 1.0])
    comparison = Comparison()
    comparison.add(0, "buffer", {"mask": mask}, {"mask": mask.clone()})
    assert comparison.passes(0)
    comparison.add(0, "buffer", {"mask": mask}, {"mask": other})
    assert comparison.largest == math.inf


def test_noise_is_measured_against_the_norm_of_all() -> None:
    """A gradient that is all rounding is no error beside large ones, and is one by itself."""
    noise, other = torch.full((4,), 1e-17, dtype=torch.float64), torch.full((4,), -1e-17, dtype=torch.float64)
    large = torch.full((100,), 10.0, dtype=torch.float64)
    assert relative_errors({"noise": noise, "large": large}, {"noise": other, "large": large})["noise"] < 1e-10
    assert relative_errors({"noise": noise}, {"noise": other})["noise"] == pytest.approx(2)
    assert total_norm({"a": large, "b": torch.tensor([10**9])}) == pytest.approx(100)  # integers have no part in it


def test_rounding_of_complex_numbers_is_noise_too() -> None:
    noise, large = torch.full((4,), 1e-17j, dtype=torch.complex128), torch.full((100,), 6 + 8j)
    assert relative_errors({"noise": noise, "large": large}, {"noise": -noise, "large": large})["noise"] < 1e-10
    assert total_norm({"a": large, "b": large.real}) == pytest.approx(math.hypot(100, 60))
    wrong = torch.full((4,), 1e-3j, dtype=torch.complex128)
    assert relative_errors({"noise": wrong, "large": large}, {"noise": noise, "large": large})["noise"] > 0.5


def test_total_error_is_that_of_one_long_vector() -> None:
    truth = {"small": torch.zeros(4, dtype=torch.float64), "large": torch.full((100,), 3.0, dtype=torch.float64)}
    wrong = {"small": torch.full((4,), 1e-3), "large": truth["large"] + 2e-3}
    assert total_error(wrong, truth) == pytest.approx(math.sqrt(4 * 1e-6 + 100 * 4e-6) / 30, rel=1e-6)
    assert total_error(truth, truth) == 0
    wrong["small"][1] = math.nan
    assert total_error(wrong, truth) == total_error({"large": truth["large"]}, truth) == math.inf


def test_names_shapes_and_integers_must_agree() -> None:
    a = torch.ones(3)
    errors = relative_errors(
        {"a": a, "extra": a, "shape": torch.ones(3, 1), "n": torch.tensor(5)},
        {"a": a, "missing": a, "shape": a, "n": torch.tensor(4)},
    )
    assert errors == {"a": 0, "extra": math.inf, "missing": math.inf, "shape": math.inf, "n": 0.25}
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.full((2,), 1e-300), torch.zeros(2)) in (0, math.inf)


def test_worst_offenders_and_summary() -> None:
    comparison = Comparison()
    truth = {"w": torch.ones(4, dtype=torch.float64), "b": torch.ones(1, dtype=torch.float64)}
    for step in range(3):
        wrong = {"w": truth["w"] * (1 + 1e-12), "b": truth["b"] * (1 + 1e-6 * step)}
        comparison.add(step, "gradient", wrong, truth)
        comparison.add_number(step, "loss", 2.0, 2.0)
    worst = comparison.worst(2)
    assert [(d.name, d.step, d.what) for d in worst] == [("b", 2, "gradient"), ("b", 1, "gradient")]
    assert isinstance(worst[0], Difference) and worst[0].error == pytest.approx(2e-6)
    assert comparison.summary() == {"gradient": comparison.largest, "loss": 0.0}
    assert comparison.largest == pytest.approx(2e-6) and not comparison.passes() and comparison.passes(1e-5)


def test_nothing_compared_is_not_equal() -> None:
    assert not Comparison().passes(1e9)


def test_what_is_exactly_zero_is_compared_with_the_size_of_all() -> None:
    zeros, rounding = {"a": torch.zeros(3), "b": torch.zeros(2)}, {"a": torch.full((3,), 4.6e-17), "b": torch.zeros(2)}
    assert relative_errors(rounding, zeros)["a"] == math.inf
    assert relative_errors(rounding, zeros, scale=2.0)["a"] < 1e-10
    assert relative_errors({**zeros, "a": torch.full((3,), 1e-9)}, zeros, scale=2.0)["a"] > 1e-6
    comparison = Comparison()
    comparison.add_number(0, "loss", 4.6e-17, 0.0, scale=2.0)
    comparison.add_number(0, "grad_norm", 1.0 + 1e-9, 1.0, scale=1e9)  # only zeros have this scale
    assert [d.error < 1e-10 for d in comparison.differences] == [True, False]


def test_limits_of_noise() -> None:
    ours, noise = Comparison(), Comparison()
    for comparison, errors in ((ours, (3e-9, 3e-9, 3e-5, 0.0)), (noise, (1e-9, 1e-12, 1e-3, 0.0))):
        for name, error in zip("abcd", errors, strict=True):
            comparison.differences.append(Difference(name, 0, "gradient", error))
    found = {d.name: d for d in ours.limited(noise).differences}
    assert found["a"].limit == pytest.approx(2e-8) and found["a"].within(1e-10)
    assert not found["b"].within(1e-10)
    assert found["c"].limit == 1e-6 and not found["c"].within(1e-10)
    assert [found[n].multiplied(1e-10) for n in "abcd"] == [False, False, True, False]
    raised, multiplied = ours.limited(noise).notes(1e-10)
    assert raised.startswith("1 of the differences") and "1 of the 2 differences that are too large" in multiplied
    assert "up to 1e-03" in multiplied and not ours.notes(1e-10)
    assert not ours.limited(noise).passes() and [d.name for d in ours.limited(noise).worst(2)] == ["c", "b"]
