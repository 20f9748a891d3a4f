"""Everything goes together with everything: whatever a plan combines equals one device, and what is not legal says
why.
"""

from __future__ import annotations

import functools
import itertools
import random

import pytest
from torch import Tensor

import zoo
from routing import clearest
from settings import EXPERTS, VALUES, Setting, drawn, every_pair
from shardwise.core.errors import ConfigError
from shardwise.core.schedules import traits
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady_batches
from shardwise.verify.verify import TOLERANCE, verify

PAIRS = every_pair(0)
WORDS, BATCHES = 24, 5
"""Of asynchronous pipelines more than the first batches have old weights."""


@functools.cache
def alone(name: str) -> tuple[Compiled, list[dict[str, Tensor]]]:
    """A model on one device, whose capture serves all plans, and batches."""
    one = zoo.make(name, WORDS)
    batch = clearest(one.module, one.batch, WORDS) if name in EXPERTS else one.batch
    batches = [{k: v.roll(i, 0) for k, v in batch.items()} for i in range(BATCHES)]
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
@pytest.mark.parametrize("setting", PAIRS, ids=lambda setting: "-".join(map(str, setting)))
def test_every_pair(setting: Setting) -> None:
    """Of each two axes every pair of values that is legal."""
    print(f"\n{setting}: {check(setting):.1e}")


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(60))
def test_any_three(seed: int) -> None:
    """Three kinds of parallelism or more, and all else, at random."""
    setting = drawn(random.Random(seed), lambda one: sum(size > 1 for size in one.sizes) >= 3)
    assert setting is not None
    print(f"\nseed {seed}: {setting}: {check(setting):.1e}")


# ---- what is not legal -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[Setting, str]] = [
    (Setting("own gpt", ep=2), "ep: 2 is not legal: no layer of experts was found in the model; legal: 1"),
    (
        Setting("own gpt", tensor=("1d", 2, "by-number")),
        'experts: "by-number" is not legal: no layer of experts was fo',
    ),
    (Setting("mixtral", ep=2, tensor=("1d", 3, "by-number")), "for 4 experts over ep = 2; legal: 1 to 2, or experts ="),
    (Setting("mixtral", ep=5), "ep: 5 is not legal for 4 experts; legal: 1 to 4"),
    (
        Setting("own gpt", data=(2, 3, 1), pp=(2, "pipedream-2bw"), microbatches=2),
        'zero: sharded states are not legal with schedule "pipedream-2bw", which keeps several versions of weights; '
        'legal: 0, or a schedule with one version, such as "1f1b"',
    ),
    (
        Setting("own gpt", pp=(2, "pipedream")),
        'schedule: "pipedream" updates each stage for itself, but wte.weight is used by stages 0 and 1; legal: weights '
        'that are not tied across stages, or another schedule, such as "pipedream-2bw"',
    ),
    (Setting("own gpt", pp=(2, "pipedream"), microbatches=2), 'microbatches: 2 is not legal with schedule "pipedream"'),
    (Setting("own gpt", pp=(2, "pipedream-2bw")), "microbatches: 1 is not legal .* on 2 ranks; legal: at least 2"),
    (Setting("own gpt", pp=(2, "naive"), microbatches=2), 'microbatches: 2 is not legal with schedule "naive" .*: 1'),
    (Setting("own gpt", pp=(2, "pipedream"), precision="fp16"), 'precision: "fp16" is not legal .*; legal: "fp32", "b'),
    (
        Setting("own gpt", pp=(5, "1f1b")),
        r"pp: 5 stages, but the model is cut into 4 blocks \(.*\); legal: at most 4 stages",
    ),
    (
        Setting("own gpt", pp=(3, "zbv")),
        r"pp: 6 stages, but the model is cut into 4 blocks \(.*\); legal: at most 4 stages: pp = 2, or a schedule with "
        "fewer than 2 stages on each rank",
    ),
    (Setting("own gpt", tensor=("2d", 2)), 'tp: 2 is not legal with tensor "2d"; legal: a square, such as 4 or 9'),
    (Setting("own gpt", tensor=("2.5d", 4)), r'tp: 4 is not legal with tensor "2\.5d"; legal: .*, such as 8 or 18'),
    (Setting("own gpt", tensor=("3d", 4)), 'tp: 4 is not legal with tensor "3d"; legal: a cube, such as 8 or 27'),
    (Setting("own gpt", data=(3, 1, 2)), "replicas: 2 of 3 ranks is not legal; legal: 1, 3"),
]


def begin(setting: Setting) -> None:
    """Make the programs of a setting, of which nothing runs."""
    compiled = alone(setting.model)[0].under(setting.plan)
    compiled.programs(compiled.general, setting.microbatches, steady_batches(setting.plan))


@pytest.mark.quick(2)
@pytest.mark.parametrize(("setting", "words"), REFUSED, ids=lambda one: one[:24] if isinstance(one, str) else "")
def test_what_is_refused(setting: Setting, words: str) -> None:
    """The option, its value and what would be legal are named, before anything runs."""
    with pytest.raises(ConfigError, match=words):
        begin(setting)


@pytest.mark.slow
def test_what_no_setting_has_is_what_is_refused() -> None:
    """Every pair of values that these settings leave out is refused."""
    found = {pair for one in PAIRS for pair in itertools.combinations(one._asdict().items(), 2)}
    for (first, one), (second, other) in itertools.product(
        *[[(axis, value) for axis, values in VALUES.items() for value in values]] * 2
    ):
        pair = (first, one), (second, other)
        if list(VALUES).index(first) < list(VALUES).index(second) and pair not in found:
            values = {"model": "own gpt", **dict(pair)}
            with pytest.raises(ConfigError):
                begin(Setting(**values))
