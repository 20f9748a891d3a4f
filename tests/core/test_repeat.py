"""Programs whose updates are validated, and that could not run again what a wrong update has spoilt, are refused."""

from __future__ import annotations

import pytest

from shardwise.core.check import ProgramError, check
from shardwise.core.instruction import Buffer, BufferKind, Instruction, Lane, Op
from shardwise.core.mesh import Mesh
from shardwise.core.program import Program

NORM = Buffer(BufferKind.NORM, 0)
DECIDE, VALIDATE, BACKUP = (Instruction(op, version=1) for op in (Op.DECIDE, Op.VALIDATE, Op.BACKUP))


def stage(place: int, *instructions: Instruction) -> Program:
    return Program(f"stage{place}", (("pp", place),), instructions)


def send(**other: object) -> Instruction:
    return Instruction(Op.SEND, microbatch=0, peer=("pp", 1), lane=Lane.SEND, **other)  # type: ignore[arg-type]


def receive(**other: object) -> Instruction:
    return Instruction(Op.RECEIVE, microbatch=0, peer=("pp", -1), lane=Lane.RECEIVE, **other)  # type: ignore[arg-type]


def test_an_update_that_is_validated_has_been_decided_on() -> None:
    check([Program("all", (), (DECIDE, VALIDATE))], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="VALIDATE.* is of batch 1, which nothing decides on"):
        check([Program("all", (), (VALIDATE,))], Mesh.of(dp=1))
    with pytest.raises(ProgramError, match="BACKUP.* is of an update that no VALIDATE looks at"):
        check([Program("all", (), (BACKUP,))], Mesh.of(dp=1))


def test_what_adds_to_a_value_cannot_run_again() -> None:
    with pytest.raises(ProgramError, match="between the update of batch 1 and its VALIDATE"):
        check([Program("all", (), (DECIDE, Instruction(Op.REPORT, version=1), VALIDATE))], Mesh.of(dp=1))


def test_a_message_runs_again_on_both_sides() -> None:
    mesh = Mesh.of(pp=2)
    check([stage(0, DECIDE, send(), VALIDATE), stage(1, DECIDE, receive(), VALIDATE)], mesh)
    check([stage(0, DECIDE, send(), VALIDATE), stage(1, DECIDE, VALIDATE, receive(crosses=True))], mesh)
    with pytest.raises(ProgramError, match="comes twice if an update was wrong, and does not say so"):
        check([stage(0, DECIDE, send(), VALIDATE), stage(1, DECIDE, VALIDATE, receive())], mesh)
    with pytest.raises(ProgramError, match="comes twice if an update was wrong, and does not say so"):
        check([stage(0, DECIDE, send(), VALIDATE), stage(1, DECIDE, receive(crosses=True), VALIDATE)], mesh)
    with pytest.raises(ProgramError, match="before a VALIDATE that its sender sends behind one"):
        check([stage(0, DECIDE, VALIDATE, send()), stage(1, DECIDE, receive(), VALIDATE)], mesh)
    with pytest.raises(ProgramError, match="again if batch 1 was wrong, which its rank never validates"):
        check([stage(0, DECIDE, send(), VALIDATE), stage(1, receive())], mesh)


def test_a_collective_runs_again_on_all_ranks() -> None:
    total = Instruction(Op.GATHER, bucket=0, axes=("pp",), lane=Lane.GATHER)
    check([stage(k, DECIDE, total, VALIDATE) for k in range(2)], Mesh.of(pp=2))
    with pytest.raises(ProgramError, match="is run again by some of its ranks and not by others"):
        check([stage(0, DECIDE, total, VALIDATE), stage(1, total, DECIDE, VALIDATE)], Mesh.of(pp=2))
