"""A recorded part of a user's loop as a function of batch fields, which is captured as a loss function is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_leaves, tree_unflatten

from shardwise.capture.computation import Computation
from shardwise.core.errors import ShardwiseError
from shardwise.core.fields import WHOLE
from shardwise.graph.layouts import check_layout
from shardwise.train.values import Owner, Source, Value


class Of(NamedTuple):
    """A tensor, by its number among the results of a call."""

    call: int
    result: int


class Field(NamedTuple):
    """A batch field whose rows, if it has some, are in ``dim`` where the loop uses it."""

    name: str
    dim: int = 0


class Call(NamedTuple):
    """A call of a function of torch, or of the model, if that is None, or of a model of another owner, if a number.

    ``apart`` says that what it writes to buffers is written elsewhere."""

    function: Any
    leaves: tuple[Any, ...]
    spec: TreeSpec
    grad: bool
    apart: bool
    line: str


@dataclass
class Models:
    """The models of a script: the names of the state of each other model, under which fields it comes, and a copy of it
    without memory; ``entry`` calls the script's own model on arguments."""

    entry: Any
    others: list[nn.Module] = field(default_factory=list)
    states: list[dict[str, str]] = field(default_factory=list)  # field by name
    entries: list[Any] = field(default_factory=list)


class Script(Computation):
    """``calls`` in their order; the loss is the sum of ``losses``, and ``kept`` are the values that the loop holds.

    The new values of the buffers that calls of other models write (``written``) follow those that are kept.  Without
    losses, as in an evaluation, the loss is the sum of the first value that is kept."""

    def __init__(
        self, calls: Sequence[Call], losses: Sequence[Any], kept: Sequence[Any], models: Models,
        written: Sequence[tuple[int, str]] = (),
    ) -> None:  # fmt: skip
        self.calls, self.losses, self.kept, self.models = tuple(calls), tuple(losses), tuple(kept), models
        self.written = tuple(written)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def bare(self) -> Script:
        """Return it without values that are kept."""
        return Script(self.calls, self.losses or self.kept[:1], (), self.models)

    def run(self, module: nn.Module, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the loss and what is kept."""
        made: list[list[Any]] = []
        states = [{name: fields[key] for name, key in one.items()} for one in self.models.states]
        for one in self.calls:
            leaves = [_resolved(leaf, made, fields) for leaf in one.leaves]
            args, kwargs = tree_unflatten(leaves, one.spec)
            with nullcontext() if one.grad else torch.no_grad():
                made.append(tree_leaves(self._call(one, module, states, args, kwargs)))
        losses = [_resolved(leaf, made, fields) for leaf in self.losses]
        kept = [_resolved(leaf, made, fields) for leaf in self.kept]
        buffers = [states[at][name] for at, name in self.written]
        losses = [one.sum() if one.dim() else one for one in losses]  # what the loop looks at may have several elements
        loss = sum(losses[1:], losses[0]) if losses else kept[0].to(_wide(kept[0])).sum()
        return loss, *(one.detach() for one in kept), *buffers

    def _call(self, one: Call, module: nn.Module, states: list[dict[str, Tensor]], args: Any, kwargs: Any) -> Any:
        if isinstance(one.function, int):
            state, other = states[one.function], self.models.others[one.function]
            buffers = {name: state[name].clone() for name, _ in other.named_buffers() if name in state}
            found = _called(other, self.models.entries[one.function], {**state, **buffers}, args, kwargs)
            if not one.apart:
                state.update(buffers)
            return found
        if one.function is not None:
            return one.function(*args, **kwargs)
        if not one.apart:
            return self.models.entry(module, args, kwargs)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        return _called(module, self.models.entry, buffers, args, kwargs)


def _wide(value: Tensor) -> torch.dtype:
    return value.dtype if value.is_floating_point() else torch.get_default_dtype()


class _Entered(nn.Module):
    """Calls a module as its owner does, so that ``functional_call`` can give it another state."""

    def __init__(self, module: nn.Module, entry: Any) -> None:
        super().__init__()
        self.module, self._entry = module, entry

    def forward(self, args: Any, kwargs: Any) -> Any:
        """Return what the module returns."""
        return self._entry(self.module, args, kwargs)


def _called(module: nn.Module, entry: Any, state: Mapping[str, Tensor], args: Any, kwargs: Any) -> Any:
    return functional_call(_Entered(module, entry), {f"module.{k}": v for k, v in state.items()}, (args, kwargs))


def _resolved(leaf: Any, made: Sequence[Sequence[Any]], fields: Mapping[str, Tensor]) -> Any:
    if isinstance(leaf, Of):
        return made[leaf.call][leaf.result]
    if isinstance(leaf, Field):
        value = fields[leaf.name]
        return value.movedim(0, leaf.dim) if leaf.dim else value
    return leaf


class FieldPart(NamedTuple):
    """A field of a script: its value, all rows of it, with the rows in the first dim if it has some."""

    value: Tensor
    key: tuple[Any, ...]  # what is the same in each step that the script fits


@dataclass
class Plot:
    """A script of the loop's values with the fields that it takes, and what to do with its results.

    ``key`` is equal for values that are computed alike; ``calls`` are the loop's calls of models."""

    script: Script
    key: tuple[Any, ...]
    fields: dict[str, FieldPart]
    calls: list[Source]
    owners: list[Owner]  # of the other models, whose states are further fields


def plot(
    own: Owner, losses: Sequence[Value], kept: Sequence[Value], entries: Mapping[Owner, Any],
    others: Mapping[Owner, nn.Module], rows: int | None, dim: int,
) -> Plot:  # fmt: skip
    """Return the script of ``losses`` and ``kept`` for the model of ``own``.

    ``rows`` is the number of rows in the batch, which are in ``dim`` of what the loop brings where that has as many, or
    in its first dim; None: that of the first tensor that a model takes."""
    return _Plotter(own, entries, others, rows, dim).run(losses, kept)


class _Plotter:
    def __init__(
        self, own: Owner, entries: Mapping[Owner, Any], others: Mapping[Owner, nn.Module], rows: int | None, dim: int
    ) -> None:
        self.own, self.entries, self.others, self.rows, self.dim = own, entries, others, rows, dim
        self.at: dict[Source, int] = {}
        self.fields: dict[str, FieldPart] = {}
        self.named: dict[Any, Field] = {}
        self.brought: dict[Any, Value] = {}
        self.owners: list[Owner] = []
        self.states: list[dict[str, str]] = []

    def run(self, losses: Sequence[Value], kept: Sequence[Value]) -> Plot:
        sources = sorted(needed_by([*losses, *kept]), key=lambda one: one.number)
        if self.rows is None:
            brought = (v for one in sources if one.owner is not None for v in one.inputs)
            first = next((v for v in brought if v.meta.dim() > self.dim), None)
            if first is None:
                raise ShardwiseError(
                    "model(...): no tensor with rows; legal: tensors among the arguments (torch.as_tensor of an array)"
                )
            self.rows = first.meta.shape[self.dim]
        calls = [self.call(one, i) for i, one in enumerate(sources)]
        ends = [[self.leaf(value) for value in one] for one in (losses, kept)]
        written = self.written(sources)
        models = Models(
            self.entries[self.own], [self.others[one] for one in self.owners], self.states,
            [self.entries[one] for one in self.owners],
        )  # fmt: skip
        key = (
            tuple((_token(c.function), tuple(map(_token, c.leaves)), str(c.spec), c.grad, c.apart) for c in calls),
            tuple(map(id, self.owners)),
            tuple(ends[0]),
            written,
            tuple((name, *part.key) for name, part in self.fields.items()),
        )
        script = Script(calls, ends[0], ends[1], models, written)
        return Plot(script, key, self.fields, [s for s in sources if s.owner is not None], self.owners)

    def written(self, sources: Iterable[Source]) -> tuple[tuple[int, str], ...]:
        """Return the buffers of other models that their calls here write."""
        calling = [s.owner for s in sources if s.owner is not None and s.owner is not self.own and not s.committed]
        found = [(at, one) for at, one in enumerate(self.owners) if one in calling]
        return tuple((at, name) for at, one in found for name, _ in self.others[one].named_buffers())

    def call(self, one: Source, number: int) -> Call:
        self.at[one] = number
        function = one.function
        if one.owner is not None:
            if one.stale:
                what = "the model was called before optimizer.step() changed its weights"
                raise ShardwiseError(f"{one.line}: {what}; legal: a call after it, or detach() of its output")
            function = None if one.owner is self.own else self.other(one.owner)
        names = _argument_names(one)
        leaves = [
            self.leaf(leaf, name) if isinstance(leaf, Value) else leaf
            for leaf, name in zip(one.leaves, names, strict=True)
        ]
        return Call(function, tuple(leaves), one.spec, one.grad, one.committed or not one.training, one.line)

    def other(self, owner: Owner) -> int:
        if owner not in self.owners:
            at = len(self.owners)
            self.owners.append(owner)
            state = [*self.others[owner].named_parameters(), *self.others[owner].named_buffers()]
            self.states.append({name: f"{WHOLE}state {at} {name}" for name, _ in state})
        return self.owners.index(owner)

    def leaf(self, value: Value, name: str = "") -> Of | Field:
        """Return where a value comes from: a call, or a field."""
        if value.source is not None and not value.settled:
            return Of(self.at[value.source], value.index)
        known = id(value) if value.brought is None else value.key
        if (same := self.brought.setdefault(known, value)) is not value and not _alike(same.get(), value.get()):
            known = id(value)  # it was written in between where torch does not count, as through numpy
        if known not in self.named:
            self.named[known] = self.field(value, name)
        return self.named[known]

    def field(self, value: Value, name: str) -> Field:
        tensor = value.get()
        dims = [d for d in dict.fromkeys((self.dim, 0)) if tensor.dim() > d and tensor.shape[d] == self.rows]
        number = len(self.fields)
        if dims:
            check_layout("model(...)", f'"{name}"' if name else "an argument", tensor)
            name = name if name and name not in self.fields else f"input {number}"
            tensor = tensor.movedim(dims[0], 0) if dims[0] else tensor
            self.fields[name] = FieldPart(tensor, (True, dims[0], tensor.dtype, tensor.dim()))
            return Field(name, dims[0])
        name = f"{WHOLE}{number}"
        self.fields[name] = FieldPart(tensor, (False, 0, tensor.dtype, tensor.dim()))
        return Field(name)


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the host have the same values; on a device, only torch can have written them."""
    return one.device.type != "cpu" or torch.equal(one, other)


def needed_by(ends: Iterable[Value]) -> set[Source]:
    """Return the calls that these values are computed by."""
    found: set[Source] = set()
    stack = [value for value in ends if not value.settled]
    while stack:
        source = stack.pop().source
        if source is not None and source not in found:
            found.add(source)
            stack.extend(one for one in source.inputs if not one.settled)
    return found


def _argument_names(one: Source) -> list[str]:
    """Return a name for each leaf of a call of a model: that of the argument, if it is one by itself."""
    names = getattr(one.function, "names", None) if one.owner is not None else None
    return names if names is not None and len(names) == len(one.leaves) else [""] * len(one.leaves)


def _token(value: Any) -> Any:
    """Return what tells an argument apart in a key."""
    if isinstance(value, Of | Field):
        return value
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return type(value), value
