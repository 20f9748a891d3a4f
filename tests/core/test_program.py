from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import OP_INFO, Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program, class_of

small = st.integers(-1, 5)
buffers = st.builds(Buffer, st.sampled_from(BufferKind), small, small, st.integers(0, 2))
instructions = st.builds(
    Instruction,
    st.sampled_from(Op),
    unit=small,
    bucket=small,
    microbatch=small,
    slot=small,
    version=st.integers(0, 3),
    peer=st.none() | st.tuples(st.sampled_from(["pp", "cp"]), small),
    axes=st.lists(st.sampled_from(["dp", "tp"]), max_size=2).map(tuple),
    lane=st.sampled_from(Lane),
    reads=st.lists(buffers, max_size=2).map(tuple),
    writes=st.lists(buffers, max_size=2).map(tuple),
    first=st.lists(small, max_size=2).map(tuple),
    waits=st.lists(small, max_size=2).map(tuple),
)
programs = st.builds(
    Program,
    st.text(max_size=5),
    st.lists(st.tuples(st.sampled_from(["pp", "ep"]), small), max_size=2, unique_by=lambda pair: pair[0]).map(tuple),
    st.lists(instructions, max_size=4).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(programs)
def test_json_round_trip(program: Program) -> None:
    back = Program.from_json(program.to_json())
    assert back == program
    assert all(type(i.op) is Op and type(i.lane) is Lane for i in back.instructions)
    assert all(type(b.kind) is BufferKind for i in back.instructions for b in (*i.reads, *i.writes))
    assert hash(back) == hash(program)


def test_every_op_has_its_facts() -> None:
    assert list(OP_INFO) == list(Op)


def test_json_leaves_defaults_out() -> None:
    data = json.loads(Program("all", (), (Instruction(Op.FORWARD, unit=3),)).to_json())
    pools = {"slots": [], "unreduced": [], "stashes": [], "batches": 1}
    assert data == {"name": "all", "coordinates": {}, **pools, "instructions": [{"op": "FORWARD", "unit": 3}]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"name": "a", "coordinates": {}}',
        '{"name": "a", "coordinates": {}, "instructions": [{"op": "JUMP"}]}',
        '{"name": "a", "coordinates": {}, "instructions": [{"op": "STEP", "buket": 1}]}',
        '{"name": "a", "coordinates": {}, "instructions": [{"op": "STEP", "lane": "fast"}]}',
        '{"name": "a", "coordinates": {}, "instructions": [{"op": "STEP", "reads": [["heap", 0, 0, 0]]}]}',
    ],
)
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(ShardwiseError, match="not a program in JSON"):
        Program.from_json(text)


def test_text_is_one_instruction_a_line() -> None:
    x, grad = Buffer("activation", 1, 0), Buffer("grad", 0)
    program = Program(
        "stage1",
        (("pp", 1),),
        (
            Instruction(Op.RECEIVE, microbatch=0, peer=("pp", -1), lane=Lane.RECEIVE, writes=(x,)),
            Instruction(Op.BACKWARD, unit=1, microbatch=0, reads=(x,), writes=(grad,), waits=(0,)),
            Instruction(Op.REDUCE, bucket=0, axes=("dp",), lane=Lane.REDUCE, waits=(1,)),
        ),
    )
    assert program.text().splitlines() == [
        "stage1: pp=1, 3 instructions",
        "0  receive  RECEIVE m0 from pp-1      → activation1.m0",
        "1  compute  BACKWARD u1 m0 wait 0     activation1.m0 → grad0",
        "2  reduce   REDUCE b0 over dp wait 1",
    ]
    assert Program("all").text() == "all: every rank, 0 instructions"


def test_class_of_a_rank() -> None:
    mesh = Mesh.of(pp=2, dp=2)
    first, second = Program("first", (("pp", 0),)), Program("second", (("pp", 1),))
    assert [class_of([first, second], mesh, rank).name for rank in range(4)] == [
        "first",
        "first",
        "second",
        "second",
    ]
    with pytest.raises(ShardwiseError, match="rank 2 .*one program and has 0: none"):
        class_of([first], mesh, 2)
    with pytest.raises(ShardwiseError, match="rank 0 .*has 2: first, all"):
        class_of([first, Program("all")], mesh, 0)
