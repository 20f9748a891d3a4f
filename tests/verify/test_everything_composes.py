"""Everything goes together with everything: whatever a plan combines equals one device, and what is not legal says
why.
"""

from __future__ import annotations

import functools
import random

import pytest
from torch import Tensor

import zoo
from settings import Setting, drawn, every_pair
from shardwise.core.schedules import traits
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import TOLERANCE, verify

WORDS, BATCHES = 24, 5
"""Of asynchronous pipelines more than the first batches have old weights."""


@functools.cache
def alone(name: str) -> tuple[Compiled, list[dict[str, Tensor]]]:
    """A model on one device, whose capture serves all plans, and batches."""
    one = zoo.make(name, WORDS)
    batches = [{k: v.roll(i, 0) for k, v in one.batch.items()} for i in range(BATCHES)]
    return Compiled(one.module.train(), Setting(name).plan, batches[0], one.loss), batches


def check(setting: Setting) -> float:
    """Compare a setting with one device, and return the largest error in fp64."""
    one, batches = alone(setting.model)
    kind = traits(setting.pp[1])
    few = {name: value[:3] for name, value in batches[1].items()}  # than some plans have ranks
    given = batches if kind.asynchronous else [batches[0], few]
    clip = None if kind.stages_alone else 1.0  # whose stages know no norm of all
    report = verify(one.module, given, setting.plan, clip_norm=clip, captured=one)
    assert report.compared > 50
    assert report.passed and report.largest <= TOLERANCE, (
        setting,
        report.worst[:3],
        report.low_precision,
        report.notes,
    )
    return report.largest


@pytest.mark.slow
@pytest.mark.few(16)
@pytest.mark.parametrize("setting", every_pair(0), ids=lambda setting: "-".join(map(str, setting)))
def test_every_pair(setting: Setting) -> None:
    """Of each two axes every pair of values that is legal."""
    print(f"\n{setting}: {check(setting):.1e}")


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(60))
def test_any_three(seed: int) -> None:
    """Three kinds of parallelism or more, and all else, at random."""
    setting = drawn(random.Random(seed), lambda one: sum(size > 1 for size in one.sizes) >= 3)
    assert setting is not None
    print(f"\nseed {seed}: {setting}: {check(setting):.1e}")
