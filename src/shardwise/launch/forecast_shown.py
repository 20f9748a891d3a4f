"""Show a forecast: its plan in two lines, and the memory that a rank needs."""

from __future__ import annotations

from shardwise.estimate.predict import Prediction
from shardwise.estimate.timeline import by_category
from shardwise.report.memory import MemoryProfile
from shardwise.report.tables import count, plural, size

from .forecast import Forecast


def account(prediction: Prediction) -> MemoryProfile:
    """Return a prediction as the account that is shown, stored and drawn."""
    moments = prediction.timeline.moments
    return MemoryProfile(
        prediction.rank, tuple(str(one) for one in prediction.timeline.instructions),
        tuple({c.value: n for c, n in moment.peak.items()} for moment in moments),
        {c.value: n for c, n in by_category(prediction.persistent).items()}, prediction.timeline.at, prediction.at,
        prediction.host_bytes,
    )  # fmt: skip


def servers(forecast: Forecast) -> str:
    """Return the memory of the largest of the servers that are processes beside the workers."""
    workers, number = forecast.plan.serving.workers, len(forecast.servers)
    one = max(forecast.servers, key=lambda one: one.total(workers))
    words = {"parameters": one.states.parameters, "gradients": one.states.gradients, "optimizer": one.states.optimizer,
             "versions of rows": one.versions, "pushes under way": workers * one.push}  # fmt: skip
    parts = ", ".join(f"{what} {size(n)}" for what, n in words.items() if n)
    return f"{number} beside {plural(workers, 'worker')}, {size(one.total(workers))} each: {parts}"


def headline(forecast: Forecast) -> str:
    """Return two lines: the model with its devices, and the plan."""
    config, plan, dp = forecast.config, forecast.plan, forecast.config.parallel
    model = (
        config.model.name
        or config.model.transformers
        or config.model.pretrained
        or str(config.model.factory).rpartition(":")[2]
    )
    number = count(sum(p.numel() for p in forecast.compiled.module.parameters()))
    stage = f"ZeRO-{dp.zero}" if dp.zero else "replicated"
    words = [f"{plan.pipeline.schedule} pipelines of {dp.pp} ranks"] if dp.pp > 1 else []
    words += [f"{plan.tensor.chosen_by} over {dp.tp} ranks"] if dp.tp > 1 else []
    words += [stage, f"{config.rows_of_step} rows", plural(plan.microbatches, "microbatch")]
    words += [plan.numeric.precision]
    words += [f"recompute {plan.memory.recompute}"] if plan.memory.recompute != "none" else []
    words += [f"gathered {plan.data.gathered}"] if dp.zero == 3 else []
    words += [f"reduced by {plan.data.reduced}"] if dp.zero >= 2 and plan.microbatches > 1 else []
    words += ["optimizer on the host"] if plan.memory.offloads_optimizer else []
    return f"{model}, {number} parameters, on {plan.mesh.size} x {forecast.device.name}\n{', '.join(words)}"
