"""Predict what a plan needs on a device before anything is allocated: whether it fits, how long parameters can stay
gathered, and which plan would fit.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardwise.config import Config, build_optimizer, build_plan
from shardwise.core.communicators import sizes
from shardwise.core.errors import ConfigError
from shardwise.core.garbage import without_gc
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.estimate.devices import GIB, Device
from shardwise.estimate.fit import Fit, FitChoices, nearest
from shardwise.estimate.memory import gradient_dtypes
from shardwise.estimate.predict import Prediction, fullest, predict
from shardwise.estimate.prefetch import depth
from shardwise.estimate.servers import ServerBytes, server_bytes
from shardwise.lower.compiled import Compiled
from shardwise.lower.traced_for import solves, traced_for
from shardwise.measure.unit_cost import cost
from shardwise.measure.unit_memory import Profile, profile
from shardwise.parallel.data import batch_axes, shard_axes
from shardwise.parallel.pipeline import PIPELINE
from shardwise.report.files import PLAN
from shardwise.report.tables import size
from shardwise.shard.solver.cost_model import MicrobatchCost
from shardwise.shard.solver.solve import TooFew
from shardwise.units.trace import Trace

from .left_open import COMBINATIONS, OPEN, EarlierChoice, left_open


@dataclass
class Forecast:
    """This predicts the memory of ``config`` on ``device``.

    ``compiled`` is the model under :attr:`plan`, the plan of the config with values for what the config leaves open.
    ``note`` tells of these choices.
    """

    config: Config
    compiled: Compiled
    device: Device
    note: str | None = None
    common: bool = False  # whether ranks are processes of one host that share memory
    _compiled: dict[Any, Compiled] = field(default_factory=dict)  # by those parts of a plan that traces depend on
    _known: dict[tuple[Plan, int | None], Prediction] = field(default_factory=dict)
    _profiles: dict[Any, Profile] = field(default_factory=dict)  # many plans have the same profiles

    @staticmethod
    def of(
        config: Config,
        compiled: Compiled,
        device: Device,
        common: bool = False,
        before: EarlierChoice | None = None,
    ) -> Forecast:
        """Return the forecast for a model that was compiled for ``build_plan(config)``.

        What the config leaves open stays as it was ``before`` if that fits, so that a run that goes on adds numbers in
        the same order.  Raise :class:`ConfigError` if it does not fit but the config asks for the same bits.
        """
        found = Forecast(config, compiled, device, common=common)
        if keys_left := left_open(config):
            found._choose(keys_left, COMBINATIONS if before is None else (COMBINATIONS[before.way], *COMBINATIONS))
        if solves(found.plan):
            found._shrink(0 if before is None else before.tensor_bytes)
        if before is not None:
            found.check_kept(found._keeps(before, keys_left))
        if config.parallel.prefetch is None:
            found._gather_ahead()
        return found

    @property
    def plan(self) -> Plan:
        return self.compiled.plan

    @cached_property
    def beside(self) -> Mapping[str, int]:
        """Return the bytes that the rank that needs most takes beside tensors, by what takes them; none on a CPU."""
        return self._beside(build_plan(self.config))

    @cached_property
    def budget(self) -> int:
        """Return the bytes that a rank has for tensors: ``train.memory_gib``, or its device's without the reserve."""
        return max(self._left(self.beside), 0)

    def _left(self, beside: Mapping[str, int]) -> int:
        """Return the budget of a plan that takes ``beside`` besides tensors, negative if that alone is too much."""
        given = self.config.train.memory_gib
        return self.device.budget - sum(beside.values()) if given is None else int(given * GIB)

    @property
    def worst(self) -> Prediction:
        """Return the prediction for the rank that needs most memory."""
        return self.predict(self.plan)

    @cached_property
    def optimizer(self) -> OptimizerChoice:
        """The optimizer, with its groups of this model's parameters."""
        return build_optimizer(self.config, self.compiled.module)

    @property
    def servers(self) -> list[ServerBytes]:
        """Return the bytes of each server that is a process beside the workers."""
        return server_bytes(self.compiled.buckets, self.plan, self.optimizer) if self.plan.serving.apart else []

    @property
    def fits(self) -> bool:
        return self.worst.peak_bytes <= self.budget

    def predict(self, plan: Plan, rank: int | None = None) -> Prediction:
        """Predict the memory of ``rank`` under ``plan``, by default of the rank that needs most."""
        if (plan, rank) not in self._known:
            compiled, rows = self._traced(plan), self.config.rows_together
            self._known[plan, rank] = predict(
                lambda size: compiled.trace_of(self._ones, size, rows), plan, self.optimizer,
                rows=rows, device=self.device.kind, rank=rank, common=self.common,
                profiled=self._profiled, split=compiled.stages_of,
            )  # fmt: skip
        return self._known[plan, rank]

    def peaks(self, plan: Plan) -> list[int]:
        """Return, for each stage of the pipeline, the peak bytes of the rank that needs most."""
        trace, rows = self._trace(plan), self.config.rows_together
        ranks = fullest(trace, plan, self.optimizer, rows, self._traced(plan).stages_of(trace, plan))
        return [self.predict(plan, rank).peak_bytes for rank in ranks]

    def profile(self) -> tuple[Trace, Profile]:
        """Return the trace of a microbatch under :attr:`plan`, and the memory of its units on the first rank, with
        backwards split into two parts."""
        plan, trace = self.plan, self._trace(self.plan)
        parts, rows = plan.mesh.axis_size(batch_axes(plan.mesh)), self.config.rows_together // plan.microbatches
        options: dict[str, Any] = {
            "microbatches": plan.microbatches,
            "index": 0,
            "gradient_dtypes": gradient_dtypes(trace, plan),
            "split": True,
        }
        options |= {"tensor": plan.mesh.places(0, tuple(trace.tensor)), "recompute": plan.memory.recompute}
        return trace, self._profiled(trace, rows, parts, self.device.kind, **options)

    def others(self) -> list[Prediction]:
        """Return the predictions for the first and the last rank, if they differ from the worst."""
        ranks = sorted({0, self.plan.mesh.size - 1} - {self.worst.rank})
        found = [self.predict(self.plan, rank) for rank in ranks]
        return [one for one in found if (one.peak, one.states) != (self.worst.peak, self.worst.states)]

    def nearest(self) -> Fit:
        """Search for the plan that fits and differs least from this one."""
        parallel = self.config.parallel
        now = FitChoices(
            batch_size=self.config.data.batch_size, dp=parallel.dp, dp_replicate=parallel.dp_replicate,
            zero=parallel.zero,
            gathered=parallel.gathered, reduced=parallel.reduced, recompute=parallel.recompute,
            microbatches=parallel.microbatches, offload=parallel.offload,
            precision=parallel.precision, kind=self.device.kind,
            tp=parallel.tp if self.compiled.general.opaque is None else None,
        )  # fmt: skip
        found = nearest(now, self._left(self.beside), self._peak)
        least = self.predict(self._changed(found.least_changes)).peak_bytes
        return found._replace(
            peak=least if found.changes is None else self.predict(self._changed(found.changes)).peak_bytes, least=least
        )

    def check(self) -> None:
        """Raise :class:`ConfigError` if the plan does not fit, saying where, by how much, and what would fit."""
        if not self.fits:
            raise ConfigError(f"{self.misfit()}; {self.advice(self.nearest())}")

    def check_kept(self, kept: bool) -> None:
        """Raise :class:`ConfigError` if the plan was not ``kept`` but the config asks for the same bits."""
        if self.config.train.deterministic and not kept:
            raise ConfigError(
                f"train.deterministic: what this run began with ({PLAN} in its folder) does not fit into "
                f"{size(self.budget)} a rank, and another "
                "plan adds in another order; legal: as much free memory as it began with, or train.deterministic = "
                "false"
            )

    def _keeps(self, before: EarlierChoice, keys_left: Sequence[str]) -> bool:
        """Return whether what the free memory decides is as ``before``; the user may have changed everything else."""
        earlier = dict(zip(OPEN, COMBINATIONS[before.way], strict=True))
        same = all(getattr(self.plan.data, key) == earlier[key] for key in keys_left)
        return same and (not solves(self.plan) or self.plan.tensor.bytes == before.tensor_bytes)

    def check_host(self, free: int) -> None:
        """Raise :class:`ConfigError` if offloaded state does not fit into a rank's ``free`` bytes on the host."""
        needed = self.worst.host_bytes
        if needed > free:
            wrong = f"rank {self.worst.rank} needs {size(needed)} on the host, which has {size(free)} free for it"
            legal = "fewer ranks a host, or parallel.zero of at least 1, which shards an offloaded optimizer"
            raise ConfigError.on(f'parallel.offload = "{self.plan.memory.offload}"', wrong, legal)

    def misfit(self) -> str:
        """Say by how much the plan does not fit, and where."""
        worst, over = self.worst, self.worst.peak_bytes - self.budget
        largest = max(worst.peak, key=lambda c: worst.peak[c])
        given = self.config.train.memory_gib
        limit = f"train.memory_gib = {given:g}" if given is not None else self._limit()
        return (
            f"memory: rank {worst.rank} needs {size(worst.peak_bytes)}, {size(over)} more than {limit}; most of it, "
            f"{size(worst.peak[largest])}, is {largest} (the peak: {worst.at})"
        )

    def _limit(self) -> str:
        """Return ``the 70.1 GiB that a rank has for tensors on H100-80GB``, and what the rest is used for."""
        device, beside = self.device, sum(self.beside.values())
        if not device.taken and not beside:
            return f"the {size(self.budget)} that a rank has on {device.name}"
        if beside > device.budget:
            others = f", and others have taken {size(device.taken)}" if device.taken else ""
            return (
                f"{device.name} leaves: of its {size(device.memory)}, {size(beside)} are for what is beside "
                f"tensors{others}"
            )
        rest = [f"{size(beside)} are for what is beside tensors"] if beside else []
        rest += [f"{size(device.taken)} others have taken"] if device.taken else []
        return (
            f"the {size(self.budget)} that a rank has for tensors on {device.name} (of {size(device.memory)}, "
            f"{', '.join(rest)})"
        )

    def advice(self, fit: Fit) -> str:
        """Describe what :meth:`nearest` has found."""
        if fit.changes is not None:
            return f"the nearest plan that fits: {as_settings(fit.changes)} ({size(fit.peak)} a rank)"
        with_ = f", with {as_settings(fit.least_changes)}" if fit.least_changes else ""
        reserve = self.device.reserve
        if reserve is None or self.config.train.memory_gib is not None:
            return (
                f"no plan fits; legal: train.memory_gib of at least {gib_at_least(fit.least)}, the least that any "
                f"plan needs{with_}"
            )
        whole = reserve.device(fit.least, self._beside(self._changed(fit.least_changes)))
        return f"no plan fits; legal: a device with at least {size(whole)} free, the least that any plan needs{with_}"

    def _choose(self, left: Sequence[str], ways: Sequence[Sequence[str]]) -> None:
        """Take the first of ``ways`` that fits, else the last."""
        chosen: dict[str, Any] = {}
        for way in ways:
            chosen = {key: word for key, word in zip(OPEN, way, strict=True) if key in left}
            plan = self.plan.replace(**chosen)
            needed = self.predict(plan).peak_bytes
            if needed <= self.budget:
                break
        self.compiled = self.compiled.under(plan)
        what = "the longest that fits" if needed <= self.budget else "the shortest, and even so too long"
        values = as_settings({f"parallel.{key}": word for key, word in chosen.items()})
        self.note = f"{values}: {what} into {size(self.budget)} a rank ({size(needed)} needed)"

    def _gather_ahead(self) -> None:
        """On GPUs, prefetch as many units as it takes to hide gathers behind computation, or as fit.  On CPUs both
        share the cores, so that nothing can be hidden."""
        plan, axes = self.plan, shard_axes(self.plan.mesh)
        if self.device.kind != "gpu" or not axes or self.compiled.general.opaque is not None:
            return
        trace, rows = self._trace(plan), self.config.rows_together // plan.microbatches
        links = plan.mesh.links(self.compiled.per_host or plan.mesh.size)
        across = [axis for axis in axes if links[axis] != "device"]
        costs = cost(trace, rows, plan.mesh.axis_size(batch_axes(plan.mesh)), self.device.kind)
        wanted = depth(trace, plan, costs, self.compiled.device_rates(across))
        for ahead in range(wanted, plan.data.prefetch, -1):
            deeper = plan.replace(prefetch=ahead)
            if self.predict(deeper).peak_bytes <= self.budget:
                self.take(
                    deeper,
                    f"parallel.prefetch = {ahead}: hides gathers under computing, by the rates "
                    f"{'assumed' if self.compiled.links is None else 'measured'} of {self.device.name}",
                )
                return

    def _shrink(self, before: int = 0) -> None:
        """Find the solver's fastest plan that fits, if the fastest of all does not: lower the solver's limit of bytes,
        which begins at ``before`` (0: no limit), by the excess until the plan fits."""
        first = self.plan
        plan = first.replace(tensor_bytes=before) if before else first
        while (over := self.predict(plan).peak_bytes - self.budget) > 0:
            took = self._solved(plan).nbytes
            try:
                plan = plan.replace(tensor_bytes=max(took - over * plan.mesh.axis_size(PIPELINE), 1))
                self._traced(plan)
            except TooFew as error:
                plan = plan.replace(tensor_bytes=error.least)
                if error.least == took:
                    break
        if plan is first:
            return
        fast, found = (f"{1e3 * self._solved(one).total:.3g} ms" for one in (first, plan))
        what = "a plan" if self.predict(plan).peak_bytes <= self.budget else "the least plan, and even so too large,"
        why = (
            "as this run began"
            if plan.tensor.bytes == before
            else f"for that of {fast} does not fit into {size(self.budget)} a rank"
        )
        note = f'parallel.tensor_plan = "auto": {what} of {found} a microbatch, {why}'
        self.take(plan, note)

    def take(self, plan: Plan, note: str) -> None:
        """Change to ``plan``, and append ``note``."""
        self.compiled = self._traced(plan).under(plan)
        self.note = note if self.note is None else f"{self.note}; {note}"

    def _solved(self, plan: Plan) -> MicrobatchCost:
        predicted = self._traced(plan).general.predicted
        assert predicted is not None
        return predicted()

    def _peak(self, changes: Mapping[str, Any]) -> int:
        """Return the peak bytes under ``changes``, plus the bytes by which they make the budget smaller; changes that
        are not legal, as for a schedule, return more bytes than any device has."""
        try:
            plan = self._changed(changes)
            return self.predict(plan).peak_bytes + self._left(self.beside) - self._left(self._beside(plan))
        except ConfigError:
            return sys.maxsize

    def _changed(self, changes: Mapping[str, Any]) -> Plan:
        return build_plan(changed(self.config, changes))

    def _beside(self, plan: Plan) -> dict[str, int]:
        if self.device.reserve is None:
            return {}
        more = self._traced(plan).beside_programs(self._trace(plan))
        return self.device.beside(sizes(self.predict(plan).program, plan.mesh, more))

    def _traced(self, plan: Plan) -> Compiled:
        """Return the model traced for ``plan``; of what can change here, traces depend on precision and tensor
        parallelism only."""

        def key(plan: Plan) -> tuple[Any, ...]:
            return traced_for(plan.replace(parameters=self.plan.data.parameters), self.compiled.per_host)

        self._compiled.setdefault(key(self.plan), self.compiled)
        if key(plan) not in self._compiled:
            with without_gc():
                self._compiled[key(plan)] = self.compiled.under(plan)
        return self._compiled[key(plan)]

    def _trace(self, plan: Plan) -> Trace:
        """Return the trace of a microbatch of a full batch."""
        rows = self.config.rows_together
        return self._traced(plan).trace_of(self._ones, rows // plan.microbatches, rows)

    def _profiled(self, one: Trace, rows: int, parts: int, device: str, **options: Any) -> Profile:
        key = (id(one), rows, parts, device, repr(options))
        if key not in self._profiles:
            self._profiles[key] = profile(one, rows, parts, device, **options)
        return self._profiles[key]

    @property
    def _ones(self) -> tuple[str, ...]:
        """Return the masks that count as all ones, which are all or none: they are all ones in the example."""
        example = self.compiled.example
        return self.compiled.masks if all(bool((example[m] == 1).all()) for m in self.compiled.masks) else ()


def changed(config: Config, changes: Mapping[str, Any]) -> Config:
    """Return ``config`` with other values of ``parallel.…``."""
    values = {key.removeprefix("parallel."): value for key, value in changes.items()}
    return replace(config, parallel=replace(config.parallel, **values))


def as_settings(changes: Mapping[str, Any]) -> str:
    """Return ``parallel.zero = 3, parallel.recompute = "full"``."""
    return ", ".join(f"{key} = {value!r}".replace("'", '"') for key, value in changes.items())


def gib_at_least(nbytes: int) -> str:
    """Return ``nbytes`` in GiB, rounded up to four digits."""
    digits = 3 - math.floor(math.log10(nbytes / GIB))
    return f"{math.ceil(nbytes / GIB * 10**digits) / 10**digits:.{max(digits, 0)}f}"
