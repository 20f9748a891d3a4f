"""An oracle of programs: it runs those of all ranks on toy units in exact integers, and one device beside them.

A unit multiplies.  With the parameters ``w`` of its buckets, the live tensors ``a`` that it reads and a constant ``x``
of its rows,

    s = Σ c·a + x,   W = 1 + Σ κ·w,   each output = d · s · W   (modulo a prime)

so a wrong, stale, missing or doubled operand changes everything that follows, and its derivatives are exact.  Every
buffer that a program frees is forgotten at once, and every element that nobody has written is None, with which nothing
can be computed.  Collectives and messages take their operands when they are issued, and their results come when
somebody waits for them.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program, class_of
from shardwise.lower.stages import StageSplit
from shardwise.parallel.data import SHARDS, batch_axes, placement
from shardwise.parallel.versions import double_buffered_version, stashed_version
from shardwise.units.trace import Bucket, Trace, Unit

PRIME = 2**31 - 1
EACH = 2  # elements of a shard
Values = list[int | None]


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
    """What is computed, whoever does it: units over buckets of ``parts`` shards."""

    trace: Trace
    parts: int

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

    @staticmethod
    def arriving(unit: Unit, gradients: Mapping[str, int]) -> int:
        """The gradient of s·W from those of the outputs."""
        return sum(constant("d", n) * gradients.get(n, 0) for n in unit.outputs) % PRIME

    @staticmethod
    def leaving(unit: Unit, arrived: int, w: int) -> dict[str, int]:
        """The gradients of the inputs that have one."""
        pairs = zip(unit.inputs, unit.input_grads, strict=True)
        return {n: arrived * w * constant("c", unit.index, n) % PRIME for n, wanted in pairs if wanted}

    def gradient(self, unit: Unit, bucket: Bucket, arrived: int, s: int) -> list[int]:
        """That of a bucket, of which the parameters of this unit have a part."""
        return [arrived * s * k % PRIME for k in self.weights(unit, bucket)]


def targets(m: int, rows: int) -> int:
    """How many targets some rows of a microbatch have."""
    return constant("targets", m, rows) % 1000 + 1


def verdict(norm: int) -> int:
    return (5 * norm + 3) % PRIME


def updated(w: int, state: int, gradient: int, decided: int) -> tuple[int, int]:
    """A parameter and its state after a step."""
    state = (3 * state + gradient * decided) % PRIME
    return (5 * w - state) % PRIME, state


# ---- one device ------------------------------------------------------------------------------------------------------


@dataclass
class Device:
    """One device that trains on batch after batch with the versions of the weights that a plan's schedule is defined
    by.

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
            both = [updated(w, s, g, verdict(own)) for w, s, g in before]
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
            arrived = toy.arriving(unit, pending)
            for name, gradient in toy.leaving(unit, arrived, w).items():
                pending[name] += gradient
            for bucket in toy.used(unit):
                new = toy.gradient(unit, bucket, arrived, s)
                gradients[bucket.index] = [(g + n) % PRIME for g, n in zip(gradients[bucket.index], new, strict=True)]
        return live["loss"] * weight


# ---- all ranks -------------------------------------------------------------------------------------------------------


@dataclass
class Post:
    """What a rank has under way: ``deliver`` takes the result when all others have come too."""

    key: object
    deliver: Callable[[Any], None]
    one: Instruction


@dataclass
class Exchange:
    """What all members of a group, or both ends of a message, have handed in so far."""

    members: tuple[int, ...]
    given: dict[int, tuple[str, Any]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.given) == len(self.members)


class World:
    """All ranks of a plan, and what they exchange."""

    def __init__(self, toy: Toy, plan: Plan, programs: Sequence[Program]) -> None:
        self.exchanges: dict[object, Exchange] = {}
        self.ranks = [
            Rank(self, toy, plan, class_of(programs, plan.mesh, rank), rank) for rank in range(plan.mesh.size)
        ]

    def step(self) -> list[dict[int, dict[str, int]]]:
        """Run every program once; loss and norm of each batch as each rank reports them."""
        self.exchanges.clear()
        running = {rank.rank: rank.run() for rank in self.ranks}
        while running:
            before = sum(rank.position for rank in self.ranks), len(running)
            for number in list(running):
                try:
                    next(running[number])
                except StopIteration:
                    del running[number]
            after = sum(rank.position for rank in self.ranks), len(running)
            assert before != after, (
                f"nobody goes on: {[str(r.program.instructions[r.position]) for r in self.ranks if r.rank in running]}"
            )
        return [rank.reported for rank in self.ranks]


class Rank:
    """One rank: its memory by buffer, and what it does at each instruction."""

    def __init__(self, world: World, toy: Toy, plan: Plan, program: Program, rank: int) -> None:
        self.world, self.toy, self.plan, self.program, self.rank = world, toy, plan, program, rank
        mesh = plan.mesh
        at = mesh.index(rank, SHARDS)
        self.own = slice(EACH * at, EACH * (at + 1))
        self.rows, self.all_rows = mesh.index(rank, batch_axes(plan.mesh)), mesh.axis_size(batch_axes(plan.mesh))
        self.rule = {b.index: placement(plan, b.parameters[0].name) for b in toy.trace.buckets}
        whole = {b.index: b for b in toy.trace.buckets}
        self.param: dict[int, Values] = {}
        self.state: dict[int, Values] = {}
        for index, bucket in whole.items():
            values: Values = list(toy.initial(bucket))
            self.param[index] = values if self.rule[index].rest == "R" else values[self.own]
            self.state[index] = [0] * (EACH if self.rule[index].state == "S" else toy.numel)
        self.grad: dict[int, Values] = {i: self._nothing(i) for i in whole}
        self.memory: dict[Buffer, Any] = {}  # what lives within a step
        self.position = 0
        self.under_way: dict[int, Post] = {}
        self.counts: dict[object, int] = defaultdict(int)
        self.reported: dict[int, dict[str, int]] = {}  # by batch

    def _nothing(self, bucket: int) -> Values:
        return [None] * (EACH if self.rule[bucket].grad == "S" else self.toy.numel)

    def held(self, bucket: int, values: Values) -> slice:
        """Where what the optimizer takes lies in a gradient, or in parameters."""
        return self.own if self.rule[bucket].state == "S" and len(values) == self.toy.numel else slice(0, len(values))

    # ---- the order of things -----------------------------------------------------------------------------------------

    def run(self) -> Iterator[None]:
        """Every instruction in order; it yields where it has to wait for others."""
        assert not self.memory, f"left from the step before: {sorted(self.memory)}"
        run: dict[Op, Callable[[Instruction], None]] = {
            op: getattr(self, f"do_{op.lower()}") for op in {i.op for i in self.program.instructions}
        }
        self.reported = {}
        for position, one in enumerate(self.program.instructions):
            self.position = position
            for at in one.waits:
                yield from self.wait(at)
            run[one.op](one)
            if self.position not in self.under_way:
                self.free(one)
        for at in sorted(self.under_way):
            yield from self.wait(at)

    def wait(self, at: int) -> Iterator[None]:
        """For an instruction and for those before it in its queue."""
        queue = self.program.instructions[at].queue
        for earlier in [p for p, post in self.under_way.items() if p <= at and post.one.queue == queue]:
            post = self.under_way.pop(earlier)
            exchange = self.world.exchanges[post.key]
            while not exchange.complete:
                yield
            kinds = {kind for kind, _ in exchange.given.values()}
            assert len(kinds) == 1, f"{post.one}: others do {kinds}"
            post.deliver([exchange.given[member][1] for member in exchange.members])
            self.free(post.one)

    def post(
        self,
        one: Instruction,
        members: tuple[int, ...],
        what: str,
        value: Any,
        deliver: Callable[[Any], None],
        to: object = None,
    ) -> None:
        """Hand in ``value``; ``deliver`` gets those of all members, in their order, when this rank waits."""
        channel = (members, str(one.lane), to) if to is None else (members, to)
        key = (channel, self.counts[channel])
        self.counts[channel] += 1
        exchange = self.world.exchanges.setdefault(key, Exchange(members))
        assert self.rank not in exchange.given
        exchange.given[self.rank] = what, value
        if one.lane is Lane.COMPUTE:
            raise AssertionError(f"{one} communicates on the compute lane")
        self.under_way[self.position] = Post(key, deliver, one)

    def free(self, one: Instruction) -> None:
        for buffer in one.frees:
            self.memory.pop(buffer, None)

    # ---- computing ---------------------------------------------------------------------------------------------------

    def whole(self, one: Instruction) -> Callable[[Bucket], Values]:
        """A bucket as this instruction may read it: in a slot, as an old version, or where it rests."""

        def find(bucket: Bucket) -> Values:
            for place in one.reads:
                if place.kind in ("slot", "stash") and self.memory[place][0] == bucket.index:
                    found: Values = self.memory[place][1]
                    return found
            assert Buffer("param", bucket.index) in one.reads, f"{one} does not read bucket {bucket.index}"
            assert len(self.param[bucket.index]) == self.toy.numel, f"{one} reads a shard"
            return self.param[bucket.index]

        return find

    def unit(self, one: Instruction) -> Unit:
        return self.toy.trace.units[one.unit]

    def inputs(self, one: Instruction) -> dict[str, int]:
        """The live tensors that a unit reads."""
        unit, found = self.unit(one), {}
        for other in self.toy.trace.units:
            place = Buffer("activation", other.index, one.microbatch)
            if set(other.outputs) & set(unit.inputs):
                assert place in one.reads
                found |= self.memory[place]
        return found

    def do_forward(self, one: Instruction) -> None:
        unit, m = self.unit(one), one.microbatch
        s = self.toy.sum(unit, self.inputs(one), (m, self.rows))
        w = self.toy.factor(unit, self.whole(one))
        for place in one.writes:
            if place.kind == "activation":
                self.memory[place] = self.toy.outputs(unit, s, w)
            elif place.kind in ("saved", "kept"):
                self.memory[place] = s, w
            else:
                assert place.kind == "loss"
                part = self.toy.outputs(unit, s, w)["loss"] * self.weight(one, m)
                self.memory[place] = (self.memory.get(place, 0) + part) % PRIME

    def weight(self, one: Instruction, m: int) -> int:
        (place,) = [p for p in one.reads if p.kind == "weight"]
        found: int = self.memory[place][m]
        return found

    def do_recompute(self, one: Instruction) -> None:
        unit, (place,) = self.unit(one), one.writes
        found = (
            self.toy.sum(unit, self.inputs(one), (one.microbatch, self.rows)),
            self.toy.factor(unit, self.whole(one)),
        )
        kept = Buffer("kept", one.unit, one.microbatch)
        assert kept not in one.reads or self.memory[kept] == found
        self.memory[place] = found

    def do_backward(self, one: Instruction) -> None:
        unit, m = self.unit(one), one.microbatch
        s, w = self.memory[Buffer("saved", one.unit, m)]
        assert s == self.toy.sum(unit, self.inputs(one), (m, self.rows)), "an input has changed since forward"
        assert w == self.toy.factor(unit, self.whole(one)), "a parameter has changed since forward"
        pending: dict[str, int] = defaultdict(int)
        for place in one.reads:
            if place.kind in ("gradient", "received"):
                assert place.index == one.unit
                for name, value in self.memory[place].items():
                    pending[name] += value
        if "loss" in unit.outputs:
            pending["loss"] = self.weight(one, m)
        arrived = self.toy.arriving(unit, pending)
        leaving = self.toy.leaving(unit, arrived, w)
        for place in one.writes:
            if place.kind == "gradient":
                mine = {n: v for n, v in leaving.items() if n in self.toy.trace.units[place.index].outputs}
                there = self.memory.setdefault(place, defaultdict(int))
                for name, value in mine.items():
                    there[name] += value
            elif place.kind == "deferred":
                self.memory[place] = arrived, s
        self.add_gradients(one, arrived, s, "whole" if one.op is Op.BACKWARD else "input")

    do_backward_input = do_backward

    def do_backward_weight(self, one: Instruction) -> None:
        self.add_gradients(one, *self.memory[Buffer("deferred", one.unit, one.microbatch)], "weight")

    def add_gradients(self, one: Instruction, arrived: int, s: int, part: str) -> None:
        """To the gradients that the instruction writes; of a bucket with both kinds of parameters each part of a
        backward gives some.
        """
        unit, slots = self.unit(one), dict(one.slots)
        for bucket in self.toy.used(unit):
            names = {p.name for p in bucket.parameters}
            inside, products = names & set(unit.inside), names & set(unit.products)
            times = {
                "whole": 1,
                "input": (3 if products else 1) if inside else 0,
                "weight": (-2 if inside else 1) if products else 0,
            }[part]
            if not times or not bucket.learns:
                continue
            goal = self.goal(one, bucket.index, slots)
            for i, value in enumerate(self.toy.gradient(unit, bucket, arrived, s)):
                goal[i] = (known(goal[i]) + times * value) % PRIME

    def goal(self, one: Instruction, bucket: int, slots: Mapping[int, int]) -> Values:
        """Where a backward adds to a bucket's gradient: zeros at first."""
        if bucket in slots:
            place = Buffer("unreduced", slots[bucket])
            assert place in one.writes
            if bucket in one.first:
                self.memory[place] = bucket, [0] * self.toy.numel
            assert self.memory[place][0] == bucket
            found: Values = self.memory[place][1]
            return found
        assert Buffer("grad", bucket) in one.writes, f"{one} does not write the gradient of bucket {bucket}"
        assert len(self.grad[bucket]) == self.toy.numel, f"{one} writes a whole gradient to a shard"
        if bucket in one.first:
            self.grad[bucket][:] = [0] * self.toy.numel
        return self.grad[bucket]

    # ---- communication -----------------------------------------------------------------------------------------------

    def do_count(self, one: Instruction) -> None:
        (place,) = one.writes
        per_batch = self.plan.microbatches
        mine = {m: targets(m, self.rows) for m in range(place.version * per_batch, (place.version + 1) * per_batch)}

        def deliver(all_of: list[dict[int, int]]) -> None:
            self.memory[place] = {m: sum(each[m] for each in all_of) for m in mine}

        self._sum(one, "COUNT", mine, deliver)

    def _sum(self, one: Instruction, what: str, value: Any, deliver: Callable[[Any], None]) -> None:
        if one.axes:
            self.post(one, self.plan.mesh.group(self.rank, one.axes), f"{what} {one.axes}", value, deliver)
        else:
            deliver([value])

    def do_gather(self, one: Instruction) -> None:
        b, (place,) = one.bucket, one.writes
        mine = self.param[b][self.own] if len(self.param[b]) == self.toy.numel else self.param[b]

        def deliver(parts: list[Values]) -> None:
            whole = [value for part in parts for value in part]
            if place.kind == "slot":
                assert place not in self.memory, f"{one}: the slot is in use"
                self.memory[place] = b, whole
            else:
                self.param[b][:] = whole

        self._sum(one, f"GATHER {b}", list(mine), deliver)

    def do_round(self, one: Instruction) -> None:
        self.memory[Buffer("unreduced", one.slot)] = one.bucket, list(self.grad[one.bucket])

    def do_reduce(self, one: Instruction) -> None:
        if one.bucket < 0:
            (place,) = one.writes
            value = self.memory.get(place, 0)
            self._sum(one, place.kind, value, lambda values: self.memory.__setitem__(place, sum(values) % PRIME))
            return
        b, x = one.bucket, self.grad[one.bucket]
        if one.slot >= 0:
            index, x = self.memory[Buffer("unreduced", one.slot)]
            assert index == b
        shard = one.scatters or (self.rule[b].state == "S" and len(x) == self.toy.numel)
        given = list(x) if one.scatters or not shard else x[self.own]

        def deliver(parts: list[Values]) -> None:
            total: Values = [sum(map(known, values)) % PRIME for values in zip(*parts, strict=True)]
            if one.scatters:
                total = total[self.own]
            if one.slot >= 0 and Buffer("grad", b) in one.writes:
                assert b in one.first
                goal = self.grad[b]
                goal[self.held(b, goal)] = total
            elif shard:
                x[:] = [None] * len(x)
                x[self.own] = total
            else:
                x[:] = total

        self._sum(one, f"REDUCE {b} {one.scatters}", given, deliver)

    def do_add(self, one: Instruction) -> None:
        b, goal = one.bucket, self.grad[one.bucket]
        if one.slot >= 0:
            index, values = self.memory[Buffer("unreduced", one.slot)]
            assert index == b
            values = values[self.held(b, values)]
        else:
            values = self.memory[one.reads[0]]
        at = self.held(b, goal)
        before = [0] * len(values) if b in one.first else goal[at]
        goal[at] = [(known(x) + known(y)) % PRIME for x, y in zip(before, values, strict=True)]

    def do_send(self, one: Instruction) -> None:
        place = one.reads[0]
        if one.bucket >= 0:
            goal = self.grad[one.bucket]
            value: Any = list(goal[self.held(one.bucket, goal)])
        else:
            there = self.memory[place]
            value = {name: there.get(name, 0) if place.kind == "gradient" else there[name] for name in one.tensors}
        self._message(one, value, lambda _: None)

    def do_receive(self, one: Instruction) -> None:
        (place,) = one.writes

        def deliver(values: list[Any]) -> None:
            value = values[0]
            if place.kind == "grad":
                goal = self.grad[one.bucket]
                goal[self.held(one.bucket, goal)] = value
            elif place.kind == "activation":
                self.memory[place] = self.memory.get(place, {}) | value
            else:
                self.memory[place] = value

        self._message(one, None, deliver)

    def _message(self, one: Instruction, value: Any, deliver: Callable[[Any], None]) -> None:
        assert one.peer is not None
        other = self.plan.mesh.offset(self.rank, *one.peer, wrap=True)
        pair = (self.rank, other) if one.op is Op.SEND else (other, self.rank)
        what = f"bucket {one.bucket}" if one.bucket >= 0 else f"{one.unit} {one.microbatch} {one.tensors}"
        self.post(one, pair, what, value, deliver, "gradients" if one.bucket >= 0 else "tensors")

    # ---- the update --------------------------------------------------------------------------------------------------

    def do_norm(self, one: Instruction) -> None:
        """Of this rank's own shard of every gradient; of replicas the first counts."""
        (place,) = one.writes
        first = self.plan.mesh.index(self.rank, batch_axes(self.plan.mesh)) == self.plan.mesh.index(self.rank, SHARDS)
        shards = [self.grad[b.index] for b in one.reads]
        mine = [value for x in shards for value in (x[self.own] if len(x) == self.toy.numel else x)]
        self.memory[place] = sum(known(g) ** 2 for g in mine) % PRIME if first else 0

    def do_decide(self, one: Instruction) -> None:
        self.memory[one.writes[0]] = verdict(self.memory[one.reads[0]])

    def do_step(self, one: Instruction) -> None:
        b, decided = one.bucket, self.memory[Buffer("verdict", version=one.version)]
        goal, param = self.grad[b], self.param[b]
        gradient, at = goal[self.held(b, goal)], self.held(b, param)
        both = [
            updated(known(w), known(s), known(g), decided)
            for w, s, g in zip(param[at], self.state[b], gradient, strict=True)
        ]
        if len(param) == self.toy.numel and self.rule[b].state == "S":
            param[:] = [None] * len(param)  # the other ranks' shards are not those that are here any more
        param[at] = [w for w, _ in both]
        self.state[b] = [s for _, s in both]
        goal[:] = [None] * len(goal)

    def do_stash(self, one: Instruction) -> None:
        (place,) = one.writes
        assert place not in self.memory, f"{one}: the slot is in use"
        self.memory[place] = one.bucket, list(self.param[one.bucket])

    def do_report(self, one: Instruction) -> None:
        self.reported[one.version] = {p.kind: self.memory[p] for p in one.reads if p.kind in ("loss", "norm")}


def differences(toy: Toy, plan: Plan, programs: Sequence[Program], steps: int = 2) -> list[str]:
    """What ranks report or hold after some steps that one device does not."""
    world = World(toy, plan, programs)
    rows = plan.mesh.axis_size(batch_axes(plan.mesh))
    device, found = Device(toy, plan, rows), []
    for number in range(steps):
        truth = dict(enumerate({"loss": loss, "norm": norm} for loss, norm in device.window(programs[0].batches)))
        for rank, reported in enumerate(world.step()):
            if reported != truth:
                found.append(f"step {number}, rank {rank}: {reported}, not {truth}")
    for rank, bucket in itertools.product(world.ranks, toy.trace.buckets):
        if any(b.index == bucket.index and i.op is Op.STEP for i in rank.program.instructions for b in i.writes):
            values = rank.param[bucket.index]
            at = rank.held(bucket.index, values)
            whole = device.history[bucket.index][-1]
            part = whole[at] if len(values) == toy.numel else whole[rank.own]
            if values[at] != part:
                found.append(f"rank {rank.rank}: bucket {bucket.index} differs")
    return found
