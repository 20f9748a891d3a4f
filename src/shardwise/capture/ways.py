"""The ways in which a forward can be captured, tried one after the other.

As it is; with answers to what it reads of the batch in Python (:mod:`reads`); and around functions that run as they are
written (:mod:`eager_calls`), also with answers.  What stops one way says which function the next one leaves out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from shardwise.capture import stored
from shardwise.capture.assumed import BRANCHES, NUMBERS, Check, Noting, raises
from shardwise.capture.candidates import candidates
from shardwise.capture.casts import cast_field, precision_layers
from shardwise.capture.coins import Drawing
from shardwise.capture.eager_calls import MOST, EagerCalls, Forward
from shardwise.capture.environment import environment_read
from shardwise.capture.example import rows_seen
from shardwise.capture.forms import Form
from shardwise.capture.host_draws import Drawn, DrawsHere, Looking
from shardwise.capture.known import AS_IT_IS, Known, Tried, Way
from shardwise.capture.named import NotNamed
from shardwise.capture.parts import part_of
from shardwise.capture.reads import PICKS, Answering, Read, Unanswered, asked
from shardwise.capture.reasons import not_captured
from shardwise.capture.seen_calls import READS, NotEager, OpenSize
from shardwise.capture.wrapped import Watched, rows_in
from shardwise.core.errors import ConfigError
from shardwise.core.structure import like
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.torch_private import exporting, process_lock

Made = tuple[Captured, Tried | None]

CHECKS = 64  # that a forward may take for granted


class OtherWay(Uncapturable):
    """Forward goes another way by values that a step alone knows."""


class NoAnswer(Uncapturable):
    """Forward reads what answers to more functions would not answer either."""


class Depends(Uncapturable):
    """What forward computes depends on what it changes in Python."""


ANSWERS: tuple[tuple[frozenset[Any], bool], ...] = (
    (frozenset(), False), (BRANCHES, False), (BRANCHES | NUMBERS, False), (BRANCHES | NUMBERS | PICKS, False),
    (BRANCHES, True), (BRANCHES | NUMBERS, True), (BRANCHES | NUMBERS | PICKS, True),
)  # fmt: skip


@dataclass
class Ways:
    """What makes a capture of a ``module``: ``watched`` gives a copy of it that is captured or tried, in which
    functions may run as they are written, ``forward`` runs one with values, also of batches of other ``forms``, and
    ``capture`` and ``trial`` take such copies."""

    module: nn.Module
    watched: Callable[[bool, bool], Watched]
    forward: Forward
    batch: Mapping[str, Tensor]
    drawing: Drawing | None
    known: Known
    forms: Sequence[Form]
    capture: Callable[[Watched], Captured]
    trial: Callable[[Captured, Watched, Watched], Tried | None]
    sole: bool = False  # whether the way of earlier captures is the only one
    environment: frozenset[str] = frozenset()  # the variables that were read for it

    def on_disk(self, key: str, numbers: Mapping[str, int | None]) -> Captured | None:
        """Return a capture on disk by the way that was kept with ``key``: of the first of several keys that has one,
        each with the ``numbers`` of rows that it is for, and for what forward reads of the batch in this way; None
        where there is none to believe.

        Other threads wait, as for :meth:`first`."""
        with process_lock:
            way = stored.way_of(self.name(key), self.module, ANSWERS)
            if way != AS_IT_IS:
                self.known.way = way
            for one in dict.fromkeys((way, AS_IT_IS)):
                with contextlib.suppress(Exception):  # the user's code may raise anything: the model is captured
                    if (found := self._on_disk(one, numbers)) is not None:
                        return found
            return None

    def _on_disk(self, way: Way, numbers: Mapping[str, int | None]) -> Captured | None:
        calls = self.calls(way, self.watched(True, False)) if way.functions else None
        reads = self.read(way, calls) if way.reads else ()

        def model() -> Watched:
            made = self.watched(True, bool(way.functions))
            made.calling, made.reading = calls, Answering(reads, way.reads) if reads else None
            return made

        for key, rows in numbers.items():
            name = stored.name_with(self.name(key), reads)
            if stored.is_kept(name):
                if calls is not None:
                    calls.see(rows_seen(rows), forms=True)
                if (found := stored.find(name, model, self.batch, calls)) is not None:
                    found.reads = reads
                    return found
        return None

    def keep(self, key: str, own: str, captured: Captured, trial: Tried | None) -> None:
        """Keep on disk for all of ``key`` the way that has led to a capture, and the capture, by its ``own`` key, if
        its ``trial`` has names."""
        try:
            stored.keep_way(self.name(key), self.known.way, self.module, ANSWERS)
        except NotNamed:
            return
        if trial is not None and not captured.opened:
            stored.keep(stored.name_with(self.name(own), captured.reads), captured, self.batch, trial, self.environment)

    def name(self, key: str) -> str:
        """Return the name under which a capture and its way are kept: they may be others where forward could read
        something else in Python, for sizes, too, that no trial sees; and ranks have to go the same way."""
        return f"{key}-{self.state}"

    @cached_property
    def state(self) -> str:
        """A hash of what forward could read in Python before the capture, as another start will find it."""
        return self.watched(True, False).state().digest()

    def calls(self, way: Way, wrapped: Watched) -> EagerCalls | None:
        """Return the calls that run as written in a way; None where there are none."""
        if not way.functions:
            return None
        number = sum(one.numel() for one in wrapped.parameters())
        return EagerCalls(way.functions, self.forward, precision_layers(wrapped.precision), number, self.forms)

    def first(self) -> Made:
        """Return the capture and the trial of the first way that leads to one, beginning with that of earlier captures;
        raise what stopped the first way where none does.

        Other threads wait, which would replace code of functions that both of them capture."""
        with process_lock, environment_read() as names:
            found = self._first()
        self.environment = frozenset(names)
        return found

    def _first(self) -> Made:
        if self.known.way != AS_IT_IS:
            try:
                return self.one(self.known.way)
            except OpenSize:
                raise
            except Uncapturable:
                if self.sole:
                    raise
        found, stopped = self.answered(())
        if found is not None:
            return found
        error, chosen, refused = stopped[0], tuple[FunctionType, ...](), list[NotEager]()
        while len(chosen) < MOST:
            for one in candidates(stopped, chosen, getattr(type(self.module), "forward", None)):
                try:
                    found, another = self.answered((*chosen, one))
                except OpenSize:
                    raise
                except NotEager as why:
                    refused.append(why)
                    if why.function is one:
                        continue
                    raise _refused(error, refused) from None
                if found is not None:
                    return found
                chosen, stopped = (*chosen, one), another
                break
            else:
                break
        raise error.drawn if isinstance(error, DrawsHere) else _refused(error, refused)

    def drawing_place(self, drawn: Drawn, functions: tuple[FunctionType, ...]) -> Uncapturable:
        """Return an error that was raised where a forward draws from a generator of Python or numpy, outside of these
        ``functions``; raise ``drawn`` where no place is found."""
        looking = Looking(drawn)
        calls = self.calls(Way(functions), self.watched(True, True))
        with exporting(), contextlib.nullcontext() if calls is None else calls.passed_by(looking):
            try:
                with looking.stops():
                    self.forward(rows_in(self.batch), 0)
            except DrawsHere as place:
                return place
        raise drawn

    def answered(self, functions: tuple[FunctionType, ...]) -> tuple[Made | None, list[Uncapturable]]:
        """Return a capture with as few answers as it takes, around ``functions``; or None, and what stopped each
        way."""
        stopped, unanswered = list[Uncapturable](), set[bool]()
        for reads, assumes in ANSWERS:
            if assumes in unanswered:
                continue
            way = Way(functions, reads, assumes)
            try:
                found = self.one(way)
            except Drawn as drawn:
                return None, [self.drawing_place(drawn, functions)]
            except (NotEager, Depends):
                raise
            except Uncapturable as error:
                stopped.append(error)
                if isinstance(error, OtherWay):
                    break
                if isinstance(error, NoAnswer):
                    unanswered.add(assumes)
            else:
                self.known.way = way
                return found, []
        return None, stopped

    def one(self, way: Way) -> Made:
        """Return the capture and the trial of one way; raise :class:`Uncapturable` where it leads to none."""
        wrapped, again = (self.watched(trial, bool(way.functions)) for trial in (False, True))
        calls = self.calls(way, wrapped)
        wrapped.calling = again.calling = calls
        reads: tuple[Read, ...] = ()
        if way.reads:
            reads = self.read(way, calls)
            wrapped.reading, again.reading = (Answering(reads, way.reads) for _ in range(2))
        try:
            captured = self.capture(wrapped)
        except ConfigError as error:
            if way == AS_IT_IS:
                raise
            raise Uncapturable(str(error)) from error
        captured.reads = reads
        try:
            return captured, self.trial(captured, wrapped, again)
        except Drawn:
            raise
        except ConfigError as found:
            if way == AS_IT_IS:
                raise
            # As one unit the model has trials of its own.
            raise Depends(str(found).removeprefix("model: ").partition("; legal: ")[0]) from None

    def read(self, way: Way, calls: EagerCalls | None) -> tuple[Read, ...]:
        """Return what forward reads in Python by the functions of ``way``, with the answers for the batch."""
        asking = self.watched(False, bool(way.functions))
        asking.calling = calls
        # Copies: autograd takes no tensors that were made in inference mode.
        own = {n: cast_field(v.detach().to("cpu", copy=True), asking.precision) for n, v in self.batch.items()}
        rows = rows_in(self.batch)
        try:
            if calls is not None:
                calls.see(rows_seen(rows))
            checks = self.checks(calls) if way.assumes else ()
            fields = like(own, self.batch)
            reads, assumed = asked(asking, asking.module, fields, way.reads, rows, self.drawing, calls, checks)
            if way.assumes and not assumed:
                raise OtherWay("forward checks no values that depend on parameters")
            self.take(checks, assumed, calls)
        except (NotEager, OtherWay):
            raise
        except Unanswered as error:
            raise NoAnswer(not_captured(error.why, asking.module)) from error.why
        except Exception as error:  # the user's code may raise anything where there are no values
            raise Uncapturable(not_captured(error, asking.module)) from error
        if not reads:
            raise Uncapturable("forward reads nothing that follows from the batch alone")
        return tuple(reads)

    def checks(self, calls: EagerCalls | None) -> list[Check]:
        """Return the truth values that a forward of the batch reads outside of ``calls``."""
        noting = Noting()
        self.noted(noting, calls)
        return noting.checks

    def noted(self, noting: Noting, calls: EagerCalls | None) -> None:
        """Run a forward of the batch with values under ``noting``, in the way in which it is captured."""
        with exporting(), contextlib.nullcontext() if calls is None else calls.passed_by(noting):
            self.forward(rows_in(self.batch), 0, noting)

    def take(self, checks: Sequence[Check], assumed: Sequence[int], calls: EagerCalls | None) -> None:
        """Raise :class:`Uncapturable` where the answer of a check that was ``assumed`` may be another in a step that
        one device would make."""
        if len(assumed) > CHECKS:
            raise OtherWay(f"forward checks more than {CHECKS} values in Python")
        for number in assumed:
            if not checks[number].finite and not raises(lambda noting: self.noted(noting, calls), number):
                raise OtherWay(f"forward goes another way by values that depend on parameters{checks[number].place}")


def _refused(error: Uncapturable, refused: Sequence[NotEager]) -> Uncapturable:
    """Return what stopped a capture, with why nothing can run as written: the first part that was tried, else the first
    function; most read the parameters of a module, which says little."""
    told = [one for one in refused if one.why != READS]
    first = next((one for one in told if part_of(one.function) is not None), told[0] if told else None)
    return error if first is None else Uncapturable(f"{error}; nor can it run as written, for {first}")


__all__ = ["Made", "Ways"]
