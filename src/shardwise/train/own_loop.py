"""The steps of a user's own loop: what it has recorded up to ``backward`` is captured, once, and run as programs."""

from __future__ import annotations

import atexit
import inspect
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from shardwise.capture.capture import loss_of, rows_in, shadow
from shardwise.capture.running import at_line
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.fields import KEPT, WHOLE, has_rows
from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.part import STEP, UPDATE, Part
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, Batch
from shardwise.graph.torch_private import fake_mode, without_torch_functions
from shardwise.initial.copies import copied
from shardwise.lower.compiled import Compiled
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import StepResult
from shardwise.runtime.communicator import host_sum
from shardwise.train.habits import Watch
from shardwise.train.kept import KeptValue
from shardwise.train.recording import Deferred, Later, Owner, Plain, Source, Value, outputs, value_of
from shardwise.train.script import FieldPart, Plot, plot
from shardwise.train.shown import Look, fill, shown, written
from shardwise.train.trainer import Trainer

STILL_THERE = (
    "the gradients of the last step are still there, and on one device this adds to them; legal: optimizer.zero_grad() "
    "after each step"
)


@dataclass(frozen=True)
class Arguments:
    """What a call of a model is made of, for messages and for the names of fields."""

    names: list[str]


class Kind(NamedTuple):
    """What a model returns for a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def meta(self) -> Tensor:
        """Return a new tensor of this kind."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class Between(NamedTuple):
    """Values that are computed of those of several programs, and what each program has to keep for them."""

    values: list[Value]
    parts: list[list[Value]]


class Steps(Owner, Look):
    """The model of a loop: what was recorded since its last step, and the trainer, which is made at the first step."""

    def __init__(
        self,
        module: nn.Module,
        choice: OptimizerChoice,
        plan: Plan,
        options: Mapping[str, Any],
        watch: Watch,
        rows: int,
    ) -> None:
        self.module, self.plan, self.watch, self.dim = module, plan, watch, rows
        self.choice, self.options = choice, dict(options)
        self.loss = self.options.pop("loss", None)
        self.version = 0
        self.due: list[Value] = []  # the losses whose backward was called since the gradients were set to zero
        self.added: str | None = None  # the line of a backward while the last step's gradients were there
        self.zeroed = True  # whether the gradients of the last step have been set to zero
        self.open: list[Source] = []  # calls of the model in training since the last step
        self.held: weakref.WeakSet[Value] = weakref.WeakSet()  # what the loop holds and is not known
        self.known_state: tuple[int, dict[str, Tensor]] | None = None
        self.turn = 0  # the programs that have run since the last step
        self.last: tuple[Batch, Compiled] | None = None  # what the last of them computed
        self.ended: list[Value] = []  # what they made known
        self.filled = -1  # the version of the weights that the loop sees
        self._seen: dict[str, Tensor] | None = None
        self._trainer: Trainer | None = None
        self._template: nn.Module | None = None
        self._shapes: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self._compiled: dict[Any, Compiled] = {}

    # ---- the trainer -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer; raise :class:`ShardwiseError` before the first step."""
        if self._trainer is None:
            raise ShardwiseError("the model is not captured yet; legal: after the first step")
        return self._trainer

    @property
    def captured(self) -> bool:
        """Whether there is a trainer."""
        return self._trainer is not None

    def changed(self) -> None:
        """Note that the weights have been set: what was recorded before is of others."""
        self.version += 1
        self.known_state, self.due, self.open = None, [], []

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the loop's values are."""
        if self._trainer is not None:
            return self._trainer.comm.device
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def _made(self, found: Plot) -> Trainer:
        """Return the trainer, made for a plot with losses if there is none."""
        if self._trainer is None:
            _ = self.template  # what the module is now
            self._with_states(found)
            with torch.inference_mode(False):
                example = {name: part.value for name, part in found.fields.items()}
                self._trainer = Trainer(self.module, self.choice, self.plan, example, loss=found.script, **self.options)
            self._compiled[found.key, True] = self._trainer.compiled
            self.watch.begin()
            self._trainer.before_close.append(self._give_back)
            atexit.register(self._leave)
        return self._trainer

    def _give_back(self) -> None:
        self.watch.end(self.trainer.state_dict())

    def _leave(self) -> None:
        """Close the trainer at the end of the process: nobody sees the module any more."""
        if self._give_back in self.trainer.before_close:
            self.trainer.before_close.remove(self._give_back)
        self.trainer.close()

    def compiled(self, found: Plot, training: bool, backward: bool) -> Compiled:
        """Return what a plot is captured as: once for all that are computed alike."""
        trainer, key = self._made(found) if backward else self.trainer, (found.key, training)
        if key not in self._compiled:
            self._with_states(found)
            example = {name: part.value for name, part in found.fields.items()}
            with torch.inference_mode(False):
                self._compiled[key] = trainer.compiled.beside(found.script, example, training, backward)
        return self._compiled[key]

    # ---- calls of the model ------------------------------------------------------------------------------------------

    def entry(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module as the loop calls it; with a loss function return the loss, which sees all arguments."""
        if self.loss is None:
            return module(*args, **kwargs)
        names = inspect.signature(module.forward).parameters
        every = any(one.kind is one.VAR_KEYWORD for one in names.values())
        bound = inspect.signature(module.forward).bind_partial(*args)
        fields = {**bound.arguments, **kwargs}
        output = module(**{name: value for name, value in fields.items() if every or name in names})
        return loss_of(self.loss(output, fields), f"model.loss: {getattr(self.loss, '__name__', 'it')}(output, batch)")

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the model gives for arguments, recorded in training, computed in evaluation mode."""
        training = self.module.training
        self.watch.check(training)
        names = self._names(args, kwargs)
        if training and not torch.is_grad_enabled():
            raise ShardwiseError(f"model(...) without gradients in training mode{at_line()}; legal: after model.eval()")
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if not training:  # nothing of it has a gradient
            with torch.no_grad():
                return self._evaluate(
                    [one._value.get() if isinstance(one, Deferred) else one for one in leaves], spec, names
                )
        values = [value_of(one) if isinstance(one, Tensor) else one for one in leaves]
        source = Source(Arguments(names), spec.unflatten(values), self, True)
        self.open.append(source)
        return outputs(source, *self._results(values, spec, True))

    def _names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Return a name for each leaf of the arguments; raise :class:`ConfigError` where the model does not take them."""
        signature = inspect.signature(self.module.forward)
        beside = set() if self.loss is None else kwargs.keys() - signature.parameters.keys()
        try:
            bound = signature.bind(*args, **{name: value for name, value in kwargs.items() if name not in beside})
        except TypeError as error:
            raise ConfigError(f"model(...): {error}; legal: the arguments of the model's forward") from None
        kinds = {name: one.kind for name, one in signature.parameters.items()}
        positional = [name for name, kind in kinds.items() if kind not in (
            inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.KEYWORD_ONLY,
        )][: len(args)]  # fmt: skip
        del bound
        positional += [""] * (len(args) - len(positional))
        pairs = [*zip(positional, args, strict=True), *kwargs.items()]
        return [name if one is value else "" for name, value in pairs for one in tree_leaves(value)]

    @property
    def template(self) -> nn.Module:
        """A copy of the module whose parameters take no memory, for the shapes of what it returns."""
        if self._template is None:
            self._template = shadow(self.module, self.plan.numeric.precision)
        return self._template

    def _results(self, values: Sequence[Any], spec: TreeSpec, training: bool) -> tuple[list[Any], TreeSpec]:
        """Return what the model returns for arguments like these: for each tensor one like it and whether it has a
        gradient."""
        modes = [one.training for one in self.module.modules()]
        key = (
            str(spec), training, tuple(modes),
            tuple((tuple(v.meta.shape), v.meta.dtype, v.grad) if isinstance(v, Value) else repr(v) for v in values),
        )  # fmt: skip
        if key not in self._shapes:
            for one, mode in zip(self.template.modules(), modes, strict=True):
                one.training = mode
            try:
                with fake_mode():
                    found = self._run_template(values, spec, training)
            except Exception:  # what it computes depends on values: it runs on some
                found = self._run_template(values, spec, training)
            self._shapes[key] = found
        kinds, out = self._shapes[key]
        return [(one.meta(), one.grad) if isinstance(one, Kind) else one for one in kinds], out

    def _run_template(self, values: Sequence[Any], spec: TreeSpec, training: bool) -> tuple[list[Any], TreeSpec]:
        def like(value: Value) -> Tensor:
            made = torch.zeros(value.meta.shape, dtype=value.meta.dtype)
            if value.known is not None and type(made) is Tensor:
                made = value.known.get().detach().cpu()
            return made.requires_grad_(value.grad)

        args, kwargs = spec.unflatten([like(one) if isinstance(one, Value) else one for one in values])
        with torch.set_grad_enabled(training), torch.random.fork_rng():
            flat, out = tree_flatten(self.entry(self.template, args, kwargs))
        if strange := [one for one in flat if not isinstance(one, Tensor | int | float | bool | str | None)]:
            what = f"forward returns an object of type {type(strange[0]).__name__}"
            raise ConfigError(f"model: {what}; legal: tensors, and tuples, lists, dicts and outputs of transformers")
        found = [
            Kind(tuple(map(int, one.shape)), one.dtype, one.requires_grad) if isinstance(one, Tensor) else one
            for one in flat
        ]
        return found, out

    # ---- values ------------------------------------------------------------------------------------------------------

    def note(self, value: Value) -> None:
        """Note that the loop holds a value."""
        self.held.add(value)

    def backward(self, loss: Value) -> None:
        """Note a loss for the next step of every model that it depends on."""
        if loss.stale:
            what = "this loss is that of a step that is done" if loss.known is not None else "the weights have changed"
            raise ShardwiseError(f"loss.backward(){at_line()}: {what}; legal: once a step, of calls after the last one")
        owners = [one for one in loss.owners if isinstance(one, Steps) and _learns(loss, one)]
        for one in owners:
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
            if one.zeroed:
                one.due.append(loss)
            else:
                one.added = at_line()  # the loop may set these gradients to zero before it needs them

    def _plot(self, losses: Sequence[Value], kept: Sequence[Value]) -> Plot:
        every = {owner for value in (*losses, *kept) for owner in value.owners} | {self}
        mine = [one for one in every if isinstance(one, Steps)]
        return plot(
            self, losses, kept, {one: one.entry for one in mine}, {one: one.template for one in mine}, None, self.dim
        )

    def _waiting(self, calls: set[Source]) -> list[Value]:
        """Return what the loop holds of these calls alone and does not know, in the order in which it was made."""
        found = [v for v in list(self.held) if v.known is None and v.alive and not v.stale and v.calls <= calls]
        return sorted(found, key=lambda v: (v.source.number if v.source else 0, v.index))

    def compute(self, wanted: Value) -> None:
        """Compute a value, and what else the loop holds of the calls since the last step, without their step."""
        owners = [one for one in wanted.owners if isinstance(one, Steps)]
        of_step = (one for one in owners if any(loss.calls & wanted.calls for loss in one.due))
        if (owner := next(of_step, owners[-1])) is not self:
            owner.compute(wanted)
            return
        losses = [one for one in self.due if not one.stale]
        calls = {call for one in (*losses, wanted) for call in one.calls}
        kept = self._waiting(calls)
        kept = kept if any(one is wanted for one in kept) else [*kept, wanted]
        if not losses:
            losses = [_with_gradient(wanted)]
            if self._trainer is None:
                self._locally(kept, losses)
                return
        found = self._plot(losses, kept)
        if self._made(found).compiled.general.opaque is not None:
            self._locally(kept, losses)
            return
        self.push()
        compiled = self.compiled(found, True, bool(self.due))
        batch = self._batch(found)
        self._take(kept, self.trainer.engine.evaluate(batch.fields, batch.rows, compiled=compiled), batch.rows)

    def _take(self, kept: Sequence[Value], result: StepResult, rows: int) -> None:
        for i, value in enumerate(kept):
            parts = result.kept.get(f"{KEPT}{i}")
            if parts is not None:
                value.known = KeptValue(self.trainer.comm, self.plan, parts, value.meta, rows)
                self.held.discard(value)

    def _locally(self, kept: Sequence[Value], losses: Sequence[Value]) -> None:
        """Compute values in the ordinary way, on every rank: before the first step, and for a model that is not
        captured."""
        found = self._plot(losses, kept)
        script = found.script
        script.calls = tuple(one._replace(apart=True) for one in script.calls)
        fields = {name: part.value for name, part in self._with_states(found).items()}
        module = self.module if self._trainer is None else self._replica()
        with torch.no_grad():
            _, *values = script.run(module, fields)
        for value, one in zip(kept, values, strict=False):
            value.known = Plain(one)

    def _replica(self) -> nn.Module:
        state = self.state()
        memo: dict[int, Any] = {id(p): nn.Parameter(state[n]) for n, p in self.template.named_parameters()}
        memo |= {id(b): state[n].clone() for n, b in self.template.named_buffers()}
        return copied(self.template, memo)

    def _evaluate(self, leaves: Sequence[Any], spec: TreeSpec, names: list[str]) -> Any:
        """Return what the model gives in evaluation mode: known values, which ranks have in parts."""
        opaque = self._trainer is not None and self._trainer.compiled.general.opaque is not None
        if self._trainer is None or opaque:
            module = self.module if self._trainer is None else self._replica().train(False)
            args, kwargs = spec.unflatten(leaves)
            flat, out = tree_flatten(self.entry(module, args, kwargs))
            results = [(one, False) if isinstance(one, Tensor) else one for one in flat]
            source = Source(Arguments(names), (), self)
            values = outputs(
                source, [(_like(one[0]), False) if isinstance(one, tuple) else one for one in results], out
            )
            for one, made in zip(flat, tree_leaves(values), strict=True):
                if isinstance(made, Deferred):
                    made._value.known = Plain(one)
            return values
        self.push()
        values = [value_of(one) if isinstance(one, Tensor) else one for one in leaves]
        source = Source(Arguments(names), spec.unflatten(values), self)
        made = outputs(source, *self._results(values, spec, False))
        kept = [one._value for one in tree_leaves(made) if isinstance(one, Deferred)]
        found = self._plot([], kept)
        batch = self._batch(found)
        compiled = self.compiled(found, False, False)
        result = self.trainer.engine.evaluate(batch.fields, batch.rows, compiled=compiled)
        self._take(kept, result, batch.rows)
        return made

    # ---- batches -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers as they are now, by name; all ranks call it together."""
        if self.known_state is None or self.known_state[0] != self.version:
            if self._trainer is None:
                named = [*self.module.named_parameters(), *self.module.named_buffers()]
                found = {name: value.detach().clone() for name, value in named}
            else:
                found = {**self._trainer.engine.memory.buffers, **self._trainer.state_dict()}
            self.known_state = self.version, found
        return self.known_state[1]

    def write(self, name: str, value: Tensor) -> None:
        """Set a buffer."""
        with torch.no_grad():
            if self._trainer is None:
                self.module.get_buffer(name).copy_(value)
            else:
                self._trainer.engine.memory.buffers[name].copy_(value)
        self.known_state = None

    def _with_states(self, found: Plot) -> dict[str, Any]:
        """Return the fields of a plot with the states of the other models among them."""
        for at, owner in enumerate(found.owners):
            assert isinstance(owner, Steps)
            for name, value in owner.state().items():
                if (field := f"{WHOLE}state {at} {name}") in found.script.models.states[at].values():
                    found.fields[field] = FieldPart(value, ())
        return found.fields

    def _batch(self, found: Plot) -> Batch:
        """Return this rank's rows of the fields of a plot."""
        brought = {name: part.value for name, part in found.fields.items() if not name.startswith(f"{WHOLE}state ")}
        whole = {name: part.value for name, part in self._with_states(found).items()}
        if self._trainer is not None:
            _compare(self._trainer, brought)
        mesh, rows = self.plan.mesh, rows_in(whole)
        rank = self.trainer.comm.rank
        ranges = rank_rows(rows, self.plan.microbatches, mesh.axis_size(AXES), mesh.index(rank, AXES))
        mine = {
            name: torch.cat([value[a:b] for a, b in ranges]) if has_rows(name) else value
            for name, value in whole.items()
        }
        return Batch(mine, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges))

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
        if self.due:
            self.push()
            self._run(prepare, updates=True)
        else:
            assert self.last is not None
            prepare(self.trainer)
            self.trainer.engine.set_gradients(self._gradients())
            self.trainer.step(self.last[0], self.last[1], UPDATE)
        self.version += 1
        self.open, self.zeroed, self.known_state, self.last, self.turn = [], False, None, None, 0
        for value in self.ended:
            value.forget()
        self.ended = []

    def _run(self, prepare: Callable[[Trainer], None] | None, updates: bool) -> None:
        """Run the losses that are due, one program after the other where they are computed alike."""
        if late := next((one for one in self.due if one.stale), None):
            line = "" if late.source is None else f" ({late.source.line})"
            raise ShardwiseError(
                f"a step{at_line()}: a loss{line} is of weights that have changed since; legal: zero_grad() of each "
                "model before the backward of its next loss"
            )
        self.check_open({call for one in self.due for call in one.calls})
        groups = self._groups()
        between = self._between([{call for one in losses for call in one.calls} for losses in groups])
        self.due = []
        for number, losses in enumerate(groups):
            ends = number + 1 == len(groups)
            part = Part(adds=self.turn > 0, completes=ends, updates=ends and updates)
            if part != STEP and (self.plan.overlaps or self.plan.mesh.axis_size(PIPELINE) > 1):
                what = "several backwards a step, and looks at gradients"
                raise ConfigError(f"{what}{at_line()}, are not possible in a pipeline; legal: pp = 1, clip_norm=...")
            self._program(losses, between.parts[number], part, prepare if part.updates else None)
            self.turn += 1
        for value in between.values:
            value.known = Later(value)
            self.held.discard(value)

    def _between(self, groups: Sequence[set[Source]]) -> Between:
        """Return the values that depend on the calls of several groups, and what they need of each."""
        every = set().union(*groups)
        found = Between([], [[] for _ in groups])
        stack = [v for v in self._waiting(every) if not any(v.calls <= one for one in groups)]
        seen: set[Value] = set()
        while stack:
            value = stack.pop()
            at = next((i for i, one in enumerate(groups) if value.calls <= one), None)
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
        if len(losses) > 1 and len({self._plot(one, []).key for one in losses}) > 1:
            return [list(self.due)]
        return losses

    def _program(
        self, losses: Sequence[Value], wanted: Sequence[Value], part: Part, prepare: Callable[[Trainer], None] | None
    ) -> None:
        calls = {call for one in losses for call in one.calls}
        single = losses[0] if len(losses) == 1 else None
        kept = [one for one in dict.fromkeys((*self._waiting(calls), *wanted)) if one is not single]
        found = self._plot(losses, kept)
        trainer = self._made(found)
        compiled = self.compiled(found, True, True)
        batch = self._batch(found)
        if prepare is not None:
            prepare(trainer)
        result = trainer.step(batch, compiled, part, self.turn)
        self.last = batch, compiled
        self._take(kept, result, batch.rows)
        why = f"the model was not captured, and gives no more than its loss ({compiled.general.opaque})"
        for value in kept:
            value.lost = why if value.known is None else ""
        if single is not None:
            single.known = Plain(result.loss.to(single.meta.dtype).reshape(single.meta.shape))
        for i, (at, name) in enumerate(found.script.written, start=len(kept)):
            owner = found.owners[at]
            assert isinstance(owner, Steps)
            parts = result.kept[f"{KEPT}{i}"]
            owner.write(name, KeptValue(trainer.comm, self.plan, parts, _like(owner.state()[name]), batch.rows).get())
        for call in found.calls:
            call.committed = True
        self.ended += [*losses, *kept]
        if compiled.training:
            self.known_state = None

    def zero_grad(self) -> None:
        """Take back every ``loss.backward()`` since the last step, as setting gradients to zero does."""
        self.due, self.zeroed, self.added, self.last, self.turn = [], True, None, None, 0
        if self._trainer is not None:
            self._trainer.engine.interpreter.gradients = None
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

    def show(self) -> None:
        """Bring them up to date."""
        if self._trainer is not None and self.filled != self.version:
            fill(self.seen, self.state())
            self.filled = self.version

    def push(self) -> None:
        """Give the engine what the loop has written to parameters and buffers."""
        if self._trainer is None or self._seen is None or self.filled != self.version:
            return
        if new := written(self.seen, self.state()):
            state = {name: value for name, value in self.state().items()} | new
            self._trainer.load_state_dict(state)
            self.known_state = self.version, state

    def show_gradients(self) -> None:
        """Run the losses that are due, without an update, and show their gradients."""
        if not self.due and not self.zeroed:
            raise ShardwiseError(
                f"a gradient is looked at{at_line()} after optimizer.step(); legal: between backward and step"
            )
        if not self.due:
            return
        if self.plan.numeric.precision == "fp16" or (
            self._trainer is not None and self._trainer.engine.interpreter.hooks
        ):
            what = "under fp16" if self.plan.numeric.precision == "fp16" else "of a model with hooks on parameters"
            raise ShardwiseError(f"a gradient is looked at{at_line()} {what}; legal: distribute(..., clip_norm=...)")
        self.push()
        self._run(None, updates=False)
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
        if left and self._trainer is not None:
            written = dict.fromkeys(name for unit in self._trainer.compiled.general.units for name in unit.updates)
            if names := [name for name in written if not name.startswith(KEPT)]:
                what = f"a forward in training without backward and step writes to {names[0]}"
                raise ShardwiseError(
                    f"model(...) ({left[0].line}): {what} on one device, and is not run here; legal: model.eval() for it"
                )
        self.open = [one for one in self.open if one in calls]


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


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
        if source.owner is owner:
            return True
        stack.extend(source.inputs)
    return False


def _with_gradient(value: Value) -> Value:
    """Return a value from which a gradient goes to the model, of those that ``value`` depends on."""
    stack, seen = [value], set[int]()
    while stack:
        one = stack.pop(0)
        if one.grad:
            return one
        if one.source is not None and id(one.source) not in seen:
            seen.add(id(one.source))
            stack.extend(one.source.inputs)
    raise ShardwiseError(f"a value is looked at{at_line()} that has no gradient; legal: after optimizer.step()")


def _compare(trainer: Trainer, batch: Mapping[str, Tensor]) -> None:
    """Raise :class:`ConfigError` on all ranks unless all have read the same batch, by a checksum of its bytes."""
    if trainer.plan.mesh.size == 1:
        return
    word = 0
    for name in sorted(batch):
        word = zlib.crc32(batch[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), word)
    word %= 1 << 20  # so that the sums below stay within 64 bits
    total, squares = host_sum(trainer.comm, torch.tensor([word, word * word]), "the comparison of the batch").tolist()
    if total * total != trainer.plan.mesh.size * squares:  # equal only if all words are
        raise ConfigError(
            "the ranks have read different batches; legal: the same on all, for example after torch.manual_seed(0)."
        )


__all__ = ["Steps"]
