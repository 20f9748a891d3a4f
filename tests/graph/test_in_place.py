"""Every in-place op of ATen, and every one with ``out=``, has a functional form with the same numbers, or a refusal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from shardwise.graph.captured import Uncapturable
from shardwise.graph.in_place import functional_form

aten = torch.ops.aten

SQUARE = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 0.6 + 0.2
CHOICES: dict[str, list[Any]] = {
    "Tensor": [SQUARE.flip(0), SQUARE[0], torch.arange(9).view(3, 3) % 3, torch.tensor([2, 0, 1]), SQUARE > 0.5,
               torch.tensor(0.3, dtype=torch.float64), SQUARE[:2]],
    "number": [2, 0.5], "float": [0.5], "int": [1, 0, 2], "bool": [True, False], "str": ["mean", "sum", "floor"],
    "List[int]": [[0, 1], [3, 3], [1, 0]], "List[Tensor]": [[SQUARE, SQUARE]],
    "List[Optional[Tensor]]": [[torch.tensor([2, 0, 1])], [SQUARE > 0.5]],
}  # fmt: skip
SELVES = [SQUARE, SQUARE.round().long() + 1, SQUARE > 0.5]
WRONG_IN_TORCH = {aten.binary_cross_entropy.out}  # of a mean it leaves the first element's loss in a scalar ``out``
TRIED = 400  # the most sets of arguments for an op


def writing(out: bool) -> list[Any]:
    """All ATen ops that a forward can call and that write to one tensor, ``out`` or ``self``."""
    names = sorted({s.name.removeprefix("aten::") for s in torch._C._jit_get_all_schemas() if s.name[:6] == "aten::"})
    found = []
    for name in names:
        packet = getattr(aten, name, None) if name[0] != "_" or name[:3] == "__i" else None
        ops = isinstance(packet, torch._ops.OpOverloadPacket) and not name.endswith("_backward")
        for overload in packet.overloads() if ops else ():
            op = getattr(packet, overload)
            written = [a for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            of_one = [str(a.type) for a in written] == ["Tensor"] and written[0].is_out == out
            if of_one and op not in WRONG_IN_TORCH:
                found.append(op)
    return found


def calls(op: Any) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments to try an op with; one that has a default is left out, or given where it comes before others."""
    choices: list[list[Any]] = []
    for i, a in enumerate(a for a in op._schema.arguments if not a.is_out and not a.kwarg_only):
        kind = str(a.type)
        if i == 0 and kind == "Tensor":
            choices.append(SELVES)
        elif a.has_default_value():
            choices.append([a.default_value])
        else:
            choices.append(CHOICES.get(kind.removeprefix("Optional[").removesuffix("]"), CHOICES.get(kind, [None])))
    needed = [a for a in op._schema.arguments if a.kwarg_only and not a.is_out and not a.has_default_value()]
    kwargs = {a.name: CHOICES.get(str(a.type), [None])[0] for a in needed}
    for args in itertools.islice(itertools.product(*choices), TRIED):
        yield list(args), kwargs


def ran(op: Any, out: bool) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor | None] | None:
    """The arguments, with copies of tensors, what the op has written, and the gradient of what it wrote to."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        return None
    name = next((a.name for a in op._schema.arguments if a.is_out), "")
    for args, kwargs in calls(op):
        if not args or not isinstance(args[0], Tensor):
            continue
        leaf = args[0].clone().requires_grad_(args[0].is_floating_point() and not out)
        try:
            if out:
                written = torch.zeros_like(op(*args, **kwargs, **{name: torch.empty(0).double()}))
                op(*args, **kwargs, **{name: written})
                return tuple(args), kwargs, written, None
            written = leaf * 1
            op(written, *args[1:], **kwargs)
            grad = torch.autograd.grad(written.sum(), leaf)[0] if leaf.requires_grad else None
        except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
            continue
        return (leaf.detach(), *args[1:]), kwargs, written.detach(), grad
    return None


def form_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: bool) -> Any:
    """The functional form, as a function of the first argument, in a graph in which all tensors are placeholders."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}

    def place(value: Any) -> Any:
        node = graph.placeholder(f"t{len(values)}")
        values[node] = value
        return node

    nodes = fx.node.map_aggregate((args, kwargs), lambda v: place(v) if isinstance(v, Tensor) else v)
    first = nodes[0][0] if args else None
    more = {a.name: place(None) for a in op._schema.arguments if a.is_out}
    form = functional_form(graph.call_function(op, nodes[0], {**nodes[1], **more}))
    assert form.goal is (next(iter(more.values()), first))

    def run(own: Tensor) -> Any:
        given = fx.map_arg((form.args, form.kwargs), lambda n: own if n is first else values[n])
        return form.target(*given[0], **given[1])

    return run


def check(op: Any, out: bool) -> str:
    """Hold a functional form against the op; return what was found: "same", "refused", or "not run"."""
    found = ran(op, out)
    if found is None:
        return "not run"
    args, kwargs, written, grad = found
    try:
        run = form_of(op, args, kwargs, out)
    except Uncapturable as error:
        return "refused" if str(op) in str(error) else "refused without a name"
    if out:
        torch.testing.assert_close(run(args[0]).to(written.dtype), written, rtol=0, atol=0, equal_nan=True)
        return "same"
    own = args[0].clone().requires_grad_(grad is not None)
    value = run(own)
    torch.testing.assert_close(value.detach().to(written.dtype), written, rtol=0, atol=0, equal_nan=True)
    if grad is not None and value.requires_grad and op is not aten.copy_.default:  # `copied` of the walker makes that
        mine = torch.autograd.grad(value.sum(), own, allow_unused=True)[0]
        torch.testing.assert_close(grad * 0 if mine is None else mine, grad, equal_nan=True)
    return "same"


@pytest.mark.parametrize(("out", "same", "refused"), [(False, 190, 13), (True, 380, 9)])
def test_all_forms(out: bool, same: int, refused: int) -> None:
    found: dict[str, list[str]] = {}
    for op in writing(out):
        try:
            found.setdefault(check(op, out), []).append(str(op))
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{op}: {error}") from error
    assert set(found) == {"same", "refused", "not run"}
    assert len(found["same"]) >= same
    assert len(found["refused"]) <= refused
