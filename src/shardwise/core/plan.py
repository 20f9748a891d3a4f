"""The plan: how the work of a step is divided.  Frozen data, checked when made; TOML in and out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from shardwise.core.errors import ConfigError, check_choice, check_count, check_keys, check_text, check_value
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.pins import PLANS, cuts
from shardwise.core.schedules import AUTO, SCHEDULES, traits
from shardwise.core.timetable import read

Recompute = Literal["none", "selective", "full"]
Precision = Literal["fp32", "fp64", "bf16", "fp16"]
Dropout = Literal["exact", "fast"]
Gathered = Literal["use", "forward", "step"]
Reduced = Literal["microbatch", "step"]
ReduceDtype = Literal["auto", "fp64", "fp32", "bf16", "fp16"]
Offload = Literal["none", "optimizer", "activations", "all"]
Norm = Literal["barrier", "post-validate"]
Tensor = Literal["1d", "1d-sp", "2d", "2.5d", "3d"]
TensorPlan = Literal["recipe", "auto", "propagate", "table"]
Pins = tuple[tuple[str, str], ...]

CHOICES: Mapping[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "precision": get_args(Precision),
    "schedule": (*SCHEDULES, AUTO),
    "norm": get_args(Norm),
    "tensor": get_args(Tensor),
    "tensor_plan": get_args(TensorPlan),
    "dropout": get_args(Dropout),
    "offload": get_args(Offload),
    "gathered": get_args(Gathered),
    "reduced": get_args(Reduced),
    "reduce": get_args(ReduceDtype),
}
"""The fields of a plan that are one word, with the legal words."""

OTHERS = ("pp", "dp_replicate", "dp")
"""The axes of a mesh that shard no parameter by its dims."""

LOW_PRECISIONS = ("bf16", "fp16")
"""The precisions that compute with copies of fp32 masters."""

DATA_PARALLEL_ROWS: Mapping[tuple[str, str, str], str] = {
    ("R", "P", "R"): "DDP",
    ("R", "P", "S"): "ZeRO-1",
    ("R", "S", "S"): "ZeRO-2",
    ("S", "S", "S"): "ZeRO-3",
}
"""The data-parallel table: (rest, gradient between microbatches, optimizer state) and its usual name."""


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """One row of the data-parallel table for the parameters whose name matches ``pattern`` (as in
    :mod:`fnmatch`).

    R is replicated, P a partial sum, S a flat shard over ``dp`` (replicated, or a partial sum, over ``dp_replicate``).
    ``rest`` is the parameter between steps, ``grad`` its gradient between microbatches, ``state`` the optimizer's.
    """

    pattern: str
    rest: Literal["R", "S"] = "R"
    grad: Literal["P", "S"] = "P"
    state: Literal["R", "S"] = "R"

    def __post_init__(self) -> None:
        check_text("parameters.pattern", self.pattern)
        where = f'parameters "{self.pattern}"'
        for field, legal in (("rest", "RS"), ("grad", "PS"), ("state", "RS")):
            check_choice(f"{where}: {field}", getattr(self, field), legal)
        row = (self.rest, self.grad, self.state)
        if row not in DATA_PARALLEL_ROWS:
            legal_rows = ", ".join(f"{', '.join(legal_row)} ({name})" for legal_row, name in DATA_PARALLEL_ROWS.items())
            wrong = f"rest, grad, state = {', '.join(row)} is no row of the data-parallel table"
            raise ConfigError.on(where, wrong, f"{legal_rows}.")

    @property
    def sharded(self) -> bool:
        """Whether anything of these parameters is sharded over ``dp``."""
        return self.state == "S"


@dataclass(frozen=True, slots=True)
class Plan:
    """How a step is divided over the ranks of ``mesh``: over its axes ``pp`` by layers, over ``dp_replicate`` and
    ``dp`` by rows, over any other by dims of parameters.

    ``microbatches`` is per step; over the axis ``pp`` they go through a pipeline by ``schedule``, of
    ``stages_per_rank`` stages on each rank; ``stages`` are the numbers of units in each stage, none: so that their
    costs are balanced.  Under ``norm = "post-validate"`` stages update by their own gradients' norm and go on with the
    next batch; when the norm of all is there a stage that should have clipped or skipped goes back (Qi et al., arXiv
    2401.10241, section 4).  There, and under an asynchronous schedule, the pipeline is empty after every ``window``
    batches; under ``vertical_sync`` PipeDream uses the first stage's version of the weights on all.  Schedule "auto"
    goes by ``timetable``, a text for each rank over ``pp`` (``core/timetable.py``), such as "F0.0 F0.1 B0.0 B0.1":
    kinds, stages and microbatches in the order in which the rank computes them.  ``tensor`` is the recipe of axes that
    shard parameters; under ``tensor_plan`` "auto" a solver takes its place, under "propagate" and "table" ``pins``,
    (pattern, where to cut) as in ``core/pins.py``; a mapping may be given.  ``tensor_bytes`` is the most that what the
    solver finds may take (``core/rates.py``, ``Machine.memory``; 0: any number).  ``recompute`` says whether units are
    run forward again in backward, under "selective" without their matrix products, convolutions and attention;
    ``precision`` is the dtype of computing; ``dropout = "fast"`` allows fused kernels whose masks depend on the layout.
    The first of ``parameters`` whose pattern matches a parameter's name is its rule.

    Of parameters that rest sharded, ``gathered`` says how long they stay whole: for one use, from a
    microbatch's forward to its backward, or for the whole step; ``prefetch`` is how many units ahead they are
    gathered.  Of gradients that are sharded between microbatches, ``reduced`` says when: after the unit's
    backward of every microbatch, or of the last.  ``reduce`` is the dtype in which gradients are summed over
    ranks ("auto": that in which they are kept, fp32 or fp64).  ``offload = "optimizer"`` keeps master weights
    and optimizer state on the host, which also takes the step (ZeRO-Offload, arXiv 2101.06840);
    "activations" keeps there what autograd keeps between forward and backward, of accelerators only; "all" both.
    :class:`ConfigError` names the field, the value and what is legal.
    """

    mesh: Mesh = Mesh.of(dp=1)
    microbatches: int = 1
    recompute: Recompute = "none"
    precision: Precision = "fp32"
    schedule: str = "1f1b"
    parameters: tuple[ParameterRule, ...] = (ParameterRule("*"),)
    dropout: Dropout = "exact"
    offload: Offload = "none"
    gathered: Gathered = "use"
    reduced: Reduced = "microbatch"
    prefetch: int = 1
    reduce: ReduceDtype = "auto"
    stages_per_rank: int = 1
    stages: tuple[int, ...] = ()
    vertical_sync: bool = False
    norm: Norm = "barrier"
    tensor: Tensor = "1d"
    window: int = 32
    timetable: tuple[str, ...] = ()
    tensor_plan: TensorPlan = "recipe"
    pins: Pins = ()
    tensor_bytes: int = 0

    def __post_init__(self) -> None:
        check_value("mesh", self.mesh, isinstance(self.mesh, Mesh), "a Mesh, such as Mesh.of(dp=2)")
        check_count("microbatches", self.microbatches)
        check_count("prefetch", self.prefetch, least=0)
        check_count("stages_per_rank", self.stages_per_rank)
        self._check_stages()
        for field, legal in CHOICES.items():
            check_choice(field, getattr(self, field), legal)
        self._check_timetable()
        self._check_pins()
        rules = self.parameters
        if (
            not isinstance(rules, tuple | list)
            or not rules
            or not all(isinstance(rule, ParameterRule) for rule in rules)
        ):
            raise ConfigError(f"parameters: {rules!r} is not legal; legal: one ParameterRule or more.")
        object.__setattr__(self, "parameters", tuple(rules))
        self._check_shards()
        self._check_asynchronous()

    def _check_stages(self) -> None:
        legal = "the number of units in each stage, such as [3, 3]"
        check_value("stages", self.stages, isinstance(self.stages, tuple | list), legal)
        object.__setattr__(self, "stages", tuple(self.stages))
        for number in self.stages:
            check_count("stages", number)
        ranks, each = self.mesh.axis_size("pp"), self.stages_per_rank
        if self.stages and len(self.stages) != ranks * each:
            wrong = f"{list(self.stages)} are {len(self.stages)} stages"
            raise ConfigError.on("stages", wrong, f"{ranks * each}, for {ranks} ranks over pp with {each} each.")

    def _check_timetable(self) -> None:
        if self.schedule != AUTO:
            if self.timetable:
                wrong = f'"{self.schedule}" has its own'
                raise ConfigError.on("timetable", wrong, 'schedule = "auto" with a timetable.')
            object.__setattr__(self, "timetable", ())
            return
        if not self.timetable:
            texts = 'one text for each rank over pp, such as "F0.0 F0.1 B0.0 B0.1"'
            legal = f"{texts}, or `shardwise train`, which measures the stages and finds one."
            raise ConfigError.on("schedule", '"auto" needs a timetable', legal)
        read(self.timetable, self.mesh.axis_size("pp"), self.stages_per_rank, self.microbatches)
        object.__setattr__(self, "timetable", tuple(self.timetable))

    @property
    def tensor_axes(self) -> tuple[str, ...]:
        """The axes that shard parameters by their dims, in the order of the mesh, those of one rank left out."""
        return tuple(axis.name for axis in self.mesh.axes if axis.name not in OTHERS and axis.size > 1)

    def _check_pins(self) -> None:
        pins = tuple(self.pins.items()) if isinstance(self.pins, Mapping) else self.pins
        if not isinstance(pins, tuple | list) or not all(
            isinstance(pin, tuple | list) and len(pin) == 2 for pin in pins
        ):
            legal = 'a mapping, such as {"*.q_proj.weight": "column"}.'
            raise ConfigError.on("pins", f"{self.pins!r} is not legal", legal)
        object.__setattr__(self, "pins", tuple((pattern, text) for pattern, text in pins))
        check_pins(self.tensor_plan, self.pins, self.tensor_axes)
        check_count("tensor_bytes", self.tensor_bytes, least=0)
        if self.tensor_bytes and self.tensor_plan != "auto":
            wrong = f'{self.tensor_bytes} is not legal with tensor_plan = "{self.tensor_plan}"'
            raise ConfigError.on("tensor_bytes", wrong, '0, or tensor_plan = "auto".')

    def _check_shards(self) -> None:
        sharded = next((rule for rule in self.parameters if rule.sharded), None)
        if sharded is not None and "dp" not in self.mesh.names:
            wrong = f"S is a shard over the axis dp, which the mesh ({self.mesh.shape}) does not have"
            raise ConfigError.on(f'parameters "{sharded.pattern}"', wrong, 'a mesh with an axis "dp".')
        wide = ("fp64",) if self.precision == "fp64" else ("fp32", "bf16", "fp16")
        check_choice("reduce", self.reduce, ("auto", *wide))

    @property
    def _pipelined(self) -> bool:
        """Whether there is a pipeline of several ranks."""
        return self.mesh.axis_size("pp") > 1

    @property
    def asynchronous(self) -> bool:
        """Whether weights are updated while microbatches of other batches are in the pipeline."""
        return self._pipelined and traits(self.schedule).asynchronous

    @property
    def stages_alone(self) -> bool:
        """Whether each stage updates its weights by itself, without waiting for the others."""
        return self._pipelined and traits(self.schedule).stages_alone

    @property
    def double_buffered(self) -> bool:
        """Whether a batch is updated only before the next but one needs its weights."""
        return self._pipelined and traits(self.schedule).double_buffered

    @property
    def post_validates(self) -> bool:
        """Whether stages update before the norm over all of them is known."""
        return self._pipelined and self.norm == "post-validate"

    @property
    def overlaps(self) -> bool:
        """Whether a program is of a window of batches, of which one begins before the last is over on all ranks."""
        return self.asynchronous or self.post_validates

    def _check_asynchronous(self) -> None:
        check_count("window", self.window)
        check_value("vertical_sync", self.vertical_sync, isinstance(self.vertical_sync, bool), "true, false")
        check_asynchronous(
            self.schedule, self.mesh.axis_size("pp"), self.microbatches, self.precision, self.reduce,
            self.vertical_sync, self.norm,
            sharded=any(rule.sharded for rule in self.parameters) and self.mesh.axis_size("dp") > 1,
        )  # fmt: skip

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and optimizer state are on the host."""
        return self.offload in ("optimizer", "all")

    @property
    def offloads_activations(self) -> bool:
        """Whether what autograd keeps goes to the host until backward."""
        return self.offload in ("activations", "all")

    def check_device(self, kind: str) -> None:
        """:class:`ConfigError` if ranks on devices of this ``kind``, "cpu" or "gpu", cannot do what the plan says."""
        if self.offloads_activations and kind == "cpu":
            wrong = f'"{self.offload}" is not legal on a CPU, whose memory is the host\'s'
            raise ConfigError.on("offload", wrong, '"none", "optimizer".')

    def replace(self, **changes: Any) -> Plan:
        """A plan with some fields changed, checked anew."""
        check_keys("plan", changes, (field.name for field in fields(Plan)))
        return replace(self, **changes)

    def rule(self, name: str) -> ParameterRule:
        """The rule of the parameter called ``name``: the first that matches."""
        for rule in self.parameters:
            if fnmatchcase(name, rule.pattern):
                return rule
        patterns = ", ".join(f'"{rule.pattern}"' for rule in self.parameters)
        raise ConfigError(
            f'parameters: no rule matches "{name}"; legal: a rule for each, such as "*"; found: {patterns}.'
        )

    def to_toml(self) -> str:
        """The plan as TOML; :meth:`from_toml` reads it back unchanged."""
        counts = ("microbatches", "prefetch", "stages_per_rank", "window", "tensor_bytes")
        lines = [f"{field} = {getattr(self, field)}" for field in counts]
        lines += [f"vertical_sync = {str(self.vertical_sync).lower()}"]
        lines += [f"stages = {list(self.stages)}"]
        lines += ["timetable = [", *(f"    {_quote(text)}," for text in self.timetable), "]"]
        lines += [f"{field} = {_quote(getattr(self, field))}" for field in CHOICES]
        if not self.mesh.axes:
            lines += ["mesh = []"]
        lines += ["", "[pins]", *(f"{_quote(pattern)} = {_quote(text)}" for pattern, text in self.pins)]
        for axis in self.mesh.axes:
            lines += ["", "[[mesh]]", f"name = {_quote(axis.name)}", f"size = {axis.size}"]
        for rule in self.parameters:
            lines += ["", "[[parameters]]"]
            lines += [f"{field.name} = {_quote(getattr(rule, field.name))}" for field in fields(ParameterRule)]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str) -> Plan:
        """Read a plan; what is left out has its default, what is unknown or wrong raises ConfigError."""
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"plan: not TOML: {error}.") from error
        check_keys("plan", values, (field.name for field in fields(Plan)))
        if "mesh" in values:
            values["mesh"] = Mesh(tuple(_records("mesh", values["mesh"], Axis)))
        if "parameters" in values:
            values["parameters"] = tuple(_records("parameters", values["parameters"], ParameterRule))
        return Plan(**values)


def check_pins(tensor_plan: str, pins: Sequence[tuple[str, str]], axes: Sequence[str]) -> None:
    """:class:`ConfigError` where ``pins``, over these axes of tensor parallelism, do not go together with
    ``tensor_plan``.
    """
    own = ", ".join(f'"{name}"' for name in PLANS)
    given = dict(pins)
    if tensor_plan not in PLANS:
        if given:
            wrong = f'"{next(iter(given))}" is not legal with tensor_plan = "{tensor_plan}", which decides itself'
            raise ConfigError.on("pins", wrong, f"none, or tensor_plan = {own}.")
        return
    if not axes:
        wrong = f'"{tensor_plan}" is not legal without ranks to shard over'
        raise ConfigError.on("tensor_plan", wrong, '"recipe", or tp of 2 or more.')
    if not given:
        legal = '"recipe", "auto", or pins, such as {"*.q_proj.weight" = "column"}.'
        raise ConfigError.on("tensor_plan", f'"{tensor_plan}" goes by pins, and there are none', legal)
    for pattern, text in given.items():
        check_text("pins: pattern", pattern)
        cuts(pattern, text, axes)
    if len(given) < len(pins):
        twice = next(p for i, (p, _) in enumerate(pins) if any(p == q for q, _ in list(pins)[:i]))
        raise ConfigError.on("pins", f'"{twice}" is there twice', "once.")


def check_asynchronous(
    schedule: str,
    pp: int,
    microbatches: int,
    precision: str,
    reduce: str,
    vertical_sync: bool,
    norm: str,
    *,
    sharded: bool,
) -> None:
    """:class:`ConfigError` where a schedule that does not wait for an empty pipeline cannot do what is asked of it."""
    kind, illegal = traits(schedule), f'not legal with schedule "{schedule}"'
    if vertical_sync and not kind.stages_alone:
        others = ", ".join(f'"{other.name}"' for other in SCHEDULES.values() if other.stages_alone)
        raise ConfigError.on("vertical_sync", f"true is {illegal}", f"false, or schedule {others}.")
    if not kind.asynchronous or pp == 1:
        return
    if norm != "barrier":
        raise ConfigError.on("norm", f'"{norm}" is {illegal}, which has no barrier to do without', '"barrier".')
    if sharded:
        raise ConfigError.on("zero", f"sharded states are {illegal}, which keeps several versions of weights", "0.")
    if reduce not in ("auto", "fp64", "fp32"):
        raise ConfigError.on("reduce", f'"{reduce}" is {illegal}', '"auto".')
    if kind.stages_alone and microbatches != 1:
        wrong = f"{microbatches} is {illegal}, which updates after each microbatch"
        raise ConfigError.on("microbatches", wrong, "1, with batches as large as a microbatch shall be.")
    if kind.stages_alone and precision == "fp16":
        wrong = f'"fp16" is {illegal}, for all stages decide on its loss scale together'
        raise ConfigError.on("precision", wrong, '"fp32", "bf16", "fp64".')


def _records(where: str, items: object, kind: type[Any]) -> list[Any]:
    """The records of type ``kind`` in the array of tables ``items``."""
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ConfigError(f"{where}: {items!r} is not legal; legal: tables, each under [[{where}]].")
    required = [field.name for field in fields(kind)][: 1 if kind is ParameterRule else 2]
    for position, item in enumerate(items):
        check_keys(f"{where}[{position}]", item, (field.name for field in fields(kind)))
        for key in required:
            if key not in item:
                raise ConfigError(f'{where}[{position}]: "{key}" is missing; found: {", ".join(item) or "nothing"}.')
    return [kind(**item) for item in items]


def _quote(text: str) -> str:
    """``text`` as a basic TOML string: JSON's escapes are TOML's, but for DEL, which TOML wants escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
