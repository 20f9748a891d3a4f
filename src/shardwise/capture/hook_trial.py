"""Trials of the hooks on parameters before the first step: what they do that no rank may do, and whether they act on
each element of a gradient by itself. They call copies of the hooks; what the user's own objects keep stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardwise.capture.hooks import UserHooks, draws
from shardwise.capture.snapshot import Look, difference
from shardwise.capture.state import PythonState
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.graph.torch_private import TorchDispatchMode, storage_key

SAMPLES = ((1.0, 1.0, 0), (1e-6, 1e6, 0), (1e6, 1e-6, 0), (1e-6, 1e6, 1), (1e6, 1e-6, -1), (0.0, 0.0, 0))
"""The numbers of a trial: the size of those in the first part and of those in the rest, and the sign of all, if one."""


class Facts(NamedTuple):
    """What a trial has to know of a gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def check_hooks(hooks: UserHooks, gradients: Mapping[str, Facts]) -> None:
    """Raise :class:`ConfigError` where a trial shows that a hook does what :meth:`UserHooks.apply` refuses, draws from
    the generator of Python or numpy, or depends on which parameter's hook is called first: a plan has its own order."""
    try:
        first, forth, back = (hooks.copied() for _ in range(3))
    except ConfigError:  # no trial is possible; a step looks again
        return
    before = _state(first)
    for _ in _tried(first, gradients, gradients):
        pass
    if _same(before, _state(first)):
        return
    others = dict(_tried(back, reversed(gradients), gradients))
    for name, found in _tried(forth, gradients, gradients):
        if found is not None and (others[name] is None or not _close(found, others[name])):
            wrong = "what its hook returns depends on calls of other parameters' hooks, whose order is the plan's"
            raise ConfigError.on(f"parameter {name}", wrong, "hooks that keep what they need for one parameter alone")


def _state(hooks: UserHooks) -> dict[Any, Any]:
    """Return what hooks keep now, but for the model's own tensors and modules."""
    look = Look(hooks.own())
    look.pass_by(hooks.own().values())
    return {"": look(dict(hooks.parameters)), **dict(look.of_functions())}


def _same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return all(difference(one.get(key), other.get(key)) is None for key in {**one, **other})


def _tried(
    hooks: UserHooks, order: Iterable[str], gradients: Mapping[str, Facts]
) -> Iterator[tuple[str, Tensor | None]]:
    """Yield what hooks make of random numbers: nothing if they take no random numbers."""
    for name in order:
        generators, draw = PythonState(nn.Module()), torch.Generator().manual_seed(0)
        given = [_numbers(gradients[name], draw, (1.0, 1.0, 0), 0) for _ in range(2)]
        found = None
        try:
            found = hooks.apply(name, *given)
        except ShardwiseError:
            raise
        except Exception:  # noqa: S110 - it may be written for numbers of another kind
            pass
        for generator in generators.drawn():
            raise draws(name, generator)
        yield name, found


def dependence(hooks: UserHooks, name: str, gradient: Facts, size: int) -> str:
    """Return in what way the hooks of a parameter do more than to act on each element by itself; "" if in none.

    Every op that they call on what they are given must be one of elements, and a part of ``size`` elements, flat, must
    give what the whole gives. Nothing that they keep may change, for each rank would keep something of its part."""
    try:
        own = hooks.copied()
    except ConfigError:
        return "it keeps an object that cannot be copied for a trial"
    own = UserHooks({name: own.parameters[name]}, own.tensors)
    before, ops = _state(own), _Ops()
    try:
        same = all(_same_in_parts(own, name, gradient, size, sample, ops) for sample in SAMPLES)
    except ShardwiseError:
        raise
    except Exception:  # a hook may take no other shape than the parameter's
        same = False
    if ops.found:
        return f"it calls {ops.found}"
    if not _same(before, _state(own)):
        return "it keeps state from call to call"
    return "" if same else "it gives something else on a part"


def _same_in_parts(
    hooks: UserHooks, name: str, facts: Facts, size: int, sample: tuple[float, float, int], ops: _Ops
) -> bool:
    draw = torch.Generator().manual_seed(0)
    gradient, data = (_numbers(facts, draw, sample, size) for _ in range(2))
    whole = hooks.apply(name, gradient, data, ops.watch)
    if whole.shape != gradient.shape:
        return False
    flat = gradient.flatten(), data.flatten()
    cuts = [[one[:size].clone() for one in flat], [one[size:].clone() for one in flat]]
    parts = [hooks.apply(name, *cut, watch=ops.watch) for cut in cuts if cut[0].numel()]
    return all(p.dim() == 1 for p in parts) and _close(whole.flatten(), torch.cat(parts))


def _numbers(facts: Facts, draw: torch.Generator, sample: tuple[float, float, int], size: int) -> Tensor:
    first, rest, sign = sample
    found = torch.randn(facts.shape, generator=draw, dtype=facts.dtype).flatten()
    found[:size] *= first
    found[size:] *= rest
    return (found.abs() * sign if sign else found).view(facts.shape).to(facts.device)


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-6, atol=0, equal_nan=True)


class _Ops:
    """Looks at the ops that hooks call on what follows from what they are given; ``found`` is the first that is not
    one of elements."""

    def __init__(self) -> None:
        self.found = ""
        self.kept: list[Tensor] = []  # so that no other tensor gets their memory
        self.followed: set[int] = set()

    @contextmanager
    def watch(self, given: Tensor) -> Iterator[None]:
        """Look at the ops of a hook that is ``given`` this."""
        self.kept, self.followed = [], set()
        self.follow([given, given.grad])
        with _Leaving(self), _Elements(self):
            yield

    def follows(self, values: Any) -> bool:
        """Whether any of the tensors in ``values`` follows from what a hook was given."""
        return any(isinstance(one, Tensor) and storage_key(one) in self.followed for one in tree_leaves(values))

    def follow(self, values: Any) -> None:
        """Note that these follow from it."""
        tensors = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
        self.kept += tensors
        self.followed.update(map(storage_key, tensors))


ELEMENTS = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("alias", "clone", "copy_", "copy", "_to_copy", "detach", "empty_like", "fill", "fill_", "full_like",
                 "ones_like", "view", "_unsafe_view", "zero_", "zeros_like")
)  # fmt: skip
"""The ops of elements that torch does not mark as such."""

LEAVING = frozenset(
    [Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__]
)
"""By these the elements of a tensor go where no op is seen."""


class _Elements(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, ops: _Ops) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = ops

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        follows = self.ops.follows((args, kwargs))
        found = func(*args, **(kwargs or {}))
        if follows:
            if torch.Tag.pointwise not in func.tags and func.overloadpacket not in ELEMENTS:
                self.ops.found = self.ops.found or str(func)
            self.ops.follow(found)
        return found


class _Leaving(TorchFunctionMode):
    def __init__(self, ops: _Ops) -> None:
        super().__init__()
        self.ops = ops

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LEAVING and self.ops.follows((args, kwargs)):
            self.ops.found = self.ops.found or f"Tensor.{func.__name__}"
        return func(*args, **(kwargs or {}))
