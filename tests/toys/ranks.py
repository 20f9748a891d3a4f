"""One rank of the program oracle: it runs a program on toy units, and exchanges numbers with the other ranks.

Every buffer that a program frees is forgotten at once, and every element that nobody has written is None, with which
nothing can be computed.  Collectives and messages take their operands when they are issued, and their results come when
somebody waits for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.plan import Plan
from shardwise.core.program import Program
from shardwise.parallel.data import SHARDS, batch_axes, placement
from shardwise.units.trace import Bucket, Unit
from toys.units import EACH, PRIME, Toy, Values, known, targets, updated


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


class Rank:
    """One rank: its memory by buffer, and what it does at each instruction."""

    def __init__(self, exchanges: dict[object, Exchange], toy: Toy, plan: Plan, program: Program, rank: int) -> None:
        self.exchanges, self.toy, self.plan, self.program, self.rank = exchanges, toy, plan, program, rank
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
        self.done = 0  # what it has got done: grows as long as the rank goes on
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
        self.reported = {}
        for position in range(len(self.program.instructions)):
            yield from self.execute(position)
        yield from self.wait_for_all()

    def execute(self, position: int) -> Iterator[None]:
        """One instruction, after what it waits for."""
        self.position, one = position, self.program.instructions[position]
        for at in one.waits:
            yield from self.wait(at)
        operate: Callable[[Instruction], None] = getattr(self, f"do_{one.op.lower()}")
        operate(one)
        if position not in self.under_way:
            self.free(one)
        self.done += 1

    def wait_for_all(self) -> Iterator[None]:
        for at in sorted(self.under_way):
            yield from self.wait(at)

    def wait(self, at: int) -> Iterator[None]:
        """For an instruction and for those before it in its queue."""
        queue = self.program.instructions[at].queue
        for earlier in [p for p, post in self.under_way.items() if p <= at and post.one.queue == queue]:
            post = self.under_way.pop(earlier)
            exchange = self.exchanges[post.key]
            while not exchange.complete:
                yield
            kinds = {kind for kind, _ in exchange.given.values()}
            assert len(kinds) == 1, f"{post.one}: others do {kinds}"
            post.deliver([exchange.given[member][1] for member in exchange.members])
            self.free(post.one)
            self.done += 1

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
        exchange = self.exchanges.setdefault(key, Exchange(members))
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
        arrived = self.toy.arriving(unit, pending, m, self.rows)
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
        self.memory[one.writes[0]] = self.toy.scale(self.memory[one.reads[0]])

    def do_step(self, one: Instruction) -> None:
        b, scale = one.bucket, self.memory[Buffer("verdict", version=one.version)]
        goal, param = self.grad[b], self.param[b]
        gradient, at = goal[self.held(b, goal)], self.held(b, param)
        both = [
            updated(known(w), known(s), known(g), scale)
            for w, s, g in zip(param[at], self.state[b], gradient, strict=True)
        ]
        if len(param) == self.toy.numel and self.rule[b].state == "S":
            param[:] = [None] * len(param)  # the other ranks' shards are not those that are here any more
        param[at] = [w for w, _ in both]
        self.state[b] = [s for _, s in both]
        self.spend(one)

    def spend(self, one: Instruction) -> None:
        """The gradient of an updated bucket is of no use any more."""
        goal = self.grad[one.bucket]
        goal[:] = [None] * len(goal)

    def do_stash(self, one: Instruction) -> None:
        (place,) = one.writes
        assert place not in self.memory, f"{one}: the slot is in use"
        self.memory[place] = one.bucket, list(self.param[one.bucket])

    def do_report(self, one: Instruction) -> None:
        self.reported[one.version] = {p.kind: self.memory[p] for p in one.reads if p.kind in ("loss", "norm")}
