"""Parity: what the traced local graphs compute on thread ranks, against the plain module under ordinary autograd."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.layout import rank_rows
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.measure.storage_tracker import StorageTracker
from shardwise.parallel.data import batch_axes
from shardwise.runtime.engine import Engine
from shardwise.runtime.threads import ThreadCommunicator, run_ranks
from shardwise.units.trace import Trace
from shardwise.verify.oracle import Oracle, plain_optimizer
from shardwise.verify.verify import in_pieces

TOLERANCE = 1e-10
Fields = Mapping[str, Tensor]
Loss = Callable[[Any, Fields], Tensor]


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


class Unseen:
    """A communicator whose own copies trackers do not count, since other communicators make none; its buffers do count.

    ``trackers`` may change; without any it is the communicator.
    """

    def __init__(self, one: Any, trackers: list[StorageTracker]) -> None:
        self.one, self.trackers = one, trackers

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.one, name)
        if name == "host":
            return Unseen(value, self.trackers)
        if name not in (*COLLECTIVES, "push", "send", "receive", "wait"):
            return value

        def unseen(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as paused:
                for tracker in self.trackers:
                    paused.enter_context(tracker.paused())
                found = value(*args, **kwargs)
            return None if found is None else Unseen(found, self.trackers)

        return unseen


@dataclass
class Run:
    """What some steps of a training gave: a loss for each, the last step's gradients, and the state after the last."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass
class Subject:
    """A module, its batch and its traces, made once and shared by all runs of a test."""

    module: nn.Module
    batch: Fields
    loss: Loss | None = None
    dropout: str = "exact"
    training: bool = True
    compiled: dict[tuple[int, int, str], Compiled] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = self.module.double().train(self.training)
        self.batch = {k: v.double() if v.is_floating_point() else v for k, v in self.batch.items()}

    @property
    def trace(self) -> Trace:
        """The trace for any batch."""
        return self.compile(1, 1, "none").general

    def compile(self, dp: int, microbatches: int, recompute: str) -> Compiled:
        """The model under a plan."""
        key = (dp, microbatches, recompute)
        if key not in self.compiled:
            how = {"recompute": recompute, "precision": "fp64", "dropout": self.dropout}
            plan = Plan.of(Mesh.of(dp=dp), microbatches=microbatches, **how)
            traces = next((c._traces for c in self.compiled.values()), {})
            self.compiled[key] = Compiled(
                self.module, plan, self.batch, self.loss, training=self.training, _traces=traces
            )
        return self.compiled[key]


def sharded_run(
    subject: Subject, dp: int, microbatches: int = 1, recompute: str = "none", rows: int | None = None,
    steps: int = 1, optimizer: OptimizerChoice | None = None, seed: int = 0,
) -> Run:  # fmt: skip
    """Train on ``dp`` thread ranks; checks that all of them end up with the same numbers."""
    return planned_run(subject.compile(dp, microbatches, recompute), subject.batch, rows, steps, optimizer, seed)


def planned_run(
    compiled: Compiled, batch: Fields, rows: int | None = None, steps: int = 1,
    optimizer: OptimizerChoice | None = None, seed: int = 0,
) -> Run:  # fmt: skip
    """Train by the plan of ``compiled`` on thread ranks; checks that all of them end up with the same numbers."""
    count = next(iter(batch.values())).shape[0] if rows is None else rows
    choice, plan = optimizer or OptimizerChoice("sgd", lr=0.0), compiled.plan

    def rank(comm: ThreadCommunicator) -> Run:
        engine = Engine(compiled, comm, choice, seed=seed, strict=True)
        kept: list[dict[str, Tensor]] = []
        engine.interpreter.keep_gradients = kept
        axes = batch_axes(plan.mesh)
        ranges = rank_rows(
            count, min(plan.microbatches, count), plan.mesh.axis_size(axes), plan.mesh.index(comm.rank, axes)
        )
        mine = [i for a, b in ranges for i in range(a, b)]
        losses = [float(engine.step({k: v[mine] for k, v in batch.items()}, count).loss) for _ in range(steps)]
        return Run(losses, kept[-1], engine.state_dict())

    runs = run_ranks(compiled.plan.mesh, rank, timeout=60)
    for other in runs[1:]:
        assert other.losses == runs[0].losses or all(map(math.isnan, (*other.losses, *runs[0].losses)))
        assert _worst(other.gradients, runs[0].gradients)[0] <= 1e-14, "ranks disagree on a gradient"
        assert _worst(other.state, runs[0].state)[0] <= 1e-14, "ranks disagree on the state"
    return runs[0]


def plain_run(subject: Subject, rows: int | None = None) -> Run:
    """Forward and backward of a copy of the module, with nothing of shardwise in between."""
    module = copy.deepcopy(subject.module)
    fields = {k: v[:rows] for k, v in subject.batch.items()}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        output = module(**fields)
        loss = subject.loss(output, fields) if subject.loss else output
        loss = loss if isinstance(loss, Tensor) else loss.loss
        loss.backward()
    finally:
        torch.set_default_dtype(before)
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return Run([float(loss)], gradients, {k: v.detach() for k, v in module.state_dict().items()})


def oracle_run(
    subject: Subject, microbatches: int = 1, rows: int | None = None, steps: int = 1,
    optimizer: OptimizerChoice | None = None,
    seed: int = 0,
) -> Run:  # fmt: skip
    """As ``plain_run``, with an optimizer and keyed random functions; microbatches are apart where the plan's are."""
    choice, pieces = optimizer or OptimizerChoice("sgd", lr=0.0), in_pieces(subject.compile(1, microbatches, "none"))
    oracle = Oracle(
        subject.module,
        subject.loss,
        plain_optimizer(choice),
        seed=seed,
        group_of=choice.group_of,
        microbatches=pieces.microbatches,
        parts=pieces.parts,
    )
    fields = {k: v[:rows] for k, v in subject.batch.items()}
    taken = [oracle.step(fields, choice.learning_rate(s)) for s in range(steps)]
    values = {**taken[-1].parameters, **taken[-1].buffers}
    state = {k: values[k] for k in subject.module.state_dict() if k in values}
    return Run([t.loss for t in taken], taken[-1].gradients, state)


ROUNDING = 1e-14  # a tensor that is smaller than this beside all others of its kind is zero but for rounding


def errors(ours: Run, truth: Run) -> dict[str, float]:
    """Relative errors by name: of losses, gradients and, where both have it, state.

    A tensor's error is against the larger of its own norm and 1e-6 of the norm of all, or against the norm of all where
    it is zero but for rounding; a gradient that one side lacks is infinitely wrong, and so is what is not finite on one
    side only.
    """
    found: dict[str, float] = {}
    for i, (a, b) in enumerate(zip(ours.losses, truth.losses, strict=True)):
        found[f"loss {i}"] = (
            0.0 if a == b or (math.isnan(a) and math.isnan(b)) else _finite(abs(a - b) / max(abs(b), 1e-30))
        )
    for what, mine, theirs in (("gradient", ours.gradients, truth.gradients), ("state", ours.state, truth.state)):
        norm = math.sqrt(
            sum(float(v.double().norm()) ** 2 for v in theirs.values() if bool(v.double().isfinite().all()))
        )
        names = mine.keys() | theirs.keys() if what == "gradient" else mine.keys() & theirs.keys()
        for name in names:
            found[f"{what} {name}"] = (
                _error(mine[name], theirs[name], norm) if name in mine and name in theirs else math.inf
            )
    return found


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def _error(mine: Tensor, theirs: Tensor, norm: float) -> float:
    """Return the error of a tensor, given the norm of all of its kind."""
    if mine.shape != theirs.shape:
        return math.inf
    if torch.equal(mine, theirs) or torch.equal(mine.isnan(), theirs.isnan()) and bool(mine.isnan().all()):
        return 0.0
    difference, size = float((mine.double() - theirs.double()).norm()), float(theirs.double().norm())
    least = norm if size <= ROUNDING * norm else 1e-6 * norm
    return _finite(difference / max(size, least, 1e-30))


def _worst(mine: Fields, theirs: Fields) -> tuple[float, str]:
    assert mine.keys() == theirs.keys()
    norm = math.sqrt(sum(float(v.double().norm()) ** 2 for v in theirs.values()))
    return max(((_error(mine[n], theirs[n], norm), n) for n in mine), default=(0.0, ""))


def parity(
    module: nn.Module | Subject, batch: Fields | None = None, loss: Loss | None = None, *,
    dp: Iterable[int] | int = (2, 3),
    rows: Iterable[int | None] = (None,), microbatches: int = 1, recompute: str = "none", keyed: bool = False,
    steps: int = 1, optimizer: OptimizerChoice | None = None, dropout: str = "exact", training: bool = True,
    tolerance: float = TOLERANCE, opaque: bool = False,
) -> Trace:  # fmt: skip
    """Assert that the traced module computes what the plain one does, for every ``dp`` and number of ``rows`` (None:
    all).

    ``keyed``, microbatches and steps ask for the oracle of ``shardwise.verify`` as the truth, else it is plain
    autograd.  Returns the trace, for further questions.
    """
    subject = module if isinstance(module, Subject) else Subject(module, batch or {}, loss, dropout, training)
    if not opaque:
        assert subject.trace.opaque is None, subject.trace.opaque
    for count in rows:
        if keyed or microbatches > 1 or steps > 1 or optimizer is not None:
            pieces = microbatches if count is None else min(microbatches, count)
            truth = oracle_run(subject, pieces, count, steps, optimizer)
        else:
            truth = plain_run(subject, count)
        for size in (dp,) if isinstance(dp, int) else dp:
            ours = sharded_run(subject, size, microbatches, recompute, count, steps, optimizer)
            found = errors(ours, truth)
            worst = max(found, key=lambda n: found[n])
            assert found[worst] <= tolerance, f"dp {size}, rows {count}: {worst} is off by {found[worst]:.1e}"
    return subject.trace
