"""One device: what all ranks together have to compute."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from shardwise.core.plan import Plan
from shardwise.lower.stages import StageSplit
from shardwise.parallel.versions import double_buffered_version, stashed_version
from shardwise.units.trace import Unit
from toys.units import PRIME, Toy, targets, updated


@dataclass
class Device:
    """One device that trains on batch after batch with the versions of the weights that a plan's schedule is defined
    by, and knows the norm of all gradients before it updates any weight.

    ``history`` has for each bucket its values after 0, 1, ... updates since the pipeline was empty.
    """

    toy: Toy
    plan: Plan
    rows: int

    def __post_init__(self) -> None:
        self.stages = StageSplit.of(self.toy.trace, self.plan)
        self.history = {b.index: [self.toy.initial(b)] for b in self.toy.trace.buckets}
        self.states = {index: [0] * len(values[0]) for index, values in self.history.items()}

    def window(self, batches: int) -> list[tuple[int, int]]:
        """Train from an empty pipeline to an empty pipeline: loss and norm of each batch."""
        self.history = {index: values[-1:] for index, values in self.history.items()}
        return [self.batch(number) for number in range(batches)]

    def batch(self, number: int) -> tuple[int, int]:
        loss, gradients = 0, {index: [0] * len(values[0]) for index, values in self.history.items()}
        for m in range(number * self.plan.microbatches, (number + 1) * self.plan.microbatches):
            weight = sum(targets(m, r) for r in range(self.rows))
            for r in range(self.rows):
                loss += self._rows(gradients, weight, m, r)
        learning = [b for b in self.toy.trace.buckets if b.learns]
        squares = {b.index: sum(g * g for g in gradients[b.index]) % PRIME for b in learning}
        norm = sum(squares.values()) % PRIME
        for bucket in learning:
            index, own = bucket.index, norm
            if self.plan.stages_alone:
                mine = self.stages.holders(bucket)
                own = sum(squares[other.index] for other in learning if self.stages.holders(other) == mine) % PRIME
            before = zip(self.history[index][-1], self.states[index], gradients[index], strict=True)
            both = [updated(w, s, g, self.toy.scale(own)) for w, s, g in before]
            self.history[index].append([w for w, _ in both])
            self.states[index] = [s for _, s in both]
        return loss % PRIME, norm

    def _version(self, unit: Unit, m: int) -> int:
        """The number of updates in the weights that a unit uses for a microbatch."""
        if self.plan.stages_alone:
            return stashed_version(
                m, self.stages.stage[unit.index], self.stages.stages, self.plan.pipeline.vertical_sync
            )
        if self.plan.double_buffered:
            return double_buffered_version(m, self.plan.microbatches)
        return m // self.plan.microbatches

    def _rows(self, gradients: dict[int, list[int]], weight: int, m: int, r: int) -> int:
        """The loss of some rows; their gradients are added."""
        toy = self.toy
        live: dict[str, int] = {}
        saved: dict[int, tuple[int, int]] = {}
        for unit in toy.trace.units:
            weights = {b.index: self.history[b.index][self._version(unit, m)] for b in toy.used(unit)}
            s, w = toy.sum(unit, live, (m, r)), toy.factor(unit, lambda b, weights=weights: weights[b.index])  # type: ignore[misc]
            saved[unit.index] = s, w
            live |= toy.outputs(unit, s, w)
        pending: dict[str, int] = defaultdict(int)
        pending["loss"] = weight
        for unit in reversed([u for u in toy.trace.units if u.differentiable]):
            s, w = saved[unit.index]
            arrived = toy.arriving(unit, pending, m, r)
            for name, gradient in toy.leaving(unit, arrived, w).items():
                pending[name] += gradient
            for bucket in toy.used(unit):
                new = toy.gradient(unit, bucket, arrived, s)
                gradients[bucket.index] = [(g + n) % PRIME for g, n in zip(gradients[bucket.index], new, strict=True)]
        return live["loss"] * weight
