"""Run one rank: its steps, evaluations, samples and checkpoints, and what they leave in the run's folder."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from shardwise import __version__
from shardwise.backend import Backend
from shardwise.core.metrics import LOSS, PERPLEXITY
from shardwise.data.loader import Batch
from shardwise.data.stream_loader import AnyLoader
from shardwise.estimate.predict import describe
from shardwise.lower.versions import steady_batches
from shardwise.report.files import (
    ADAPTER,
    BEST,
    MEMORY,
    METRICS,
    RESULT,
    SAMPLE,
    SAMPLES,
    WEIGHTS,
    begins_anew,
)
from shardwise.report.observers import Observers
from shardwise.runtime.communicator import host_sum
from shardwise.runtime.progress import LEAVING
from shardwise.runtime.recorder import TRACE, Recorder, trace_name
from shardwise.train.checkpoints import Checkpoints
from shardwise.train.errors import LossScaleError, NonFiniteError
from shardwise.train.expert_loads import expert_loads, in_metrics

from .about import facts, write_about
from .begin import settle
from .folder import CHECKPOINTS, read_lines
from .measuring import StepMemory, write_memory
from .model_folder import keep_pretrained, model_facts, write_models
from .ready import Ready
from .repeatable import repeatable
from .results import (
    Metrics,
    MetricsWriter,
    append_line,
    peak_memory,
    tokens_per_row,
    write_json,
)
from .sampling import Sampler
from .validation import Validation

log = logging.getLogger("shardwise")


@dataclass
class Run(Ready):
    """This is the training of one rank, from its first step to its last."""

    metrics: MetricsWriter | None = None
    utilisation: Callable[[int, float], Metrics] | None = None
    observers: Observers = field(default_factory=Observers)
    stopped_early: dict[str, Any] | None = None
    _settled: bool = False
    _written: list[Path] = field(default_factory=list)
    _to_measure: int = -1  # the first step whose memory may be measured; -1 once it has been

    def train(self) -> bool:
        """Take the steps that are left, and save a checkpoint; return False if asked to stop before the last step."""
        trainer = self.trainer
        loader = trainer.loader(self.data.train, self.config.data.batch_size)
        with loader, self._checkpoints() as checkpoints:
            self.side.progress.phase("looking for a checkpoint")
            first = 0 if self._anew() else checkpoints.restore(loader) or 0
            write_about(self, checkpoints, first)
            same = repeatable(trainer.comm.device, self.config.train.deterministic)
            with self._metrics(first), self._told(checkpoints), same:
                self.validation.resume(checkpoints, first)
                self.stopped_early = self.validation.stopped()
                self._steps(first, loader, checkpoints)
            with self._told(checkpoints):
                if trainer.engine.step_index > first:
                    self._save(checkpoints, loader, wait=True)
        return self.stopped_early is not None or trainer.engine.step_index >= self.config.train.steps

    @cached_property
    def validation(self) -> Validation:
        """Return the run's evaluations."""
        return Validation.of(self)

    def _anew(self) -> bool:
        """Return on all ranks whether the run does not go on with the one that is still in its folder, as rank 0 sees
        it."""
        comm = self.trainer.comm
        mine = torch.tensor([float(comm.rank == 0 and begins_anew(self.folder))])
        return bool(host_sum(comm, mine, "whether the run begins anew").any())

    def _settle(self, first: int) -> None:
        """Make the folder that of this run, now that step ``first`` has worked; only the first call counts."""
        if self._settled:
            return
        self.trainer.finish()
        self.side.progress.phase("making the folder that of this run")
        self._settled, comm = True, self.trainer.comm
        comm.barrier(what="the first step of all ranks")
        if comm.rank == 0:
            for line in settle(self.folder, first):
                self.side.tell(line)
            keep_pretrained(self.config)
            assert self.metrics is not None
            self.observers.tell("on_start", facts(self, first))
            self.metrics.begin((self.folder / METRICS).open("a", encoding="utf-8"))
        comm.barrier(what="the folder that rank 0 makes ready")
        self.validation.settled()

    @contextmanager
    def _told(self, checkpoints: Checkpoints) -> Iterator[None]:
        """Tell an error at once, since what follows it waits for a checkpoint under way and for a device's numbers."""
        try:
            yield
        except Exception as error:
            if checkpoints.under_way:
                self.side.progress.phase(LEAVING)
            if self.side.failed is not None:
                self.side.failed(error)
            raise

    def _steps(self, first: int, loader: AnyLoader, checkpoints: Checkpoints) -> None:
        """Take the steps from ``first`` on; one that is not finite ends the run after saving the weights before it."""
        trainer, step, steps = self.trainer, first, self.config.train.steps
        self._clock = time.perf_counter()
        self._to_measure = next(at for at in count(first + 1) if at not in self.config.train.trace_steps)
        try:
            while step < steps and not trainer.stopping and self.stopped_early is None:
                stop = self._window(step)
                with self._watched(step, stop) as measuring:
                    self._train(step, stop, loader, measuring)
                self._settle(first)
                step = stop
                if self._after(step, checkpoints, loader):
                    self._clock = time.perf_counter()  # what was done since then is no part of the next step
            trainer.finish()
            self._settle(first)  # where no step was left
        except (NonFiniteError, LossScaleError):
            if not self.config.parallel.local_steps:  # of islands one alone is here, and the others wait for it
                self.save_weights()
            raise

    def _window(self, step: int) -> int:
        """Return the end of the window of steps that begins with ``step``: it ends before anything else is due."""
        plan, train = self.trainer.plan, self.config.train
        if not plan.overlaps:
            return step + 1
        every = [n for n in (self.config.checkpoint.every, self.config.validation.every, train.sample_every) if n > 0]
        stop = min(train.steps, step + plan.pipeline.window, *(step + n - step % n for n in every))
        return min(stop, step + steady_batches(plan)) if self._measures(step) and not self._traced(step, stop) else stop

    def _traced(self, step: int, stop: int) -> list[int]:
        return [at for at in self.config.train.trace_steps if step <= at < stop]

    def _measures(self, step: int) -> bool:
        return 0 <= self._to_measure <= step

    def _train(self, step: int, stop: int, loader: AnyLoader, measuring: StepMemory | None) -> None:
        begun = deque[tuple[float, int]]()  # when each batch without a result began, and its number of rows

        def batches() -> Iterator[Batch]:
            for at in range(step, stop):
                self.side.progress.begin(at)
                now = self._clock if at == step else time.perf_counter()
                batch = next(loader) if measuring is None else measuring.taking(loader)
                self.side.progress.batch(batch.rows)
                begun.append((now, batch.of_all))
                if self.side.stop:
                    self.trainer.request_stop()
                yield batch

        for at, result in enumerate(self.trainer.steps(batches(), stop - step), step):
            start, rows = begun.popleft()
            # If batches overlap, their results come late, and several at once.
            end = begun[0][0] if begun else time.perf_counter()
            self._clock = end
            every = self.config.train.expert_load_every
            more = in_metrics(expert_loads(result, self.trainer.comm)) if every and at % every == 0 else {}
            if self.metrics is not None:
                self.metrics.add(at, rows, result, end - start, more)

    @contextmanager
    def _watched(self, step: int, stop: int) -> Iterator[StepMemory | None]:
        """Record the steps from ``step`` to ``stop``, or measure their memory, if it is their turn."""
        if traced := self._traced(step, stop):
            with self._recorded(traced[0], step):
                yield None
            return
        if not self._measures(step):
            yield None
            return
        self._to_measure = -1  # also on ranks that do not measure, since their windows have to be the same
        if self.metrics is None:
            yield None
            return
        with self._measured() as measuring:
            yield measuring

    @contextmanager
    def _recorded(self, step: int, first: int) -> Iterator[None]:
        """Let every rank record when its instructions run in a step, or in its window, which begins with ``first``."""
        trainer, path = self.trainer, self.folder / TRACE / trace_name(self.trainer.comm.rank)
        stages = trainer.engine.cut.stage
        with Recorder(trainer.engine.interpreter, lambda one: stages[one.unit] if one.unit >= 0 else -1) as recorder:
            yield
        self._settle(first)
        self.side.progress.phase(f"writing down what step {step} did when")
        found = recorder.found(step, peak_memory(trainer.comm.device))
        with suppress(OSError):  # append_line warns of the same error
            path.parent.mkdir(exist_ok=True)
        append_line(path, found.to_dict(), self.side.tell)

    @contextmanager
    def _measured(self) -> Iterator[StepMemory]:
        """Measure the memory of a step of rank 0, and write it beside the prediction."""
        trainer, metrics = self.trainer, self.metrics
        if metrics is not None:
            metrics.flush()  # it reads the peak of a GPU, which is reset now
        with StepMemory(trainer.engine, lambda one: describe(one, trainer.compiled.general)) as memory:
            yield memory
        self.side.progress.phase("writing down the memory of a step")
        try:
            write_memory(self.folder / MEMORY, self.forecast, memory.account())
        except OSError as error:
            self.side.tell(f"{self.folder / MEMORY} cannot be written: {error.strerror}; the run goes on")

    def _after(self, done: int, checkpoints: Checkpoints, loader: AnyLoader) -> bool:
        """Do what is due after ``done`` steps (evaluate, sample, save), and return whether anything was."""
        train, every = self.config.train, self.config.checkpoint.every
        last = done == train.steps
        self._log_saved(checkpoints)
        evaluates, best = self.validation.due(done), False
        if evaluates:
            self._evaluate(done)
            best = self.validation.bettered(checkpoints)
            self.stopped_early = self.validation.stopped()
        samples = train.sample_every > 0 and done % train.sample_every == 0 and not last
        if samples:
            self._sample(done)
        saves = (best or (every > 0 and done % every == 0)) and not last
        if saves:
            self._save(checkpoints, loader)
        return evaluates or samples or saves

    def _save(self, checkpoints: Checkpoints, loader: AnyLoader, wait: bool = False) -> None:
        self.side.progress.phase(f"saving a checkpoint after step {self.trainer.engine.step_index - 1}")
        if self.metrics is not None:
            self.metrics.flush()  # a run killed after this checkpoint goes on after these steps
        checkpoints.save(loader)
        if wait:
            checkpoints.wait()
            self._log_saved(checkpoints)

    def _log_saved(self, checkpoints: Checkpoints) -> None:
        for one in checkpoints.poll():
            if one.error is None:
                self.validation.saved(one.step)
                told = {"step": one.step, "path": str(one.path), "bytes": one.nbytes, "seconds": one.seconds}
                self.observers.tell("on_checkpoint", told)
                words = "checkpoint of step %d: %.1f MiB, training stood still for %.3f s, on disk after %.2f s"
                log.info(words, one.step, one.nbytes / 2**20, one.stall_seconds, one.seconds)

    def _evaluate(self, done: int) -> None:
        values = self.validation.evaluate(done)
        self.observers.tell("on_evaluation", values)
        self.trainer.comm.barrier(what="the evaluation's record")

    def _sample(self, done: int) -> None:
        """Collect the state from all ranks, and let rank 0 write a sample."""
        self.side.progress.phase(f"writing a sample after step {done - 1}")
        sampler = Sampler(self)
        if not sampler.able:
            return
        state = self.trainer.state_dict(rank=0)
        if self.trainer.comm.rank == 0:
            values = {"step": done, "text": sampler.text(state)}
            append_line(self.folder / SAMPLES, values, self.side.tell)
            self.observers.tell("on_sample", values)
        # Others wait here, where they are patient, and not in the next step's first collective.
        self.trainer.comm.barrier(what="the sample of rank 0")

    def _checkpoints(self) -> Checkpoints:
        config = self.config.checkpoint
        meta: dict[str, Any] = {"config": self.config.resolved(), "shardwise": __version__}
        meta["model"] = model_facts(self)
        return Checkpoints(
            self.trainer, self.folder / CHECKPOINTS, keep_last=config.keep_last, keep_every=config.keep_every,
            staging_bytes=None if config.staging_mib is None else config.staging_mib << 20, meta=meta,
            warn=self.side.tell,
        )  # fmt: skip

    @contextmanager
    def _metrics(self, first: int) -> Iterator[MetricsWriter | None]:
        if self.trainer.comm.rank != 0:
            yield None
            return
        history = [one for one in read_lines(self.folder / METRICS) if one["step"] < first]
        tokens = tokens_per_row(self.trainer.compiled.example)
        self.metrics = MetricsWriter(
            None, self.trainer.engine.optimizer, tokens, self.trainer.comm.device, self.side.on_step, history,
            warn=self.side.tell, utilisation=self.utilisation, observers=self.observers,
        )  # fmt: skip
        pending = False
        try:
            yield self.metrics
        except BaseException as error:
            # All ranks raise these errors together, after their devices have done the step.
            agreed = isinstance(error, NonFiniteError | LossScaleError)
            pending = not agreed and Backend.of(self.trainer.comm.device).asynchronous
            raise
        finally:
            self.metrics.close(flush=not pending)

    def save_weights(self) -> None:
        """Collect the weights from all ranks, tensor by tensor, and let rank 0 write them."""
        self.side.progress.phase("saving the weights")
        self._written = write_models(self, self.trainer.engine.whole)
        self.trainer.comm.barrier(what="the weights that rank 0 writes")  # ranks that fail before this end rank 0 too

    def finish(self) -> None:
        """Write a sample with the saved weights if the model can, and the result of the run."""
        folder = self.folder
        written = {"adapter" if path.name == ADAPTER else "weights": str(path) for path in self._written}
        sampler = Sampler(self)
        if sampler.able:
            self.side.progress.phase("writing a sample")
            text = sampler.text(load_file(folder / WEIGHTS))
            (folder / SAMPLE).write_text(text, encoding="utf-8")
            written["sample"] = str(folder / SAMPLE)
        assert self.metrics is not None
        mesh, device = self.trainer.plan.mesh, self.trainer.comm.device
        result: Metrics = {
            **self.metrics.summary(),
            "ranks": mesh.size,
            "device": device.type,
            "run_dir": str(folder),
            **written,
        }
        for last in self.validation.history[-1:]:
            result |= {"validation_loss": last[LOSS], "evaluation": last}
            result |= {PERPLEXITY: last[PERPLEXITY]} if PERPLEXITY in last else {}
        if self.stopped_early is not None:
            result["stopped_early"] = self.stopped_early
        if (folder / BEST).exists():
            result["best"] = json.loads((folder / BEST).read_text(encoding="utf-8"))
        write_json(folder / RESULT, result)
        self.observers.end("finished", result)
        log.info("done: %s", ", ".join(f"{key} {value}" for key, value in result.items()))
