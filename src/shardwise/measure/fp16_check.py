"""Check that the CPU has a kernel for every op of a model in fp16: torch lacks some, and only says so in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from shardwise.capture.casts import KERNEL_ADVICE, cast_buffer, cast_field, lacks_kernel, shadow_dtype
from shardwise.capture.coins import Drawing
from shardwise.capture.example import example_rows
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.graph.aten_ops import Fact, has
from shardwise.ops.env import Env
from shardwise.ops.own_op import facts_of
from shardwise.units.batch_sums import stand_ins
from shardwise.units.opaque import first_loss
from shardwise.units.split import with_backward
from shardwise.units.trace import Trace, Unit

aten = torch.ops.aten
ROWS = 2
PRODUCTS = Fact.MATRIX_PRODUCT | Fact.CONVOLUTION | Fact.ATTENTION
"""These ops have fp16 kernels on every CPU, on many up to 70 times slower than fp32 ones: they run in fp32 here."""


def check_kernels(trace: Trace, module: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Run every op of ``trace`` forward and backward on the CPU, on two rows like those of ``batch``.

    The shards are those of the last rank of each tensor-parallel axis, which are never empty.  The parameters of one
    unit at a time are in memory, and units of the same code and sizes run once.  Only the value of a product is
    computed, in fp32.  Raises :class:`ConfigError`, which names the op without a kernel, its module and torch's reason.
    """
    (_check_units if trace.opaque is None else _check_opaque)(trace, module, batch)


def _check_units(trace: Trace, module: nn.Module, batch: Mapping[str, Tensor]) -> None:
    rows, mesh = trace.rows or ROWS, Mesh.spanned(trace.tensor)
    last = mesh.size - 1
    pieces = {p.name: p.local_shape(mesh, last) for b in trace.buckets for p in b.parameters if p.axes}
    fields = {k: cast_field(v, trace.precision) for k, v in example_rows(batch, rows).items()}
    if trace.draws is not None:
        fields |= trace.draws.of(fields, dict(module.named_buffers()), Drawing(0, 0))
    live: dict[str, Tensor] = {}
    known: dict[Any, tuple[Tensor, ...]] = {}
    for unit in trace.units:
        values = [
            *(_parameter(module, n, trace, pieces.get(n)) for n in unit.parameters),
            *(cast_buffer(module.get_buffer(n).detach().cpu(), trace.precision) for n in unit.buffers),
            *unit.constants,
            *(fields[n] for n in unit.fields),
            *(live[n].requires_grad_(g) for n, g in zip(unit.inputs, unit.input_grads, strict=True)),
        ]
        key = unit.code, unit.output_grads, tuple((v.shape, v.dtype, v.requires_grad) for v in values)
        if key not in known:
            env = Env(_Alike(), rows=rows, tensor=mesh.places(last, tuple(trace.tensor)))
            env.counts = [torch.ones_like(one, device="cpu") for one in stand_ins(trace.sums, env)]
            known[key] = _Nodes(unit, trace.precision).run(env, *values)
        live |= {n: v.detach() for n, v in zip(unit.outputs, known[key], strict=False)}
        del values  # frees this unit's parameters before the next unit's are made


def _parameter(module: nn.Module, name: str, trace: Trace, piece: tuple[int, ...] | None) -> Tensor:
    """Return a parameter in its compute dtype, or a tensor of its local shape where it is on meta or sharded."""
    own = module.get_parameter(name)
    dtype, some = shadow_dtype(module, name, own, trace.precision), own.is_meta or piece is not None
    value = torch.full(piece or own.shape, 0.01, dtype=dtype) if some else own.detach().to("cpu", dtype, copy=True)
    return value.requires_grad_(own.requires_grad)


class _Alike:
    """This communicator is its own handle, and all its ranks hold what this one holds; a sum is one rank's value."""

    def all_reduce(self, x: Tensor, *args: Any, out: Tensor, **options: Any) -> _Alike:
        out.copy_(x)
        return self

    def all_gather(self, out: Tensor, x: Tensor, *args: Any, **options: Any) -> _Alike:
        out.view(out.numel() // max(x.numel(), 1), x.numel()).copy_(x.view(-1))
        return self

    def reduce_scatter(self, out: Tensor, x: Tensor, *args: Any, **options: Any) -> _Alike:
        out.copy_(x.view(-1)[: out.numel()])
        return self

    def all_to_all(self, out: Tensor, x: Tensor, *args: Any, **options: Any) -> _Alike:
        if out.numel() <= x.numel():
            out.view(-1).copy_(x.view(-1)[: out.numel()])
        else:
            out.zero_()
        return self

    shift = all_to_all

    def wait(self) -> None:
        """Return at once."""


class _Nodes(fx.Interpreter):
    """Run the graph of a unit op by op, and each op's backward by itself, so that one that fails can be named."""

    def __init__(self, unit: Unit, precision: str) -> None:
        assert unit.graph is not None
        super().__init__(nn.Module(), graph=unit.graph)
        self.unit, self.precision = unit, precision
        self.learning = with_backward(unit.graph, unit.output_grads)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if has(n, PRODUCTS) or facts_of(n.target).kept:
            return self._product(n, args, kwargs)
        try:
            with torch.enable_grad():
                result = n.target(*args, **kwargs)
            if n in self.learning:
                self._backward(n, result)
        except Exception as error:
            if not lacks_kernel(error):
                raise
            _refuse(
                str(n.target).removeprefix("aten."), n.meta.get("path") or self.unit.name, self.precision, str(error)
            )
        return _apart(result)

    @torch.no_grad()
    def _product(self, n: fx.Node, args: Any, kwargs: Any) -> Tensor:
        given = [v for i in n.all_input_nodes if isinstance(v := self.env[i], Tensor)]
        args, kwargs = fx.node.map_aggregate((args, kwargs), _wide)
        result: Tensor = n.target(*args, **kwargs)
        return result.to(n.meta["val"].dtype).requires_grad_(any(v.requires_grad for v in given))

    def _backward(self, n: fx.Node, result: Any) -> None:
        given = [v for i in n.all_input_nodes if isinstance(v := self.env[i], Tensor) and v.requires_grad]
        made = [
            v
            for v in (result if isinstance(result, tuple | list) else [result])
            if isinstance(v, Tensor) and v.requires_grad
        ]
        if given and made:
            torch.autograd.grad(made, given, [torch.ones_like(v) for v in made], allow_unused=True)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.float16 else value


def _apart(result: Any) -> Any:
    """Return an op's result, detached from its autograd graph."""
    if isinstance(result, tuple | list):
        return type(result)(_apart(v) for v in result)
    return result.detach().requires_grad_(result.requires_grad) if isinstance(result, Tensor) else result


def _check_opaque(trace: Trace, module: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Run backward of the whole model; its forward has run for the trace."""
    if any(p.is_meta for p in module.parameters()):
        return
    loss = first_loss(trace.units[0], module, batch, trace.precision, torch.device("cpu"))
    try:
        loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        if not lacks_kernel(error):
            raise
        _refuse("backward", "the model", trace.precision, str(error))


def _refuse(op: str, path: str, precision: str, error: str) -> NoReturn:
    wrong = f"a CPU cannot compute {op} in {path}: {error.splitlines()[0]}"
    raise ConfigError.on(f'precision = "{precision}"', wrong, KERNEL_ADVICE)
