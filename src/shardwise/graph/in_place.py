"""The functional form of ops that write: the op that returns what they leave in the tensor that they write to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx

from shardwise.graph.captured import Uncapturable
from shardwise.graph.naming import place
from shardwise.graph.schema import op_name
from shardwise.graph.torch_private import schema

aten = torch.ops.aten

_NOT_REPLAYED = {"resize_", "set_", "resize_as_", "requires_grad_", "swap_", "as_strided_"}
_RENAMED: dict[str, Callable[..., Any]] = {  # to the ops that rules know
    "zero_": aten.zeros_like.default,
    "fill_": aten.full_like.default,
    "swapaxes_": aten.transpose.int,
    "swapdims_": aten.transpose.int,
}


class Form(NamedTuple):
    """``target(*args, **kwargs)`` is what a captured op leaves in ``goal``."""

    goal: fx.Node
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def functional_form(old: fx.Node) -> Form:
    """Return the functional form of an in-place op, or of one with ``out=``.

    Raises :class:`Uncapturable` where there is none."""
    described = schema(old.target)
    given = {**{a.name: v for a, v in zip(described.arguments, old.args, strict=False)}, **old.kwargs}
    written = [a for a in described.arguments if _is_written(a)]
    goal, name = given.get(written[0].name), op_name(old)
    if len(written) == 1 and isinstance(goal, fx.Node) and name not in _NOT_REPLAYED:
        if name in _RENAMED and not isinstance(given.get("value"), fx.Node):
            return Form(goal, _RENAMED[name], old.args, old.kwargs)
        target = functional_op(old.target)
        if target is not None:
            return Form(goal, target, *_arguments(target, old.target, given))
    raise Uncapturable(f"in-place op {old.target} has no functional form{place(old)}")


def functional_op(op: Any) -> Any:
    """Return the ATen op with the arguments of ``op`` that writes nothing; None if there is none.

    Its overload can have another name, and its arguments other names or another order: ``pow_.Scalar`` is
    ``pow.Tensor_Scalar``, ``dropout_(self)`` is ``dropout(input)``, and ``polygamma_(self, n)`` is ``polygamma(n,
    self)``."""
    name = op_name(op)
    if not schema(op).name.startswith("aten::"):
        return None
    bases = [name] if name[-1] != "_" else [f"__{name[3:]}"] if name.startswith("__i") else [name[:-1]]  # __ior__
    packets = [p for base in (*bases, f"{name[:-1]}_functional") if (p := getattr(aten, base, None)) is not None]
    pure = [o for p in packets for o in (getattr(p, n) for n in p.overloads()) if not schema(o).is_mutable]
    by_name = (o for o in pure if sorted(_read(o)) == sorted(_read(op)))
    by_place = (o for o in pure if [kind for _, kind in _read(o)] == [kind for _, kind in _read(op)])
    return next(by_name, None) or next(by_place, None)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _read(op: Any) -> list[tuple[str, str]]:
    """Return the names and types of the arguments of an op, but for ``out``."""
    return [(a.name, str(a.type)) for a in schema(op).arguments if not a.is_out]


def _arguments(target: Any, op: Any, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what ``target`` takes of the arguments ``given`` to ``op``; a default that it lacks is given, too."""
    own, theirs = [name for name, _ in _read(op)], [a.name for a in schema(target).arguments]
    named = dict(zip(theirs, own, strict=True)) if set(own) != set(theirs) else {name: name for name in own}
    defaults = {a.name: a.default_value for a in schema(op).arguments if a.has_default_value()}
    args, kwargs, in_order = [], {}, True
    for a in schema(target).arguments:
        name = named[a.name]
        left_out = name not in given and a.has_default_value()
        in_order &= not left_out and not a.kwarg_only
        if left_out:
            continue
        value = given[name] if name in given else defaults[name]
        if in_order:
            args.append(value)
        else:
            kwargs[a.name] = value
    return tuple(args), kwargs
