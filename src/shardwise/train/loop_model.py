"""The model of a user's own loop: its calls are recorded, and values that the loop looks at are computed."""

from __future__ import annotations

import atexit
import inspect
import warnings
import weakref
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from shardwise.capture.running import at_line
from shardwise.capture.wrapped import WithLoss, rows_in
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.fields import KEPT, WHOLE, has_rows
from shardwise.core.layout import rank_rows
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.data.loader import AXES, Batch
from shardwise.graph.layouts import check_layout
from shardwise.initial.copies import copied
from shardwise.lower.compiled import FORMS, MANY, Compiled
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime.batch import StepResult
from shardwise.shard.op_spec import Shard
from shardwise.train.awaited import Awaited, tensors_of
from shardwise.train.boxes import Boxes
from shardwise.train.habits import Watch
from shardwise.train.kept import KeptValue
from shardwise.train.other_names import agreed, with_other_names
from shardwise.train.own_rows import check_same
from shardwise.train.recording import Deferred, outputs, value_of
from shardwise.train.script import FieldPart, Plot, Script, plot
from shardwise.train.shapes import Shapes
from shardwise.train.trainer import Trainer
from shardwise.train.values import Later, Owner, Plain, Source, Value


@dataclass(frozen=True)
class Arguments:
    """What a call of a model is made of, for messages and for the names of fields."""

    names: list[str]


class Model(Owner):
    """The model of a loop: its calls, the values that they give, and the trainer, which is made at the first step."""

    def __init__(
        self,
        module: nn.Module, choose: Callable[[], OptimizerChoice], plan: Plan, options: Mapping[str, Any], watch: Watch,
        rows: int,
    ) -> None:  # fmt: skip
        self.module, self.plan, self.watch, self.dim = module, plan, watch, rows
        # What the loop's optimizer is; until the model is captured the loop may change that.
        self.choose, self.choice, self.options = choose, choose(), dict(options)
        self.loss = self.options.pop("loss", None)
        self.awaited = Awaited(module, self.loss)
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
        self.before: dict[str, Tensor] | None = None  # what it saw at the last calls, before there is a trainer
        self.renamed = False  # whether the loop has tensors of its own with the memory of what it sees
        self.unseen = False  # whether the loop may write to it without autograd's knowledge
        self.made: Trainer | None = None
        self.when_made: list[Callable[[Trainer], object]] = []  # calls that may set its state
        self.boxes = Boxes(rows)
        self.shapes = Shapes(module, plan.numeric.precision, self.entry)
        # Those of a plot's key differ in what they keep; the keys are in the order of their last use.
        self._compiled: OrderedDict[Any, list[Compiled]] = OrderedDict()
        self._captures = 0  # of different computations

    # ---- the trainer -------------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Trainer:
        """The trainer; raise :class:`ShardwiseError` before the first step."""
        if self.made is None:
            raise ShardwiseError("the model is not captured yet; legal: after the first step")
        return self.made

    def changed(self) -> None:
        """Note that the weights have been set: what was recorded before is of others."""
        self.version += 1
        self.known_state, self.due, self.open = None, [], []
        self.keep_up()

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device on which the loop's values are."""
        if self.made is not None:
            return self.made.comm.device
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def trained(self, found: Plot) -> Trainer:
        """Return the trainer, made for a plot with losses if there is none."""
        if self.made is None:
            self.awaited.check()
            self.awaited.forget()
            self.choice = self.choose()
            others = self._others()
            _ = self.shapes.template  # what the module is now
            self.with_states(found)
            with torch.inference_mode(False):
                example = {name: part.value for name, part in found.fields.items()}
                self.made = Trainer(self.module, self.choice, self.plan, example, loss=found.script, **self.options)
                self.made.engine.zero_gradients(set_to_none=True)
            self._compiled[found.key, True] = [self._told(self.made.compiled)]
            self.watch.begin()
            self.renamed = agreed(others, self.made.comm)
            self.made.before_save.append(self.push)
            self.made.before_close.append(self._give_back)
            atexit.register(self._leave)
            for function in self.when_made:
                function(self.made)
            self.known_state = None
            self.keep_up()
        return self.made

    def _others(self) -> list[str]:
        return with_other_names(self.module, (self._seen or {}).values())

    def _give_back(self) -> None:
        self.watch.end(self.trainer.state_dict())

    def _leave(self) -> None:
        """Close the trainer at the end of the process: nobody sees the module any more."""
        if self._give_back in self.trainer.before_close:
            self.trainer.before_close.remove(self._give_back)
        self.trainer.close()

    def compiled(self, found: Plot, training: bool, backward: bool) -> Compiled:
        """Return what a plot is captured as: once for all that are computed alike, and keep no more than the first."""
        trainer, key = self.trained(found) if backward else self.trainer, (found.key, training)
        if key not in self._compiled:
            self._captures += 1
            if self._captures == MANY:
                warnings.warn(
                    f"distribute(){at_line()}: the loop has computed something else {MANY} times; each is captured, "
                    "which takes as long as the first step: does a number of Python change from step to step? legal: a "
                    "tensor in its place, such as torch.tensor(number)", stacklevel=2,
                )  # fmt: skip
        alike, kept = self._compiled.setdefault(key, []), set(found.script.kept)
        self._compiled.move_to_end(key)
        if len(self._compiled) > FORMS:  # a loop that computes with sizes is captured for each
            self._compiled.popitem(last=False)
        enough = sorted((len(script_of(one).kept), i) for i, one in enumerate(alike) if kept <= {*script_of(one).kept})
        if enough:
            return alike[enough[0][1]]
        self.with_states(found)
        example = {name: part.value for name, part in found.fields.items()}
        with torch.inference_mode(False):
            alike.append(self._told(trainer.compiled.beside(found.script, example, training, backward)))
        return alike[-1]

    def _told(self, compiled: Compiled) -> Compiled:
        """Warn of what microbatches change, and of what ranks do that decide by their own rows."""
        general, pipelined = compiled.general, self.plan.mesh.axis_size(PIPELINE) > 1
        several = general.opaque is not None and self.plan.mesh.size * self.plan.microbatches > 1
        apart = general.notes_of_microbatches(self.plan.microbatches, pipelined)
        for note in [*(general.notes if several else []), *apart]:
            warnings.warn(f"distribute(){at_line()}: {note}", stacklevel=2)
        return compiled

    # ---- calls of the model ------------------------------------------------------------------------------------------

    def entry(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a module as the loop calls it; with a loss function return the loss, which sees all arguments."""
        args, kwargs = self.boxes.unboxed((tuple(args), dict(kwargs)))
        if self.loss is None:
            return module(*args, **kwargs)
        bound = inspect.signature(module.forward).bind_partial(*args)
        return WithLoss(module, self.loss)({**bound.arguments, **kwargs})

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return what the model gives for arguments, recorded in training, computed in evaluation mode."""
        training = self.module.training
        self.watch.check(training)
        args, kwargs = self.boxes.boxed(args, kwargs)
        names = self._names(args, kwargs)
        if training and not torch.is_grad_enabled():
            raise ShardwiseError(f"model(...) without gradients in training mode{at_line()}; legal: after model.eval()")
        frozen = self.begin_call()
        if training and self.made is None and not self.due and self.awaited.change():
            self.changed()  # the calls before are of another module, and no step needs them
            self.shapes.forget()
        leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
        if not training:  # nothing of it has a gradient
            with torch.no_grad():
                return self._evaluate(
                    [one._value.get() if isinstance(one, Deferred) else one for one in leaves], spec, names
                )
        for one, name in zip(leaves, names, strict=True):
            if isinstance(one, Tensor) and not isinstance(one, Deferred):
                check_layout("model(...)", f'"{name}"' if name else "an argument", one, whole=True)
        values = [value_of(one) if isinstance(one, Tensor) else one for one in leaves]
        source = Source(Arguments(names), spec.unflatten(values), self, True, frozen)
        self.open.append(source)
        with self.awaited.plain():
            results, out = self.shapes.results(values, spec, True)
        if self.made is None:
            self.awaited.note(self.version, self.shapes.written)
            if self._others():  # what is written there now acts as if the loop had looked
                self.show(False)
                self.unseen = True
        if frozen and not any(one.grad for one in source.inputs):
            results = [(one[0], False) if isinstance(one, tuple) else one for one in results]
        return outputs(source, results, out)

    def _names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
        """Return a name for each leaf of the arguments; raise :class:`ConfigError` for what the model does not take."""
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

    # ---- values ------------------------------------------------------------------------------------------------------

    def note(self, value: Value) -> None:
        """Note that the loop holds a value."""
        self.held.add(value)

    def plot(self, losses: Sequence[Value], kept: Sequence[Value]) -> Plot:
        every = {owner for value in (*losses, *kept) for owner in value.owners} | {self}
        mine = [one for one in every if isinstance(one, Model)]
        return plot(
            self,
            losses,
            kept,
            {one: one.entry for one in mine},
            {one: one.shapes.template for one in mine},
            None,
            self.dim,
        )

    def waiting(self, calls: set[Source]) -> list[Value]:
        """Return what the loop holds of these calls alone and does not know, in the order in which it was made."""
        found = [v for v in list(self.held) if v.known is None and v.alive and not v.stale and v.calls <= calls]
        return sorted(found, key=lambda v: (v.source.number if v.source else 0, v.index))

    def compute(self, wanted: Value) -> None:
        """Compute a value, and what else the loop holds of the calls since the last step, without their step."""
        owners = [one for one in wanted.owners if isinstance(one, Model)]
        of_step = (one for one in owners if any(loss.calls & wanted.calls for loss in one.due))
        if (owner := next(of_step, owners[-1])) is not self:
            owner.compute(wanted)
            return
        if self.plan.microbatches > 1 and wanted.source is not None and wanted.source.owner is None:
            wanted.known = Later(wanted)  # of what models gave for the whole batch
            self.held.discard(wanted)
            return
        losses = [one for one in self.due if not one.stale]
        calls = {call for one in (*losses, wanted) for call in one.calls}
        kept = self.waiting(calls)
        if self.plan.microbatches > 1:
            kept = [one for one in kept if one.source is not None and one.source.owner is not None]
        kept = kept if any(one is wanted for one in kept) else [*kept, wanted]
        if not losses:
            losses = [_with_gradient(wanted)]
            if self.made is None:
                self._locally(kept, losses)
                return
        found = self.plot(losses, kept)
        with self.as_called():
            compiled = self.trained(found).compiled
        if compiled.general.opaque is None:
            compiled = self.compiled(found, True, bool(self.due))
        if compiled.general.opaque is not None:
            self._locally(kept, losses)
            return
        batch = self.batch(found)
        result = self.trainer.engine.evaluate(batch.fields, batch.rows, compiled=compiled, alike=True)
        self.take(kept, found, compiled, result, batch.rows)

    def take(self, kept: Sequence[Value], found: Plot, compiled: Compiled, result: StepResult, rows: int) -> None:
        """Note the values that a plot keeps, of what the program has kept of a batch of so many rows."""
        whole = self.plan.microbatches == 1 or compiled.general.cuts_batch
        for value, leaf in zip(kept, found.script.kept, strict=True):
            parts = result.kept.get(f"{KEPT}{script_of(compiled).kept.index(leaf)}")
            if parts is not None and not whole and not isinstance(parts.placement, Shard):
                legal = compiled.general.ways_to_meet(self.plan.mesh.axis_size(PIPELINE) > 1)
                value.lost = f"each microbatch has one of its own (legal: {legal})"
            elif parts is not None:
                value.known = KeptValue(self.trainer.comm, self.plan, parts, value.meta, rows)
                self.held.discard(value)

    def _locally(self, kept: Sequence[Value], losses: Sequence[Value]) -> None:
        """Compute values in the ordinary way, on every rank: before the first step, and for a model that is not
        captured."""
        found = self.plot(losses, kept)
        script = found.script
        script.calls = tuple(one._replace(apart=True) for one in script.calls)
        fields = {name: part.value for name, part in self.with_states(found).items()}
        module = self.module if self.made is None else self._replica()
        with torch.no_grad(), self.as_called():
            self.awaited.check()
            with self.awaited.plain():
                _, *values = script.run(module, fields)
        for value, one in zip(kept, values, strict=False):
            value.known = Plain(one)

    def _replica(self) -> nn.Module:
        state = self.state()
        memo: dict[int, Any] = {id(p): nn.Parameter(state[n]) for n, p in self.shapes.template.named_parameters()}
        memo |= {id(b): state[n].clone() for n, b in self.shapes.template.named_buffers()}
        return copied(self.shapes.template, memo)

    def _evaluate(self, leaves: Sequence[Any], spec: TreeSpec, names: list[str]) -> Any:
        """Return what the model gives in evaluation mode: known values, which ranks have in parts."""
        self.check_written("model(...) in evaluation mode")
        if self.made is not None and self.made.compiled.general.opaque is None:
            made = self._evaluated(leaves, spec, names)
            if made is not None:
                return made
        module = self.module if self.made is None else self._replica().train(False)
        args, kwargs = spec.unflatten(leaves)
        with self.awaited.plain():
            flat, out = tree_flatten(self.entry(module, args, kwargs))
        results = [(one, False) if isinstance(one, Tensor) else one for one in flat]
        source = Source(Arguments(names), (), self)
        values = outputs(source, [(like_of(one[0]), False) if isinstance(one, tuple) else one for one in results], out)
        for one, made in zip(flat, tree_leaves(values), strict=True):
            if isinstance(made, Deferred):
                made._value.known = Plain(one)
        return values

    def _evaluated(self, leaves: Sequence[Any], spec: TreeSpec, names: list[str]) -> Any:
        """Return what the captured model gives in evaluation mode; None where it cannot be captured in that mode."""
        values = [value_of(one) if isinstance(one, Tensor) else one for one in leaves]
        source = Source(Arguments(names), spec.unflatten(values), self)
        source.grad = True  # where autograd is off, the graph does not say to which module an op belongs
        made = outputs(source, *self.shapes.results(values, spec, False))
        kept = [one._value for one in tree_leaves(made) if isinstance(one, Deferred)]
        found = self.plot([], kept)
        compiled = self.compiled(found, False, False)
        if compiled.general.opaque is not None:
            return None
        batch = self.batch(found)
        result = self.trainer.engine.evaluate(batch.fields, batch.rows, compiled=compiled, alike=True)
        self.take(kept, found, compiled, result, batch.rows)
        return made

    # ---- batches -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return parameters and buffers as they are now, by name; all ranks call it together."""
        if self.known_state is None or self.known_state[0] != self.version:
            if self.made is None:
                with self.awaited.plain():
                    found = {name: value.detach().clone() for name, value in tensors_of(self.module)}
            else:
                found = {**self.made.engine.memory.buffers, **self.made.state_dict()}
            self.known_state = self.version, found
        return self.known_state[1]

    def write(self, name: str, value: Tensor) -> None:
        """Set a buffer."""
        with torch.no_grad():
            if self.made is None:
                with self.awaited.plain():
                    self.module.get_buffer(name).copy_(value)
            else:
                self.made.engine.memory.buffers[name].copy_(value)
        self.known_state = None

    def with_states(self, found: Plot) -> dict[str, Any]:
        """Return the fields of a plot with the states of the other models among them."""
        for at, owner in enumerate(found.owners):
            assert isinstance(owner, Model)
            for name, value in owner.state().items():
                if (field := f"{WHOLE}state {at} {name}") in found.script.models.states[at].values():
                    found.fields[field] = FieldPart(value, ())
        return found.fields

    def batch(self, found: Plot) -> Batch:
        """Return this rank's rows of the fields of a plot."""
        brought = {name: part.value for name, part in found.fields.items() if not name.startswith(f"{WHOLE}state ")}
        whole = {name: part.value for name, part in self.with_states(found).items()}
        if self.made is not None:
            check_same(self.made.plan, self.made.comm, brought)
        mesh, rows = self.plan.mesh, rows_in(whole)
        rank = self.trainer.comm.rank
        ranges = rank_rows(rows, self.plan.microbatches, mesh.axis_size(AXES), mesh.index(rank, AXES))
        mine = {
            name: torch.cat([value[a:b] for a, b in ranges]) if has_rows(name) else value
            for name, value in whole.items()
        }
        return Batch(mine, rows, tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges), alike=True)

    @abstractmethod
    def check_written(self, what: str) -> None:
        """Raise :class:`ShardwiseError` where ``what`` reads a buffer that a call which did not run writes to."""

    @abstractmethod
    def show(self, buffers: bool) -> None:
        """Bring what the loop sees up to date."""

    @abstractmethod
    def keep_up(self) -> None:
        """Bring what the loop sees up to date where it may look without our knowing."""

    @abstractmethod
    def push(self) -> None:
        """Give the engine what the loop has written to parameters and buffers."""

    @abstractmethod
    def begin_call(self) -> bool:
        """Take what the loop has done to parameters before a call; return whether all are frozen for it."""

    @abstractmethod
    def as_called(self) -> AbstractContextManager[object]:
        """Let the module have the parameters of the calls since the last step, inside a context."""


def like_of(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device="meta")


def script_of(compiled: Compiled) -> Script:
    """Return the script that was captured."""
    assert isinstance(compiled.loss, Script)
    return compiled.loss


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


__all__ = ["Arguments", "Model", "like_of", "script_of"]
