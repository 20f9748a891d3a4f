"""The engine of one rank puts memory, compiled programs and the interpreter behind ``step(fields, rows)``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.casts import cast_buffer, shadow_dtype
from shardwise.capture.coins import Drawing
from shardwise.capture.forms import differing, form_of
from shardwise.capture.hooks import UserHooks
from shardwise.core.averaging import check_average
from shardwise.core.clipping import check_clipping
from shardwise.core.errors import ConfigError, ShardwiseError
from shardwise.core.instruction import Instruction, Op
from shardwise.core.local_options import ISLANDS
from shardwise.core.optim import OptimizerChoice
from shardwise.core.part import STEP, Part
from shardwise.core.plan import Plan
from shardwise.core.program import Program, class_of
from shardwise.core.scale import ScaleChoice
from shardwise.core.tensor_options import NON_TENSOR_AXES
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled
from shardwise.lower.named_sizes import shown
from shardwise.parallel.data import batch_axes
from shardwise.parallel.pipeline import PIPELINE
from shardwise.runtime import collect
from shardwise.runtime.averaged import averaged
from shardwise.runtime.batch import TURN, StepInput, StepResult
from shardwise.runtime.buffers import BucketMemory, RankMemory, local_part
from shardwise.runtime.choices import Choices
from shardwise.runtime.communicator import Communicator, host_groups, host_sum
from shardwise.runtime.gradients import Gradients
from shardwise.runtime.hooks import GradientHooks
from shardwise.runtime.interpreter import Interpreter, Run
from shardwise.runtime.optimizer import Settings, check_optimizer
from shardwise.runtime.post_validation import PostValidatedRun
from shardwise.runtime.served_worker import ServedWorker
from shardwise.runtime.tables import check_tables
from shardwise.runtime.whole_state import WholeState, first_names
from shardwise.units.share import Share
from shardwise.units.trace import Bucket, Trace

T = TypeVar("T")


class Engine:
    """Train ``compiled.module`` from ``compiled.values``, read one tensor at a time; the module itself is not touched.

    Args:
        compiled: the model and plan; shared by thread ranks.
        comm: this rank's communicator, over the plan's mesh.
        optimizer: the choice of optimizer and learning rate.
        clip_norm: the gradient norm to clip to, or None for no clipping.
        clip_value: the most that an element of the gradient may be away from 0, or None; not beside ``clip_norm``.
        seed: the key of the random ops.
        progress: a function that is called with (position, instruction) before each instruction.
        loss_scale: the loss scaling under fp16, by default ``ScaleChoice()``, which is dynamic.
        strict: fill memory with NaN as soon as its content has ended, so that a later use shows.
        servers: this worker's connection to parameter servers that are other processes; the engine tells it the
            parameters.
    """

    def __init__(
        self,
        compiled: Compiled,
        comm: Communicator,
        optimizer: OptimizerChoice,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        seed: int = 0,
        progress: Callable[[int, Instruction], None] | None = None,
        strict: bool = False,
        loss_scale: ScaleChoice | None = None,
        servers: ServedWorker | None = None,
    ) -> None:
        running, planned = (
            ", ".join(f"{axis.name}={axis.size}" for axis in mesh.axes if axis.size > 1) or "one rank"
            for mesh in (comm.mesh, compiled.plan.mesh)
        )
        if running != planned:
            raise ConfigError.on("mesh", f"the communicator's is {running}", f"the plan's, {planned}")
        optimizer = optimizer.resolved(name for name, _ in compiled.module.named_parameters())
        self.compiled, self.comm, self.optimizer = compiled, comm, optimizer
        self.settings: Settings | None = None  # the hyperparameters of the next step, if not the optimizer's
        self.step_index, self._seed = 0, seed
        module, trace, plan, values = compiled.module, compiled.general, compiled.plan, compiled.values
        optional = trace.optional
        plan.memory.check_device(Backend.of(comm.device).kind)
        check_optimizer(optimizer, torch.device("cpu") if plan.memory.offloads_optimizer else comm.device)
        check_clipping(plan, clip_norm, clip_value)
        check_average(plan, optimizer)
        if optimizer.any_whole and plan.data.updates != "tensors":
            wrong = f'"{optimizer.name}" needs whole tensors, under a plan with updates = "{plan.data.updates}"'
            raise ConfigError.on("optimizer", wrong, 'a plan with updates = "tensors", as whole_tensors_for() makes')
        check_tables(trace.buckets, plan, optimizer)
        values.check()
        comm.prepare(compiled.first_communicators)
        # What the hosts of an island's ranks agree on; other islands may be in another step.
        self.island = tuple(name for name in comm.mesh.names if name != ISLANDS)
        if plan.local.steps:
            host_groups(comm, self.island)
        # The programs whose communicators are there, by computation; one of a shape that no longer comes goes away.
        self._prepared: WeakKeyDictionary[Compiled, set[tuple[int | Part | None, ...]]] = WeakKeyDictionary()
        self.pipe = comm.mesh.index(comm.rank, PIPELINE)
        axes = batch_axes(plan.mesh)
        self.choices = Choices(comm, plan, self._summed, lambda: self.memory.buffers)
        self.cut = compiled.stages_of(trace)
        self.updating = self.cut.updating()
        self.holders = {b.index: self.cut.holders(b) for b in trace.buckets}
        own = self.cut.own(trace.buckets, self.pipe)
        shares = {b.index: Share.of(b, plan, optimizer, comm.rank, bool(optional)) for b in own}
        buckets = {
            b.index: BucketMemory.allocate(
                b, shares[b.index], comm, optimizer, plan.memory.offloads_optimizer, plan.local
            )
            for b in own
        }
        for memory in buckets.values():
            memory.load(values)
        buffers = {
            n: cast_buffer(b.detach().to(comm.device, copy=True), trace.precision) for n, b in module.named_buffers()
        }
        placed = {p.name for b in trace.buckets for p in b.parameters}
        self.unused = {n: values[n].clone() for n, _ in module.named_parameters() if n not in placed}
        self.memory = RankMemory(buckets, buffers, comm, plan, loss_scale)
        self.whole = WholeState(
            comm, plan, optimizer, self.memory, first_names(module), trace.buckets, self.holders, self.updating,
            self.unused,
        )  # fmt: skip
        given = compiled.hooks or UserHooks()
        hooks = GradientHooks(given.copied() if comm.shares_objects else given, buckets)
        hooks.check()
        self.interpreter = Interpreter(
            comm, self.memory, axes, seed, tuple(b.index for b in trace.buckets if b.learns),
            tuple(b.index for b in own if b.learns and self.counts(b)), tuple(trace.tensor), clip_norm, clip_value,
            progress, optional=optional,
            strict=strict, offload=plan.memory.offloads_activations, hooks=hooks if given.parameters else None,
            runs=PostValidatedRun if plan.post_validates else Run,
            servers=self._at_servers(servers, plan),
        )  # fmt: skip

    def _at_servers(self, servers: ServedWorker | None, plan: Plan) -> ServedWorker | None:
        """Tell servers apart which parameters are here; raise :class:`ConfigError` where there are none to tell."""
        if (servers is None) == plan.serving.apart:
            wrong = f'server = "{plan.serving.kind}" {"without" if servers is None else "with"} servers'
            raise ConfigError.on("Engine(servers=…)", wrong, "a connection to them where they are apart, else None")
        if servers is not None:
            whole = 'server = "sync" or "none"'
            if self.compiled.hooks is not None and self.compiled.hooks.parameters:
                name = next(iter(self.compiled.hooks.parameters))
                wrong = "it has a hook, and servers apart take gradients before hooks could see them"
                raise ConfigError.on(f"parameter {name}", wrong, whole)
            if (why := self.compiled.general.opaque) is not None:
                wrong = f"the model could not be captured ({why}), and servers would update what a batch does not reach"
                raise ConfigError.on("server", wrong, whole)
            if self.compiled.general.checks is not None:
                wrong = "forward decides in Python by values of a batch, and servers would update what it leaves out"
                raise ConfigError.on("server", wrong, whole)
            if self.comm.device.type != "cpu":
                raise ConfigError.on("server", f'"{plan.serving.kind}" on a {self.comm.device.type} device', '"sync"')
            servers.parameters = {index: m.param for index, m in self.memory.buckets.items() if m.learns}
        return servers

    def leads(self, bucket: int) -> bool:
        """Return whether this rank's pipeline coordinate is the first that has a bucket; the ranks there save it."""
        return self.holders[bucket][0] == self.pipe

    def counts(self, bucket: Bucket) -> bool:
        """Return whether this rank counts a bucket in the norm: at each place on the batch axes the first of the ranks
        that have the same part of it does.
        """
        mesh = self.comm.mesh
        others = mesh.other_axes((*NON_TENSOR_AXES, *bucket.axes))
        return self.leads(bucket.index) and mesh.index(self.comm.rank, others) == 0

    def step(
        self, fields: Mapping[str, Tensor], rows: int, stop: bool = False, *, ones: tuple[str, ...] | None = None,
        compiled: Compiled | None = None, part: Part = STEP, turn: int = 0, alike: bool = False,
    ) -> StepResult:  # fmt: skip
        """Take one optimizer step on a batch of ``rows`` rows; ``fields`` has this rank's rows (its part of each
        microbatch in turn).

        All ranks call it together; ``stop`` tells all that this rank has been asked to stop.  ``ones`` are the masks
        that are all ones in ``fields``, where the caller knows; ``compiled`` is another computation with the same
        parameters; ``alike`` says that the rows of all ranks have one shape.  Returns 0-d device tensors; the host
        reads nothing.

        A step may be several calls, each of which runs a ``part``: those before the last do not update, and count up
        ``turn``.
        """
        self.check_weights("step")
        compiled = self.choices.fitting(fields, rows, compiled or self.compiled, self.drawing, alike)
        drawing = self.drawing._replace(seed=self._seed + turn * TURN)
        fields = self.choices.with_draws(fields, rows, compiled, drawing)
        part = self._meeting(part)
        traces = self.choose(fields, rows, compiled, ones=ones)
        program = self.program(compiled, traces, part=part)
        if not part.alone and self.interpreter.gradients is None:
            self.interpreter.gradients = Gradients(self.memory, self.comm, self.interpreter.strict)
        found = self.interpreter.run(traces, program, self._input(rows, fields, rows, stop, compiled, part, turn))
        self.interpreter.gradients = None if part.updates else self.interpreter.gradients
        return found

    def check_weights(self, what: str) -> None:
        """Raise :class:`ShardwiseError` where the weights are their averages, and ``what`` would take them for it."""
        if self.memory.is_averaged:
            raise ShardwiseError(f"{what}: the weights are their averages; legal: after the end of averaged()")

    def _summed(self, numbers: Tensor, what: str) -> Tensor:
        """Sum numbers of the host over the ranks of this island, or over all ranks where there are no islands."""
        return host_sum(self.comm, numbers, what, self.island if self.compiled.plan.local.steps else None)

    def _drawing(self, step: int) -> int:
        """Return the number that keys the random numbers of a step: islands draw numbers of their own."""
        mesh = self.comm.mesh
        return step * mesh.axis_size(ISLANDS) + mesh.index(self.comm.rank, ISLANDS)

    @property
    def drawing(self) -> Drawing:
        """The key of the random numbers of the next step."""
        return Drawing(self._seed, self._drawing(self.step_index))

    def _meeting(self, part: Part) -> Part:
        """Return a part of a step with the outer step that is due at its end; the first notes where all begin."""
        local = self.compiled.plan.local
        if not local.steps or not part.updates:
            return part
        for bucket in self.memory.buckets.values():
            if bucket.learns:
                bucket.outer  # noqa: B018 - it begins where it is first asked for
        return replace(part, outer=local.due(self.step_index))

    def gradients(self) -> dict[str, Tensor]:
        """Return the whole gradients that parts of a step have completed, by name; all ranks call it together.  What no
        backward has reached on any rank is left out, but for zeros that are kept."""
        made, buckets = self.interpreter.gradients, [b for b in self.memory.buckets.values() if b.learns]
        if made is not None:
            made.complete()
        found = {
            name: value for b in buckets
            for name, value in collect.whole(b, b.held_gradient, f"gradients of bucket {b.bucket.index}").items()
        }  # fmt: skip
        if made is None:
            return found
        names = [one.name for one in self.compiled.general.parameters]
        reached = self._summed(torch.tensor([float(name in made.reached) for name in names]), "what backward reaches")
        if self.memory.keeps_zeros and self.memory.had is not None:
            reached += self.memory.had.to(reached)
        left = {name for name, ranks in zip(names, reached.tolist(), strict=True) if not ranks}
        return {name: one for name, one in found.items() if name not in left}

    def zero_gradients(self, set_to_none: bool) -> None:
        """Forget the gradients of the last step.  If they are not ``set_to_none``, those of parameters that the next
        step leaves out are zero, and they take one, as with torch's optimizers."""
        self.interpreter.gradients, self.memory.keeps_zeros = None, not set_to_none
        if (optional := self.compiled.general.optional) and (set_to_none or self.memory.had is None):
            self.memory.had = torch.zeros(len(optional), device=self.comm.device)

    @torch.no_grad()
    def set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace what :meth:`gradients` returned, before the update."""
        for b in self.memory.buckets.values():
            if b.learns:
                held = b.held_gradient
                for parameter, box, here in b.boxes(held, b.held.start, b.held.start, b.held.stop):
                    if parameter.name in gradients:
                        here.copy_(gradients[parameter.name][box.slices])
                if b.table is not None:
                    b.table.replace(held)

    def steps(self, batches: Iterator[tuple[Mapping[str, Tensor], int, bool]], number: int) -> Iterator[StepResult]:
        """Take ``number`` steps in one program, and yield their results: under an asynchronous schedule the pipeline is
        empty only before the first step and after the last.

        ``batches`` gives what :meth:`step` takes, always with the same number of rows and the same shapes; each is
        asked for when its step begins.  Results come in order, each once all stages know it.  The caller must take all:
        other ranks wait.
        """
        self.check_weights("steps")
        given = exactly(number, batches)
        fields, rows, stop = next(given)
        compiled = self.choices.fitting(fields, rows, self.compiled, self.drawing)
        if compiled.general.draws is not None:
            wrong = "batches overlap, and forward draws random numbers of Python or numpy for each"
            raise ConfigError.on("schedule", wrong, "one in which a step ends before the next begins")
        if compiled.general.checks is not None:
            wrong = "batches overlap, and forward decides in Python by values of each"
            raise ConfigError.on("schedule", wrong, "one in which a step ends before the next begins")
        traces = self.choose(fields, rows, compiled, general=True)
        program = self.program(compiled, traces, number)
        every = self._of_window(itertools.chain([(fields, rows, stop)], given), compiled)
        yield from self.interpreter.results(traces, program, (self._input(rows, *one, compiled) for one in every))

    def _of_window(
        self, batches: Iterator[tuple[Mapping[str, Tensor], int, bool]], compiled: Compiled
    ) -> Iterator[tuple[Mapping[str, Tensor], int, bool]]:
        for fields, rows, stop in batches:
            if differing(compiled.form, form_of(fields)):
                wrong = f"rows of shapes {shown(fields)} after {shown(compiled.example)}"
                raise ConfigError.on("batch", wrong, "the same shapes in every batch of a window")
            yield fields, rows, stop

    def _input(
        self, expected: int, fields: Mapping[str, Tensor], rows: int, stop: bool, compiled: Compiled | None = None,
        part: Part = STEP, turn: int = 0,
    ) -> StepInput:  # fmt: skip
        """Return the next step's batch, for a program that was made for ``expected`` rows."""
        self.choices.check(fields, rows, compiled or self.compiled)
        if rows != expected:
            raise ConfigError(
                f"batch: {rows} rows after batches of {expected}; legal: as many in every batch of a window"
            )
        at = self.step_index
        self.step_index += part.updates
        # Islands learn only where they meet that one of them was asked to stop.
        stop = stop and (bool(part.outer) or not self.compiled.plan.local.steps)
        settings = self.settings or self.optimizer.settings(at)
        return StepInput(fields, rows, self._drawing(at), settings, stop, self.optimizer.averages(at), turn)

    @torch.inference_mode(False)  # what is captured and kept for later steps is no tensor of an inference
    def evaluate(
        self,
        fields: Mapping[str, Tensor],
        rows: int,
        ones: tuple[str, ...] | None = None,
        compiled: Compiled | None = None,
        alike: bool = False,
    ) -> StepResult:
        """Return the loss of a batch in evaluation mode; nothing is trained.  All ranks call it together.

        ``compiled`` is another computation with the same parameters: its forward runs, in its mode; where that is
        training, no buffer changes, and the random numbers are those of the next step."""
        compiled = self.choices.fitting(fields, rows, compiled or self.compiled.evaluation(), self.drawing, alike)
        fields = self.choices.with_draws(fields, rows, compiled, self.drawing)
        traces = self.choose(fields, rows, compiled, ones=ones)
        read = {p.name: p for t in traces for b in t.buckets for p in b.parameters if p.name in self.unused}
        for name, parameter in read.items():
            value, precision = local_part(self.unused[name], parameter, self.comm), compiled.plan.numeric.precision
            dtype = shadow_dtype(compiled.module, name, compiled.module.get_parameter(name), precision)
            self.memory.leaves[name] = value.to(self.comm.device, dtype)
        program = self.program(compiled, traces, part=None)
        self.interpreter.commits = not compiled.training
        try:
            return self.interpreter.run(traces, program, StepInput(fields, rows, self._drawing(self.step_index), ()))
        finally:
            self.interpreter.commits = True

    def program(
        self, compiled: Compiled, traces: Sequence[Trace], batches: int = 1, part: Part | None = STEP
    ) -> Program:
        """Return the program that this rank runs; all ranks call it together, which before the program's first run
        starts the communicators that it lacks.
        """
        key, prepared = (batches, part, *map(id, traces)), self._prepared.setdefault(compiled, set())
        if key not in prepared:
            for one in dict.fromkeys(traces):
                compiled.stages_of(one).check_held(self.cut, learns=compiled.training and part is not None)
            self.comm.prepare(compiled.communicators(traces, batches, part))
            prepared.add(key)
        return class_of(compiled.programs_for(traces, batches, part), self.comm.mesh, self.comm.rank)

    def choose(
        self,
        fields: Mapping[str, Tensor],
        rows: int,
        compiled: Compiled | None = None,
        *,
        ones: tuple[str, ...] | None = None,
        general: bool = False,
    ) -> list[Trace]:
        """Return the trace of each microbatch of this batch, see :meth:`Choices.traces`."""
        return self.choices.traces(fields, rows, compiled or self.compiled, ones=ones, general=general)

    def culprit(
        self, fields: Mapping[str, Tensor], rows: int, step: int, compiled: Compiled | None = None
    ) -> tuple[str, str]:
        """Return the unit that first produced a non-finite value in a skipped step, and what that value was; all ranks
        call it together.

        It runs the step again on the same batch and looks at each unit's results; nothing changes, since the step is
        skipped again.
        """
        drawing = Drawing(self._seed, self._drawing(step))
        # The step has compared shapes.
        compiled = self.choices.fitting(fields, rows, compiled or self.compiled, drawing, alike=True)
        fields = self.choices.with_draws(fields, rows, compiled, drawing)
        traces = self.choose(fields, rows, compiled)
        program = self.program(compiled, traces)
        units = len(traces[0].units)
        never = 2 * len(traces) * units
        first = [never]

        def place(one: Instruction) -> int:
            """Return an instruction's place among those of all ranks: forwards come first, and backwards go through the
            units in reverse. What one microbatch makes may reach all others in the next unit.
            """
            at, again = (one.unit, 0) if one.op is Op.FORWARD else (units - 1 - one.unit, units)
            return (again + at) * len(traces) + one.microbatch

        def inspect(position: int, what: str, values: list[Tensor]) -> None:
            if any(v.is_floating_point() and not bool(torch.isfinite(v).all()) for v in values):
                first[0] = min(first[0], place(program.instructions[position]))

        scale = self.memory.loss_scale
        before = None if scale is None else {name: value.clone() for name, value in scale.state_dict().items()}
        self.interpreter.inspect = inspect
        try:
            self.interpreter.run(
                traces, program, StepInput(fields, rows, self._drawing(step), self.optimizer.settings(step))
            )
        finally:
            self.interpreter.inspect = None
        if scale is not None and before is not None:
            scale.load_state_dict(before)
        mine = torch.zeros(never + 1, dtype=torch.int64)
        mine[first[0]] = 1
        at = int(torch.nonzero(self._summed(mine, "search for the first non-finite value"))[0])
        if at == never:
            return "none", "gradient norm"
        forward, unit = at < len(traces) * units, at // len(traces) % units
        return traces[0].units[
            unit if forward else units - 1 - unit
        ].name, "forward's output" if forward else "backward's gradient"

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """Return the full single-device state under the module's own names, on the host: parameters in their master
        precision, and buffers.

        All ranks call it together; with ``rank``, only that rank gets it, and the others get an empty dict.
        """
        return self.whole.on_host(rank)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the parameters are their averages, for evaluations and :meth:`state_dict`; all
        ranks enter it together.  Raises :class:`ShardwiseError` where there is no average."""
        if self.optimizer.ema is None:
            raise ShardwiseError("there is no average of the weights; legal: an optimizer with ema = 0.999, say")
        self.check_weights("averaged()")
        return averaged(self.memory, self.comm)

    def everywhere(self, mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole tensors of parameters that learn, by name: ``mine`` has those of this rank's stage, and the
        other stages send what they have.  All ranks call it together.
        """
        if self.cut.ranks == 1:
            return dict(mine)
        found, learning = dict(mine), [b for b in self.compiled.general.buckets if b.learns]
        every = [(b, p) for b in learning for p in b.parameters]
        has = torch.tensor([float(p.name in mine) for _, p in every], device=self.comm.device)
        self.comm.all_reduce(has, PIPELINE, lane="state", what="names of the tensors of stages").wait()
        for (bucket, parameter), here in zip(every, has.cpu().tolist(), strict=True):
            if not here:
                continue
            dtype, root = bucket.wide, self.holders[bucket.index][0]
            if parameter.name not in found:
                found[parameter.name] = torch.empty(parameter.shape, dtype=dtype, device=self.comm.device)
            name = f"{parameter.name} of stage {root}"
            self.comm.broadcast(found[parameter.name], PIPELINE, root, lane="state", what=name).wait()
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and buffers from a single-device state, which must be complete; optimizer state stays, and so
        does an average of the weights that has some steps."""
        self.check_weights("load_state_dict")
        missing = set(self.compiled.module.state_dict()) - set(state)
        if missing:
            raise ShardwiseError(f"state lacks {', '.join(sorted(missing)[:5])}")
        values = Values.of_mapping(self.compiled.module, state)
        for bucket in self.memory.buckets.values():
            bucket.load(values)
            if bucket.local.steps and bucket.learns:
                bucket.outer.begin()
            if bucket.average is not None:
                bucket.average.follow()
        with torch.no_grad():
            for name, value in (self.unused | self.memory.buffers).items():
                if name in state:
                    value.copy_(state[name])


def exactly(number: int, batches: Iterator[T]) -> Iterator[T]:
    """Yield ``number`` of ``batches``, each when it is asked for.  Raises :class:`ConfigError` where fewer come."""
    for came in range(number):
        try:
            one = next(batches)
        except StopIteration:
            raise ConfigError.on("batches", f"{came} came", f"{number}, one for each step") from None
        yield one
