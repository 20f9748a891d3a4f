"""Capture a module and its loss as one flat graph of ATen ops, by ``torch.export`` with a symbolic batch dim.

The capture runs on a *shadow* of the module: the same structure with uninitialised parameters of the compute dtype, so
that casts in the graph are those of the precision that trains, and nothing that the user holds is touched.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.capture.casts import cast_buffer, cast_field, precision_layers, shadow_dtype
from shardwise.capture.computation import Computation
from shardwise.capture.functions import functions_recorded
from shardwise.capture.hooks import RefuseTensorHooks, refuse_module_hooks
from shardwise.capture.intercept import Intercept
from shardwise.capture.lazy_zeros import lazy_zeros
from shardwise.capture.reasons import fixed_rows, not_captured
from shardwise.capture.state import Change, PythonState, assigned_buffers, kept_tensors
from shardwise.capture.trial import RUNS, RUNS_UNSEEN, Found, apart, generators_kept, runs
from shardwise.capture.warned import passed_on
from shardwise.core.errors import ConfigError, describe
from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.torch_private import exports_modules_unhooked, import_export
from shardwise.initial.copies import copied

UNSEEN = "something that no look into its attributes shows (an iterator, a clock, a state elsewhere)"
HINT_ROWS = 6  # the number of rows of the captured example: export would specialise 1


LossFunction = Callable[[Any, Mapping[str, Tensor]], Tensor] | Computation


class WithLoss(nn.Module):
    """Run ``module`` and then its loss; ``forward(fields)`` returns the scalar loss of a dict of batch fields.

    Without a loss function the module gets every field by keyword and returns the loss or an output with ``.loss``.
    With one, it gets the fields that its ``forward`` names, and ``loss(output, fields)`` sees all of them.  A
    :class:`Computation` calls the module itself, and ``forward`` returns all that it does.
    """

    def __init__(
        self, module: nn.Module, loss: LossFunction | None = None, ones: tuple[str, ...] = (), precision: str = "fp32"
    ) -> None:
        super().__init__()
        self.module = module
        self.loss = loss
        self.precision = precision
        self.ones = ones  # fields known to be all ones (attention masks of batches without padding)

    def __call__(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch; hooks on all modules are not called for this one, which no user knows."""
        return self.forward(fields)

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, a tensor; for a :class:`Computation` a tuple of it and what is kept."""
        seen = {k: torch.ones_like(v) if k in self.ones else v for k, v in fields.items()}
        with Intercept(*precision_layers(self.precision)) if self.precision != "fp32" else contextlib.nullcontext():
            if isinstance(self.loss, Computation):
                loss, *kept = self.loss.run(self.module, seen)
                return (loss_of(loss, "loss.backward(): the loop"), *kept) if kept else loss_of(loss)
            if self.loss is not None:
                output = self.loss(self.module(**_accepted(self.module, seen)), seen)
                return loss_of(output, f"model.loss: {getattr(self.loss, '__name__', 'it')}(output, batch)")
            return loss_of(self.module(**seen))


Wrapped = TypeVar("Wrapped", bound=WithLoss)


@dataclass
class Noted:
    """What a forward has changed in Python. It is an object of its own, for export puts back attributes and lists."""

    changes: list[Change] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)


class Watched(WithLoss):
    """The same while it is captured: what forward assigns to a buffer is written, and what changes in Python noted."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted = Noted()

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, as before."""
        functions = [] if isinstance(self.loss, Computation) else [self.loss]
        before, buffers = PythonState(self.module, *functions), dict(self.module.named_buffers())
        loss = super().forward(fields)
        assigned_buffers(self.module, buffers, _write)
        self.noted.changes, self.noted.drawn = before.changes(), before.drawn()
        return loss


def check_assigned(name: str, old: Tensor, new: Tensor) -> None:
    """Raise :class:`ConfigError` where a tensor that forward assigns to a buffer cannot be its new value."""
    if new.shape != old.shape or new.dtype != old.dtype:
        wrong = f"forward assigns a tensor of shape {tuple(new.shape)}, {new.dtype}, to the buffer {name}"
        raise ConfigError(f"model: {wrong}; legal: one like before, of shape {tuple(old.shape)}, {old.dtype}")
    if new.requires_grad:
        wrong = f"forward assigns a tensor with a gradient to the buffer {name}"
        raise ConfigError(f"model: {wrong}; legal: {name} = ….detach()")


def _write(name: str, old: Tensor, new: Tensor) -> None:
    check_assigned(name, old, new)
    with torch.no_grad():
        old.copy_(new)


def loss_of(output: Any, source: str = "model: forward") -> Tensor:
    """Return the loss in what ``source`` returned, as a scalar: itself, ``output.loss`` or ``output["loss"]``.

    Of a tuple or list it is the first item.  Raises :class:`ConfigError` where there is no scalar loss."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor) or loss.dim() and loss.numel() != 1:
        legal = "a scalar loss, or an output with .loss" if source == "model: forward" else "a scalar tensor"
        hint = " (or model.loss = a function of (output, batch) that makes it)" if source == "model: forward" else ""
        raise ConfigError(
            f"{source} returned {_kind(loss if isinstance(loss, Tensor) else output)}; legal: {legal}{hint}"
        )
    if not loss.is_floating_point():
        raise ConfigError(f"{source} returned a loss of {loss.dtype}; legal: a loss of a floating-point dtype")
    return loss.reshape(())


def _kind(value: Any) -> str:
    """Return what a value is, for people: a size that capture keeps open is the number of rows."""
    if isinstance(value, Tensor):
        sizes = ", ".join(str(s) if isinstance(s, int) else "rows" for s in value.shape)
        return f"a tensor of shape ({sizes})"
    if isinstance(value, int | float | torch.SymInt | torch.SymFloat):
        return "a number that is no tensor: nothing can be differentiated"
    return "None" if value is None else f"an object of type {type(value).__name__}"


def _accepted(module: nn.Module, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(fields)
    names = {p.name for p in parameters}
    return {k: v for k, v in fields.items() if k in names}


def capture(
    module: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    loss: LossFunction | None = None,
    precision: str = "fp32",
    training: bool = True,
    ones: tuple[str, ...] = (),
    rows: int | None = None,
) -> Captured:
    """Capture ``module`` with its loss on rows like those of ``batch`` (a dict of tensors with a common first dim).

    ``rows`` asks for a static graph of exactly that many rows; without it the batch dim is symbolic where the model
    allows and otherwise static, as large as ``batch``.  Raises :class:`Uncapturable` with the reason where export
    stops.
    """
    refuse_module_hooks(module)

    def watched() -> Watched:
        return set_mode(Watched(shadow(module, precision), loss, ones, precision), training)

    with generators_kept():
        wrapped = watched()
        captured = _captured(wrapped, batch, rows)
        _check_state(captured, wrapped, watched(), batch)
    return captured


def _check_state(captured: Captured, wrapped: Watched, again: Watched, batch: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` where what forward computes depends on what it changes in Python, or on numbers of
    generators that are not torch's: a trial with another shadow, ``again``, shows that. Leave notes where it does not.

    The trial runs also where no change was seen: iterators, clocks and the like cannot be looked into."""
    changes, drawn = wrapped.noted.changes, wrapped.noted.drawn
    found: list[Found] = []
    number = RUNS if changes or drawn else RUNS_UNSEEN
    try:
        found = runs(again, again.module, _example(again, batch, captured.rows), bool(drawn), number)
        line = apart(found)
    except Exception as error:  # the user's code may do anything with what an earlier forward has left behind
        line = describe(error) if changes or drawn else None
    kept = " and ".join(name for name, one in again.module.named_buffers() if one.requires_grad)
    if line is not None and kept:
        raise ConfigError(
            f"model: forward leaves its graph in the buffer {kept} ({line}): ordinary PyTorch cannot take a second "
            "step either, for that graph has gone by then; legal: detach() what is written there"
        )
    if line is not None:
        what = ", ".join([*map(str, changes), *(f"the generator of {name}" for name in drawn)]) or UNSEEN
        legal = "buffers (self.register_buffer) in place of attributes, torch's random functions in place of Python's"
        place = f" ({line})" if line else ""
        raise ConfigError(f"model: what forward computes depends on {what}, which it changes{place}; legal: {legal}")
    # A flag that a first forward sets says nothing later on.
    if changed := [str(one) for one in changes if not one.of_tensors and one.after is not True]:
        captured.notes.append(
            f"forward changes {', '.join(changed)}: what it computes is the same in {len(found)} forwards, and the "
            "steps see no later values"
        )
    if drawn:
        names = " and ".join(drawn)
        captured.notes.append(
            f"forward draws from {names}: what it computes does not depend on it; the steps draw none"
        )


def _captured(wrapped: Watched, batch: Mapping[str, Tensor], rows: int | None) -> Captured:
    if rows is None:
        try:
            return _export(wrapped, batch, None)
        except ConfigError:
            raise
        except Exception as error:  # export raises many kinds; the static capture decides
            reason = fixed_rows(error, wrapped.module)
        rows = rows_in(batch)
        try:
            captured = _export(wrapped, batch, rows)
        except ConfigError:
            raise
        except Exception as error:
            raise Uncapturable(not_captured(error, wrapped.module)) from error
        captured.notes.append(
            f"captured for {rows} rows at a time, and again for every other number that comes: {reason}"
        )
        return captured
    try:
        return _export(wrapped, batch, rows)
    except ConfigError:
        raise
    except Exception as error:
        raise Uncapturable(not_captured(error, wrapped.module)) from error


def set_mode(wrapped: Wrapped, training: bool) -> Wrapped:
    """Put a module into evaluation or training mode, and return it.

    In training mode, submodules in evaluation mode inside a module that trains stay so (a frozen BatchNorm), but a
    module that is in evaluation mode as a whole, as ``from_pretrained`` gives it, trains."""
    if training and wrapped.module.training:
        return wrapped
    return wrapped.train(training)


def shadow(module: nn.Module, precision: str) -> nn.Module:
    """Return a copy of ``module`` whose parameters have the compute dtype and take no memory, as nobody touches them.

    Buffers are copies, cast as the precision asks, and other attributes are copies, too."""
    memo: dict[int, Any] = kept_tensors(module)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in memo:
            dtype = shadow_dtype(module, name, parameter, precision)
            memo[id(parameter)] = nn.Parameter(lazy_zeros(parameter.shape, dtype), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = cast_buffer(buffer.detach().to("cpu", copy=True), precision)
    return copied(module, memo)


def rows_in(batch: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a batch, which all of its fields have."""
    return next(value for name, value in batch.items() if has_rows(name)).shape[0]


def example_rows(batch: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Return ``rows`` rows that repeat those of ``batch``, as distinct tensors, since export merges equal ones; a field
    without rows stays what it is."""
    out = {}
    for name, value in batch.items():
        if not has_rows(name):
            out[name] = value.detach().cpu().clone()
            continue
        index = torch.arange(rows) % max(value.shape[0], 1)
        out[name] = value.detach().cpu()[index].clone()
    return out


def _example(wrapped: WithLoss, batch: Mapping[str, Tensor], rows: int | None) -> dict[str, Tensor]:
    return {k: cast_field(v, wrapped.precision) for k, v in example_rows(batch, rows or HINT_ROWS).items()}


def _export(wrapped: WithLoss, batch: Mapping[str, Tensor], rows: int | None) -> Captured:
    example = _example(wrapped, batch, rows)
    shapes = None
    if rows is None:
        dim = torch.export.Dim("rows", min=1, max=1 << 30)
        shapes = ({name: {0: dim} if has_rows(name) else None for name in example},)
    with passed_on() as warned, _quiet(), RefuseTensorHooks(), functions_recorded() as functions:
        import_export()
        with exports_modules_unhooked():
            program = torch.export.export(wrapped, (example,), strict=False, dynamic_shapes=shapes)
    if any(isinstance(constant, Tensor) and constant.is_meta for constant in program.constants.values()):
        raise Uncapturable(
            "it computes with a tensor without memory, which its constructor made and no attribute holds"
        )
    places = program.graph_module.graph.find_nodes(op="placeholder")
    if others := [node for node in places if not isinstance(node.meta.get("val"), Tensor)]:
        raise Uncapturable(
            f"it computes with an object that is no tensor, such as a torch.Generator ({others[0].name})"
        )
    signature = program.graph_signature
    canonical = _canonical(wrapped)
    order = list(example)
    return Captured(
        graph=program.graph_module.graph,
        owner=program.graph_module,
        parameters={k: canonical[v] for k, v in signature.inputs_to_parameters.items()},
        buffers={k: canonical[v] for k, v in signature.inputs_to_buffers.items()},
        constants={k: program.constants[v] for k, v in signature.inputs_to_lifted_tensor_constants.items()},
        fields=dict(zip(signature.user_inputs, order, strict=True)),
        rows=rows,
        precision=wrapped.precision,
        trainable={canonical[k]: p.requires_grad for k, p in wrapped.named_parameters(remove_duplicate=False)},
        values={
            k: program.state_dict[v] if v in program.state_dict else program.constants[v]
            for k, v in signature.inputs_to_buffers.items()
        },
        functions=list(functions),
        notes=list(warned),
        names={k.removeprefix("module."): canonical[k] for k, _ in wrapped.named_parameters(remove_duplicate=False)},
    )


def _canonical(wrapped: WithLoss) -> dict[str, str]:
    """Return, by names under the wrapper, the first name, in the user's module, of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for kind in (wrapped.named_parameters, wrapped.named_buffers):
        for name, value in kind(remove_duplicate=False):
            names[name] = first.setdefault(id(value), name.removeprefix("module."))
    return names


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence export, which logs every guard of a failed symbolic capture; the reason is kept in the exception."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # it also prints the graph that it had so far
            yield
    finally:
        logging.disable(before)
