"""A module with its loss, and its outputs, in the forms in which it is run and captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.capture.assumed import BRANCHES, NUMBERS
from shardwise.capture.casts import precision_layers
from shardwise.capture.computation import Computation
from shardwise.capture.ctc import CtcLosses
from shardwise.capture.eager_calls import EagerCalls
from shardwise.capture.expert_loops import ExpertLoops
from shardwise.capture.in_form import InForm, UserLoss, arguments
from shardwise.capture.intercept import Intercept, Proceed
from shardwise.capture.outputs import Found, Wanted, flatten, is_one_number, no_rows, scalar, unlabelled, without_labels
from shardwise.capture.reads import Answering
from shardwise.capture.state import Change, PythonState, assigned_buffers
from shardwise.core.errors import ConfigError
from shardwise.core.fields import has_rows
from shardwise.core.structure import like
from shardwise.graph.torch_private import numbers_watched

LossFunction = UserLoss | InForm


class WithLoss(nn.Module):
    """Run ``module`` and then its loss; ``forward(fields)`` returns the scalar loss of a dict of batch fields.

    Without a loss function the module gets every field, by keyword or as one dict
    (:func:`~shardwise.capture.in_form.arguments`), and returns the loss or an output with ``.loss``.  With one, it gets
    the fields that its ``forward`` names, and ``loss(output, fields)`` sees all of them.  A :class:`Computation` calls
    the module itself, and ``forward`` returns all that it does.  Under :class:`InForm` both get the batch in the form
    that it had before it was fields.
    """

    captured = False  # whether what runs is captured, and may read no values

    def __init__(
        self,
        module: nn.Module,
        loss: LossFunction | None = None,
        precision: str = "fp32",
    ) -> None:
        super().__init__()
        self.module = module
        self.form = loss if isinstance(loss, InForm) else None
        self.loss: UserLoss | None = loss.loss if isinstance(loss, InForm) else loss
        self.precision = self.fields_in = precision  # what computes, and in what fields come

    def __call__(self, fields: Mapping[str, Tensor]) -> Any:
        """Return what ``forward`` does; hooks on all modules are not called for this one, which no user knows."""
        return self.forward(fields)

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, a tensor; for a :class:`Computation` a tuple of it and what is kept."""
        seen = self.seen(fields)
        with self.casting():
            if isinstance(self.loss, Computation):
                loss, *kept = self.loss.run(self.module, seen)
                loss = loss_of(loss, "loss.backward(): the loop")
                return (loss, *kept) if kept else loss
            return self.loss_in(self.returned(seen), seen)

    def seen(self, fields: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the fields as the module sees them."""
        return like(dict(fields), fields)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the precision meanwhile."""
        return Intercept(*precision_layers(self.precision)) if self.precision != "fp32" else contextlib.nullcontext()

    def returned(self, seen: Mapping[str, Tensor], labels: bool = True) -> Any:
        """Return what the module returns, if asked without its labels."""
        if self.form is not None:
            form = self.form if labels else unlabelled(self.form, self.module)
            return form.call(self.module, form.batch(seen, self.captured, self.fields_in))
        fields = dict(seen) if labels else without_labels(self.module, seen)
        args, kwargs = arguments(self.module, fields, self.loss is None or not labels)
        return self.module(*args, **kwargs)

    def loss_in(self, output: Any, seen: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of what the module returned."""
        if self.loss is None:
            return loss_of(output)
        if isinstance(self.loss, Computation):
            legal = "model.eval(), and a call of the model"
            raise ConfigError(f"model: metrics of outputs where an own loop computes the loss; legal: {legal}")
        batch = seen if self.form is None else self.form.batch(seen, self.captured, self.fields_in)
        return loss_of(self.loss(output, batch), f"model.loss: {getattr(self.loss, '__name__', 'it')}(output, batch)")


Wrapped = TypeVar("Wrapped", bound=WithLoss)


@dataclass
class Noted:
    """What a forward has changed in Python. It is an object of its own, for export puts back attributes and lists."""

    changes: list[Change] = field(default_factory=list)
    drawn: list[str] = field(default_factory=list)
    before: PythonState | None = None  # what it began with
    looped: int = 0  # over so many experts it loops, at most


class Stops:
    """A layer that keeps what the last read of a value that stopped a capture has raised: forward may catch it, and go
    on by another way than with values."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        try:
            return proceed(func, args, kwargs)
        except Exception as error:
            if func in BRANCHES or func in NUMBERS:
                self.note(error)
            raise

    def note(self, error: Exception) -> None:
        """Keep what a read has raised."""
        self.error = error


class Watched(WithLoss):
    """The same while it is captured: what forward assigns to a buffer is written, and what changes in Python noted."""

    captured = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.noted = Noted()
        self.looks = True  # whether somebody will read what is noted
        self.reading: Answering | None = None  # answers what forward reads in Python
        self.calling: EagerCalls | None = None  # stands for calls that run as written

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, as before, and after it what forward reads in Python."""
        return self.with_operands(self.noting(super().forward, fields))

    def with_operands(self, results: Any) -> Any:
        """Return results and after them the tensors that were read."""
        if self.reading is None:
            return results
        return (*(results if isinstance(results, tuple) else (results,)), *self.reading.operands)

    def state(self) -> PythonState:
        """Return what forward may keep or read in Python, as it is now."""
        return PythonState(self.module, *([] if isinstance(self.loss, Computation) else [self.loss]))

    def noting(self, forward: Callable[[Mapping[str, Tensor]], Any], fields: Mapping[str, Tensor]) -> Any:
        """Return what ``forward`` returns, and note what it changes."""
        before = self.state() if self.looks else None
        buffers = dict(self.module.named_buffers())
        same_rows(fields)
        reading = contextlib.nullcontext() if self.reading is None else self.reading.answers()
        calling = contextlib.nullcontext() if self.calling is None else self.calling.called()
        loops, stops = ExpertLoops(), Stops()
        with reading, calling, Intercept(CtcLosses(), loops, stops), numbers_watched(stops.note):
            results = forward(fields)
        if stops.error is not None:
            raise stops.error
        assigned_buffers(self.module, buffers, _write)
        if before is not None:
            self.noted.changes, self.noted.drawn, self.noted.before = before.changes(), before.drawn(), before
        self.noted.looped = loops.experts
        return results


class Settled:
    """Whether what forward may keep in Python is as it was when this was asked before: another run would compute the
    same."""

    def __init__(self, wrapped: Watched) -> None:
        self.wrapped = wrapped
        self.before: PythonState | None = None

    def __call__(self) -> bool:
        before, self.before = self.before, self.wrapped.state()
        return before is not None and not before.changes(self.before)


class WithOutputs(Watched):
    """The same, whose forward returns ``(loss, *outputs)``; without a loss, where only outputs are wanted, zero.

    ``outputs`` tells how they make what the module returned.
    """

    def __init__(self, module: nn.Module, loss: LossFunction | None, precision: str, wanted: Wanted) -> None:
        super().__init__(module, loss, precision)
        self.wanted, self.outputs = wanted, Found()

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the loss of a batch, and its outputs."""
        return self.with_operands(self.noting(self.results, fields))

    def results(self, fields: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Run the module, a second time without its labels if it returns its loss alone."""
        seen = self.seen(fields)
        rows = rows_in(seen)
        with self.casting():
            output = self.returned(seen)
            structure, tensors = flatten(output, rows)
            loss = self.loss_in(output, seen) if self.wanted == "both" else None
            if structure is None and self.loss is None and is_one_number(output):
                output = self.returned(seen, labels=False)
                structure, tensors = flatten(output, rows)
        if structure is None:
            raise no_rows(output, rows)
        self.outputs.structure = structure
        return (tensors[0].new_zeros((), dtype=torch.float32) if loss is None else loss, *tensors)


class InOneNumber(WithOutputs):
    """The same, whose forward returns one number that depends on the loss and on all outputs."""

    def forward(self, fields: Mapping[str, Tensor]) -> Any:
        """Return the number, and after it what forward reads in Python."""
        return self.with_operands(scalar(self.noting(self.results, fields)))


class Resized(ConfigError):
    """Forward gives a buffer another shape."""


def check_assigned(name: str, old: Tensor, new: Tensor) -> None:
    """Raise :class:`ConfigError` where a tensor that forward assigns to a buffer cannot be its new value."""
    if new.shape != old.shape or new.dtype != old.dtype:
        wrong = f"forward assigns a tensor of shape {tuple(new.shape)}, {new.dtype}, to the buffer {name}"
        error = ConfigError if new.shape == old.shape else Resized
        raise error(f"model: {wrong}; legal: one like before, of shape {tuple(old.shape)}, {old.dtype}")
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


def set_mode(wrapped: Wrapped, training: bool) -> Wrapped:
    """Put a module into evaluation or training mode, and return it.

    In training mode, submodules in evaluation mode inside a module that trains stay so (a frozen BatchNorm), but a
    module that is in evaluation mode as a whole, as ``from_pretrained`` gives it, trains."""
    if training and wrapped.module.training:
        return wrapped
    return wrapped.train(training)


def rows_in(batch: Mapping[str, Tensor]) -> int:
    """Return the number of rows of a batch, which all of its fields have."""
    return next(value for name, value in batch.items() if has_rows(name)).shape[0]


def same_rows(batch: Mapping[str, Tensor]) -> None:
    """Tell a capture that all fields have the same rows, also those that forward never brings together; it would
    give each of these a size of its own."""
    rows = rows_in(batch)
    if not all(value.shape[0] == rows for name, value in batch.items() if has_rows(name)):
        raise ConfigError(f"batch: fields differ in rows; legal: {rows} rows in each, as in the first")
