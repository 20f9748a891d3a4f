"""A model compiled for a plan, and for batches that differ from the first in shapes, in constants, or in the way that
forward decides by their values.  All thread ranks of a process share it.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from shardwise.capture.casts import cast_field
from shardwise.capture.coins import Drawing
from shardwise.capture.forms import Form, differing, form_of, resized
from shardwise.capture.in_form import InForm
from shardwise.capture.outputs import Wanted
from shardwise.capture.varying import Varying
from shardwise.capture.wrapped import LossFunction, rows_in
from shardwise.core.errors import ConfigError
from shardwise.core.layout import shard_sizes
from shardwise.core.plan import Plan
from shardwise.core.structure import Fields, changed_constant, check_alike, like, structure_of
from shardwise.lower import named_sizes
from shardwise.lower.lowered_model import LoweredModel
from shardwise.lower.own_reads import OwnReads
from shardwise.lower.traced_for import solves, traced_for
from shardwise.lower.traced_model import NO_STEP
from shardwise.parallel.pipeline import PIPELINE
from shardwise.units.trace import Trace

MOST_CONSTANTS = 16  # the most combinations of constants in batches for each of which a model is captured
MANY_CONSTANTS = 4  # of so many a user is told
FORMS = 32  # the most shapes of batches, and ways of forward, whose traces are kept at a time
MANY = 8  # the number of ways in which forward decides of which a user is told


@dataclass(eq=False)
class Compiled(LoweredModel):
    """The traces and programs of a model under a plan, as :class:`TracedModel` and :class:`LoweredModel` describe them.

    Batches of other shapes have traces of their own (:meth:`fitting`), as those for which forward decides in another
    way (:meth:`deciding`), those with other constants (:meth:`of_constants`), and evaluation (:meth:`evaluation`)."""

    _evaluations: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)
    _constants: dict[tuple[Any, ...], Compiled] = field(default_factory=dict)  # for batches with other constants
    _forms: OrderedDict[Form, Compiled] = field(default_factory=OrderedDict)
    _decided: list[Compiled] = field(default_factory=list)  # for the other ways in which forward decides

    def evaluation(self, wanted: Wanted = "loss", example: Mapping[str, Tensor] | None = None) -> Compiled:
        """Return the same model in evaluation mode, under the same plan; it is captured when it is first needed.  It
        computes what is ``wanted`` of batches like ``example``, by default those that train."""
        if example is None or _key(example) == _key(self.example):
            example = self.example
        key = (wanted, *_key(example))
        with self._lock:
            if key not in self._evaluations:
                alike = example is self.example
                like = None if self.like is None else self.like.evaluation(wanted, example)
                self._evaluations[key] = replace(
                    self, training=False, wanted=wanted, example=example, like=like,
                    _captures=self._captures if alike else {},
                    _varying=self._varying if alike else self._varying.again(), **_of_its_own(),
                )  # fmt: skip
            return self._evaluations[key]

    def beside(
        self, loss: LossFunction, example: Mapping[str, Tensor], training: bool = True, backward: bool = True
    ) -> Compiled:
        """Return another computation with the same model, under the same plan, whose parameters have the same memory.

        Raises :class:`ConfigError` if with a ``backward`` other parameters learn by it."""
        found = replace(
            self, loss=loss, example=example, training=training, varies={}, _weights={}, _captures={},
            _varying=Varying(), **_of_its_own(),
        )  # fmt: skip
        if training and backward:
            self._check_learning(found.general)
        return found

    def _check_meeting(self, other: Compiled) -> None:
        """Raise :class:`ConfigError` where rows meet in ``other`` and not here, so that no note has said what its
        microbatches compute."""
        new = [where for where in other.general.meets if where not in self.general.meets]
        if self.plan.microbatches > 1 and new:
            wrong = f"rows meet in {', '.join(new)} by the branch that forward takes for this batch, and by no other"
            pipelined = self.plan.mesh.axis_size(PIPELINE) > 1
            raise ConfigError.on("microbatches", wrong, other.general.ways_to_meet(pipelined))

    # ---- batches of other shapes -------------------------------------------------------------------------------------

    @cached_property
    def form(self) -> Form:
        """The shapes of the batches that this is compiled for."""
        return form_of(self.example)

    def fitting(self, fields: Mapping[str, Tensor]) -> Compiled:
        """Return the same computation for batches of the shapes of ``fields``; itself if those are its own, or if they
        differ in more than sizes.  The :data:`FORMS` that were used last are kept.

        Raises :class:`ConfigError` where a size is more than ``varies`` says, or where no trace takes the shapes."""
        form = form_of(fields)
        dims = {} if form == self.form else differing(self.form, form)
        if not dims:
            return self
        named_sizes.check_sizes(fields, named_sizes.sizes_of(self.varies, self.example))
        with self._lock:
            found = self._forms.get(form)
            if found is None:
                self._varying.add(dims)
                found = self._forms[form] = self._of_form(form)
                if len(self._forms) > FORMS:
                    self._forms.popitem(last=False)
            self._forms.move_to_end(form)
        return found

    def _of_form(self, form: Form) -> Compiled:
        example = resized(self.example, form)
        if self.general.opaque is not None:  # its one unit takes any shape
            found = copy.copy(self)
            found.example = example
            vars(found).pop("form", None)
            return found
        found = replace(
            self, example=example, varies={}, like=None if self.like is None else self.like.fitting(example),
            _weights={}, _captures={}, **_of_its_own(),
        )  # fmt: skip
        if found.general.opaque is not None:
            wrong = f"rows of shapes {named_sizes.shown(example)} cannot be captured: {found.general.opaque}"
            raise ConfigError.on("batch", wrong, f"shapes that can, such as {named_sizes.shown(self.example)}")
        return found

    @property
    def reads_batch(self) -> bool:
        """Whether forward decides in Python by values of the batch, and not by random numbers and buffers alone."""
        return self.general.checks is not None and bool(self.general.checks.fields)

    def deciding(
        self, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing = NO_STEP
    ) -> Compiled:
        """Return the same computation for a ``batch``, all rows of it on the host, by whose values, and by the random
        numbers of the step of ``drawing``, forward decides in Python; itself if it decides as for the example.

        Raises :class:`ConfigError` where forward cannot be captured for the batch."""
        fields = like({name: cast_field(value, self.general.precision) for name, value in batch.items()}, batch)
        return self._deciding(batch, fields, buffers, drawing)._with_parts(fields, buffers, drawing)

    def _deciding(
        self, batch: Mapping[str, Tensor], fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing
    ) -> Compiled:
        with self._lock:
            for one in (self, *self._decided):
                if one.general.checks is not None and one.general.checks.hold(fields, buffers, drawing):
                    return one
            found = replace(
                self, example=batch, varies={}, _weights={}, _captures={}, _varying=self._varying.another_way(drawing),
                **_of_its_own(),
            )  # fmt: skip
            if found.general.opaque is not None or found.general.checks is None:
                why = found.general.opaque or "it reads nothing of it in Python, though it did of others"
                wrong = f"a batch for which forward decides in another way, and so cannot be captured: {why}"
                raise ConfigError.on("batch", wrong, "torch.where in place of branches in Python")
            if found.reads_batch and not self.reads_batch:
                wrong = f"forward reads {found.general.checks.fields[0]} in Python in one branch alone"
                raise ConfigError.on("model", wrong, "a forward that reads values of the batch in every step")
            if self.training:
                self._check_learning(found.general, fewer=True)
            self._check_meeting(found)
            self._decided = [*self._decided[1 - FORMS :], found]
            if len(self._decided) == MANY:
                warnings.warn(
                    f"model: forward has decided by values of the batch in {MANY} ways beside the first; each is "
                    "captured when it first comes, which takes as long as the start", stacklevel=2
                )  # fmt: skip
        return found

    def _with_parts(self, fields: Mapping[str, Tensor], buffers: Mapping[str, Tensor], drawing: Drawing) -> Compiled:
        """Return this for a batch whose microbatches may be captured for what forward reads of their own rows.

        Raises :class:`ConfigError` where what they read does not follow from what it reads of all rows."""
        rows, general = rows_in(fields), self.general
        sizes = shard_sizes(rows, min(self.plan.microbatches, rows))
        if len(sizes) == 1 or general.checks is None or general.rows is None or general.cuts_batch:
            return self
        with self._lock:
            parts = self._own_reads.traces(general, fields, sizes, buffers, drawing)
            if parts is None or all(one is self.trace((), size) for one, size in zip(parts, sizes, strict=True)):
                return self
            if parts not in self._with_other_parts:
                for old in [*self._with_other_parts][: -FORMS + 1]:
                    del self._with_other_parts[old]
                found = copy.copy(self)
                found.parts = parts
                self._with_other_parts[parts] = found
            return self._with_other_parts[parts]

    @cached_property
    def _with_other_parts(self) -> dict[tuple[Trace, ...], Compiled]:
        """This with other ``parts``."""
        return {}

    @cached_property
    def _own_reads(self) -> OwnReads:
        return OwnReads(lambda size: self.trace((), size), self._trace_of_part, self._agree)

    def _trace_of_part(self, part: Mapping[str, Tensor]) -> Trace:
        """Return a trace for rows of a batch that decide in another way than the first rows of the example."""
        found = self._traced_as(part, (), rows_in(part), apart=True)
        if found.opaque is not None:
            wrong = f"{rows_in(part)} rows that decide in another way cannot be captured: {found.opaque}"
            raise ConfigError.on("microbatch", wrong, "torch.where in place of branches in Python")
        if self.training:
            self._check_learning(found, fewer=True)
        self._check_placed(found, self.buckets)
        return found

    # ---- batches with other constants --------------------------------------------------------------------------------

    def of_constants(self, fields: Mapping[str, Tensor]) -> Compiled:
        """Return the same computation for batches that have the constants of ``fields``; it is captured when these
        first come.

        Raises :class:`ConfigError` where a constant has had more than :data:`MOST_CONSTANTS` values."""
        form = structure_of(fields)
        if form is None or not isinstance(self.loss, InForm) or form.key == self.loss.form.key:
            return self
        check_alike(fields, self.example, "batch", example=True)
        with self._lock:
            if form.key not in self._constants:
                if len(self._constants) + 1 >= MOST_CONSTANTS:
                    name = changed_constant(form, self.loss.form)
                    wrong = f'"{name}" has had {MOST_CONSTANTS} values, and the model is captured for each'
                    raise ConfigError.on("batch", wrong, "a number or a tensor where it has many values")
                if len(self._constants) + 2 == MANY_CONSTANTS:
                    warnings.warn(
                        f'batch: "{changed_constant(form, self.loss.form)}" has had {MANY_CONSTANTS} values; the model '
                        "is captured for each, which takes as long as the start; a tensor may have any value",
                        stacklevel=2,
                    )
                example = Fields(self.example, form, self.loss.objects)
                self._constants[form.key] = self.beside(self.loss, example, self.training, self.training)
            return self._constants[form.key]

    def check_constants(self, fields: Mapping[str, Tensor]) -> None:
        """Raise :class:`ConfigError` where a batch has other constants than this was captured for."""
        form = structure_of(fields)
        if form is not None and isinstance(self.loss, InForm) and form.key != self.loss.form.key:
            name = changed_constant(form, self.loss.form)
            before, now = self.loss.form.constants[name], form.constants[name]
            wrong = f'"{name}" is {now!r} after {before!r}, where batches are computed by one program'
            raise ConfigError.on("batch", wrong, "one value in all batches, or a number or a tensor")

    # ---- other plans -------------------------------------------------------------------------------------------------

    def under(self, plan: Plan) -> Compiled:
        """Return the same model under another plan; both share captures, and traces if these do not depend on what
        differs.
        """
        return self._under(plan, None)

    def decided(self, plan: Plan) -> Compiled:
        """Return the same model under a plan that differs in precision or dropout; it uses a solver's decisions for
        this one.
        """
        same = traced_for(plan, self.per_host) == traced_for(self.plan, self.per_host)
        return self._under(plan, self if solves(plan) and not same else self.like)

    def _under(self, plan: Plan, like: Compiled | None) -> Compiled:
        same = like is self.like and traced_for(plan, self.per_host) == traced_for(self.plan, self.per_host)
        traces, weights = (self._traces, self._weights) if same else ({}, {})
        buckets, axes = (self.buckets, self._axes) if same else ([], {})
        return replace(
            self, plan=plan, like=like, buckets=buckets, _axes=axes, _weights=weights, _stages={},
            **{**_of_its_own(), "_traces": traces},
        )  # fmt: skip


def _key(example: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """Return what a capture depends on of an example."""
    structure = structure_of(example)
    return *(() if structure is None or structure.plain else (structure.tree, *structure.key)), *form_of(example)


def _of_its_own() -> dict[str, Any]:
    """Return the fields of a computation that has made nothing yet."""
    return {
        "_traces": {}, "_programs": {}, "_lock": threading.RLock(), "_evaluations": {}, "_forms": OrderedDict(),
        "_constants": {}, "_decided": [],
    }  # fmt: skip
