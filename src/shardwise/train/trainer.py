"""The Trainer trains a plain ``nn.Module`` with an optimizer choice and a plan, as if on one device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.data import IterableDataset

from shardwise.backend import Backend
from shardwise.capture.in_form import InForm
from shardwise.capture.running import noting_batch
from shardwise.capture.wrapped import LossFunction, rows_in
from shardwise.core.errors import ConfigError, ShardwiseError, check_count
from shardwise.core.instruction import Instruction
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.part import STEP, Part
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.data.forming import fields_of, formed, with_tensors
from shardwise.data.loader import Batch
from shardwise.data.samples import Samples
from shardwise.data.stream_loader import AnyLoader, open_loader, open_pass
from shardwise.data.streams import is_dataset
from shardwise.lower.compiled import Compiled
from shardwise.lower.traced_for import solves
from shardwise.parallel.pipeline import stages_in_words
from shardwise.parallel.whole_tensors import whole_tensors_for
from shardwise.runtime.batch import StepResult
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import connect, ranks_of_a_host
from shardwise.runtime.engine import Engine, exactly
from shardwise.runtime.progress import Progress
from shardwise.train.errors import LossScaleError, NonFiniteError
from shardwise.train.own_rows import OwnRows, check_word

from .evaluation import Evaluation, evaluate, evaluate_loader, joined, predictions
from .given_metrics import metrics_of

Unseen = tuple[int, Batch, StepResult, Compiled | None]
"""A step that the host has not looked at: its number, its batch, its result, and what it computed if not as usual."""


class Trainer:
    """Train a model as one rank of a run.

    Args:
        module: any module; called with a batch's fields by keyword, it returns the loss or an output with ``.loss``.
            It is read once, for structure and initial values, and not changed; with ``initial`` it may be on the meta
            device.  Ranks that are threads of one process share one :class:`shardwise.lower.compiled.Compiled` instead,
            made beforehand: capture is not thread-safe.
        optimizer: the optimizer, its hyperparameters and its schedule.
        plan: the division of the step; its mesh has as many ranks as there are processes.
        example: a batch of at least one row, such as a dict of tensors with rows in their first dim, or a tuple
            (:func:`shardwise.data.forming.fields_of`).
        varies: the dims of fields whose size is not the same in all batches, with the largest, as
            ``{"tokens.1": 512}``: memory is predicted for these sizes.  A plan without data parallelism takes batches
            of any shape, named or not; ranks that have different rows in a step compare the sizes that are named.
        initial: the values to start from by name, read one at a time, such as ``Values.of_recorded(record(constructor),
            seed)``: then no rank holds the whole model beside what it trains.  By default they are those of ``module``.
        loss: ``loss(output, fields)``, for modules that do not return their loss.
        loss_weight: for a model that cannot be captured, what its loss is of its rows, if a trial does not show that:
            "rows" (a mean over them), "sum", or "targets:FIELD" (a mean over that field's, but for those of -100).
        whole: the names of tensors of a batch that have no rows, but are the same for all of them.
        clip_norm: the gradient norm to clip to.
        clip_value: the most that each element of the gradient may be away from 0, in place of ``clip_norm``.
        seed: the key of dropout and other random ops, and of the loader's order.
        loss_scale: the factor of the loss under fp16; by default it is dynamic.
        comm: this rank's communicator; by default the one that torchrun's environment asks for.
        progress: called with (position, instruction) before each instruction; by default a rank that `shardwise launch`
            started tells its launcher, which names it if it hangs.

    Raises :class:`shardwise.core.errors.ConfigError` before anything runs where model, batch and plan do not fit.
    """

    def __init__(
        self,
        module: nn.Module | Compiled,
        optimizer: OptimizerChoice,
        plan: Plan,
        example: Any,
        *,
        initial: Mapping[str, Tensor] | None = None,
        loss: LossFunction | None = None,
        loss_weight: str | None = None,
        varies: Mapping[str, int] | None = None,
        whole: tuple[str, ...] = (),
        clip_norm: float | None = None,
        clip_value: float | None = None,
        seed: int = 0,
        loss_scale: ScaleChoice | None = None,
        comm: Communicator | None = None,
        progress: Callable[[int, Instruction], None] | None = None,
    ) -> None:
        self.plan, self.seed, self.whole = whole_tensors_for(plan, optimizer), seed, whole
        self._of_data: list[str] = []  # notes on the last loader
        self._owns_comm = comm is None
        self._record = Progress.from_environment() if progress is None and comm is None else None
        if self._record is not None:
            progress = self._record.instruction
        on_wait = self._record.wait if self._record is not None else None
        self.comm: Communicator = comm if comm is not None else connect(plan.mesh, on_wait=on_wait)
        if self._record is not None:
            self._record.set_role(stages_in_words(plan, self.comm.rank))
            self._record.follow(self.comm.device)
        shared = isinstance(module, Compiled)
        if isinstance(module, Compiled) and module.plan.data.updates != self.plan.data.updates:
            module = module.under(self.plan)
        self.compiled = (
            module if isinstance(module, Compiled)
            else self._compiled(module, formed(example, whole), loss, loss_weight, initial, varies or {})
        )  # fmt: skip
        self.engine = Engine(
            self.compiled,
            self.comm,
            optimizer,
            clip_norm=clip_norm,
            clip_value=clip_value,
            seed=seed,
            progress=progress,
            loss_scale=loss_scale,
        )
        if not shared:
            self.compiled.release()
        self._unseen: Unseen | None = None
        self._own_rows = OwnRows(plan, self.comm)
        self._asked_to_stop = False
        self.stopping = False
        # Calls that need the other ranks: a loop's writes are taken before a save, and saves are waited for at the end.
        self.before_save: list[Callable[[], object]] = []
        self.before_close: list[Callable[[], object]] = []

    def _compiled(
        self, module: nn.Module, example: Mapping[str, Tensor], loss: LossFunction | None, loss_weight: str | None,
        initial: Mapping[str, Tensor] | None, varies: Mapping[str, int],
    ) -> Compiled:  # fmt: skip
        per_host = ranks_of_a_host(self.comm) if solves(self.plan) else None
        return Compiled(
            module, self.plan, example, loss, self.comm.device, initial=initial, per_host=per_host,
            loss_weight=loss_weight, varies=varies,
        )  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """Return what a user should know of how the model was captured: static dims, ops on every rank, fall-backs; and
        of how the data of the last :meth:`loader` resumes."""
        general = self.compiled.general
        slow = general.notes_without_rule(self.compiled.microbatch_rows)
        notes = [*self._of_data, *self.compiled.values.notes, *self.compiled.notes, *slow]
        asynchronous = Backend.of(self.comm.device).asynchronous
        if asynchronous and not self.compiled.alike_over_batch:
            notes.append(
                f"{', '.join(self.compiled.masks)}: batches without padding are computed as if they had some, since "
                "ranks that differed in "
                "that would not exchange the same (BatchNorm over the whole batch, negatives from it)"
            )
        if asynchronous and (found := general.host_reads()):
            notes.append(
                f"{', '.join(found)}: the host waits for the device in each, to read sizes; bf16 has a kernel that "
                "needs none"
            )
        return notes

    @property
    def _rows(self) -> int:
        return rows_in(self.compiled.example)

    def loader(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> AnyLoader:
        """Return endless batches of this rank's rows of ``dataset``: a map-style one, an ``IterableDataset``, a
        ``DataLoader``, or an iterable of samples (:func:`shardwise.data.streams.source_of`).

        Ranks of one tp or pp group get the same rows.  ``batch_size`` is the number of rows of the whole step, over all
        ranks and microbatches; by default it is the example's, and for a ``DataLoader`` its own.  ``collate_fn`` makes
        a whole batch of a list of samples.  With one, and for all but map-style datasets, every rank reads the whole
        batches, which are compared, and takes its rows.
        """
        found = open_loader(
            dataset, *self._place, self._rows if batch_size is None else batch_size, self.plan.microbatches,
            self.seed if seed is None else seed, collate=collate_fn, check=partial(check_word, self.plan, self.comm),
            **self._reading,
        )  # fmt: skip
        self._of_data = found.notes
        return found

    @property
    def _place(self) -> tuple[Mesh, int]:
        return self.plan.mesh, self.comm.rank

    @property
    def _reading(self) -> dict[str, Any]:
        return {"whole": self.whole, "pin": Backend.of(self.comm.device).pins, "masks": self.compiled.masks}

    def one_pass(self, dataset: Any, batch_size: int | None = None, batches: int | None = None) -> Iterator[Batch]:
        """Return an iterator over this rank's rows of each batch of one pass over ``dataset``, for :meth:`evaluate`;
        with ``batches`` there are no more than that number."""
        size = self._rows if batch_size is None else batch_size
        return open_pass(dataset, *self._place, size, self.plan.microbatches, batches=batches, **self._reading)

    def step(
        self,
        batch: Any,
        compiled: Compiled | None = None,
        part: Part = STEP,
        turn: int = 0,
    ) -> StepResult:
        """Run forward, backward and one optimizer step; all ranks call it with their part of the same batch.

        ``batch`` is one of :meth:`loader`, or one like the example: the rows that this rank has read.  Then every rank
        passes the same number of rows, in every step (:class:`OwnRows`); ranks that differ only in other axes than
        ``dp_replicate`` and ``dp`` pass the same rows.  ``compiled`` is another computation with the same parameters
        (:meth:`Compiled.beside`); ``part`` and ``turn`` are as in :meth:`Engine.step`.

        It returns device tensors: the loss of the whole batch and the gradient norm before clipping.  A step that is
        not finite changes nothing; :class:`NonFiniteError` is raised at once on CPU, and one step later on a GPU, where
        the host does not wait.
        """
        batch = self._batch(batch, "step")
        at = self.engine.step_index
        if self._record is not None:
            self._record.begin(at)
            self._record.batch(batch.rows)
        with noting_batch(lambda: batch.fields):
            result = self.engine.step(
                batch.fields, batch.rows, self._asked_to_stop, ones=batch.ones, compiled=compiled, part=part, turn=turn,
                alike=batch.alike,
            )  # fmt: skip
        if self._record is not None:
            self._record.phase(f"the end of step {at}")  # what the script does between steps may take long
        if not part.updates:
            return result
        due = self._unseen
        self._unseen = (at, batch, result, compiled)
        if self.comm.device.type == "cpu":
            due = self._unseen
        if due is not None:
            self._look(*due)
        return result

    def steps(self, batches: Iterator[Batch], number: int) -> Iterator[StepResult]:
        """Take ``number`` steps on the next of ``batches``, which have equal numbers of rows; yield the results in
        order.

        Under an asynchronous schedule, and where updates are validated later, the steps of a window overlap: its
        pipeline is empty only before the first and after the last, and so results come later than their batches are
        asked for.  Take them all, or the other ranks wait.  A step that is not finite raises at the window's end, and a
        request to stop takes effect there.  Other schedules take one step after the other.
        """
        size, batches = self.plan.pipeline.window if self.plan.overlaps else 1, exactly(number, batches)
        for start in range(0, number, size):
            if self.stopping:
                return
            count = min(size, number - start)
            if count == 1:
                yield self.step(next(batches))
            else:
                yield from self._window(batches, count)

    def _window(self, batches: Iterator[Batch], number: int) -> Iterator[StepResult]:
        first, taken, late = self.engine.step_index, deque[Batch](), self.comm.device.type != "cpu"
        due = deque[Unseen]()
        failed: Unseen | None = None

        def given() -> Iterator[tuple[Mapping[str, Tensor], int, bool]]:
            for at in range(first, first + number):
                if self._record is not None:
                    self._record.begin(at)
                batch = next(batches)
                if self._record is not None:
                    self._record.batch(batch.rows)
                taken.append(batch)
                yield batch.fields, batch.rows, self._asked_to_stop

        with noting_batch(lambda: taken[-1].fields if taken else {}):
            for at, result in enumerate(self.engine.steps(given(), number), first):
                due.append((at, taken.popleft(), result, None))
                if len(due) > late and self._has_failed((one := due.popleft())[2]):
                    failed = failed or one
                yield result
        if self._record is not None:
            self._record.phase(f"the end of step {first + number - 1}")
        self._unseen = due.pop() if due else None
        if failed is not None:
            self._look(*failed)

    def request_stop(self) -> None:
        """Ask all ranks to stop: after this step or the next but one ``stopping`` is true, on all in the same step.

        This only sets a flag: a signal handler may call it.
        """
        self._asked_to_stop = True

    def evaluate_batch(self, batch: Any) -> StepResult:
        """Return the loss of a batch in evaluation mode; all ranks call it with their part of the same batch, which is
        what :meth:`step` takes.

        ``weight`` of the result is the amount over which it is a mean, for means over several batches.
        """
        batch = self._batch(batch, "evaluate_batch")
        with noting_batch(lambda: batch.fields):
            return self.engine.evaluate(batch.fields, batch.rows, batch.ones, alike=batch.alike)

    def _batch(self, given: Any, use: str) -> Batch:
        if isinstance(given, Batch):
            return given
        if isinstance(self.compiled.loss, InForm):
            return self._own_rows.batch(fields_of(given, whole=self.whole), use)
        if not isinstance(given, Mapping):
            legal = "a batch of trainer.loader(...), or one like the example, a dict of tensors: this rank's rows"
            raise ShardwiseError(f"Trainer.{use}(...) of a {type(given).__name__}; legal: {legal}")
        return self._own_rows.batch(with_tensors(given), use)

    def evaluate(
        self, data: Any, metrics: Any = (), *, batch_size: int | None = None, batches: int | None = None
    ) -> Evaluation:
        """Return the loss and the metrics of ``data`` in evaluation mode; all ranks call it together.

        Args:
            data: a map-style dataset or an ``IterableDataset``; or an iterable of whole batches that every rank has (a
                DataLoader), or of batches of :meth:`one_pass`.
            metrics: names of ready-made metrics ("accuracy", "top-5", "perplexity", "f1", "f1-binary"), functions
                ``metric(outputs, batch) -> (sum, count)`` or a dict of these by name, objects of torchmetrics, or a
                dict of any of these by name.  Each row counts exactly once.
            batch_size: the rows of a batch of a dataset, over all ranks; by default it is the example's.
            batches: the most batches; their rows are spread evenly over the dataset.
        """
        found = metrics_of(metrics, self.compiled.module)
        if batches is not None:
            check_count("batches", batches)
        if is_dataset(data) or isinstance(data, IterableDataset):
            example = self._example_of(data) if is_dataset(data) else None
            return evaluate(self.engine, self.one_pass(data, batch_size, batches), found, example)
        if not hasattr(data, "__iter__") or isinstance(data, Mapping):
            legal = "a dataset, a loader of whole batches, or batches of one_pass"
            raise ConfigError(f"Trainer.evaluate(...) of a {type(data).__name__}; legal: {legal}; one: evaluate_batch")
        return evaluate_loader(self.engine, iter(data) if batches is None else islice(data, batches), found)

    def predictions(self, dataset: Any, batch_size: int | None = None, *, rank: int | None = None) -> Iterator[Any]:
        """Yield the outputs of each batch of a map-style ``dataset``, in its order, on the host; see :meth:`predict`.

        All ranks iterate together; with ``rank`` only that rank gets outputs, and the others None.
        """
        example = self._example_of(dataset)
        return predictions(self.engine, self.one_pass(dataset, batch_size), example, rank)

    def predict(self, dataset: Any, batch_size: int | None = None, *, rank: int | None = None) -> Any:
        """Return the model's outputs for all rows of ``dataset``, in its order, each row once, on the host.

        Outputs are what the model's forward returns without its loss and without what has no rows: a tensor, a tuple,
        or a dict whose names are attributes too (``found.logits``).  If forward returns the loss alone, they are what
        it returns without the field "labels".  The dataset needs no labels.  All ranks call it together; with ``rank``
        only that rank gets the result, and the others None.
        """
        found = [one for one in self.predictions(dataset, batch_size, rank=rank) if one is not None]
        return joined(found) if found else None

    def _example_of(self, dataset: Any) -> dict[str, Tensor]:
        samples = Samples(dataset)
        return samples.read([0, min(1, samples.size - 1)])

    def finish(self) -> None:
        """Look at the last step; raise :class:`NonFiniteError` if it was not finite."""
        if self._unseen is not None:
            self._look(*self._unseen)

    def _has_failed(self, result: StepResult) -> bool:
        """Look at a step's numbers on the host, and return whether it has failed."""
        found = result.on_host()
        self.stopping = self.stopping or bool(found.stop)
        return found.skipped and (found.overflows is None or found.halted)

    def _look(self, step: int, batch: Batch, result: StepResult, compiled: Compiled | None) -> None:
        if self._has_failed(result):
            unit, what = self.engine.culprit(batch.fields, batch.rows, step, compiled)
            self.engine.memory.halted.zero_()  # a caller that catches the error may go on
            self._unseen = None
            found = result.on_host()
            if found.scale is not None and found.overflows is not None:
                raise LossScaleError(step, found.overflows, found.scale, unit, what)
            raise NonFiniteError(step, unit, what, self.plan.stages_alone)

    def state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """Return the full single-device state, under the module's own names, on the host; all ranks call it together.

        ``rank`` is the only one that gets it; by default every one does.  A device holds no more of it at a time than
        one bucket.
        """
        return self.engine.state_dict(rank)

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the weights are their moving average, for :meth:`evaluate`, :meth:`predict` and
        :meth:`state_dict`; all ranks enter it together.  Buffers, such as running statistics, are the model's own.

        The optimizer must have an ``ema``; :class:`ShardwiseError` otherwise, and where a step is taken inside.
        """
        return self.engine.averaged()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take parameters and buffers from a single-device state, such as ``module.state_dict()``."""
        self.engine.load_state_dict(state)

    def close(self) -> None:
        """Leave the other ranks, once checkpoints that are being written are on disk."""
        while self.before_close:
            self.before_close.pop()()
        self._leave()
        if self._owns_comm:
            self.comm.close()

    def _leave(self) -> None:
        if self._record is not None:
            self._record.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.before_close.clear()  # the other ranks may be elsewhere
            self._leave()
            if self._owns_comm:
                self.comm.abort()
        else:
            self.close()
