"""A captured graph as JSON, and back: nodes, the shapes of their values, and where in the model they come from.

Only what is written in terms of torch's ops, plain numbers and symbolic sizes can be encoded; anything else raises
:class:`NotEncoded`.  Decoding builds nothing but graphs of these ops and tensors without values, so a file from
elsewhere runs no code; but its graph may be another one.
"""

from __future__ import annotations

import importlib
import keyword
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured
from shardwise.graph.torch_private import (
    SYMBOLIC,
    Assumed,
    HigherOrderOperator,
    OpOverload,
    Symbols,
    exporting,
    read_expression,
    storage_key,
    written_expression,
)
from shardwise.ops.custom_function import WholeCall

OPS = frozenset({"placeholder", "get_attr", "call_function", "output"})
ARITHMETIC = frozenset({
    "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lt", "mod", "mul", "ne", "neg", "not_", "or_",
    "pos", "pow", "sub", "truediv",
})  # fmt: skip
"""The functions of :mod:`operator` by which graphs compute sizes."""
ENUMS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class NotEncoded(Exception):
    """Something in the capture has no form on disk."""


def encoded(captured: Captured) -> dict[str, Any]:
    """Return a capture as what JSON can write, but for its constants, the values of its buffers and what it reads."""
    if not all(isinstance(one, WholeCall) for one in captured.functions):
        raise NotEncoded("a function")
    writer = _Writer(captured)
    graph = writer.graph(captured.owner)
    facts = [writer.expression(one) for one in captured.assumed.facts if one.free_symbols <= writer.names.keys()]
    ranges = {writer.names[one]: each for one, each in captured.assumed.ranges.items() if one in writer.names}
    plain = ("parameters", "buffers", "fields", "rows", "trainable", "notes", "precision", "names", "looped", "draws")
    return {
        **{name: getattr(captured, name) for name in plain},
        "outputs": writer.argument(captured.outputs, {}), "calls": len(captured.functions),
        "graph": graph, "texts": list(writer.texts), "facts": facts, "ranges": ranges, "symbols": writer.places,
    }  # fmt: skip


def decoded(
    written: Mapping[str, Any], example: Mapping[str, Tensor], constants: Mapping[str, Tensor],
    values: Mapping[str, Tensor], calls: Sequence[WholeCall] = (),
) -> Captured:  # fmt: skip
    """Return a capture as it was encoded.

    Args:
        example: a batch of the shapes of which it was captured.
        constants: its constants, by placeholder.
        values: what each buffer has, by name.
        calls: the calls that run as written, which are not encoded.
    """
    reader = _Reader(written, example)
    owner = reader.graph(written["graph"])
    facts = tuple(read_expression(one, reader.expressions) for one in written["facts"])
    ranges = {reader.expressions[name]: tuple(each) for name, each in written["ranges"].items()}
    plain = ("parameters", "buffers", "fields", "rows", "trainable", "precision", "names", "looped", "draws")
    own = {name: values[buffer] for name, buffer in written["buffers"].items()}
    return Captured(
        graph=owner.graph, owner=owner, constants=dict(constants), values=own, assumed=Assumed(facts, ranges),
        notes=list(written["notes"]), outputs=_structure(written["outputs"]),
        functions=list(calls[: written["calls"]]), **{name: written[name] for name in plain},
    )  # fmt: skip


class _Writer:
    def __init__(self, captured: Captured) -> None:
        self.texts: dict[str, int] = {}  # what many nodes have in common
        self.storages: dict[int, tuple[int, Tensor]] = {}  # the number of each, and its first tensor
        self.names: dict[Any, str] = {}  # of symbols
        self.places: dict[str, tuple[str, int]] = {}  # of symbols: the first field and dim of that size
        for node in captured.graph.find_nodes(op="placeholder"):
            field = captured.fields.get(node.name)
            for dim, size in enumerate(node.meta["val"].shape) if field is not None else ():
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol and size.node.expr not in self.names:
                    name = f"s{len(self.names)}"
                    self.names[size.node.expr], self.places[name] = name, (str(field), dim)

    def expression(self, one: Any) -> Any:
        try:
            return written_expression(one, self.names)
        except KeyError as error:
            raise NotEncoded(f"the size {one}") from error

    def graph(self, owner: fx.GraphModule) -> list[dict[str, Any]]:
        number: dict[fx.Node, int] = {}
        nodes = []
        for node in owner.graph.nodes:
            one = {"op": node.op, "name": node.name, "target": self.target(node, owner)}
            one["args"] = self.argument(node.args, number)
            if node.kwargs:
                one["kwargs"] = self.argument(dict(node.kwargs), number)
            if "val" in node.meta:
                one["val"] = self.value(node.meta["val"])
            if stack := node.meta.get("nn_module_stack"):
                one["stack"] = [self.text(f"{key}\0{path}\0{_class(kind)}") for key, (path, kind) in stack.items()]
            if trace := node.meta.get("stack_trace"):
                one["trace"] = self.text(trace)
            nodes.append(one)
            number[node] = len(number)
        return nodes

    def text(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))

    def target(self, node: fx.Node, owner: fx.GraphModule) -> Any:
        if node.op == "get_attr":
            inner = getattr(owner, str(node.target))
            if not isinstance(inner, fx.GraphModule):
                raise NotEncoded(f"the attribute {node.target}")
            return [str(node.target), self.graph(inner)]
        if node.op != "call_function":
            return str(node.target)
        if isinstance(node.target, OpOverload):
            return ["op", str(node.target)]
        if isinstance(node.target, HigherOrderOperator):
            return ["higher", str(node.target)]
        module, name = getattr(node.target, "__module__", ""), getattr(node.target, "__name__", "")
        if not _legal(module, name) or getattr(importlib.import_module(module), name, None) is not node.target:
            raise NotEncoded(f"the function {node.target}")
        return ["function", module, name]

    def argument(self, value: Any, number: Mapping[fx.Node, int]) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, fx.Node):
            return {"node": number[value]}
        if isinstance(value, tuple | list):
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self.argument(one, number) for one in value]}
        if isinstance(value, dict):
            return {"dict": [[key, self.argument(one, number)] for key, one in value.items()]}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        for name, kind in ENUMS.items():
            if isinstance(value, kind):
                return {name: str(value).removeprefix("torch.")}
        raise NotEncoded(f"an argument of type {type(value).__name__}")

    def value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self.tensor(value)}
        if isinstance(value, tuple | list):
            return {"tuple" if isinstance(value, tuple) else "list": [self.value(one) for one in value]}
        if isinstance(value, SYMBOLIC):
            return {type(value).__name__: self.expression(value.node.expr)}
        return self.argument(value, {})

    def tensor(self, value: Tensor) -> list[Any]:
        key = storage_key(value)
        at, first = self.storages.setdefault(key, (len(self.storages), value))
        new = first is value
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or first.dtype != value.dtype:
            raise NotEncoded("a tensor that is no plain one")
        if new and value.storage_offset() != 0:
            raise NotEncoded("a view without its base")
        return [
            at, str(value.dtype).removeprefix("torch."), str(value.device), value.requires_grad,
            self.number(value.storage_offset()), [*map(self.number, value.shape)], [*map(self.number, value.stride())],
        ]  # fmt: skip

    def number(self, value: Any) -> Any:
        """Return a size: a number, or the expression of a symbolic one in a list of one."""
        return [self.expression(value.node.expr)] if isinstance(value, torch.SymInt) else int(value)


def _class(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


class _First(nn.Module):
    """Has the symbols of a batch: every size of its fields that is one."""

    def forward(self, fields: Mapping[str, Tensor]) -> Tensor:
        return torch.stack([value.sum() for value in fields.values()]).sum()


class _Reader:
    def __init__(self, written: Mapping[str, Any], example: Mapping[str, Tensor]) -> None:
        self.texts: Sequence[str] = written["texts"]
        self.storages: dict[int, Tensor] = {}  # on the meta device
        self.first = _first({field: example[field] for field in written["fields"].values()}, written["symbols"])
        sizes = {name: self.first[field].shape[dim] for name, (field, dim) in written["symbols"].items()}
        self.expressions = {name: size.node.expr for name, size in sizes.items() if isinstance(size, torch.SymInt)}
        rows = next((size for name, size in sizes.items() if written["symbols"][name][1] == 0), None)
        self.symbols = Symbols({}, rows, next(iter(self.first.values())).fake_mode)  # type: ignore[attr-defined]

    def graph(self, written: Sequence[Mapping[str, Any]]) -> fx.GraphModule:
        root, new, nodes = nn.Module(), fx.Graph(), list[fx.Node]()
        for one in written:
            op, target = one["op"], one["target"]
            if op not in OPS:
                raise KeyError(op)
            if op == "get_attr":
                target, inner = target
                setattr(root, _word(target), self.graph(inner))
            elif op == "placeholder":
                _word(target)
            elif op == "call_function":
                target = _function(target)
            args, kwargs = self.argument(one["args"], nodes), self.argument(one.get("kwargs", {"dict": []}), nodes)
            made = new.create_node(op, target, args, kwargs, one["name"])
            if "val" in one:
                made.meta["val"] = self.argument(one["val"], nodes)
            if "stack" in one:
                each = [self.texts[at].split("\0") for at in one["stack"]]
                made.meta["nn_module_stack"] = {key: (path, kind) for key, path, kind in each}
            if "trace" in one:
                made.meta["stack_trace"] = self.texts[one["trace"]]
            nodes.append(made)
        return fx.GraphModule(root, new)

    def argument(self, written: Any, nodes: Sequence[fx.Node]) -> Any:
        if not isinstance(written, dict):
            return written
        ((kind, value),) = written.items()
        if kind == "node":
            return nodes[value]
        if kind in ("tuple", "list"):
            found = [self.argument(one, nodes) for one in value]
            return tuple(found) if kind == "tuple" else found
        if kind == "dict":
            return {_word(key): self.argument(one, nodes) for key, one in value}
        if kind == "device":
            return torch.device(value)
        if kind == "tensor":
            return self.tensor(*value)
        if kind in ENUMS:
            found = getattr(torch, value)
            if not isinstance(found, ENUMS[kind]):
                raise KeyError(value)
            return found
        symbolic = {each.__name__: each for each in SYMBOLIC}[kind]
        return self.symbols.number(read_expression(value, self.expressions), symbolic)

    def tensor(
        self, at: int, dtype: str, device: str, grad: bool, offset: Any, sizes: Sequence[Any], strides: Sequence[Any]
    ) -> Tensor:
        shape, steps = (tuple(map(self.number, one)) for one in (sizes, strides))
        if at not in self.storages:
            seen = self.storages[at] = torch.empty_strided(shape, steps, dtype=getattr(torch, dtype), device="meta")
        else:
            seen = self.storages[at].as_strided(shape, steps, self.number(offset))
        found = self.symbols.shown(seen, torch.device(device))
        return found.requires_grad_(grad) if grad else found

    def number(self, written: Any) -> Any:
        if isinstance(written, list):
            return self.symbols.number(read_expression(written[0], self.expressions), torch.SymInt)
        return written


def _first(example: Mapping[str, Tensor], symbols: Mapping[str, Sequence[Any]]) -> dict[str, Tensor]:
    """Return fields without values, whose sizes are symbols where ``symbols`` says so."""
    rows = torch.export.Dim("rows", min=1, max=1 << 30)
    at = {(field, dim) for field, dim in symbols.values()}
    whole = any(dim == 0 and has_rows(field) for field, dim in at)
    shapes = {
        name: {
            dim: rows if dim == 0 and has_rows(name) else torch.export.Dim.AUTO
            for dim in range(value.dim()) if (name, dim) in at or (dim == 0 and has_rows(name) and whole)
        } or None for name, value in example.items()
    }  # fmt: skip
    with exporting():
        program = torch.export.export(_First(), (dict(example),), strict=False, dynamic_shapes=(shapes,))
    places = program.graph_module.graph.find_nodes(op="placeholder")
    return {name: node.meta["val"] for name, node in zip(example, places, strict=True)}


def _function(written: Sequence[str]) -> Any:
    kind, *names = written
    if kind == "function":
        if not _legal(*names):
            raise KeyError(".".join(names))
        return getattr(importlib.import_module(names[0]), names[1])
    found: Any = torch.ops.higher_order if kind == "higher" else torch.ops
    for word in names[0].split("."):
        found = getattr(found, word)
    if not isinstance(found, HigherOrderOperator if kind == "higher" else OpOverload):
        raise KeyError(names[0])
    return found


def _structure(written: Any) -> Any:
    """Return the structure of outputs, whose names may be any text."""
    if not isinstance(written, dict):
        return written
    ((kind, value),) = written.items()
    return {name: _structure(one) for name, one in value} if kind == "dict" else tuple(map(_structure, value))


def _word(text: Any) -> str:
    """Return a name that stands in the source of a graph's code; raise :class:`KeyError` for anything else."""
    if not isinstance(text, str) or not text.isidentifier() or keyword.iskeyword(text):
        raise KeyError(text)
    return text


def _legal(module: str, name: str) -> bool:
    """Whether a graph may call a function beside torch's ops: one of numbers and sizes."""
    if module == "_operator":
        return name in ARITHMETIC
    return module == "math" or (module == "torch" and name.startswith("sym_"))
