"""What a loop sees of a distributed model: parameters, buffers and gradients are brought up to date when it looks, and
what it has written to them is taken up before the next program.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from shardwise.capture.running import at_line
from shardwise.core.errors import ShardwiseError
from shardwise.core.fields import is_kept
from shardwise.graph.torch_private import version, without_torch_functions
from shardwise.train.loop_model import Model
from shardwise.train.shown import Look, fill, shown, written
from shardwise.train.values import Source


class Sight(Model, Look):
    """The model of a loop, and what the loop sees of it."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._learn: dict[str, bool] = {}  # requires_grad of the parameters at the last calls before the first step
        self._counts: dict[str, int] = {}  # how often what it sees had been written to, at the last calls

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take back every ``loss.backward()`` since the last step, as setting gradients to zero or to None does."""

    @abstractmethod
    def _run_as_called(self) -> None:
        """Run the losses that are due, with the parameters of their calls and without an update."""

    @property
    def seen(self) -> dict[str, Tensor]:
        """Parameters and buffers as the loop sees them, by name."""
        if self._seen is None:
            self._seen = shown(self.module, self)
            self._learn = {name: one.requires_grad for name, one in self.module.named_parameters()}
        return self._seen

    def show(self, buffers: bool) -> None:
        """Bring them up to date, for a look at ``buffers`` or at parameters alone."""
        if buffers:
            self.check_written("a buffer is looked at")
        if self.made is None:
            if self.before is None and self.open:
                _ = self.seen
                self.before = {name: one.detach().clone() for name, one in self.state().items()}
                self._count()
        else:
            self._fill()

    def _fill(self) -> None:
        if self.filled != self.version:
            fill(self.seen, self.state())
            self.filled = self.version
            self._count()

    def _count(self) -> None:
        with without_torch_functions():
            self._counts = {name: version(one) for name, one in (self._seen or {}).items()}

    def write(self, name: str, value: Tensor) -> None:
        """Set a buffer, also where the loop sees it."""
        super().write(name, value)
        if self.before is not None and name in self.before:
            self.before[name] = value.detach().clone()
        if self._seen is not None and name in self._seen and self.made is not None and self.filled == self.version:
            fill({name: self._seen[name]}, {name: value})
            with without_torch_functions():
                self._counts[name] = version(self._seen[name])

    def check_unseen_writes(self) -> None:
        """Raise :class:`ShardwiseError` where the loop has written to what it has called the model with, and autograd
        cannot know (``.data``): on one device what forward computed has the old values, and backward uses the new."""
        if self._seen is None or not (self.unseen or self.renamed):
            return
        with without_torch_functions():
            still = {name for name, one in self._seen.items() if version(one) == self._counts.get(name)}
        if names := [name for name in self._late() if name in still]:
            what = f"{names[0]} was written to since model(...) without autograd's knowledge (.data)"
            legal = "before model(...), after backward(), or of the parameter itself under torch.no_grad()"
            raise ShardwiseError(
                f"loss.backward(){at_line()}: {what}, and gradients may be of neither value; legal: {legal}"
            )

    def keep_up(self) -> None:
        if self.renamed:
            self._fill()

    def _late(self) -> dict[str, Tensor]:
        """Return what the loop has written to parameters and buffers since the last call of the model, by name."""
        if self._seen is None or (self.before is None if self.made is None else self.filled != self.version):
            return {}
        return written(self._seen, self.before or self.state())

    def push(self) -> None:
        """Give the engine what the loop has written; what was computed before is of other weights."""
        if new := self._late():
            if self.made is not None:
                state = {**self.state(), **new}
                self.made.load_state_dict(state)
            self.version += 1
            self.filled, self.known_state = self.version, None if self.made is None else (self.version, state)
        self.before = None

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Let the module have the parameters of the last calls inside the context, if there is no trainer yet, which
        would take them."""
        new = self._late() if self.made is None else {}
        if new:
            assert self.before is not None
            fill(self.seen, self.before)
        try:
            yield
        finally:
            if new:
                self.filled, self.before = self.version, None if self.made is not None else self.before
                fill(self.seen, new)

    def begin_call(self) -> bool:
        """Take what the loop has done to parameters before a call; return whether all are frozen for it."""
        self.push()
        if self._seen is None:
            return False
        self._count()
        own = dict(self.module.named_parameters())
        with without_torch_functions():
            for name, learnt in self._learn.items():  # what the loop has done to the module itself counts as well
                if self._seen[name].requires_grad == learnt != own[name].requires_grad and self.made is None:
                    self._seen[name].requires_grad_(not learnt)
        flags = {name: one.requires_grad for name, one in self._seen.items() if name in own}
        other = [name for name, flag in flags.items() if flag != own[name].requires_grad]
        if other and any(flags.values()):
            if self.made is not None:
                what = f"requires_grad of {other[0]} is {flags[other[0]]}, unlike when the model was captured"
                legal = "before the first step, for all, or before another distribute() after model.trainer.close()"
                raise ShardwiseError(f"model(...){at_line()}: {what}; legal: {legal}")
            for name in other:
                own[name].requires_grad_(flags[name])
            self.shapes.forget()
        if self.made is None:
            self._learn = flags
        return bool(other) and not any(flags.values())

    def show_gradients(self) -> None:
        """Run the losses that are due, without an update, and show their gradients."""
        if not self.due and not self.zeroed:
            raise ShardwiseError(
                f"a gradient is looked at{at_line()} after optimizer.step(); legal: between backward and step"
            )
        if not self.due:
            return
        if self.plan.numeric.precision == "fp16" or (self.made is not None and self.made.engine.interpreter.hooks):
            what = "under fp16" if self.plan.numeric.precision == "fp16" else "of a model with hooks on parameters"
            raise ShardwiseError(f"a gradient is looked at{at_line()} {what}; legal: distribute(..., clip_norm=...)")
        self._run_as_called()
        found = self.trainer.engine.gradients()
        with without_torch_functions():
            for name, one in self.seen.items():
                if name in found:
                    one.grad = found[name].to(one.device, one.dtype)

    def drop_gradients(self) -> None:
        """Take a gradient that is set to None for a ``zero_grad()``, unless it has been computed."""
        if self.last is not None:
            raise ShardwiseError(
                f"a gradient is set to None{at_line()}: on one device its parameter would take no step; legal: "
                "requires_grad_(False) before the first step, or zero_grad()"
            )
        self.zero_grad()

    def _gradients(self) -> dict[str, Tensor]:
        with without_torch_functions():
            return {name: one.grad for name, one in self.seen.items() if one.grad is not None}

    def check_open(self, calls: set[Source]) -> None:
        """Raise :class:`ShardwiseError` where a forward without a backward, which does not run here, would have written
        to a buffer."""
        left = [one for one in self.open if one not in calls and not one.committed]
        if left and self.made is not None and (names := self._written()):
            what = f"a forward in training without backward and step writes to {names[0]}"
            raise ShardwiseError(
                f"model(...) ({left[0].line}): {what} on one device, and is not run here; legal: model.eval() for it"
            )
        self.open = [one for one in self.open if one in calls]

    def check_written(self, what: str) -> None:
        left = [one for one in self.open if not one.committed]
        if left and (names := self._written()):
            raise ShardwiseError(
                f"{what}{at_line()}: a forward in training ({left[0].line}) has written to {names[0]} on one device, "
                "and runs here in the step; legal: before that forward, or after optimizer.step()"
            )

    def _written(self) -> list[str]:
        """Return the names of the buffers that forward writes to in training."""
        if self.made is None:
            return sorted(self.shapes.written)
        written = dict.fromkeys(name for unit in self.made.compiled.general.units for name in unit.updates)
        return [name for name in written if not is_kept(name)]
