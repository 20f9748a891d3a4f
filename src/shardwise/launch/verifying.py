"""``python -m shardwise.launch.verifying RUN_DIR`` runs one rank of ``shardwise verify --ranks-as processes``."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.report.files import CONFIG

from .rank import rank_process

PUSHES = 4  # the number of batches for each worker of servers apart
MEETING_STEPS = 3  # the number of steps after which islands meet in a verification, if that is fewer than the plan's

if TYPE_CHECKING:
    import torch

    from shardwise.config import Config
    from shardwise.core.optim import OptimizerChoice
    from shardwise.core.plan import Plan
    from shardwise.lower.compiled import Compiled
    from shardwise.runtime.communicator import Communicator
    from shardwise.verify.verify import Report, VerifiedStep


def verify_config(config: Config, comm: Communicator | None = None, device: torch.device | None = None) -> Report:
    """Verify what ``config`` describes; with ``comm`` this process is one rank, else all ranks are threads of it.

    The threads and the single-device run that they are compared with compute on ``device``, by default the CPU.
    """
    from shardwise.verify.verify import OVERLAPPING_STEPS, STEPS, verify

    from .subject import compiled_here, depends_on_device, subject, with_device_choices

    with config.answering():
        found = subject(config, STEPS)
        plan, note = found.plan, None
        if plan.overlaps:
            found = subject(config, OVERLAPPING_STEPS)
        if plan.local.steps:
            plan, note = meeting_often(plan)
            found = replace(subject(config, 2 * plan.local.steps + 1), plan=plan)
        if plan.serving.apart:
            found = subject(config, PUSHES * plan.serving.workers)
        captured = None
        if depends_on_device(config) or device is not None:
            captured = with_device_choices(config, compiled_here(config, found, device=device))
            plan = meeting_often(captured.plan)[0]
        report = verify(
            found.module,
            found.batches,
            plan,
            loss=found.loss,
            optimizer=_averaging(config, plan),
            clip_norm=config.train.clip_norm or None,
            clip_value=config.train.clip_value,
            seed=config.train.seed,
            run=None if comm is None else _one_rank(comm),
            captured=captured,
        )
        report.notes += [] if note is None else [note]
        return report


def _averaging(config: Config, plan: Plan) -> OptimizerChoice | None:
    """Return the optimizer of a verification with the average of the config's, which begins and counts soon enough for
    a short run; None without one."""
    from shardwise.config import build_optimizer
    from shardwise.verify.verify import optimizer_for

    if config.optimizer.ema is None:
        return None
    chosen = build_optimizer(config)
    start, every = min(chosen.ema_start, 1), min(chosen.ema_every, 2)
    return replace(optimizer_for(plan), ema=chosen.ema, ema_start=start, ema_every=every, ema_warmup=chosen.ema_warmup)


def meeting_often(plan: Plan) -> tuple[Plan, str | None]:
    """Return a plan whose islands, if there are any, meet after so few steps that a short run sees them meet, with a
    note if these are fewer than the plan's."""
    local = plan.local
    steps = min(local.steps, max(MEETING_STEPS, local.fragments))
    if steps == local.steps:
        return plan, None
    note = f"the plan's islands meet every {local.steps} steps, of which a short run would see nothing"
    return plan.replace(local_steps=steps), note


def _one_rank(
    comm: Communicator,
) -> Callable[[Compiled, Callable[[Communicator], list[VerifiedStep]]], list[list[VerifiedStep]]]:
    """Return a function that runs this rank alone and gathers what the other ranks have last, which must agree."""
    import torch

    from shardwise.core.communicators import CONTROL
    from shardwise.verify.verify import VerifiedStep

    def run(compiled: Compiled, rank: Callable[[Communicator], list[VerifiedStep]]) -> list[list[VerifiedStep]]:
        mine = rank(comm)
        size = comm.mesh.size
        last = [VerifiedStep(math.nan, math.nan, {}, {}, {}) for _ in range(size)]
        for kind in ("parameters", "buffers", "averages"):
            for name, value in getattr(mine[-1], kind).items():
                own = value.contiguous().flatten().view(torch.uint8)
                gathered = torch.empty(size * own.numel(), dtype=torch.uint8)
                what = f"{name} of {kind}"
                comm.host.all_gather(gathered, own, comm.mesh.names, lane=CONTROL, what=what).wait()
                for one, part in zip(last, gathered.view(size, -1), strict=True):
                    getattr(one, kind)[name] = part.view(value.dtype).view(value.shape)
        others = [[one] for index, one in enumerate(last) if index != comm.rank]
        return [mine, *others]

    return run


def main() -> None:
    """Verify as the rank that torchrun's environment variables name; rank 0 writes ``report.json``."""
    run_dir = Path(sys.argv[1])
    with rank_process(run_dir) as progress:
        import torch

        from shardwise.config import build_plan, load_config
        from shardwise.runtime.connect import connect

        from .results import write_json

        config = load_config(run_dir / CONFIG)
        torch.set_num_threads(config.train.threads)
        comm = connect(build_plan(config).mesh, torch.device("cpu"), on_wait=progress.wait)
        try:
            report = verify_config(config, comm)
        finally:
            comm.close()
        if comm.rank == 0:
            write_json(run_dir / "report.json", report.to_dict())


if __name__ == "__main__":
    main()
