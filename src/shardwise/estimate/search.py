"""Schedule ``auto`` is the best named schedule for measured times and a limit of memory, improved by local search.

The search takes the orders of forwards and backwards of a named schedule and puts the W's in anew (``fill.py``).  It
changes how far each rank runs ahead, and how large a gap has to be to be filled, as long as that makes the step
shorter: the heuristic of Qi et al. (Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 3.1) decides by the
same two.  With many microbatches it begins with fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from shardwise.core.errors import ConfigError, check_choice, check_count
from shardwise.core.schedules import AUTO, SCHEDULES
from shardwise.core.timetable import Timetable
from shardwise.estimate.fill import Filler, PlanDraft
from shardwise.estimate.simulate import NORMS, Costs, Simulation, simulate
from shardwise.parallel.schedule import timetable

FITS = (0.05, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0)
"""The fractions that are tried: a gap before a task is filled by a W if it is at least this fraction of the W."""

CLIMBS = 8
"""The number of first states, the best ones, from which the search goes on."""

Value = tuple[float, float]
"""What the search minimises, in units of ideal time: the time of the step and, on a tie, of all ranks together."""

NEVER = (float("inf"), float("inf"))


@dataclass(frozen=True)
class Found:
    """The timetable that was chosen.  ``name`` is that of its schedule, or ``auto from`` the base of the search;
    ``named`` is the best of the named schedules that fit, if any does."""

    name: str
    timetable: Timetable
    simulation: Simulation
    named: Found | None = None

    @property
    def words(self) -> str:
        """The name without ``auto``, such as ``from zb-h2``."""
        return self.name.removeprefix(f"{AUTO} ")


@dataclass(frozen=True)
class _State:
    """A draft by what it is made from: a base, the kind of backwards (B or I), the least fraction of a W that a gap
    must have (``fit``), and the shift of each rank."""

    base: str
    kind: str
    fit: float
    shifts: tuple[int, ...]

    def shifted(self, low: int, high: int, by: int) -> _State:
        """Return the state in which ranks ``low`` to ``high`` run ahead by ``by`` more forwards."""
        return replace(self, shifts=tuple(n + by * (low <= rank <= high) for rank, n in enumerate(self.shifts)))


class _Search:
    """A search over states of ``bases``, timetables of ``microbatches`` microbatches, that plays ``events`` tasks."""

    def __init__(
        self,
        bases: Mapping[str, Timetable],
        microbatches: int,
        costs: Costs,
        limits: Sequence[float],
        norm: str,
        events: int,
    ) -> None:
        self.bases, self.norm, self.left, self.price = bases, norm, events, 3 * costs.stages * microbatches
        self.drafts = {(name, kind): PlanDraft.of(base, kind) for name, base in bases.items() for kind in "BI"}
        self.fillers, self.steps = dict[str, Filler](), dict[str, list[float]]()
        for name, base in bases.items():
            home = {task.stage: rank for rank, tasks in enumerate(base) for task in tasks}
            self.fillers[name] = Filler(costs, home, microbatches, limits)
            self.steps[name] = [
                sum(costs.step[stage] for stage in home if home[stage] == rank) for rank in range(len(base))
            ]
            self.ranks = range(len(base))
        self.unit = microbatches * sum(map(sum, (costs.forward, costs.input, costs.weight))) / len(self.ranks)
        self.values: dict[_State, Value] = {}

    def play(self, state: _State) -> tuple[Timetable, list[float], list[float]] | None:
        """Return the timetable of a state, and when its ranks begin and end; None if memory does not allow it."""
        return self.fillers[state.base].fill(self.drafts[state.base, state.kind], state.fit, state.shifts)

    def value(self, state: _State) -> Value:
        """Return the value of a state; :data:`NEVER` if memory does not allow it or no more tasks may be played."""
        if state not in self.values:
            if self.left <= 0:
                return NEVER
            self.left -= self.price
            self.values[state] = NEVER
            if played := self.play(state):
                _, begin, end = played
                if self.norm == "post-validate":
                    end = [
                        stop - start + step
                        for start, stop, step in zip(begin, end, self.steps[state.base], strict=True)
                    ]
                self.values[state] = (round(max(end) / self.unit, 9), round(sum(end) / self.unit, 9))
        return self.values[state]

    def climb(self, state: _State) -> _State:
        """Move on to better states until none is better: one rank, all up to it or all from it run further ahead or
        less far, or the fit is another."""
        moves: list[Callable[[_State], _State]] = [
            partial(_State.shifted, low=low, high=high, by=by)
            for rank in self.ranks
            for low, high in ((rank, rank), (0, rank), (rank, len(self.ranks)))
            for by in (1, -1, 2, -2)
        ]
        moves += [partial(replace, fit=fit) for fit in FITS if state.kind == "I"]
        best, before = self.value(state), None
        while before != state:
            before = state
            for move in moves:
                while (value := self.value(trial := move(state))) < best:
                    state, best = trial, value
        return state


def auto(
    ranks: int,
    microbatches: int,
    costs: Costs,
    limit: float | Sequence[float] = float("inf"),
    norm: str = "barrier",
    events: int = 1_000_000,
) -> Found:
    """Return the shortest step found with at most ``limit`` bytes of activations on any rank, or on each; all ranks
    have the same number of the stages of ``costs``.

    The search is deterministic and plays about
    ``events`` tasks at most, at some microseconds each.  Raises :class:`ConfigError` if no timetable fits, with the
    least limit that one does.
    """
    check_count("pp", ranks)
    check_count("microbatches", microbatches)
    check_choice("norm", norm, NORMS)
    each, rest = divmod(costs.stages, ranks)
    if rest:
        raise ConfigError(f"costs: {costs.stages} stages cannot be the same number on each of {ranks} ranks.")
    tables = _named(ranks, microbatches, each)
    found = [Found(name, table, simulate(table, costs, norm)) for name, table in tables.items()]
    limits = [float(limit)] * ranks if isinstance(limit, int | float) else list(limit)
    found = [
        one for one in found if all(peak <= most for peak, most in zip(one.simulation.peak_bytes, limits, strict=True))
    ]
    named = min(found, key=_order, default=None)
    if searched := _searched(ranks, microbatches, costs, limits, norm, events):
        found.append(searched)
    if not found:
        whole = _named(ranks, 1, each).values()
        least = min(
            max(sum(costs.activations[t.stage] for t in tasks if t.kind == "F") for tasks in table) for table in whole
        )
        wrong = f"no timetable fits in {min(limits):,.0f} bytes a rank"
        raise ConfigError.on("activations", wrong, f"at least {least:,.0f} bytes.")
    return replace(min(found, key=_order), named=named)


def _order(found: Found) -> tuple[float, float]:
    """Return the sort key: shorter is better, then smaller; ``min`` takes a named schedule before one only as good."""
    return float(f"{found.simulation.seconds:.9g}"), max(found.simulation.peak_bytes)


def _named(ranks: int, microbatches: int, v: int) -> dict[str, Timetable]:
    """Return the synchronous schedules that are legal for these numbers."""
    return {
        name: timetable(name, ranks, microbatches, v)
        for name, schedule in SCHEDULES.items()
        if schedule.takes(v)
        and not schedule.asynchronous
        and (schedule.max_microbatches or microbatches) >= microbatches
    }


def _bases(ranks: int, microbatches: int, v: int) -> dict[str, Timetable]:
    """Return the first timetables: the named ones, and one microbatch after another, which takes least memory."""
    alone = {
        f"{name}, one microbatch after the other": tuple(
            tuple(task._replace(microbatch=m) for m in range(microbatches) for task in tasks) for tasks in table
        )
        for name, table in _named(ranks, 1, v).items()
    }
    return {**_named(ranks, microbatches, v), **alone}


def _begin(search: _Search, ranks: int) -> list[_State]:
    """Return the bases that differ without their W's, their first ranks running ahead by 0, 1 or 2 more forwards."""
    drafts: dict[PlanDraft, str] = {}
    for name in search.bases:
        drafts.setdefault(search.drafts[name, "B"], name)
    kinds = [("B", 1.0), *(("I", fit) for fit in FITS[::2])]
    ramps = [tuple(round(more * (ranks - rank) / ranks) for rank in range(ranks)) for more in (0, 1, 2)]
    return [_State(name, kind, fit, ramp) for name in drafts.values() for kind, fit in kinds for ramp in ramps]


def _searched(
    ranks: int, microbatches: int, costs: Costs, limits: Sequence[float], norm: str, events: int
) -> Found | None:
    """Return the best that the search finds (None if nothing fits): over few microbatches first, if there are many."""
    few = 3 * ranks
    sizes = (few, microbatches) if microbatches > 2 * few else (microbatches,)
    begin: list[_State] = []
    states: list[_State] = []
    for size in sizes:
        search = _Search(_bases(ranks, size, costs.stages // ranks), size, costs, limits, norm, events // len(sizes))
        begin = begin or _begin(search, ranks)
        states = [search.climb(state) for state in sorted(states or begin, key=search.value)[:CLIMBS]]
    for state in (*sorted(states, key=search.value), *begin):
        if played := search.play(state):
            return Found(f"{AUTO} from {state.base}", played[0], simulate(played[0], costs, norm))
    return None
