"""Every schedule is held to torch's own class, or to its definition where torch has none, step by step."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as torchs

from shardwise.core.errors import ConfigError
from shardwise.core.learning_rates import LR_SCHEDULES, OPTIONS
from shardwise.core.optim import OptimizerChoice

LR, STEPS = 0.7, 97
Make = Callable[[torch.optim.Optimizer], Any]


def of_torch(make: Make, steps: int = STEPS, optimizer: str = "SGD", **options: Any) -> list[dict[str, Any]]:
    """Return the hyperparameters that torch's scheduler sets for each step."""
    made = getattr(torch.optim, optimizer)([torch.nn.Parameter(torch.zeros(1))], lr=LR, **options)
    scheduler, found = make(made), []
    for step in range(steps):
        if step:
            made.step()
            scheduler.step()
        found.append(dict(made.param_groups[0]))
    return found


def after_warmup(steps: int, make: Make) -> Make:
    """Return what makes the schedule of ``make`` behind a warm-up as shardwise has it, from lr / steps to lr."""

    def both(optimizer: torch.optim.Optimizer) -> Any:
        rise = torchs.LinearLR(optimizer, start_factor=1 / steps, end_factor=1.0, total_iters=steps - 1)
        return torchs.SequentialLR(optimizer, [rise, make(optimizer)], milestones=[steps])

    return both


LEAST = 0.03


def cyclic(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return torchs.CyclicLR(optimizer, base_lr=LEAST * LR, max_lr=LR, cycle_momentum=False, **options)


CASES: dict[str, tuple[dict[str, Any], Make]] = {
    "constant": ({}, lambda o: torchs.ConstantLR(o, factor=1.0)),
    "linear": ({"min_lr_ratio": LEAST}, lambda o: torchs.LinearLR(o, 1.0, LEAST, total_iters=STEPS - 1)),
    "linear to zero": (
        {"schedule": "linear", "min_lr_ratio": 0.0}, lambda o: torchs.LinearLR(o, 1.0, 0.0, total_iters=STEPS - 1)
    ),
    "cosine": (
        {"min_lr_ratio": LEAST}, lambda o: torchs.CosineAnnealingLR(o, T_max=STEPS - 1, eta_min=LR * LEAST)
    ),
    "polynomial": (
        {"min_lr_ratio": 0.0, "power": 1.7}, lambda o: torchs.PolynomialLR(o, total_iters=STEPS - 1, power=1.7)
    ),
    "cosine_with_restarts": (
        {"min_lr_ratio": LEAST, "cycle_steps": 13},
        lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=13, eta_min=LR * LEAST),
    ),
    "restarts of growing length": (
        {"schedule": "cosine_with_restarts", "min_lr_ratio": LEAST, "cycle_steps": 5, "cycle_mult": 3},
        lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=5, T_mult=3, eta_min=LR * LEAST),
    ),
    "step": ({"step_size": 7, "gamma": 0.6}, lambda o: torchs.StepLR(o, 7, gamma=0.6)),
    "step by a tenth": ({"schedule": "step", "step_size": 40}, lambda o: torchs.StepLR(o, 40)),
    "multistep": (
        {"milestones": (9, 10, 50, 200), "gamma": 0.4}, lambda o: torchs.MultiStepLR(o, [9, 10, 50, 200], gamma=0.4)
    ),
    "exponential": ({"gamma": 0.93}, lambda o: torchs.ExponentialLR(o, 0.93)),
    "cyclic": ({"min_lr_ratio": LEAST, "step_size_up": 7}, lambda o: cyclic(o, step_size_up=7)),
    "cyclic halved": (
        {"schedule": "cyclic", "min_lr_ratio": LEAST, "step_size_up": 3, "step_size_down": 8, "mode": "triangular2"},
        lambda o: cyclic(o, step_size_up=3, step_size_down=8, mode="triangular2"),
    ),
    "cyclic by a factor": (
        {"schedule": "cyclic", "min_lr_ratio": LEAST, "step_size_up": 9, "step_size_down": 1, "mode": "exp_range",
         "gamma": 0.97},
        lambda o: cyclic(o, step_size_up=9, step_size_down=1, mode="exp_range", gamma=0.97),
    ),
}  # fmt: skip


def choice_of(case: str, **more: Any) -> OptimizerChoice:
    options = CASES[case][0]
    given = {"name": "sgd", "lr": LR, "total_steps": STEPS, "schedule": case} | options | more
    return OptimizerChoice(**given)


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_is_torchs(case: str) -> None:
    ours, theirs = choice_of(case), of_torch(CASES[case][1])
    assert [ours.learning_rate(i) for i in range(STEPS)] == pytest.approx([one["lr"] for one in theirs], abs=1e-12)


@pytest.mark.parametrize("case", ["cosine", "linear", "cosine_with_restarts", "step", "exponential"])
def test_a_schedule_begins_behind_its_warm_up(case: str) -> None:
    options, make = CASES[case]
    warmup, more = 6, STEPS + 6
    ours = choice_of(case, warmup_steps=warmup, total_steps=more)
    theirs = of_torch(after_warmup(warmup, make), more)
    assert [ours.learning_rate(i) for i in range(more)] == pytest.approx([one["lr"] for one in theirs], abs=1e-12)


def test_milestones_are_steps_of_the_run() -> None:
    ours = OptimizerChoice(lr=LR, schedule="multistep", milestones=(12, 20), gamma=0.5, warmup_steps=8)
    right = [LR * (i + 1) / 8 for i in range(8)] + [LR] * 4 + [LR / 2] * 8 + [LR / 4] * 10
    assert [ours.learning_rate(i) for i in range(30)] == pytest.approx(right, abs=1e-15)


ONE_CYCLE: dict[str, dict[str, Any]] = {
    "by default": {},
    "three phases": {"three_phase": True, "pct_start": 0.4},
    "linear": {"anneal_strategy": "linear", "div_factor": 7.0, "final_div_factor": 3.0},
    "three phases that overlap": {"three_phase": True, "pct_start": 0.7, "anneal_strategy": "linear"},
    "own momenta": {"base_momentum": 0.2, "max_momentum": 0.7},
    "momentum stays": {"cycle_momentum": False},
    "it only falls": {"pct_start": 0.0},
    "it only rises": {"pct_start": 1.0},
}


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("case", ONE_CYCLE)
def test_one_cycle_is_torchs_with_its_momentum(case: str, optimizer: str) -> None:
    options = ONE_CYCLE[case]
    own = {"momentum": 0.5} if optimizer == "SGD" else {"betas": (0.6, 0.9)}
    ours = OptimizerChoice(optimizer.lower(), lr=LR, schedule="one_cycle", total_steps=STEPS, **own, **options)  # type: ignore[arg-type]
    theirs = of_torch(lambda o: torchs.OneCycleLR(o, max_lr=LR, total_steps=STEPS, **options), STEPS, optimizer, **own)
    for step, right in enumerate(theirs):
        mine = ours.settings(step)[0]
        assert mine["lr"] == pytest.approx(right["lr"], abs=1e-12)
        for key in own:
            assert mine[key] == pytest.approx(right[key], abs=1e-12)
    assert ours.settings(STEPS + 5) == ours.settings(STEPS - 1)


def test_one_cycle_of_groups_moves_them_all() -> None:
    """A group with a learning rate of its own goes through the same cycle, with the second of its betas as it is."""
    from shardwise.core.parameter_groups import ParameterGroup

    groups = (ParameterGroup.of("head.*", lr=LR / 5),)
    ours = OptimizerChoice("adam", lr=LR, betas=(0.1, 0.7), schedule="one_cycle", total_steps=20, groups=groups)
    for step in range(20):
        first, _, own, _ = ours.settings(step)
        assert own["lr"] == pytest.approx(first["lr"] / 5, rel=1e-14)
        assert own["betas"] == first["betas"] and own["betas"][1] == 0.7


def test_inverse_square_root() -> None:
    """It continues the warm-up as in transformers: lr * sqrt(warmup / step)."""
    ours = OptimizerChoice(lr=LR, schedule="inverse_sqrt", warmup_steps=10)
    assert [ours.learning_rate(i) for i in range(10)] == pytest.approx([LR * (i + 1) / 10 for i in range(10)])
    assert [ours.learning_rate(i) for i in range(10, 500)] == pytest.approx(
        [LR * math.sqrt(10 / i) for i in range(10, 500)], abs=1e-14
    )
    own = OptimizerChoice(lr=LR, schedule="inverse_sqrt", timescale=40.0)
    assert own.learning_rate(120) == pytest.approx(LR / 2, abs=1e-15)
    assert OptimizerChoice(lr=LR, schedule="inverse_sqrt").learning_rate(30_000) == pytest.approx(LR / 2, abs=1e-15)


def test_a_trapezoid() -> None:
    """Warm-up, stable, decay: as torch's warm-up, then `LinearLR` over the last steps alone."""
    ours = OptimizerChoice(
        lr=LR, schedule="wsd", warmup_steps=8, total_steps=STEPS, decay_fraction=0.3, min_lr_ratio=LEAST
    )
    falling = round(0.3 * STEPS)
    stable = STEPS - 1 - falling
    right = [LR * (i + 1) / 8 for i in range(8)] + [LR] * (stable - 8)
    right += [LR * (1 - (1 - LEAST) * i / falling) for i in range(falling + 1)]
    assert [ours.learning_rate(i) for i in range(STEPS)] == pytest.approx(right, abs=1e-14)


def test_transformers_has_the_same_schedules() -> None:
    """Its factor of step s is ours of step s, behind a warm-up; its schedules end one step later."""
    optimization = pytest.importorskip("transformers.optimization")
    warmup, steps = 9, 60
    pairs = {
        "linear": ({"min_lr_ratio": 0.0}, optimization.get_linear_schedule_with_warmup, {}),
        "polynomial": (
            {"power": 2.0, "min_lr_ratio": 0.2}, optimization.get_polynomial_decay_schedule_with_warmup,
            {"power": 2.0, "lr_end": 0.2 * LR},
        ),
        "cosine": ({"min_lr_ratio": 0.0}, optimization.get_cosine_schedule_with_warmup, {}),
        "inverse_sqrt": ({}, optimization.get_inverse_sqrt_schedule, {}),
    }  # fmt: skip
    for schedule, (options, make, arguments) in pairs.items():
        total = {} if schedule == "inverse_sqrt" else {"num_training_steps": steps - 1}
        theirs = of_torch(lambda o, m=make, a=arguments | total: m(o, num_warmup_steps=warmup, **a), steps)
        ours = OptimizerChoice("sgd", lr=LR, schedule=schedule, warmup_steps=warmup, total_steps=steps, **options)
        mine = [ours.learning_rate(i) for i in range(warmup, steps)]
        assert mine == pytest.approx([one["lr"] for one in theirs[warmup:]], abs=1e-12), schedule


WRONG = [
    ({"gamma": 0.5}, r'optimizer.gamma: 0.5 is not legal with schedule = "constant".*"step", "multistep", "exp'),
    ({"schedule": "cosine", "total_steps": 9, "power": 2.0}, r'optimizer.power: 2.0.*with schedule = "polynomial"'),
    ({"schedule": "step"}, "optimizer.step_size: nothing is given.*needs it"),
    ({"schedule": "step", "step_size": 0}, "optimizer.step_size: 0"),
    ({"schedule": "exponential"}, "optimizer.gamma: nothing is given.*such as 0.999"),
    ({"schedule": "multistep"}, "optimizer.milestones: nothing is given"),
    ({"schedule": "multistep", "milestones": (5, 5)}, "optimizer.milestones.*rising integers"),
    ({"schedule": "multistep", "milestones": (5, 9), "warmup_steps": 6}, "optimizer.milestones: 5 lies in the warm-up"),
    ({"schedule": "cosine_with_restarts"}, "optimizer.cycle_steps: nothing is given"),
    ({"schedule": "cyclic"}, "optimizer.step_size_up: nothing is given.*in which the learning rate rises"),
    ({"schedule": "cyclic", "step_size_up": 0}, "optimizer.step_size_up: 0"),
    ({"schedule": "cyclic", "step_size_up": 2, "mode": "square"}, "optimizer.mode: 'square'.*triangular2"),
    ({"schedule": "cyclic", "step_size_up": 2, "gamma": 0.9}, 'optimizer.gamma: 0.9.*"triangular".*with mode = "exp_'),
    ({"schedule": "cyclic", "step_size_up": 2, "warmup_steps": 2}, "optimizer.warmup_steps: 2.*a rise of its own"),
    ({"schedule": "one_cycle"}, "optimizer.total_steps: 0"),
    ({"schedule": "one_cycle", "total_steps": 9, "warmup_steps": 2}, "optimizer.warmup_steps: 2.*a rise of its own"),
    ({"schedule": "one_cycle", "total_steps": 9, "pct_start": 1.2}, "optimizer.pct_start: 1.2"),
    ({"schedule": "one_cycle", "total_steps": 9, "div_factor": 0}, "optimizer.div_factor: 0"),
    ({"schedule": "one_cycle", "total_steps": 9, "max_momentum": 1.0}, "optimizer.max_momentum: 1.0"),
    ({"schedule": "one_cycle", "total_steps": 9, "anneal_strategy": "cosine"}, "anneal_strategy.*cosine"),
    ({"schedule": "one_cycle", "total_steps": 9, "name": "sgd"}, 'cycle_momentum.*"sgd" without momentum.*false'),
    ({"schedule": "one_cycle", "total_steps": 9, "name": "adagrad"}, 'cycle_momentum.*"adagrad" without momentum'),
    ({"schedule": "inverse_sqrt", "timescale": 0}, "optimizer.timescale: 0.*above 0"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_options_of_other_schedules_and_wrong_ones_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizerChoice(**options)


def test_every_schedule_and_option_is_tested() -> None:
    tested = {options.get("schedule", case) for case, (options, _) in CASES.items()}
    assert tested | {"one_cycle", "inverse_sqrt", "wsd"} == set(LR_SCHEDULES)
    used = {option for options, _ in CASES.values() for option in options} | {
        option for options in ONE_CYCLE.values() for option in options
    }
    assert used - {"schedule"} | {"timescale", "decay_fraction"} == set(OPTIONS)
