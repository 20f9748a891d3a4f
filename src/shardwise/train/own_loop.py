"""The steps of a user's own loop: what it has recorded up to ``backward`` is captured, once, and run as programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.capture.running import at_line
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.fields import KEPT, is_kept
from shardwise.core.part import STEP, UPDATE, Part
from shardwise.graph.torch_private import version, without_torch_functions
from shardwise.lower.compiled import Compiled
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import StepResult
from shardwise.train.kept import KeptValue
from shardwise.train.loop_model import Model, like_of, script_of
from shardwise.train.recording import deferred
from shardwise.train.script import needed_by
from shardwise.train.shown import Look, fill, shown, written
from shardwise.train.trainer import Trainer
from shardwise.train.values import Later, Owner, Plain, Source, Value

STILL_THERE = (
    "the gradients of the last step are still there, and on one device this adds to them; legal: optimizer.zero_grad() "
    "after each step"
)


class Between(NamedTuple):
    """Values that are computed of those of several programs, what each program has to keep for them, and all calls."""

    values: list[Value]
    parts: list[list[Value]]
    calls: set[Source]


class Steps(Model, Look):
    """The model of a loop and its steps: what was recorded since the last one."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.clipped: tuple[float, Value] | None = None  # what the next step clips to, and the norm that the loop holds
        self._counts: dict[str, int] = {}  # how often what it sees had been written to, at the last calls

    def backward(self, loss: Value) -> None:
        """Note a loss for the next step of every model that it depends on."""
        if loss.stale:
            what = "this loss is that of a step that is done" if loss.known is not None else "the weights have changed"
            raise ShardwiseError(f"loss.backward(){at_line()}: {what}; legal: once a step, of calls after the last one")
        owners = [one for one in loss.owners if isinstance(one, Steps) and _learns(loss, one)]
        for one in owners:
            if any(call.owner is one and call.frozen for call in loss.calls):
                what = "some calls of the model are of frozen parameters"
                raise ShardwiseError(f"loss.backward(){at_line()}: {what}, others not; legal: a loss for each")
            if one.last is not None:
                raise ShardwiseError(
                    f"loss.backward(){at_line()}: gradients were looked at since zero_grad(); legal: a look after the "
                    "last backward of a step"
                )
            if not one.zeroed and len(owners) == 1:
                raise ShardwiseError(f"loss.backward(){at_line()}: {STILL_THERE}")
            if any(value is loss for value in one.due):
                raise ShardwiseError(f"loss.backward(){at_line()}: called twice before optimizer.step(); legal: once")
        for one in owners:
            one.check_unseen_writes()
            one.awaited.backward = True
            if one.zeroed:
                one.due.append(loss)
            else:
                one.added = at_line()  # the loop may set these gradients to zero before it needs them

    # ---- the step ----------------------------------------------------------------------------------------------------

    def step(self, prepare: Callable[[Trainer], None]) -> None:
        """Run forward, backward and update of the losses that are due; ``prepare`` is called before."""
        if self.added is not None:
            raise ShardwiseError(f"loss.backward(){self.added}: {STILL_THERE}")
        if not self.due and self.last is None:
            raise ShardwiseError(
                f"optimizer.step() without a backward since the last step or zero_grad{at_line()}; legal: after "
                "loss.backward()"
            )
        self.watch.check_kept()
        if self.due and not self._late():
            self._run(prepare, updates=True)
        else:
            looked = not self.due
            if self.due:  # the loop has written to parameters since it called the model
                self._run_as_called()
            self.push()
            assert self.last is not None
            self._begin_update(self.trainer, prepare)
            if looked:
                self.trainer.engine.set_gradients(self._gradients())
            self._end_update(self.trainer.step(self.last[0], self.last[1], UPDATE))
        self.version += 1
        self.open, self.zeroed, self.known_state, self.last, self.turn = [], False, None, None, 0
        for value in self.ended:
            value.forget()
        self.ended = []
        self.keep_up()

    def clip(self, norm: float) -> Tensor:
        """Let the next step clip its gradients to a norm; return their norm before that, which has a value after the
        step."""
        if not self.due and self.last is None:
            raise ShardwiseError(
                f"gradients are clipped{at_line()} without a backward; legal: between backward and step"
            )
        if self.clipped is not None or self.options.get("clip_norm") is not None:
            raise ShardwiseError(f"gradients are clipped{at_line()} a second time for a step; legal: once")
        if self.plan.stages_alone:
            wrong = f'{norm:g} is not legal with schedule "{self.plan.pipeline.schedule}"'
            raise ConfigError.on("clip_norm", f"{wrong}, whose stages do not wait for the norm of all", "none")
        dtype = torch.float64 if self.plan.numeric.precision == "fp64" else torch.float32
        found = Value(torch.empty((), dtype=dtype, device="meta"))
        found.lost = "the step computes the norm of its gradients"
        self.clipped = norm, found
        return deferred(found)

    def _begin_update(self, trainer: Trainer, prepare: Callable[[Trainer], None]) -> None:
        clip_norm = self.options.get("clip_norm")
        trainer.engine.interpreter.clip_norm = clip_norm if self.clipped is None else self.clipped[0]
        prepare(trainer)

    def _end_update(self, result: StepResult) -> None:
        if self.clipped is not None:
            value = self.clipped[1]
            value.known = Plain(result.grad_norm.to(value.meta.dtype))
            self.clipped = None

    def _run(self, prepare: Callable[[Trainer], None] | None, updates: bool) -> None:
        """Run the losses that are due, one program after the other where they are computed alike."""
        if late := next((one for one in self.due if one.stale), None):
            line = "" if late.source is None else f" ({late.source.line})"
            raise ShardwiseError(
                f"a step{at_line()}: a loss{line} is of weights that have changed since; legal: zero_grad() of each "
                "model before the backward of its next loss"
            )
        if self._seen is not None and self._gradients():
            raise ShardwiseError(
                f"a step{at_line()}: gradients of parameters were set beside loss.backward() of the model's outputs, "
                "which adds to them on one device; legal: after a look at all gradients"
            )
        groups = self._groups()
        between = self._between(groups)
        self.due = []
        for number, losses in enumerate(groups):
            ends = number + 1 == len(groups)
            part = Part(adds=self.turn > 0, completes=ends, updates=ends and updates)
            if part != STEP and (self.plan.overlaps or self.plan.mesh.axis_size(PIPELINE) > 1):
                what = "several backwards a step, looks at gradients and writes to parameters before it"
                raise ConfigError(f"{what}{at_line()}, are not possible in a pipeline; legal: pp = 1, clip_norm=...")
            self._program(losses, between, number, part, prepare if part.updates else None)
            self.turn += 1
        for value in between.values:
            value.known = Later(value)
            self.held.discard(value)

    def _run_as_called(self) -> None:
        """Run the losses that are due, with the parameters of their calls and without an update."""
        late = self._late()
        with self.as_called():
            self._run(None, updates=False)
        if self._seen is not None and self.filled == self.version:  # forward may have written to buffers
            buffers = {n: b for n, b in self._seen.items() if not isinstance(b, nn.Parameter) and n not in late}
            fill(buffers, self.state())

    def _between(self, groups: Sequence[Sequence[Value]]) -> Between:
        """Return the values that no program of a group of losses gives, and what they need of each: those that depend
        on calls of several groups, and with microbatches those that no loss needs, which may be, say, the exponential
        of a mean over the batch."""
        calls = [{call for one in losses for call in one.calls} for losses in groups]
        needed = None if self.plan.microbatches == 1 else [needed_by(losses) for losses in groups]

        def program_of(value: Value) -> int | None:
            return next(
                (i for i, one in enumerate(calls)
                 if value.calls <= one and (needed is None or value.source in needed[i])), None
            )  # fmt: skip

        found = Between([], [[] for _ in groups], set().union(*calls))
        stack = [v for v in self.waiting(found.calls) if program_of(v) is None]
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            at = program_of(value)
            if value in seen or value.settled or value.source is None:
                continue
            seen.add(value)
            if at is not None:
                found.parts[at].append(value)
            else:
                found.values.append(value)
                stack += value.source.inputs
        return found

    def _groups(self) -> list[list[Value]]:
        """Return the losses that are due in groups that have no call in common, if each is computed alike; otherwise
        one program computes all."""
        groups: list[tuple[list[Value], set[Source]]] = []
        for loss in self.due:
            calls = set(loss.calls)
            joined = [loss]
            for group in [one for one in groups if one[1] & calls]:
                groups.remove(group)
                joined, calls = [*group[0], *joined], calls | group[1]
            groups.append((joined, calls))
        losses = [one for one, _ in groups]
        if len(losses) > 1 and len({self.plot(one, []).key for one in losses}) > 1:
            return [list(self.due)]
        return losses

    def _program(
        self, losses: Sequence[Value], between: Between, number: int, part: Part,
        prepare: Callable[[Trainer], None] | None,
    ) -> None:  # fmt: skip
        calls = {call for one in losses for call in one.calls}
        single = losses[0] if len(losses) == 1 else None
        wanted = dict.fromkeys((*self.waiting(calls), *between.parts[number]))
        kept = [one for one in wanted if one is not single and one not in between.values]
        found = self.plot(losses, kept)
        trainer = self.trained(found)
        self.check_open(between.calls)
        compiled = self.compiled(found, True, True)
        batch = self.batch(found)
        if prepare is not None:
            self._begin_update(trainer, prepare)
        try:
            result = trainer.step(batch, compiled, part, self.turn)
        except (RuntimeError, ValueError, IndexError) as error:
            raise self._of_parts(compiled, error) from error
        if prepare is not None:
            self._end_update(result)
        self.last = batch, compiled
        self.take(kept, found, compiled, result, batch.rows)
        why = f"the model was not captured, and gives no more than its loss ({compiled.general.opaque})"
        for value in kept:
            value.lost = (value.lost or why) if value.known is None else ""
        if single is not None:
            single.known = Plain(result.loss.to(single.meta.dtype).reshape(single.meta.shape))
        for i, (at, name) in enumerate(found.script.written, start=len(script_of(compiled).kept)):
            owner = found.owners[at]
            assert isinstance(owner, Steps)
            parts = result.kept[f"{KEPT}{i}"]
            owner.write(name, KeptValue(trainer.comm, self.plan, parts, like_of(owner.state()[name]), batch.rows).get())
        for call in found.calls:
            call.committed = True
        self.ended += [*losses, *kept]
        if compiled.training:
            self.known_state = None

    def _of_parts(self, compiled: Compiled, error: Exception) -> Exception:
        """Return what to raise where a program fails that computes of some rows what the loop computes of all."""
        general = compiled.general
        if (
            isinstance(error, ShardwiseError)
            or general.opaque is None
            and (self.plan.microbatches == 1 or not general.meets)
        ):
            return error
        why = f"the model was not captured ({general.opaque})" if general.opaque else "each microbatch is by itself"
        legal = "a plan without microbatches and data parallelism, or a loop that names no number of rows"
        what = "what the loop computes is not possible on a part of the rows"
        return ShardwiseError(f"a step{at_line()}: {what}, and {why}: {' '.join(str(error).split())}; legal: {legal}")

    def zero_grad(self) -> None:
        """Take back every ``loss.backward()`` since the last step, as setting gradients to zero does."""
        self.due, self.zeroed, self.added, self.last, self.turn, self.clipped = [], True, None, None, 0, None
        self.awaited.backward = False
        if self.made is not None:
            self.made.engine.interpreter.gradients = None
        if self._seen is not None:
            with without_torch_functions():
                for one in self._seen.values():
                    one.grad = None

    # ---- what the loop sees of the model -----------------------------------------------------------------------------

    @property
    def seen(self) -> dict[str, Tensor]:
        """Parameters and buffers as the loop sees them, by name."""
        if self._seen is None:
            self._seen = shown(self.module, self)
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
            self._counts = {name: version(one) for name, one in self.seen.items()}

    def check_unseen_writes(self) -> None:
        """Raise :class:`ShardwiseError` where the loop has written to what it has called the model with, and autograd
        cannot know (``.data``): on one device what forward computed has the old values, and backward uses the new."""
        late, before = self._late(), self._counts
        self._count()
        if names := [name for name in late if self._counts[name] == before.get(name)]:
            what = f"{names[0]} was written to since model(...) by a tensor of which autograd knows nothing (.data)"
            legal = "before model(...), after backward(), or of the parameter itself under torch.no_grad()"
            raise ShardwiseError(
                f"loss.backward(){at_line()}: {what}, so gradients would be of neither value; legal: {legal}"
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
        flags = {name: one.requires_grad for name, one in self._seen.items() if name in own}
        other = [name for name, flag in flags.items() if flag != own[name].requires_grad]
        if other and any(flags.values()):
            if self.made is not None:
                what = f"requires_grad of {other[0]} is {flags[other[0]]}, unlike when the model was captured"
                raise ShardwiseError(f"model(...){at_line()}: {what}; legal: before the first step, or for all")
            for name in other:
                own[name].requires_grad_(flags[name])
            self.shapes.forget()
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


def _learns(loss: Value, owner: Owner) -> bool:
    """Return whether a gradient goes from a loss to a model."""
    seen: set[Source] = set()
    stack = [loss]
    while stack:
        value = stack.pop()
        source = value.source
        if source is None or not value.grad or source in seen:
            continue
        seen.add(source)
        if source.owner is owner and not source.frozen:
            return True
        stack.extend(source.inputs)
    return False
