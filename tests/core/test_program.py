from __future__ import annotations

import json

import pytest

from shardwise.core.errors import ShardwiseError
from shardwise.core.instruction import OP_INFO, Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program, class_of


def test_every_op_has_its_facts() -> None:
    assert list(OP_INFO) == list(Op)


def test_json_leaves_defaults_out() -> None:
    grad = Buffer(BufferKind.GRAD, 3)
    one = Instruction(Op.STEP, bucket=3, lane=Lane.REDUCE, axes=("dp",), reads=(grad,), waits=(0,))
    data = json.loads(Program("all", (("pp", 1),), (Instruction(Op.FORWARD, unit=3), one)).to_json())
    pools = {"slots": [], "unreduced": [], "stashes": [], "batches": 1}
    assert data == {"name": "all", "coordinates": {"pp": 1}, **pools, "instructions": [
        {"op": "FORWARD", "unit": 3},
        {"op": "STEP", "bucket": 3, "lane": "reduce", "axes": ["dp"], "reads": [["grad", 3, -1, 0]], "waits": [0]},
    ]}  # fmt: skip


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
