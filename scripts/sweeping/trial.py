"""The trial of one model: it trains in plain torch, and then each plan is held against one device by ``verify``."""

from __future__ import annotations

import copy
import math
import re
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.capture.wrapped import WithLoss
from shardwise.core.errors import ShardwiseError
from shardwise.lower.compiled import Compiled
from shardwise.verify.verify import verify
from sweeping.case import Case, Entry
from sweeping.outcome import CRASH, PASSES, PLAIN, REFUSED, TRAINS, UNTRAINED, WRONG, Outcome
from sweeping.plans import ALONE, plans

EXPERT = re.compile(r"expert", re.IGNORECASE)


def trial(entry: Entry, only: Callable[[str], bool] = lambda plan: True) -> Iterator[Outcome]:
    """Return what the model does in plain torch, and then under each plan that ``only`` says, one after the other."""
    start = time.perf_counter()
    try:
        case = entry.make()
        train_plainly(case)
    except Exception as error:
        yield Outcome(entry.name, PLAIN, UNTRAINED, said(error), seconds=since(start))
        return
    count = sum(p.numel() for p in case.module.parameters())
    yield Outcome(entry.name, PLAIN, TRAINS, seconds=since(start), parameters=count)
    wanted = {name: plan for name, plan in plans().items() if only(name)}
    if not wanted:
        return
    start = time.perf_counter()
    try:
        captured = Compiled(case.module, ALONE, case.batches[0], case.loss, loss_weight=case.weight)
    except Exception as error:
        for name in wanted:
            yield failed(entry.name, name, error, start)
        return
    seconds = since(start)
    for name, plan in wanted.items():
        yield under(entry.name, name, plan, case, captured, seconds)


def train_plainly(case: Case) -> None:
    """Train a copy of the model for two steps in plain torch; raises where that fails or its loss is not finite."""
    module = copy.deepcopy(case.module)
    learning = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-3)
    wrapped = WithLoss(module, case.loss)
    for step, batch in enumerate(case.batches):
        loss = wrapped(batch)
        if not math.isfinite(value := float(loss.detach())):
            raise ValueError(f"the loss of step {step} is {value}")
        if not loss.requires_grad:
            raise ValueError("the loss depends on no parameter")
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in learning if p.grad is not None]))
        if not math.isfinite(norm):
            raise ValueError(f"the gradient of step {step} has norm {norm}")
        optimizer.step()
        optimizer.zero_grad()


def under(model: str, name: str, plan: Any, case: Case, captured: Compiled, seconds: float) -> Outcome:
    """Hold a plan against one device."""
    start = time.perf_counter()
    try:
        report = verify(case.module, case.batches, plan, loss=case.loss, captured=captured)
        compiled = captured.under(plan)
    except Exception as error:
        found = failed(model, name, error, start)
        found.capture, found.opaque = seconds, captured.general.opaque
        return found
    opaque = compiled.general.opaque
    found = Outcome(
        model, name, PASSES if report.passed else WRONG, "", report.largest, since(start), seconds, opaque=opaque
    )
    if not report.passed:
        worst = report.worst[0] if report.worst else None
        agree = "" if report.ranks_agree else "; ranks have different parameters after the step"
        found.text = f"{worst}{agree}"
    if compiled.general.tensor:
        found.sharded, found.whole = share_sharded(compiled, case.module), left_whole(compiled)
    return found


def share_sharded(compiled: Compiled, module: nn.Module) -> float | None:
    """Return the share of the elements of parameters outside of experts that tensor parallelism shards; None if there
    are none."""
    own = [p for p in compiled.general.parameters if not EXPERT.search(p.name)]
    total = sum(p.numel for p in own)
    return round(sum(p.numel for p in own if p.axes) / total, 4) if total else None


def left_whole(compiled: Compiled) -> dict[str, int]:
    """Return the ops that every rank computes whole, with how often."""
    found: dict[str, int] = {}
    for op, _ in compiled.general.replicated:
        found[op] = found.get(op, 0) + 1
    return found


def failed(model: str, plan: str, error: BaseException, start: float) -> Outcome:
    """Return a refusal, by an error that shardwise raises on purpose, or a crash."""
    refused = isinstance(error, ShardwiseError)
    return Outcome(model, plan, REFUSED if refused else CRASH, said(error, not refused), seconds=since(start))


def said(error: BaseException, where: bool = True) -> str:
    """Return an error in a line, with where it was raised."""
    text = " ".join(str(error).split())
    if not where:
        return text[:1500]
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{_short(f.filename)}:{f.lineno}" for f in frames if "shardwise" in f.filename][-2:] + [
        f"{_short(frames[-1].filename)}:{frames[-1].lineno}"
    ]
    return f"{type(error).__name__}: {text[:1000]} ({' > '.join(dict.fromkeys(places))})"


def _short(path: str) -> str:
    for root in ("/site-packages/", "/src/", "/scripts/"):
        if root in path:
            return path.rpartition(root)[2]
    return path


def since(start: float) -> float:
    """Return the seconds since ``start``."""
    return round(time.perf_counter() - start, 2)
