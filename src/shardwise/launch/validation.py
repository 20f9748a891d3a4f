"""What a run's evaluations decide: which checkpoint is the best one, and when to stop."""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from typing import Any

from shardwise.checkpoint.folder import checkpoints, step_of
from shardwise.config import build_metrics
from shardwise.core.errors import ConfigError, did_you_mean
from shardwise.core.metrics import PERPLEXITY, Watch, goal_of
from shardwise.report.files import BEST, EVALUATIONS, begins_anew
from shardwise.runtime.communicator import host_gather_bytes
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.metrics import Metric

from .evaluation import evaluated
from .folder import CHECKPOINTS, read_lines
from .ready import Ready
from .results import append_line, write_json
from .subject import example_of

log = logging.getLogger("shardwise")

Values = dict[str, Any]


@dataclass
class Validation:
    """The evaluations of a run; all ranks have the same ``history`` of them, and so decide the same."""

    run: Ready
    metrics: list[Metric]
    best: Watch | None
    stop: Watch | None
    history: list[Values] = field(default_factory=list)
    _named: int = -1  # on rank 0, which saves: the step of the checkpoint that best.json names

    @staticmethod
    def of(run: Ready) -> Validation:
        """Return the evaluations of a run of which there are none yet."""
        config = run.config
        watch = config.validation.watch if config.validation.patience is not None else None
        best = config.checkpoint.best
        return Validation(
            run,
            build_metrics(config, run.module) if run.data.validation is not None else [],
            None if best is None else Watch(best, goal_of(best, config.checkpoint.goal)),
            None if watch is None else Watch(watch, goal_of(watch, config.validation.goal)),
        )

    def resume(self, checkpoints: Checkpoints, first: int) -> None:
        """Go on with step ``first``, after the evaluations that the run has had before it; all ranks call it together.

        Until that step has worked, the folder may have those of an earlier run, or of later steps.
        """
        trainer, folder = self.run.trainer, self.run.folder
        reads = trainer.comm.rank == 0 and not begins_anew(folder)
        mine = [one for one in read_lines(folder / EVALUATIONS) if one["step"] <= first] if reads else []
        found = host_gather_bytes(trainer.comm, json.dumps(mine).encode(), "the earlier evaluations")
        self.history = json.loads(found[0])
        if reads:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._named = int(json.loads((folder / BEST).read_text(encoding="utf-8"))["step"])
        self._choose(checkpoints)
        if (self.metrics or self.best or self.stop) and self.run.config.validation.every:
            self._try()

    def _try(self) -> None:
        """Measure one batch before the first step, so that a metric that fails, or that no evaluation has, is known at
        once."""
        found = self.measure(self.run.trainer.engine.step_index, 1)
        if self.run.data.decode is not None:
            found.setdefault(PERPLEXITY, None)  # which a batch without targets has not
        for key, watch in (("checkpoint.best", self.best), ("validation.watch", self.stop)):
            if watch is not None and watch.metric not in found:
                names = ", ".join(name for name in found if name not in ("step", "rows", "seconds"))
                hint = f".{did_you_mean(watch.metric, found)}"
                raise ConfigError.on(f'{key} = "{watch.metric}"', "no evaluation has it", names, hint)

    def due(self, done: int) -> bool:
        """Return whether the model is to be evaluated after ``done`` steps."""
        every = self.run.config.validation.every
        if not every or self.run.data.validation is None:
            return False
        return done % every == 0 or done == self.run.config.train.steps

    def measure(self, done: int, most: int | None) -> Values:
        """Return what an evaluation finds after ``done`` steps, on at most so many batches; all ranks call it."""
        run, trainer = self.run, self.run.trainer
        run.side.progress.phase(f"evaluating after step {done - 1}")
        dataset = run.data.validation
        batches = trainer.one_pass(dataset, run.config.data.batch_size, most)
        with trainer.averaged() if run.config.validation.ema else contextlib.nullcontext():
            found = evaluated(
                trainer, batches, self.metrics, example_of(dataset), perplexity=run.data.decode is not None
            )
        return {"step": done, **found}

    def evaluate(self, done: int) -> Values:
        """Evaluate after ``done`` steps, and return what was found; rank 0 writes it down."""
        run = self.run
        found = self.measure(done, run.config.validation.batches)
        # The seconds differ from rank to rank, and decide nothing.
        self.history.append(found)
        if run.trainer.comm.rank == 0:
            append_line(run.folder / EVALUATIONS, found, run.side.tell)
            log.info("after step %d: %s", done, ", ".join(f"{name} {value}" for name, value in found.items()))
        return found

    def bettered(self, checkpoints: Checkpoints) -> bool:
        """Return whether the last evaluation is the best one by now, whose checkpoint is to be kept."""
        return self._choose(checkpoints) == len(self.history) - 1 >= 0

    def _choose(self, checkpoints: Checkpoints) -> int | None:
        """Have the checkpoint of the best evaluation kept, and the one that is named the best until that one is on
        disk, for it may never get there; return the place of the best evaluation."""
        found = None if self.best is None else self.best.best(self.history)
        if found is not None:
            checkpoints.keep(self.history[found]["step"], self._named)
        return found

    def saved(self, step: int) -> None:
        """Write down, as rank 0, the checkpoint of ``step``, if it is on disk and that of the best evaluation."""
        found = None if self.best is None else self.best.best(self.history)
        if self.best is None or found is None or self.history[found]["step"] != step or self._named == step:
            return
        folder = self.run.folder
        there = [path for path in checkpoints(folder / CHECKPOINTS) if step_of(path) == step]
        if self.run.trainer.comm.rank == 0 and there:
            best, self._named = self.history[found], step
            values = {"step": step, "metric": self.best.metric, "goal": self.best.goal}
            values |= {"value": best[self.best.metric], "checkpoint": f"{CHECKPOINTS}/{there[-1].name}"}
            write_json(folder / BEST, values)

    def settled(self) -> None:
        """Write down the best of the earlier evaluations: a run that was killed while it saved may not have done it."""
        place = None if self.best is None else self.best.best(self.history)
        if place is not None:
            self.saved(int(self.history[place]["step"]))

    def stopped(self) -> Values | None:
        """Return why training ends now, or None if it goes on."""
        patience = self.run.config.validation.patience
        if self.stop is None or patience is None or self.stop.without_gain(self.history) < patience:
            return None
        place = self.stop.best(self.history)
        best = {} if place is None else self.history[place]
        return {
            "metric": self.stop.metric,
            "best": best.get(self.stop.metric),
            "best_step": best.get("step"),
            "step": self.history[-1]["step"],
            "evaluations": patience,
        }
