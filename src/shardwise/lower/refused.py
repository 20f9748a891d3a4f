"""Refuse plans that cannot give a model's numbers of one device; the errors say which option, and what is legal."""

from __future__ import annotations

from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.lower.stages import StageSplit
from shardwise.parallel.data import batch_axes
from shardwise.units.trace import Trace


def refuse(trace: Trace, plan: Plan, cut: StageSplit, training: bool) -> None:
    """Raise :class:`ConfigError` where stages, rows or microbatches divide what the trace cannot divide."""
    _refuse_stages(trace, cut)
    _refuse_uncaptured(trace, plan)
    _refuse_microbatches(trace, plan, cut, training)


def _refuse_stages(trace: Trace, cut: StageSplit) -> None:
    if cut.ranks > 1 and trace.sums is not None and trace.sums.leaves:
        wrong = f"the loss counts its targets with {trace.sums.leaves[0]}, which one stage has"
        raise ConfigError.on("pp", wrong, "pp = 1")
    own = {name for unit in trace.units for name in unit.updates}
    if cut.ranks > 1 and trace.sums is not None and (written := own.intersection(trace.sums.buffers)):
        wrong = f"what the batch's rows add up to depends on the buffer {sorted(written)[0]}, which one stage writes"
        raise ConfigError.on("pp", wrong, "pp = 1")


def _refuse_uncaptured(trace: Trace, plan: Plan) -> None:
    parts = plan.microbatches * plan.mesh.axis_size(batch_axes(plan.mesh))
    if trace.keeps and (parts > 1 or plan.memory.recompute != "none"):
        wrong = (
            f"not captured, and what forward computes depends on {', '.join(trace.keeps)}, which it changes: each rank "
            "and microbatch would change its own, and recomputation would change it again"
        )
        legal = "buffers (self.register_buffer) and torch's random functions; or "
        legal += 'dp = 1, microbatches = 1 and recompute = "none"'
        raise ConfigError.on("model", wrong, legal)
    if not trace.divisible and parts > 1:
        wrong = (
            "the model was not captured, and a trial did not show that its loss is a mean over rows, a sum, or a mean "
        )
        wrong += f"over targets that are not -100 (not captured: {trace.opaque})"
        legal = 'such a loss, or dp = 1 and microbatches = 1; "rows", "sum" or "targets:FIELD" where you know better '
        legal += "than the trial (it is not checked)"
        raise ConfigError.on("model.loss_weight", wrong, legal)
    if trace.unknown_buffers and parts > 1:
        wrong = (
            f"not captured, and what forward writes to the buffer {trace.unknown_buffers[0]} is neither the same for "
        )
        wrong += "all rows nor a sum or a mean over them, as a trial showed"
        raise ConfigError.on("model", wrong, "dp = 1 and microbatches = 1")


def _refuse_microbatches(trace: Trace, plan: Plan, cut: StageSplit, training: bool) -> None:
    if trace.numbered and trace.own_numbers is None and not trace.cuts_batch and plan.microbatches > 1:
        wrong = f"{plan.microbatches} are not possible: rows meet in {trace.numbered[0]}, by numbers that a field gives"
        wrong += " to the rows of the whole batch, of which a microbatch has some"
        raise ConfigError.on("microbatches", wrong, trace.ways_to_meet(cut.ranks > 1))
    if trace.undivided and plan.microbatches > 1 and training:
        wrong = f"the backward of {trace.undivided[0]} is not linear, and each microbatch has a part of its gradient"
        raise ConfigError.on("microbatches", wrong, "microbatches = 1")
