"""Cut a model into pipeline stages, and find the live tensors that each rank of a pipeline needs from other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.backend import Kind
from shardwise.core.errors import ConfigError
from shardwise.core.instruction import Buffer, BufferKind
from shardwise.core.plan import Plan
from shardwise.core.rates import Rates, rates
from shardwise.core.timetable import Task, Timetable, first
from shardwise.graph.sizes import depends_on_data
from shardwise.measure.unit_cost import cost
from shardwise.parallel.pipeline import PIPELINE, balance, carried
from shardwise.parallel.schedule import stage_ranks, timetable
from shardwise.units.trace import INPUTS_OF, Bucket, Trace, Unit

Weights = Mapping[int, float]
"""The cost of each unit in FLOPs, by its index."""
EVERYWHERE = -1
"""The stage of units of inputs, which depend on batch fields and buffers alone: every rank that reads them computes
them for itself."""


@dataclass(frozen=True)
class Edge:
    """Live ``tensors`` of ``unit``, or their gradients, that rank ``source`` sends to ``to`` in every microbatch."""

    source: int
    to: int
    unit: int
    tensors: tuple[str, ...]
    gradient: bool


@dataclass(frozen=True)
class Message(Edge):
    """An edge in one microbatch. The compute instruction at position ``made`` of ``source`` makes what is sent, and the
    one at position ``needed`` of ``to`` is the first that needs it.
    """

    microbatch: int
    made: int
    needed: int

    @property
    def sent(self) -> Buffer:
        """The buffer that ``source`` sends."""
        kind = BufferKind.GRADIENT if self.gradient else BufferKind.ACTIVATION
        return kind.of(self.unit, self.microbatch)

    @property
    def received(self) -> Buffer:
        """The buffer in which ``to`` receives it; gradients from different ranks have different ones."""
        return BufferKind.RECEIVED.of(self.unit, self.microbatch, self.source) if self.gradient else self.sent


@dataclass(frozen=True)
class StageSplit:
    """The ``stage`` of each unit of a trace; ``ranks`` is the number of ranks over ``pp`` that compute the stages."""

    units: tuple[Unit, ...]
    stage: tuple[int, ...]
    ranks: int
    schedule: str
    order: Timetable = ()  # the timetable of schedule "auto"
    least: int = 1  # the stages of the plan; an evaluation of outputs may have no unit of the last ones

    @staticmethod
    def of(
        trace: Trace, plan: Plan, like: Mapping[str, int] | None = None, weights: Callable[[], Weights] | None = None
    ) -> StageSplit:
        """Cut a trace into the stages of the plan, or into stages of balanced ``weights`` (:func:`weights_of` the trace
        by default). ``like`` has the stages of blocks by name, from another trace of the model. Raises
        :class:`ConfigError` if there are too few blocks, if the plan's stages have another number of them, and for a
        model not captured."""
        ranks = plan.mesh.axis_size(PIPELINE)
        number = ranks * plan.pipeline.stages_per_rank
        if trace.opaque is not None and number > 1:
            wrong = f"a model that could not be captured cannot be cut into stages ({trace.opaque})"
            raise ConfigError.on("pp", wrong, "pp = 1")
        if any(u.exchanges for u in trace.units):
            if ranks > 1:
                wrong = f'{ranks} are not legal with rows = "batch", for a stage would wait for all microbatches'
                raise ConfigError.on("pp", wrong, "pp = 1")
            stage = tuple(u.phase for u in trace.units)
        elif like is not None:
            stage = _like([u.block for u in trace.units], like)
        elif number == 1:
            stage = tuple(0 for _ in trace.units)
        else:
            stage = _stages(trace, plan, number, weights or (lambda: weights_of(trace)))
        return StageSplit(tuple(trace.units), stage, ranks, plan.pipeline.schedule, carried(plan), number)

    @property
    def names(self) -> dict[str, int]:
        """The stage of each block, by its name."""
        return {u.block: s for u, s in zip(self.units, self.stage, strict=True)}

    @property
    def stages(self) -> int:
        """The number of stages."""
        return max(*self.stage, self.least - 1) + 1

    def tasks(self, microbatches: int) -> Timetable:
        """Return the tasks of each rank, in the order in which it computes them."""
        if any(u.exchanges for u in self.units):
            return (self._in_phases(microbatches),)
        if self.order:
            return first(self.order, microbatches)
        return timetable(self.schedule, self.ranks, microbatches, self.stages // self.ranks)

    def _in_phases(self, microbatches: int) -> tuple[Task, ...]:
        """Return the tasks of one rank whose stages are phases: all microbatches finish one before the next begins."""
        each = [(s, m) for s in range(self.stages) for m in range(microbatches)]
        forward, backward = (tuple(Task(kind, s, m) for s, m in each) for kind in "FB")
        return forward + backward[::-1]

    def of_stage(self, stage: int) -> list[int]:
        """Return the units of a stage."""
        return [u for u, s in enumerate(self.stage) if s == stage]

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return stage_ranks(self.schedule, self.ranks, self.stages, self.order)

    def rank(self, unit: int) -> int:
        """Return the rank that computes a unit; the unit must have a stage."""
        return self.home[self.stage[unit]]

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """The units that each rank computes, in the order of the model, and the units without a stage that it needs."""
        found = []
        for rank in range(self.ranks):
            own = {u for u, s in enumerate(self.stage) if s != EVERYWHERE and self.rank(u) == rank}
            for u in reversed(range(len(self.units))):
                always = rank == 0 and not self.units[u].name.startswith(INPUTS_OF)
                if self.stage[u] == EVERYWHERE and (always or any(u in self.producers[r] for r in own)):
                    own.add(u)
            found.append(tuple(sorted(own)))
        return tuple(found)

    @cached_property
    def producers(self) -> tuple[tuple[int, ...], ...]:
        """The units whose live tensors each unit reads."""
        maker = {name: u.index for u in self.units for name in u.outputs}
        return tuple(tuple(sorted({maker[name] for name in u.inputs})) for u in self.units)

    def crossing(self, producer: int, rank: int, gradients: bool = False) -> tuple[str, ...]:
        """Return the live tensors of a unit that ``rank``'s units read, or those for which they compute gradients."""
        wanted = {
            name
            for u in self.of_rank[rank] if producer in self.producers[u]
            for name, grad in zip(self.units[u].inputs, self.units[u].input_grads, strict=True)
            if not gradients or (grad and self.units[u].differentiable)
        }  # fmt: skip
        return tuple(name for name in self.units[producer].outputs if name in wanted)

    @cached_property
    def sent(self) -> tuple[tuple[str, ...], ...]:
        """The live tensors that each unit with a stage sends to other ranks."""
        return tuple(
            self.crossing(u, rank)
            for u, stage in enumerate(self.stage) if stage != EVERYWHERE
            for rank in range(self.ranks) if rank != self.rank(u)
        )  # fmt: skip

    def holders(self, bucket: Bucket) -> tuple[int, ...]:
        """Return the ranks whose units use a bucket's parameters; each of them has these. Parameters are found by name,
        for the bucket may be of another trace, whose units have other numbers."""
        return tuple(sorted({rank for parameter in bucket.parameters for rank in self._users.get(parameter.name, ())}))

    def own(self, buckets: Sequence[Bucket], rank: int) -> list[Bucket]:
        """Return those of the buckets that a rank of the pipeline has."""
        return [b for b in buckets if rank in self.holders(b)]

    @cached_property
    def _users(self) -> dict[str, set[int]]:
        """The ranks that use each parameter."""
        found: dict[str, set[int]] = {}
        for rank, units in enumerate(self.of_rank):
            for name in (n for u in units for n in self.units[u].parameters):
                found.setdefault(name, set()).add(rank)
        return found

    def updating(self) -> dict[str, int]:
        """Return, for each buffer that a unit with a stage writes in forward, the rank that has its new values.

        Raises :class:`ConfigError` if another rank reads the buffer.
        """
        if self.ranks == 1:
            return {}
        found = {
            name: self.rank(u.index) for u in self.units for name in u.updates if self.stage[u.index] != EVERYWHERE
        }
        for rank, units in enumerate(self.of_rank):
            for name in (n for u in units for n in self.units[u].buffers if found.get(n, rank) != rank):
                wrong = f"the buffer {name} is written by rank {found[name]} and read by rank {rank} of the pipeline"
                raise ConfigError.on("pp", wrong, "one rank that does both")
        return found

    def check_held(self, training: StageSplit, learns: bool) -> None:
        """Raise :class:`ConfigError` if a unit reads, on a rank that has it not, a parameter or the new value of a
        buffer: they are where the units of the ``training`` trace read or write them.  If the units' program
        ``learns``, it raises also if a rank that has a parameter does not use it, unlike others."""
        written = training.updating()
        for rank, units in enumerate(self.of_rank if self.ranks > 1 else ()):
            for name in (n for u in units for n in self.units[u].parameters):
                there = training._users.get(name, {rank})
                if rank not in there:
                    wrong = (
                        f"what is asked for needs {name} on rank {rank} of the pipeline, and rank {min(there)} has it"
                    )
                    raise ConfigError.on("pp", wrong, "pp = 1, or outputs that need no more than the loss")
            for name in (n for u in units for n in self.units[u].buffers if written.get(n, rank) != rank):
                wrong = f"training writes the buffer {name} on rank {written[name]} of the pipeline, and rank {rank}"
                raise ConfigError.on("pp", f"{wrong} reads it for what is asked for", "pp = 1, or other outputs")
        for name, there in training._users.items() if learns else ():
            if (used := self._users.get(name, there)) != there:
                ranks, own = (" and ".join(map(str, sorted(one))) for one in (there, used))
                wrong = f"{name} is used on ranks {ranks} of the pipeline in other batches, and on {own} alone in this"
                raise ConfigError.on("pp", f"{wrong} one", "pp = 1, or a weight that is not shared")

    def check(self) -> None:
        """Raise :class:`ConfigError` if a tensor that crosses a cut has a size that depends on data, for then the
        receiver cannot know it."""
        for u in self.units:
            for name in {n for rank in self.readers(u.index) for n in self.crossing(u.index, rank)}:
                sizes = u.values[name].meta["val"].shape
                if any(map(depends_on_data, sizes)):
                    wrong = f"the size of a tensor that {u.name} makes and another stage reads depends on data"
                    raise ConfigError.on("pp", wrong, "pp = 1, or stages with both in one")

    def readers(self, producer: int) -> tuple[int, ...]:
        """Return the other ranks that read a unit's live tensors."""
        if self.ranks == 1 or self.stage[producer] == EVERYWHERE:
            return ()
        own = self.rank(producer)
        return tuple(
            rank
            for rank, units in enumerate(self.of_rank)
            if rank != own and any(producer in self.producers[u] for u in units)
        )


SHOWN = 5  # the most names of blocks in a message


def _counted(blocks: Mapping[str, Sequence[int]]) -> str:
    """Return how many blocks there are, for messages, and which."""
    names = list(blocks)
    shown = names if len(names) <= SHOWN else [*names[: SHOWN - 1], "…", names[-1]]
    return f"{len(names)} block{'s' * (len(names) != 1)} ({', '.join(shown)})"


def _stages(trace: Trace, plan: Plan, number: int, weights: Callable[[], Weights]) -> tuple[int, ...]:
    """Return which of ``number`` stages each unit is in; a block is in one, whatever its segments."""
    sizes, each = plan.pipeline.stages, plan.pipeline.stages_per_rank
    blocks: dict[str, list[int]] = {}
    for u in trace.units:
        if not u.is_inputs:
            blocks.setdefault(u.block, []).append(u.index)
    if sizes and sum(sizes) != len(blocks):
        wrong = f"{list(sizes)} are {sum(sizes)} blocks"
        raise ConfigError.on("stages", wrong, f"{len(blocks)} in all: {', '.join(blocks)}")
    if number > len(blocks):
        wrong, most = f"{number} stages, but the model is cut into {_counted(blocks)}", f"at most {len(blocks)} stages"
        if each > 1:
            most += f": pp = {max(1, len(blocks) // each)}, or a schedule with fewer than {each} stages on each rank"
        raise ConfigError.on("pp", wrong, most)
    if not sizes:
        costs = weights()
        sizes = balance([sum(costs[u] for u in units) for units in blocks.values()], number)
    stages = [s for s, size in enumerate(sizes) for _ in range(size)]
    found = dict(zip(blocks, stages, strict=True))
    return tuple(EVERYWHERE if u.is_inputs else found[u.block] for u in trace.units)


def weights_of(trace: Trace, kind: Kind = "cpu", own: Rates | None = None) -> Weights:
    """Return the cost of each unit on a device of this ``kind``, whose ``own`` rates are by default those assumed for
    it.

    The cost is in FLOPs: memory traffic counts as the FLOPs that could be computed in its time, and backward is taken
    to move twice the bytes of forward.
    """
    moved = 3 * (own or rates(kind, trace.precision)).flops_per_byte
    each = cost(trace, trace.rows or 2, device=kind)
    return {c.index: c.forward_flops + c.backward_flops + moved * c.forward_bytes for c in each}


def _like(names: Sequence[str], like: Mapping[str, int]) -> tuple[int, ...]:
    """Return the same stages for other units; a unit with a new name belongs to the stage of the one before it."""
    found: list[int] = []
    for name in names:
        before = max(found, default=0)
        found.append(like.get(name, max(before, 0)))
    return tuple(found)
