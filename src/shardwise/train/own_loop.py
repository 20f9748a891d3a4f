"""The steps of a user's own loop: what it has recorded up to ``backward`` is captured, once, and run as programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.capture.running import at_line
from shardwise.core.clipping import check_clipping
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.fields import KEPT
from shardwise.core.part import STEP, UPDATE, Part
from shardwise.graph.torch_private import without_torch_functions
from shardwise.lower.compiled import Compiled
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import StepResult
from shardwise.train.kept import KeptValue
from shardwise.train.loop_model import like_of, script_of
from shardwise.train.loop_sight import Sight
from shardwise.train.recording import deferred
from shardwise.train.script import needed_by
from shardwise.train.shown import fill
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


class Steps(Sight):
    """The model of a loop and its steps: what was recorded since the last one."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.clipped: tuple[float, Value] | None = None  # what the next step clips to, and the norm that the loop holds
        self.clipped_value: float | None = None

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
        self._check_clipping(norm, None)
        dtype = torch.float64 if self.plan.numeric.precision == "fp64" else torch.float32
        found = Value(torch.empty((), dtype=dtype, device="meta"))
        found.lost = "the step computes the norm of its gradients"
        self.clipped = norm, found
        return deferred(found)

    def clip_by_value(self, value: float) -> None:
        """Let the next step clip each element of its gradients to within ``value`` of 0."""
        self._check_clipping(None, value)
        self.clipped_value = float(value)

    def _check_clipping(self, norm: float | None, value: float | None) -> None:
        """Raise an error where the next step cannot clip its gradients so."""
        if not self.due and self.last is None:
            raise ShardwiseError(
                f"gradients are clipped{at_line()} without a backward; legal: between backward and step"
            )
        before = (self.clipped, self.clipped_value, *map(self.options.get, ("clip_norm", "clip_value")))
        if any(one is not None for one in before):
            raise ShardwiseError(f"gradients are clipped{at_line()} a second time for a step; legal: once")
        check_clipping(self.plan, norm, value)

    def _begin_update(self, trainer: Trainer, prepare: Callable[[Trainer], None]) -> None:
        norm, value, interpreter = self.clipped, self.clipped_value, trainer.engine.interpreter
        interpreter.clip_norm = self.options.get("clip_norm") if norm is None else norm[0]
        interpreter.clip_value = self.options.get("clip_value") if value is None else value
        prepare(trainer)

    def _end_update(self, result: StepResult) -> None:
        self.clipped_value = None
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take back every ``loss.backward()`` since the last step, as setting gradients to zero or to None does."""
        self.due, self.zeroed, self.added, self.last, self.turn = [], True, None, None, 0
        self.clipped = self.clipped_value = None
        self.awaited.backward = False
        if self.made is not None:
            self.made.engine.zero_gradients(set_to_none)
        if self._seen is not None:
            with without_torch_functions():
                for one in self._seen.values():
                    one.grad = None


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
