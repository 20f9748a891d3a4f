"""A model that cannot be captured runs as one unit: its own forward, with calls of random functions replaced by keyed
ones and calls of BatchNorm by synchronised ones.
"""

from __future__ import annotations

import copy
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from shardwise.capture.casts import KERNEL_ADVICE, cast_buffer, cast_field, lacks_kernel, precision_layers, shadow_dtype
from shardwise.capture.draws import Draw, Keys, batch_dims, decides
from shardwise.capture.example import shaken_value
from shardwise.capture.intercept import Intercept, Proceed
from shardwise.capture.keyed_calls import KeyedRandom, RefuseRandom
from shardwise.capture.outputs import Found, Wanted
from shardwise.capture.running import fields_in_words, running_module
from shardwise.capture.state import generators_kept, kept_tensors
from shardwise.capture.wrapped import LossFunction, WithLoss, WithOutputs, rows_in, set_mode
from shardwise.core.errors import ConfigError, ShardwiseError, describe
from shardwise.core.fields import has_rows
from shardwise.core.structure import Fields
from shardwise.graph.torch_private import storage_key, version
from shardwise.initial.copies import copied
from shardwise.ops import collectives, norms
from shardwise.ops.env import ROWS, Env
from shardwise.units.assigning import Assigning, AssigningOutputs, refuse_write
from shardwise.units.loss_weight import TRIED_ROWS, LossWeight
from shardwise.units.trace import Unit
from shardwise.units.written_buffers import Agreement, Written, over_ranks, told

ROWS_WEIGH = LossWeight("rows")


def opaque_unit(
    module: nn.Module, fields: tuple[str, ...], loss: LossFunction | None, precision: str, training: bool,
    weight: LossWeight = ROWS_WEIGH, trial: bool = False, written: Mapping[str, Written | None] = MappingProxyType({}),
    wanted: Wanted = "loss",
) -> Unit:  # fmt: skip
    """Return the unit ``(env, *parameters, *buffers, *fields) -> (loss as a partial sum, *new buffers, *outputs)``.

    Outputs are given where they are ``wanted``; how many there are is known once it has run.

    The loss of a rank's rows counts as ``weight`` says, and what they write to buffers as ``written`` says; in a
    ``trial`` BatchNorm lets no rows meet. The unit runs a copy of the module, one for each thread, whose tensors are on
    the meta device and are replaced at each call.
    """
    parameters = tuple(n for n, _ in module.named_parameters())
    buffers = tuple(n for n, _ in module.named_buffers())
    own = _skeleton(module)
    made = Assigning(own, loss) if wanted == "loss" else AssigningOutputs(own, loss, "fp32", wanted)
    wrapped: WithLoss = set_mode(made, training)
    wrapped.fields_in = precision
    call = OpaqueCall(wrapped, parameters, buffers, fields, precision_layers(precision), weight, trial, written)
    return Unit(
        index=0,
        name="model",
        function=call,
        code=type(module).__name__,
        graph=None,
        parameters=parameters,
        buffers=buffers,
        constants=(),
        fields=fields,
        inputs=(),
        outputs=("loss",),
        updates=buffers,
        input_grads=(),
        output_grads=(True,),
        collectives=True,
        reads_sums=weight.kind == "targets",
    )


def first_loss(
    unit: Unit, module: nn.Module, batch: Mapping[str, Tensor], precision: str, device: torch.device
) -> Tensor:
    """Return the loss of an example batch on ``device``, a scalar; errors are those of :func:`first_run`."""
    return first_run(unit, module, batch, precision, device)[0]


def first_run(
    unit: Unit, module: nn.Module, batch: Mapping[str, Tensor], precision: str, device: torch.device, first: int = 0,
    *, shaken: bool = False, on: WithLoss | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the loss of an example batch on ``device``, and what forward leaves in the buffers; its first row is row
    ``first`` of the batch for what draws random numbers.

    It runs on a new copy of the module, or ``on`` one that is given, and on copies of all tensors, so that nothing that
    the user holds changes. Parameters are ``shaken`` to tell apart what equal values make equal (a layer of zeros).
    Raises :class:`ConfigError` if the forward fails, or writes to a parameter."""
    parameters = dict(module.named_parameters())
    leaves = []
    for index, (name, p) in enumerate(parameters.items()):
        value = p.detach().to(device, shadow_dtype(module, name, p, precision), copy=True)
        leaves.append((shaken_value(value, index) if shaken else value).requires_grad_(p.requires_grad))
    before = [told(leaf) for leaf in leaves]
    buffers = [cast_buffer(b.detach().to(device), precision) for b in dict(module.named_buffers()).values()]
    rows = rows_in(batch)
    call = call_of(unit)
    try:
        with (
            call.afresh(on),
            RefuseRandom(),
            torch.set_grad_enabled(call.wrapped.training),  # as in an evaluation
        ):
            results = call(
                Env(rows=rows, offset=first, counts=[torch.ones((), device=device)]),
                *leaves,
                *buffers,
                *(cast_field(v.to(device, copy=True), precision) for v in batch.values()),
            )
    except ShardwiseError:
        raise
    except Exception as error:  # the user's code may raise anything
        missing = precision == "fp16" and device.type == "cpu" and lacks_kernel(error)
        legal = f'; legal with precision = "fp16": {KERNEL_ADVICE}' if missing else ""
        raise ConfigError(
            f"model: its forward fails in a trial with {rows} rows of the example batch ({fields_in_words(batch)}): "
            f"{describe(error)}{legal}"
        ) from error
    for name, leaf, content in zip(parameters, leaves, before, strict=True):
        if not torch.equal(told(leaf), content):  # written where torch does not see it
            refuse_write(name)
    return results


def try_backward(loss: Tensor) -> None:
    """Run the backward of a first loss where it has functions that are written in Python.

    Raises :class:`ConfigError` if it fails, as where it runs parts of forward again: the module has no values then."""
    stack, seen, written = [loss.grad_fn], set[Any](), False
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            written |= isinstance(node, torch.autograd.function.BackwardCFunction)
            stack.extend(following for following, _ in node.next_functions)
    if not written:
        return
    try:
        with RefuseRandom():
            loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # the user's code may raise anything
        wrong = f"its backward, which is written in Python, fails in a trial ({describe(error)})"
        legal = "a backward that runs no part of forward again, as torch.utils.checkpoint and reversible layers do"
        raise ConfigError.on("model", wrong, legal) from error


def call_of(unit: Unit) -> OpaqueCall:
    """Return the function of an opaque unit."""
    assert isinstance(unit.function, OpaqueCall)
    return unit.function


def _skeleton(module: nn.Module) -> nn.Module:
    memo: dict[int, Any] = kept_tensors(module)
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in module.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copied(module, memo)


class OpaqueCall:
    """The function of an opaque unit, with a copy of the module for each thread."""

    def __init__(
        self,
        wrapped: WithLoss,
        parameters: tuple[str, ...],
        buffers: tuple[str, ...],
        fields: tuple[str, ...],
        layers: list[Any],
        weight: LossWeight,
        trial: bool,
        written: Mapping[str, Written | None],
    ) -> None:
        self.layers, self.weight, self.trial, self.written = layers, weight, trial, written
        self.wrapped, self.parameters, self.buffers, self.fields = wrapped, parameters, buffers, fields
        # What a thread has for the communicator that it uses: a copy of the module, and its Agreement on buffers.
        self.own = threading.local()
        self.keys: Keys | None = None
        self.tried: tuple[int, int] | None = None  # the seed and the step whose draws are known, if others differ
        self.outputs = Found()  # how outputs make what the module returned, once it has run
        self.met: dict[str, None] = {}  # the modules in which a BatchNorm trains, once it has run
        norms = [m for m in wrapped.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.norms = any(m.training for m in norms)  # whether a rank may come to one
        self.lock = threading.Lock()

    def __call__(self, env: Env, *tensors: Tensor) -> tuple[Tensor, ...]:
        split = len(self.parameters)
        values = dict(zip((f"module.{n}" for n in (*self.parameters, *self.buffers)), tensors, strict=False))
        for name in self.buffers:  # forward may write to them
            values[f"module.{name}"] = values[f"module.{name}"].clone()
        fields = dict(zip(self.fields, tensors[split + len(self.buffers) :], strict=True))
        empty = not collectives.local_rows(env)
        if empty:
            # A row of weight zero stands in: the module may refuse an empty batch, and others wait in its collectives.
            fields = {k: v.new_zeros((1, *v.shape[1:])) if has_rows(k) else v for k, v in fields.items()}
        keys = self.keys_of(env, values, fields)
        loss, *outputs = self.run(env, values, fields, KeyedRandom(env.seed, keys))
        same = {n: values[f"module.{n}"] for n in self.buffers if self.written.get(n) == "same"}
        if same and not env.again:
            vars(self.own).setdefault("agreement", Agreement()).check(env, same)
        share = self.weight.share(env, fields)
        if isinstance(share, Tensor):  # a mean over no targets may be 0/0
            loss = torch.where(share > 0, loss, 0.0)
        before = dict(zip(self.buffers, tensors[split:], strict=False))
        new = (over_ranks(env, self.written.get(n), before[n], values[f"module.{n}"], n) for n in self.buffers)
        return ((loss * share).to(loss.dtype), *new, *(one[:0] if empty else one for one in outputs))

    def copied(self) -> WithLoss:
        """Return a copy of the module whose attributes are those that the user's module has."""
        return copy.deepcopy(self.wrapped, kept_tensors(self.wrapped))

    @contextmanager
    def afresh(self, on: WithLoss | None = None) -> Iterator[None]:
        """Run meanwhile on a new copy, so that what forward changes in Python does not last, or ``on`` a given one."""
        before = vars(self.own).copy()
        vars(self.own).clear()
        self.begin(Env(), on)
        try:
            with generators_kept() if on is None else nullcontext():
                yield
        finally:
            vars(self.own).clear()
            vars(self.own).update(before)

    def begin(self, env: Env, on: WithLoss | None = None) -> WithLoss:
        """Return this thread's copy of the module; another communicator means another training, with another copy."""
        own = vars(self.own)
        comm = own.get("comm")
        if "module" not in own or (None if comm is None else comm()) is not env.comm:
            own.clear()
            own.update(module=on or self.copied(), comm=None if env.comm is None else weakref.ref(env.comm))
        wrapped: WithLoss = own["module"]
        return wrapped

    def run(
        self, env: Env, values: dict[str, Tensor], fields: dict[str, Tensor], random: KeyedRandom,
        met: dict[str, None] | None = None,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        wrapped = self.begin(env)
        random.begin(env.step, env.offset + env.range()[0], rows_in(fields))
        norms_layer = _RowNorms() if self.trial else _SyncBatchNorms(env, self.norms or bool(self.met), met)
        writes = _ParameterWrites({n: values[f"module.{n}"] for n in self.parameters})
        with Intercept(writes, random, norms_layer, *self.layers):
            result = functional_call(wrapped, values, (Fields(fields, objects=env.objects),))
        writes.check()
        random.end()
        if isinstance(norms_layer, _SyncBatchNorms):
            norms_layer.end()
        for name, value in wrapped.assigned.items():
            values[f"module.{name}"] = value
        if isinstance(wrapped, WithOutputs):
            self.outputs.structure = wrapped.outputs.structure
        return result if isinstance(result, tuple) else (result,)

    def keys_of(self, env: Env, values: dict[str, Tensor], fields: dict[str, Tensor]) -> Keys:
        """Return how random calls are keyed, found by running the forward with more rows: once, or in each step
        where forward may decide by random numbers."""
        with self.lock:
            if self.keys is None or self.tried not in (None, (env.seed, env.step)):
                every, self.tried = rows_in(fields), None
                few = min(max(every, 2), TRIED_ROWS)  # BatchNorm refuses a single row
                self.keys = batch_dims(partial(self.drawn, env, values, fields), (few, every))
            return self.keys

    def drawn(self, env: Env, values: dict[str, Tensor], fields: dict[str, Tensor], rows: int) -> list[Draw]:
        """Return the random calls of a forward of ``rows`` rows, which repeat or cut those of ``fields``."""
        given = {
            k: torch.cat([v, v[:1].expand(max(rows - len(v), 0), *v.shape[1:])])[:rows].clone() if has_rows(k) else v
            for k, v in fields.items()
        }
        copies = {k: v.clone() if k.removeprefix("module.") in self.buffers else v for k, v in values.items()}
        random = KeyedRandom(env.seed)
        with self.afresh(), torch.enable_grad():  # forward may itself ask for gradients
            self.run(Env(rows=rows, step=env.step), copies, given, random, self.met)
        if decides(random.draws):
            self.tried = env.seed, env.step
        return random.draws


class _ParameterWrites:
    """Tells whether a forward writes to parameters: in place, through ``.data``, or by another ``.data``."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.seen = [(n, p, version(p)) for n, p in parameters.items()]
        self.places = [p.data_ptr() for p in parameters.values()]

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        result = proceed(func, args, kwargs)
        if getattr(func, "__self__", None) is Tensor.data and isinstance(result, Tensor):
            # What is written there counts for itself: the parameter's own version does not see it.
            memory = storage_key(result)
            names = (n for n, p in self.parameters.items() if storage_key(p) == memory)
            self.seen += [(name, result, version(result)) for name in names]
        return result

    def check(self) -> None:
        """Raise :class:`ConfigError` about the first parameter that was written to."""
        for name, value, before in self.seen:
            if version(value) != before:
                refuse_write(name)
        for (name, value), place in zip(self.parameters.items(), self.places, strict=True):
            if value.data_ptr() != place:
                refuse_write(name)


class _RowNorms:
    """Gives BatchNorm the statistics 0 and 1, so that rows are independent."""

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func is not F.batch_norm:
            return proceed(func, args, kwargs)
        given = _bound(args, kwargs)
        known = (given[name] for name in ("weight", "running_mean"))
        like = next((one for one in known if one is not None), given["input"])  # they may be wider than the rows
        mean, var = (like.new_full((given["input"].shape[1],), value) for value in (0, 1))
        return proceed(func, (), {**given, "running_mean": mean, "running_var": var, "training": False})


def _bound(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of ``F.batch_norm`` by name."""
    given = inspect.signature(F.batch_norm).bind(*args, **kwargs)
    given.apply_defaults()
    return dict(given.arguments)


def norms_met(unit: Unit) -> tuple[str, ...]:
    """Return the paths of the modules in which a BatchNorm has trained in the first forward of an opaque unit."""
    call: Any = unit.function
    return tuple(call.met)


class _SyncBatchNorms:
    """Replaces BatchNorm in training by one whose statistics are over the rows of all ranks.

    Each rank runs the model's own code, which may branch by values: before each BatchNorm, and at the end, all ranks
    tell each other where they are, so that none waits for a rank that does not come."""

    def __init__(self, env: Env, expected: bool, places: dict[str, None] | None = None) -> None:
        self.env, self.calls, self.expected, self.places = env, 0, expected, places

    def end(self) -> None:
        """Say that this rank runs no further BatchNorm; without any in the model, nothing could hang."""
        if self.expected and self.env.parts > 1:
            self.meet(0)

    def meet(self, channels: int) -> None:
        """Raise :class:`ShardwiseError` on all ranks unless all are at the same BatchNorm."""
        self.expected, self.calls = True, self.calls + 1
        here = torch.tensor([self.calls, channels], device=self.env.comm.device)
        every = collectives.gathered(self.env, here, (ROWS,), "place in the model").tolist()
        if any(one != every[0] for one in every):
            raise ShardwiseError(
                "a BatchNorm that trains runs on some ranks and not on others, for a branch depends on each rank's own "
                "rows; legal: a branch that is the same for all rows, or dp = 1"
            )

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        if func is F.batch_norm and self.places is not None and _bound(args, kwargs)["training"]:
            self.places[running_module()] = None
        if func is not F.batch_norm or self.env.parts == 1:
            return proceed(func, args, kwargs)
        return self.batch_norm(proceed, *args, **kwargs)

    def batch_norm(
        self, proceed: Proceed, input: Tensor, running_mean: Tensor | None, running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        if not training:
            result: Tensor = proceed(
                F.batch_norm, (input, running_mean, running_var, weight, bias, training, momentum, eps), {}
            )
            return result
        stand_in = not collectives.local_rows(self.env)
        self.meet(input.shape[1])
        y, *new = norms.sync_batch_norm(
            self.env, input, weight, bias, running_mean, running_var, momentum, eps, stand_in=stand_in
        )
        for running, value in zip((running_mean, running_var), new, strict=False):
            assert running is not None  # they are updated where they are given
            running.copy_(value)
        return y
