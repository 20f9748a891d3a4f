"""Settings of every axis at once: what is legal of them, and some at random."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from covering import covering
from shardwise.core.mesh import Mesh
from shardwise.core.plan import CHOICES, Plan
from shardwise.core.schedules import SCHEDULES
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel


class Setting(NamedTuple):
    """A model, and how a step of it is divided."""

    model: str
    data: tuple[int, int, int] = (1, 0, 1)
    """(Ranks, stage of ZeRO, groups of ranks that each have all shards)."""
    ep: int = 1
    context: tuple[int, Any] = (1, "gathered")
    tensor: tuple[Any, ...] = ("1d", 1)
    """(Recipe, ranks) and, if it is not the usual one, how these share experts."""
    pp: tuple[int, str] = (1, "1f1b")
    recompute: Any = "none"
    microbatches: int = 1
    precision: Any = "fp64"

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many ranks each kind of parallelism has."""
        return tuple(ranks_of(getattr(self, axis)) for axis in RANKS)

    @property
    def plan(self) -> Plan:
        options: dict[str, Any] = {"recompute": self.recompute, "precision": self.precision}
        plan = Plan.of(Mesh(()), microbatches=self.microbatches, **options)
        kind, size, *experts = self.tensor
        plan = context_parallel(tensor_parallel(plan, size, kind, experts=(experts or ["inside"])[0]), *self.context)
        data, zero, groups = self.data
        return pipeline(data_parallel(expert_parallel(plan, self.ep), data, zero, groups), *self.pp)


DENSE = ("own gpt", "own llama", "gpt2 padded")
EXPERTS = ("mixtral", "qwen3 moe", "deepseek")
TIED = ("own gpt", "gpt2 padded")
"""The models whose embedding is also their last layer, so that the first and the last stage share it."""
FEWEST = 4
"""The number of experts of the models that have fewest."""
VALUES: dict[str, Sequence[Any]] = {
    "model": (*DENSE, *EXPERTS),
    "data": ((1, 0, 1), (2, 0, 1), (3, 1, 1), (2, 2, 1), (2, 3, 1), (4, 0, 2), (4, 1, 2), (4, 2, 2), (4, 3, 2)),
    "ep": (1, 2, 3, 4),
    "context": ((1, "gathered"), (2, "gathered"), (2, "ring"), (2, "heads"), (3, "ring")),
    "tensor": (
        ("1d", 1),
        ("1d", 2),
        ("1d", 3),
        ("1d-sp", 2),
        ("1d-sp", 4),
        ("2d", 4),
        ("2.5d", 8),
        ("3d", 8),
        ("1d", 2, "by-number"),
        ("1d-sp", 4, "by-number"),
    ),
    "pp": ((1, "1f1b"), *((2, name) for name in SCHEDULES), (3, "1f1b"), (3, "zb-h2")),
    "recompute": CHOICES["recompute"],
    "microbatches": (1, 2, 3),
    "precision": CHOICES["precision"],
}

RANKS = ("data", "ep", "context", "tensor", "pp")
"""The axes that take ranks."""


def legal(setting: Setting) -> bool:
    """Whether the plan is legal for the model: ``test_what_is_refused`` has what it says otherwise."""
    size, name = setting.pp
    schedule, m = SCHEDULES[name], setting.microbatches
    times = schedule.min_microbatches_per_rank * size <= m <= (schedule.max_microbatches or m)
    alone = not (schedule.stages_alone and (m > 1 or setting.precision == "fp16" or setting.model in TIED))
    stale = not (schedule.asynchronous and setting.data[1])
    sharing = setting.ep * (setting.tensor[1] if setting.tensor[2:] else 1)  # the ranks that have some experts each
    return times and alone and stale and (sharing == 1 or (setting.model in EXPERTS and sharing <= FEWEST))


@functools.cache
def ranks_of(value: Any) -> int:
    """How many ranks a value of an axis takes; its size stands by itself or beside words."""
    sizes = (value,) if isinstance(value, int) else value if isinstance(value, tuple) else ()
    return next((size for size in sizes if isinstance(size, int)), 1)


def drawn(
    rng: random.Random, wanted: Callable[[Setting], bool] = lambda _: True, most: int = 16, **fixed: Any
) -> Setting | None:
    """A legal setting at random of at most so many ranks, with the ``fixed`` values, that is ``wanted``; None where
    many trials find none.
    """
    for _ in range(100):
        chosen = dict(fixed)
        left = most // math.prod(ranks_of(chosen[axis]) for axis in RANKS if axis in chosen)
        for axis in rng.sample(list(VALUES), len(VALUES)):
            if axis not in chosen:
                fitting = [one for one in VALUES[axis] if axis not in RANKS or ranks_of(one) <= left]
                if not fitting:
                    return None
                chosen[axis] = rng.choice(fitting)
                left //= ranks_of(chosen[axis]) if axis in RANKS else 1
        setting = Setting(**chosen)
        if legal(setting) and wanted(setting):
            return setting
    return None


def every_pair(seed: int, sizes: Sequence[int] = (8, 16, 32)) -> list[Setting]:
    """Legal settings in which every two axes have every pair of values that is legal, of as few ranks as that takes."""
    rng, found = random.Random(seed), []
    for first, second in itertools.combinations(VALUES, 2):
        for one, other in itertools.product(VALUES[first], VALUES[second]):
            trials = (drawn(rng, most=most, **{first: one, second: other}) for most in sizes)
            found += [next((setting for setting in trials if setting is not None), None)]
    return list(covering([setting for setting in found if setting is not None]))
