"""What programs of the oracle compute: toy units, in exact integers.

A unit multiplies.  With the parameters ``w`` of its buckets, the live tensors ``a`` that it reads and a constant ``x``
of its rows,

    s = Σ c·a + x,   W = 1 + Σ κ·w,   each output = d · s · W   (modulo a prime)

so a wrong, stale, missing or doubled operand changes everything that follows, and its derivatives are exact.  A
backward can overflow: its gradients are then NaN, the one number that is not an integer, and so is all that is
computed from them.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.units.trace import Bucket, Trace, Unit

PRIME = 2**31 - 1
EACH = 2  # elements of a shard
NEVER, ALWAYS = PRIME, -1  # limits of the norm
Values = list[int | None]


@functools.cache
def constant(*key: object) -> int:
    """A number that is the same for the same words."""
    return random.Random(repr(key)).randrange(1, PRIME)


def dot(a: Sequence[int], b: Sequence[int | None]) -> int:
    return sum(x * known(y) for x, y in zip(a, b, strict=True)) % PRIME


def known(value: int | None) -> int:
    assert value is not None, "an element is read that nobody has written"
    return value


@dataclass(frozen=True)
class Toy:
    """What is computed, whoever does it: units over buckets of ``parts`` shards.

    The gradients of a batch whose norm is above ``limit`` are scaled.  The backward of a unit in a microbatch that is
    one of ``overflows`` gives NaN where the first rows are.
    """

    trace: Trace
    parts: int
    limit: int = ALWAYS
    overflows: frozenset[tuple[int, int]] = frozenset()

    @property
    def numel(self) -> int:
        return self.parts * EACH

    def used(self, unit: Unit) -> list[Bucket]:
        """The buckets of a unit's parameters."""
        return [b for b in self.trace.buckets if {p.name for p in b.parameters} & set(unit.parameters)]

    def initial(self, bucket: Bucket) -> list[int]:
        return [constant("w", bucket.index, i) for i in range(self.numel)]

    def weights(self, unit: Unit, bucket: Bucket) -> list[int]:
        """κ of a unit: what each element of a bucket counts in W."""
        return [constant("k", unit.index, bucket.index, i) for i in range(self.numel)]

    def factor(self, unit: Unit, whole: Callable[[Bucket], Sequence[int | None]]) -> int:
        """W of a unit, from whole buckets."""
        return (1 + sum(dot(self.weights(unit, b), whole(b)) for b in self.used(unit))) % PRIME

    def sum(self, unit: Unit, inputs: Mapping[str, int], rows: object) -> int:
        """s of a unit."""
        return (
            sum(constant("c", unit.index, n) * inputs[n] for n in unit.inputs) + constant("x", unit.index, rows)
        ) % PRIME

    @staticmethod
    def outputs(unit: Unit, s: int, w: int) -> dict[str, int]:
        return {n: constant("d", n) * s * w % PRIME for n in unit.outputs}

    def arriving(self, unit: Unit, gradients: Mapping[str, int], m: int, rows: int) -> int:
        """The gradient of s·W from those of the outputs."""
        if (unit.index, m) in self.overflows and rows == 0:
            return math.nan  # type: ignore[return-value]
        return sum(constant("d", n) * gradients.get(n, 0) for n in unit.outputs) % PRIME

    @staticmethod
    def leaving(unit: Unit, arrived: int, w: int) -> dict[str, int]:
        """The gradients of the inputs that have one."""
        pairs = zip(unit.inputs, unit.input_grads, strict=True)
        return {n: arrived * w * constant("c", unit.index, n) % PRIME for n, wanted in pairs if wanted}

    def gradient(self, unit: Unit, bucket: Bucket, arrived: int, s: int) -> list[int]:
        """That of a bucket, of which the parameters of this unit have a part."""
        return [arrived * s * k % PRIME for k in self.weights(unit, bucket)]

    def scale(self, norm: int) -> int | None:
        """What gradients of this norm are multiplied by; None: there is no update."""
        if math.isnan(norm):
            return None
        return (5 * norm + 3) % PRIME if norm > self.limit else 1


def targets(m: int, rows: int) -> int:
    """How many targets some rows of a microbatch have."""
    return constant("targets", m, rows) % 1000 + 1


def updated(w: int, state: int, gradient: int, scale: int | None) -> tuple[int, int]:
    """A parameter and its state after a step."""
    if scale is None:
        return w, state
    state = (3 * state + gradient * scale) % PRIME
    return (5 * w - state) % PRIME, state
