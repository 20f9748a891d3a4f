"""The part "memory": the predicted bytes of a step beside the measured ones, and the rows that are predicted to fit
beside those that do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from shardwise.backend import Backend
from shardwise.estimate.devices import Reserve
from shardwise.report.tables import size
from task import Task, divided

from .contenders import task_for
from .fast import environment
from .parts import Part, in_child

PLANS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    "offload of the optimizer": {"offload": "optimizer"},
}
ON_GPUS: dict[str, dict[str, Any]] = {"offload of activations": {"offload": "activations"}}
EXACT = 0.005  # the largest relative error of the peak on a CPU, whose table of kernels is tested to the byte
CLOSE = 0.05  # the same on a card
TINY_BUDGET = 3 * 2**20  # bytes that stand for a card's memory on a CPU
MORE_ROWS = 1.3  # up to this multiple of the predicted rows it is tried whether more fit


def sized(device: str, tiny: bool) -> Task:
    """Return the task; its rows are short, so that the number of rows that fit is large enough to compare."""
    task = task_for(device, tiny)
    return task if tiny else replace(task, sequence=1024, rows=4)


def memory(part: Part) -> None:
    """Predict and measure every plan in a process of its own; then look for the most rows."""
    options = part.options
    plans = {**PLANS, **(ON_GPUS if options.gpu else {})}
    part.figures["plans"] = {}
    common = {"device": options.device, "tiny": options.tiny}
    for name, changes in plans.items():
        if not part.time_for(f"memory of {name}", 20.0 if options.tiny else 75.0):
            continue
        with part.guarded(f"memory of {name}"):
            found = in_child(
                "gpu.memory:one_step", min(part.left, 200.0), environment(options.device), changes=changes, **common
            )
            part.figures["plans"][name] = found
            _judge(part, name, found)
    for name in ("none", "full") if not options.tiny else ("none",):
        if part.time_for(f"the rows that fit, {name}", 20.0 if options.tiny else 90.0):
            with part.guarded(f"the rows that fit, {name}"):
                found = in_child(
                    "gpu.memory:rows_that_fit", min(part.left, 240.0), environment(options.device), changes=plans[name],
                    within=min(part.left, 240.0) * 0.7, **common,
                )  # fmt: skip
                part.figures.setdefault("rows", {})[name] = found
                words = f"{found['predicted']} predicted, {found['fitted']} ran, {found['refused'] or 'none'} did not"
                what = f"the rows that are predicted to fit do, {name}"
                if found["predicted"]:
                    part.check(what, found["predicted"] <= found["fitted"], words)
                else:
                    part.leave_out(what, "no row is predicted to fit, so none ran")


def _judge(part: Part, name: str, found: dict[str, Any]) -> None:
    predicted, measured = found["predicted"], found["measured"]
    states = all(predicted["states"][kind] == measured["states"][kind] for kind in measured["states"])
    part.check(f"model states of {name} are as predicted", states, size(sum(measured["states"].values())))
    apart = measured["peak"] / predicted["peak"] - 1
    limit = CLOSE if part.options.gpu else EXACT
    words = f"predicted {size(predicted['peak'])}, measured {size(measured['peak'])}, {apart:+.2%}"
    part.check(f"the peak of {name} is as predicted, within {limit:.1%}", abs(apart) <= limit, words)
    beside, assumed = measured.get("beside_the_allocator"), Reserve().context
    if beside is not None:
        words = f"assumed {size(assumed)}, measured {size(beside)}"
        part.check(
            f"beside the allocator {name} takes no more than `shardwise memory` assumes", beside <= assumed, words
        )


def one_step(device: str, tiny: bool, changes: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's bytes in its second step by category, between steps and at the peak, predicted and measured."""
    from shardwise.data.loader import Batch
    from shardwise.launch.forecast_shown import account
    from shardwise.launch.measuring import StepMemory

    task = sized(device, tiny)
    place = task.place
    backend = Backend.of(place)
    trainer, given = divided(0, 1, task=task, changes=changes)
    expected = account(predictor(trainer)(task.rows))
    host = {name: value.cpu() for name, value in given.fields.items()}
    given = Batch(host, given.rows, given.starts, given.counts)  # on the host, as a loader gives it
    trainer.step(given)
    with StepMemory(trainer.engine, str) as source:
        batch = source.taking(iter([given]))
        trainer.engine.step(batch.fields, batch.rows)
    seen = source.account()
    categories = ("parameters", "gradients", "optimizer")
    found: dict[str, Any] = {
        "predicted": {
            "states": {c: expected.between.get(c, 0) for c in categories},
            "peak": expected.peak_bytes,
            "at": expected.where,
        },
        "measured": {"states": {c: seen.between[c] for c in categories}, "peak": seen.peak_bytes, "at": seen.where},
    }
    for one, bytes_at in (("predicted", expected.peak), ("measured", seen.peak)):
        found[one]["categories"] = {name: int(n) for name, n in bytes_at.items() if name != "reserve"}
    found["measured"]["reserve"] = int(seen.peak.get("reserve", 0))
    if (
        backend.asynchronous
    ):  # the driver counts all processes together: context, libraries, and other processes if there are any
        backend.synchronize(place)
        free, total = backend.free_and_total(place)
        found["measured"] |= {
            "taken_of_the_card": total - free,
            "beside_the_allocator": total - free - backend.reserved(place),
        }
    return found


def predictor(trainer: Any) -> Callable[[int], Any]:
    """Return a function from the rows of a batch to the prediction for a Trainer's plan."""
    from shardwise.estimate.predict import predict

    compiled, choice = trainer.compiled, trainer.engine.optimizer
    kind = Backend.of(trainer.comm.device).kind
    return lambda rows: predict(lambda count: compiled.trace((), count), compiled.plan, choice, rows=rows, device=kind)


def rows_that_fit(device: str, tiny: bool, changes: dict[str, Any], within: float) -> dict[str, Any]:
    """Return the most rows that are predicted to fit, and the most that run; more are tried for ``within`` seconds or
    until some do not run.

    On a CPU a budget stands for the card's memory, and the measured peak of a step says whether it would fit.
    """
    from shardwise.estimate.devices import here

    end = time.monotonic() + within
    task = sized(device, tiny)
    place = task.place
    backend = Backend.of(place)
    card = here(place)
    budget = card.budget - sum(card.beside(()).values()) if backend.asynchronous else TINY_BUDGET
    trainer, _ = divided(0, 1, task=task, changes=changes)
    predict = predictor(trainer)
    predicted = most(lambda rows: predict(rows).peak_bytes <= budget)
    runs = Runs(trainer, task, budget)
    fitted, refused = 0, None
    more = sorted({round(predicted * factor) for factor in (1.05, 1.1, 1.2, MORE_ROWS)} - {predicted})
    for rows in [predicted, *more] if predicted else []:
        if fitted and time.monotonic() > end:
            break
        if not runs(rows):
            refused = rows
            break
        fitted = rows
    for factor in (0.95, 0.9, 0.8, 0.6) if not fitted else ():  # where the predicted rows do not fit, try fewer
        rows = int(predicted * factor)
        if rows and time.monotonic() < end and runs(rows):
            fitted = rows
            break
    return {
        "budget": budget,
        "predicted": predicted,
        "fitted": fitted,
        "refused": refused,
        "peak": predict(max(predicted, 1)).peak_bytes,
    }


class Runs:
    """A test whether a step with some rows runs in the card's memory, or on a CPU within a budget in bytes."""

    def __init__(self, trainer: Any, task: Task, budget: int) -> None:
        self._trainer, self._task, self._budget = trainer, task, budget

    def __call__(self, rows: int) -> bool:
        from shardwise.data.loader import Batch
        from shardwise.launch.measuring import StepMemory

        place = self._task.place
        host = replace(self._task, rows=rows, device="cpu").batch([0])
        given = Batch(host, rows, (0,), (rows,))
        if Backend.of(place).asynchronous:
            with suppress(torch.OutOfMemoryError):
                self._trainer.engine.step(given.fields, given.rows)
                Backend.of(place).synchronize(place)
                return True
            torch.accelerator.empty_cache()
            return False
        self._trainer.engine.step(given.fields, given.rows)
        with StepMemory(self._trainer.engine, str) as source:
            batch = source.taking(iter([given]))
            self._trainer.engine.step(batch.fields, batch.rows)
        return source.account().peak_bytes <= self._budget


def most(fits: Callable[[int], bool], limit: int = 1 << 14) -> int:
    """Return the largest number that fits, if all below a number do and none above; 0 where not even 1 does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
