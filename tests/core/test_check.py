from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import pytest

from shardwise.core.check import ProgramError, check
from shardwise.core.instruction import Buffer, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program

X, Y, GRAD = Buffer("activation", 0, 0), Buffer("gradient", 0, 0), Buffer("grad", 0)


class Builder:
    """The program of one class, instruction by instruction."""

    def __init__(self, name: str = "all", **coordinates: int) -> None:
        self.name, self.coordinates = name, tuple(coordinates.items())
        self.instructions: list[Instruction] = []

    def add(
        self,
        op: Op,
        lane: Lane = Lane.COMPUTE,
        waits: Iterable[int] = (),
        reads: Iterable[Buffer] = (),
        writes: Iterable[Buffer] = (),
        peer: tuple[str, int] | None = None,
        axes: tuple[str, ...] = (),
        **numbers: int,
    ) -> int:
        lists = {"waits": tuple(waits), "reads": tuple(reads), "writes": tuple(writes)}
        self.instructions.append(Instruction(op, lane=lane, peer=peer, axes=axes, **lists, **numbers))
        return len(self.instructions) - 1

    def send(self, to: int, waits: Iterable[int] = (), microbatch: int = 0, axis: str = "pp", **more: object) -> int:
        return self.add(Op.SEND, Lane.SEND, waits, peer=(axis, to), microbatch=microbatch, **more)  # type: ignore[arg-type]

    def receive(self, of: int, waits: Iterable[int] = (), microbatch: int = 0, axis: str = "pp", **more: object) -> int:
        return self.add(Op.RECEIVE, Lane.RECEIVE, waits, peer=(axis, of), microbatch=microbatch, **more)  # type: ignore[arg-type]

    def compute(self, *waits: int, **more: object) -> int:
        return self.add(Op.FORWARD, Lane.COMPUTE, waits, **more)  # type: ignore[arg-type]

    def reduce(self, bucket: int, *waits: int, axes: tuple[str, ...] = ("pp",), lane: Lane = Lane.REDUCE) -> int:
        return self.add(Op.REDUCE, lane, waits, axes=axes, bucket=bucket)

    def program(self) -> Program:
        return Program(self.name, self.coordinates, tuple(self.instructions))


def pair() -> tuple[Builder, Builder]:
    return Builder("first", pp=0), Builder("second", pp=1)


def verify(*builders: Builder, mesh: Mesh | None = None) -> None:
    check([builder.program() for builder in builders], mesh or Mesh.of(dp=2, pp=2))


def pipeline(stages: int, microbatches: int, units: int) -> list[Program]:
    """One-forward-one-backward with gradients reduced behind the last backward."""
    programs = []
    for stage in range(stages):
        b = Builder(f"stage{stage}", pp=stage)
        reductions: list[int] = []

        def forward(m: int, b: Builder = b, stage: int = stage) -> None:
            arrived = [b.receive(-1, (), m, unit=stage, writes=[Buffer("activation", 0, m)])] if stage else []
            for u in range(units):
                reads = [Buffer("param", u), Buffer("activation", u, m)]
                writes = [Buffer("activation", u + 1, m), Buffer("saved", u, m)]
                last = b.add(Op.FORWARD, Lane.COMPUTE, arrived, reads, writes, unit=u, microbatch=m)
                arrived = []
            if stage < stages - 1:
                b.send(1, [last], m, unit=stage + 1, reads=[Buffer("activation", units, m)])

        def backward(m: int, b: Builder = b, stage: int = stage, reductions: list[int] = reductions) -> None:
            top = Buffer("gradient", units, m)
            arrived = [b.receive(1, (), m, unit=stage, writes=[top])] if stage < stages - 1 else []
            for u in reversed(range(units)):
                reads = [Buffer("gradient", u + 1, m), Buffer("saved", u, m), Buffer("grad", u)]
                writes = [Buffer("gradient", u, m), Buffer("grad", u)]
                last = b.add(Op.BACKWARD, Lane.COMPUTE, arrived, reads, writes, unit=u, microbatch=m)
                arrived = []
                if m == microbatches - 1:
                    grad = [Buffer("grad", u)]
                    reductions.append(b.add(Op.REDUCE, Lane.REDUCE, [last], grad, grad, axes=("dp",), bucket=u))
            if stage:
                b.send(-1, [last], m, unit=stage - 1, reads=[Buffer("gradient", 0, m)])

        ahead = min(stages - 1 - stage, microbatches)
        for m in range(ahead):
            forward(m)
        for m in range(microbatches):
            if m + ahead < microbatches:
                forward(m + ahead)
            backward(m)
        grads = [Buffer("grad", u) for u in range(units)]
        b.add(Op.NORM, Lane.COMPUTE, reductions[-1:], grads, [Buffer("norm")], axes=("dp", "pp"))
        for u in range(units):
            b.add(Op.STEP, Lane.COMPUTE, (), [grads[u], Buffer("norm")], [Buffer("param", u)], bucket=u)
        programs.append(b.program())
    return programs


# Right programs


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 3), (2, 1), (2, 4), (3, 2), (4, 6)])
def test_pipelines_are_accepted(stages: int, microbatches: int) -> None:
    check(pipeline(stages, microbatches, 2), Mesh.of(pp=stages, dp=2))


def test_one_device_and_data_parallelism_are_accepted() -> None:
    verify(Builder(), mesh=Mesh.of(dp=1))
    b = Builder()
    last = b.compute(writes=[GRAD])
    summed = b.add(Op.REDUCE, Lane.REDUCE, [last], [GRAD], [GRAD], axes=("dp",))
    b.add(Op.STEP, waits=[summed], reads=[GRAD])
    verify(b)
    verify(b, mesh=Mesh.of(dp=1))


@pytest.mark.slow
def test_many_large_programs_take_seconds() -> None:
    programs = pipeline(64, 62, 8)
    count = sum(len(program.instructions) for program in programs)
    assert count > 64 * 1000
    began = time.process_time()
    check(programs, Mesh.of(pp=64, dp=4))
    assert time.process_time() - began < count * 50e-6  # 5 microseconds each on an idle core


# Every wait of a right pipeline is needed: taking any one away is a race


def test_every_wait_of_a_pipeline_is_needed() -> None:
    programs = pipeline(3, 2, 2)
    removed = 0
    for number, program in enumerate(programs):
        for position, instruction in enumerate(program.instructions):
            for wait in instruction.waits:
                left = replace(instruction, waits=tuple(w for w in instruction.waits if w != wait))
                listed = list(program.instructions)
                listed[position] = left
                changed = [*programs]
                changed[number] = replace(program, instructions=tuple(listed))
                with pytest.raises(ProgramError, match=r"race on .* does not wait for"):
                    check(changed, Mesh.of(pp=3, dp=2))
                removed += 1
    assert removed > 20


# Planted deadlocks


def test_two_sends_before_the_receives_deadlock_where_sends_block() -> None:
    """The classic: it passes on a backend that buffers small messages."""
    first, second = pair()
    for builder, step in ((first, 1), (second, -1)):
        sent = builder.send(step)
        builder.compute(sent)
        builder.receive(step)
    with pytest.raises(ProgramError, match="deadlock") as error:
        verify(first, second)
    text = str(error.value)
    assert "first [0] SEND m0 to pp+1: has started and needs its other side" in text
    assert "second [2] RECEIVE m0 from pp-1: is issued only after" in text


def test_sends_are_fine_where_nothing_blocks_on_them() -> None:
    first, second = pair()
    for builder, step in ((first, 1), (second, -1)):
        builder.send(step)
        builder.receive(step)
    verify(first, second)


def test_sends_on_the_compute_lane_block() -> None:
    first, second = pair()
    for builder, step in ((first, 1), (second, -1)):
        builder.add(Op.SEND, peer=("pp", step))
        builder.add(Op.RECEIVE, Lane.RECEIVE, peer=("pp", step))
    with pytest.raises(ProgramError, match="deadlock"):
        verify(first, second)


def test_messages_with_different_peers_do_not_wait_for_each_other() -> None:
    """Each of three stages first serves the neighbour that is not ready for it."""
    builders = [Builder(f"s{stage}", pp=stage) for stage in range(3)]
    for builder in builders:
        builder.send(1)
        builder.send(2)
        builder.receive(1)
        builder.receive(2)
    verify(*builders, mesh=Mesh.of(pp=3))
    for builder in builders:
        builder.instructions = [builder.instructions[at] for at in (0, 1, 3, 2)]
    verify(*builders, mesh=Mesh.of(pp=3))


def test_messages_with_one_peer_are_behind_each_other() -> None:
    """Who waits for the second waits for the first, which the other side receives only after that."""
    a, b = Builder("a", pp=0), Builder("b", pp=1)
    for _ in range(2):
        a.send(1)
    a.compute(1)
    a.send(1, axis="pp")
    first = b.receive(-1)
    b.compute(first)
    b.receive(-1)
    b.receive(-1)
    verify(a, b, mesh=Mesh.of(pp=2))
    c, d = Builder("c", pp=0), Builder("d", pp=1)
    c.send(1)
    c.compute(c.send(1))
    c.receive(1)
    d.compute(d.receive(-1))
    d.compute(d.send(-1))
    d.receive(-1)
    with pytest.raises(ProgramError, match="is issued only after"):
        verify(c, d, mesh=Mesh.of(pp=2))


def test_a_ring_inside_one_class() -> None:
    """All ranks of an axis run one program: to send before receiving deadlocks just where sending blocks."""
    ring = Builder()
    ring.send(1, axis="cp")
    ring.receive(-1, axis="cp")
    verify(ring, mesh=Mesh.of(cp=4))
    blocking = Builder()
    sent = blocking.send(1, axis="cp")
    blocking.compute(sent)
    blocking.receive(-1, axis="cp")
    with pytest.raises(ProgramError, match="deadlock"):
        verify(blocking, mesh=Mesh.of(cp=4))


def test_a_wait_for_a_message_that_needs_later_instructions_deadlocks() -> None:
    first, second = pair()
    got = first.receive(1)
    first.compute(got)
    first.send(1)
    got = second.receive(-1)
    second.send(-1, [got])
    with pytest.raises(ProgramError, match="deadlock"):
        verify(first, second)


def test_two_communicators_crosswise_on_one_lane_deadlock() -> None:
    """Each communicator sees the same sequence on all members; only together they form a circle."""
    mesh = Mesh.of(pp=2, dp=2)
    programs = {}
    for dp, pp in product(range(2), range(2)):
        b = programs[dp, pp] = Builder(f"d{dp}p{pp}", dp=dp, pp=pp)
        over = [("dp",), ("pp",)] if (dp + pp) % 2 else [("pp",), ("dp",)]
        for axes in over:
            b.reduce(0, axes=axes)
    with pytest.raises(ProgramError, match="deadlock"):
        verify(*programs.values(), mesh=mesh)
    for b in programs.values():
        b.instructions.sort(key=lambda instruction: instruction.axes)
    verify(*programs.values(), mesh=mesh)


def test_two_communicators_crosswise_on_two_lanes_deadlock_if_waits_chain_them() -> None:
    first, second = pair()
    for b, chained in ((first, True), (second, True)):
        one, two = (Lane.GATHER, Lane.REDUCE) if b is first else (Lane.REDUCE, Lane.GATHER)
        done = b.reduce(0, lane=one)
        b.reduce(0, *([done] if chained else []), lane=two)
    with pytest.raises(ProgramError, match="deadlock"):
        verify(first, second)
    for b in (first, second):
        b.instructions[1] = replace(b.instructions[1], waits=())
    verify(first, second)


def test_a_collective_against_a_message_deadlocks() -> None:
    """A tied weight reduced across stages before the last gradient was sent."""
    first, second = pair()
    got = first.receive(1)
    first.compute(got)
    first.reduce(7)
    summed = second.reduce(7)
    second.compute(summed)
    second.send(-1)
    with pytest.raises(ProgramError, match="deadlock") as error:
        verify(first, second)
    assert "REDUCE b7 over pp" in str(error.value)
    second.instructions = [replace(second.instructions[n], waits=()) for n in (2, 0, 1)]
    verify(first, second)


# Planted races


def access(write_first: bool, write_second: bool, second_lane: Lane, ordered: str) -> Builder:
    """Two accesses of one buffer with, between them, no path of waits, one wait, or a path of several."""
    b = Builder()
    kinds = [{"writes" if writes else "reads": [X]} for writes in (write_first, write_second)]
    one = b.compute(**kinds[0])
    waits = {"no": [], "wait": [one]}.get(ordered, [])
    if ordered == "path":
        hop = b.add(Op.REDUCE, Lane.GATHER, [one])
        b.add(Op.REDUCE, Lane.GATHER)
        waits = [hop + 1]
    if ordered == "wrong way":
        waits = [b.add(Op.REDUCE, Lane.GATHER)]
        b.compute(waits[0])
    b.add(Op.REDUCE, second_lane, waits, **kinds[1])  # type: ignore[arg-type]
    return b


RACES = [
    ("read-after-write", True, False),
    ("write-after-read", False, True),
    ("write-after-write", True, True),
]


@pytest.mark.parametrize(("name", "write_first", "write_second"), RACES)
@pytest.mark.parametrize("ordered", ["no", "wrong way"])
def test_races_are_found(name: str, write_first: bool, write_second: bool, ordered: str) -> None:
    with pytest.raises(ProgramError, match=f"{name} race on activation0.m0: .*REDUCE.*does not wait for .*FORWARD"):
        verify(access(write_first, write_second, Lane.REDUCE, ordered))


@pytest.mark.parametrize(("name", "write_first", "write_second"), [*RACES, ("reads", False, False)])
@pytest.mark.parametrize("ordered", ["wait", "path", "lane"])
def test_ordered_accesses_are_accepted(name: str, write_first: bool, write_second: bool, ordered: str) -> None:
    verify(access(write_first, write_second, Lane.COMPUTE if ordered == "lane" else Lane.REDUCE, ordered))


def test_an_earlier_reader_on_another_lane_is_not_forgotten() -> None:
    b = Builder()
    written = b.compute(writes=[X])
    b.send(1, [written], reads=[X])
    read = b.add(Op.REDUCE, Lane.REDUCE, [written], reads=[X])
    b.compute(read, writes=[X])
    other = Builder("second", pp=1)
    other.receive(-1)
    b.name, b.coordinates = "first", (("pp", 0),)
    with pytest.raises(ProgramError, match=r"write-after-read.*first \[3\].*first \[1\] SEND"):
        verify(b, other)


def test_waits_must_be_for_earlier_instructions() -> None:
    for wait in (0, 3, -1):
        b = Builder()
        b.compute(wait)
        with pytest.raises(ProgramError, match=f"waits for {wait}: no earlier instruction"):
            verify(b)


# Planted mismatches


def test_collectives_in_another_order_are_found() -> None:
    first, second = pair()
    for b, buckets in ((first, (0, 1)), (second, (1, 0))):
        for bucket in buckets:
            b.reduce(bucket)
    with pytest.raises(ProgramError, match=r"number 0 .* first \[0\] REDUCE b0 .* meets second \[0\] REDUCE b1"):
        verify(first, second)


@pytest.mark.parametrize("other", ["missing", "lane", "axes"])
def test_a_collective_that_a_member_does_not_join_is_found(other: str) -> None:
    first, second = pair()
    for b in (first, second):
        b.reduce(0)
    first.reduce(1)
    if other == "lane":
        second.reduce(1, lane=Lane.GATHER)
    if other == "axes":
        second.reduce(1, axes=("pp", "dp"))
    with pytest.raises(ProgramError, match="mismatched collectives: .*REDUCE b1"):
        verify(first, second)


@pytest.mark.parametrize("field", ["op", "bucket", "unit", "microbatch"])
def test_a_collective_that_differs_is_found(field: str) -> None:
    first, second = pair()
    for b in (first, second):
        b.add(Op.REDUCE, Lane.REDUCE, axes=("pp",), bucket=0, unit=0, microbatch=0)
    verify(first, second)
    change = {"op": Op.NORM, "bucket": 1, "unit": 1, "microbatch": 1}[field]
    second.instructions[0] = replace(second.instructions[0], **{field: change})  # type: ignore[arg-type]
    with pytest.raises(ProgramError, match="mismatched collectives: as number 0"):
        verify(first, second)


def test_a_group_inside_one_class_may_differ_from_other_classes() -> None:
    """Stages reduce their own buckets over dp: these are two groups."""
    first, second = pair()
    first.reduce(0, axes=("dp",))
    second.reduce(1, axes=("dp",))
    second.reduce(2, axes=("dp",))
    verify(first, second)
    first.reduce(3, axes=("dp", "pp"))
    with pytest.raises(ProgramError, match="mismatched collectives"):
        verify(first, second)


def test_messages_must_pair_up() -> None:
    first, second = pair()
    first.send(1, microbatch=0)
    with pytest.raises(ProgramError, match=r"first \[0\] SEND m0 to pp\+1 is never received"):
        verify(first, second)
    second.receive(-1, microbatch=1)
    with pytest.raises(ProgramError, match=r"first \[0\] SEND m0 to pp\+1 arrives at second \[0\] RECEIVE m1"):
        verify(first, second)
    second.instructions[0] = replace(second.instructions[0], microbatch=0)
    verify(first, second)
    second.receive(-1, microbatch=0)
    with pytest.raises(ProgramError, match=r"second \[1\] RECEIVE m0 from pp-1 is never sent"):
        verify(first, second)


def test_a_gradient_must_arrive_as_that_of_its_bucket() -> None:
    first, second = pair()
    for bucket in (0, 1):
        first.send(1, microbatch=-1, bucket=bucket)
    for bucket in (1, 0):
        second.receive(-1, microbatch=-1, bucket=bucket)
    with pytest.raises(ProgramError, match="mismatched messages: .* arrives at "):
        verify(first, second)


def test_what_was_freed_is_not_read_until_it_is_written_again() -> None:
    def program(*again: Instruction) -> Program:
        use = Instruction(Op.FORWARD, reads=(X,), frees=(X,))
        return Program("all", (), (Instruction(Op.FORWARD, writes=(X,)), use, *again))

    read, write = Instruction(Op.FORWARD, reads=(X,)), Instruction(Op.FORWARD, writes=(X,))
    check([program(write, read)], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="which .* has freed"):
        check([program(read)], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="FORWARD.* frees activation0.m0, which .*FORWARD.* has freed"):
        check([program(Instruction(Op.FORWARD, frees=(X,)))], Mesh.of(dp=1))


def test_what_another_lane_has_written_or_writes_again_is_freed_in_order() -> None:
    def program(waits: tuple[int, ...], again: tuple[int, ...]) -> Program:
        gather = Instruction(Op.GATHER, lane=Lane.GATHER, writes=(X,))
        use = Instruction(Op.FORWARD, waits=waits, frees=(X,))
        return Program("all", (), (gather, use, replace(gather, waits=again)))

    check([program((0,), (1,))], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="free-after-write race on activation0.m0"):
        check([program((), (1,))], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="write-after-free race on activation0.m0"):
        check([program((0,), ())], Mesh.of(dp=1))


def test_messages_between_two_ranks_keep_to_one_lane() -> None:
    first, second = pair()
    first.send(1)
    first.add(Op.SEND, Lane.REDUCE, peer=("pp", 1), microbatch=0)
    second.receive(-1)
    second.receive(-1)
    with pytest.raises(ProgramError, match="is on lane reduce, and .* with the same peer, on send"):
        verify(first, second)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        (Instruction(Op.SEND), "a SEND or RECEIVE has a peer"),
        (Instruction(Op.SEND, peer=("pp", 1), axes=("pp",)), "a peer and no axes"),
        (Instruction(Op.FORWARD, peer=("pp", 1)), "nothing else has a peer"),
        (Instruction(Op.SEND, peer=("pp", 2)), "has itself for a peer: pp has size 2"),
        (Instruction(Op.RECEIVE, peer=("cp", 1)), "has itself for a peer: cp has size 1"),
    ],
)
def test_malformed_messages_are_refused(instruction: Instruction, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        check([Program("all", (), (instruction,))], Mesh.of(pp=2))


def test_every_rank_needs_one_program() -> None:
    first, second = pair()
    with pytest.raises(ProgramError, match="rank 1 at .* has to have one program and has 0: none"):
        verify(first)
    with pytest.raises(ProgramError, match="has 2: second, third"):
        verify(first, second, Builder("third", pp=1))
    with pytest.raises(ProgramError, match="third is for pp=2; legal: 0 to 1"):
        verify(first, second, Builder("third", pp=2))
    with pytest.raises(ProgramError, match="has 0"):
        check([], Mesh.of(dp=1))


# Against brute force: random programs, each rank by itself, a graph of the issue, start and end of all


Graph = dict[tuple[str, int, int], list[tuple[str, int, int]]]


def order_graph(programs: dict[int, Program], mesh: Mesh, made: bool) -> Graph:
    """What has to happen before what, for all ranks: the rules as edges.  ``made``: communicators are there before the
    step.
    """
    graph: Graph = defaultdict(list)
    meetings: dict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
    for rank, program in programs.items():
        last: dict[tuple[object, ...], int] = {}
        seen: Counter[tuple[object, ...]] = Counter()
        for i, instruction in enumerate(program.instructions):
            graph["come", rank, i] += [("issue", rank, i)]
            graph["issue", rank, i] += [("start", rank, i)]
            graph["start", rank, i] += [("end", rank, i)]
            if i + 1 < len(program.instructions):
                blocking = "end" if instruction.lane is Lane.COMPUTE else "issue"
                graph[blocking, rank, i] += [("come", rank, i + 1)]
            for wait in instruction.waits:
                graph["end", rank, wait] += [("come", rank, i)]
            turn = instruction.lane, instruction.peer
            if turn in last:
                graph["end", rank, last[turn]] += [("start", rank, i)]
            last[turn] = i
            key: tuple[object, ...] = ()
            if instruction.axes:
                key = (instruction.axes, mesh.group(rank, instruction.axes), instruction.lane)
            elif instruction.peer:
                other = mesh.offset(rank, *instruction.peer, wrap=True)
                key = (rank, other) if instruction.op is Op.SEND else (other, rank)
            if key:
                meetings[(*key, "message" if instruction.peer else "", seen[key])].append((rank, i))
                seen[key] += 1
    for key, members in meetings.items():
        for a, b in product(members, members):
            graph["start", *a] += [("end", *b)]
            if not made and not key[-1]:
                graph["come", *a] += [("issue", *b)]
    return graph


def problem_of(programs: list[Program], mesh: Mesh, made: bool = True) -> str:
    """What `check` finds wrong, or nothing."""
    try:
        check(programs, mesh, None if made else ())
    except ProgramError as error:
        return str(error)
    return ""


def has_cycle(graph: Graph) -> bool:
    degree: Counter[tuple[str, int, int]] = Counter(node for nodes in graph.values() for node in nodes)
    free = [node for node in graph if not degree[node]]
    removed = 0
    while free:
        removed += 1
        for node in graph.get(free.pop(), []):
            degree[node] -= 1
            if not degree[node]:
                free.append(node)
    return removed < len(set(graph) | set(degree))


def random_programs(rng: random.Random, mesh: Mesh) -> list[Program]:
    """Programs whose collectives and messages match, in an order of its own on each stage; random waits."""
    stages = mesh.axis_size("pp")
    streams: dict[int, list[list[Instruction]]] = {stage: [] for stage in range(stages)}
    for axes in (("pp",), ("dp",), ("dp", "pp")):
        for lane in (Lane.COMPUTE, Lane.REDUCE, Lane.GATHER):
            if rng.random() < 0.3:
                ops = [Instruction(Op.REDUCE, bucket=n, axes=axes, lane=lane) for n in range(rng.randint(1, 2))]
                for stage in range(stages):
                    streams[stage].append(ops)
    for source in range(stages):
        for axis, target in [("pp", t) for t in range(stages) if t != source] + [("dp", source)]:
            if rng.random() < 0.4 and mesh.axis_size(axis) > 1:
                step, count = (target - source) if axis == "pp" else 1, rng.randint(1, 2)
                for stage, op, lane, offset in (
                    (source, Op.SEND, Lane.SEND, step),
                    (target, Op.RECEIVE, Lane.RECEIVE, -step),
                ):
                    streams[stage].append(
                        [Instruction(op, microbatch=m, peer=(axis, offset), lane=lane) for m in range(count)]
                    )
    programs = []
    for stage in range(stages):
        queues = [list(stream) for stream in streams[stage]] + [[Instruction(Op.FORWARD)] for _ in range(2)]
        merged: list[Instruction] = []
        while any(queues):
            instruction = rng.choice([queue for queue in queues if queue]).pop(0)
            waits = [w for w in range(len(merged)) if rng.random() < 0.08]
            merged.append(replace(instruction, waits=tuple(waits)))
        programs.append(Program(f"stage{stage}", (("pp", stage),), tuple(merged)))
    return programs


def test_deadlocks_agree_with_a_graph_of_all_ranks() -> None:
    rng = random.Random(7)
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for _ in range(400):
        mesh = Mesh.of(dp=rng.randint(1, 3), pp=rng.randint(1, 3))
        programs = random_programs(rng, mesh)
        of_rank = {rank: programs[mesh.coordinates(rank)["pp"]] for rank in range(mesh.size)}
        expected = [has_cycle(order_graph(of_rank, mesh, made)) for made in (True, False)]
        for made in (True, False):
            problem = problem_of(programs, mesh, made)
            assert problem.startswith("deadlock") == expected[not made], "\n".join(
                program.text() for program in programs
            )
            assert bool(problem) == expected[not made]
        verdicts[expected[0], expected[1]] += 1
    assert verdicts[True, False] == 0
    assert min(verdicts[True, True], verdicts[False, True], verdicts[False, False]) > 30, verdicts


def conflict(program: Program) -> bool:
    """Whether two conflicting accesses are unordered, from the closure of lanes and waits."""
    before: list[set[int]] = []
    for i, instruction in enumerate(program.instructions):
        direct = [
            *instruction.waits,
            *(j for j in range(i) if program.instructions[j].queue == instruction.queue),
        ]
        before.append(set(direct).union(*(before[j] for j in direct)))
        for j in set(range(i)) - before[i]:
            one, two = program.instructions[j], instruction
            ours, theirs = ({*each.reads, *each.writes, *each.frees} for each in (one, two))
            if ours & {*two.writes, *two.frees} or theirs & {*one.writes, *one.frees}:
                return True
    return False


def used_after_a_free(program: Program) -> bool:
    """Whether a buffer is read, or freed again, after it was freed and before it is written again."""
    freed: set[Buffer] = set()
    for one in program.instructions:
        if freed & {*one.reads} or (freed - {*one.writes}) & {*one.frees}:
            return True
        freed = (freed - {*one.writes}) | {*one.frees}
    return False


@pytest.mark.parametrize("frees", [0.0, 0.1])
def test_races_agree_with_the_closure_of_the_order(frees: float) -> None:
    rng = random.Random(11)
    buffers = [Buffer("grad", n) for n in range(4)]
    verdicts: Counter[bool] = Counter()
    for _ in range(600):
        instructions = [
            Instruction(
                Op.FORWARD,
                lane=rng.choice([Lane.COMPUTE, Lane.REDUCE, Lane.GATHER]),
                axes=rng.choice([(), ("dp",), ("tp",)]),
                reads=tuple(buffer for buffer in buffers if rng.random() < 0.15),
                writes=tuple(buffer for buffer in buffers if rng.random() < 0.1),
                frees=tuple(buffer for buffer in buffers if rng.random() < frees),
                waits=tuple(j for j in range(i) if rng.random() < 0.3),
            )
            for i in range(rng.randint(2, 10))
        ]
        program = Program("all", (), tuple(instructions))
        expected, misused = conflict(program), used_after_a_free(program)
        problem = problem_of([program], Mesh.of(dp=1))
        assert bool(problem) == (expected or misused), program.text()
        assert ("race on grad" in problem) == bool(problem) or ("has freed" in problem and misused), program.text()
        verdicts[expected] += 1
    assert min(verdicts.values()) > 100, verdicts
