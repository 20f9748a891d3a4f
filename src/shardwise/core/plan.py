"""This module defines the plan, which says how the work of a step is divided: frozen data, checked when made, that can
be written as TOML and read back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from typing import Any

from shardwise.core.data_options import DataOptions, ParameterRule
from shardwise.core.errors import ConfigError, check_choice, check_keys, check_value
from shardwise.core.local_options import LocalOptions
from shardwise.core.memory_options import MemoryOptions
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.numeric_options import NumericOptions
from shardwise.core.options import check_options, count, key_of
from shardwise.core.pipeline_options import PipelineOptions
from shardwise.core.schedules import traits
from shardwise.core.server_options import ServerOptions
from shardwise.core.tensor_options import TensorOptions, parameter_axes

ONE_RANK = Mesh.of(dp=1)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan divides a step over the ranks of ``mesh``: over its axis ``pp`` by layers, over ``dp_replicate`` and
    ``dp`` by rows, and over any other axis by dims of parameters.  Over ``islands`` it divides the batch into batches
    of models that train apart.

    ``microbatches`` is the number of microbatches in a step.  All other options are in groups, which document and check
    their own options; the plan checks what involves several groups.  Users and TOML write all options flat, as in
    :meth:`of`.  :class:`ConfigError` names the option, the value and what is legal.
    """

    mesh: Mesh = ONE_RANK
    microbatches: int = count(1)
    data: DataOptions = DataOptions()
    pipeline: PipelineOptions = PipelineOptions()
    tensor: TensorOptions = TensorOptions()
    numeric: NumericOptions = NumericOptions()
    memory: MemoryOptions = MemoryOptions()
    local: LocalOptions = LocalOptions()
    serving: ServerOptions = ServerOptions()

    def __post_init__(self) -> None:
        check_value("mesh", self.mesh, isinstance(self.mesh, Mesh), "a Mesh, such as Mesh.of(dp=2)")
        check_options(self)
        ranks = self.mesh.axis_size("pp")
        self.pipeline.check_ranks(ranks, self.microbatches)
        self.tensor.check_axes(parameter_axes(self.mesh))
        sharded = next((rule for rule in self.data.parameters if rule.sharded), None)
        if sharded is not None and "dp" not in self.mesh.names:
            wrong = f"S is a shard over the axis dp, which the mesh ({self.mesh.shape}) does not have"
            raise ConfigError.on(f'parameters "{sharded.pattern}"', wrong, 'a mesh with an axis "dp".')
        self._check_servers()
        self._check_tables()
        self._check_updates()
        wide = ("fp64",) if self.numeric.precision == "fp64" else ("fp32", "bf16", "fp16")
        check_choice("reduce", self.data.reduce, ("auto", *wide))
        self.local.check_mesh(self.mesh, self.overlaps, self.memory.offloads_optimizer)
        if ranks > 1:
            shards = sharded is not None and self.mesh.axis_size("dp") > 1
            check_asynchronous(self.pipeline.schedule, self.numeric.precision, self.data.reduce, sharded=shards)

    def _check_servers(self) -> None:
        """Raise :class:`ConfigError` if parameter servers do not fit the rest of the plan."""
        served = [rule for rule in self.data.parameters if rule.state == "O"]
        most, size = max((rule.servers for rule in served), default=0), self.mesh.axis_size("dp")
        if most > size:
            raise ConfigError.on("server_ranks", f"{most} are more than the {size} ranks of dp", f"1 to {size}")
        if not self.serving.apart:
            if any(not rule.servers for rule in served):
                raise ConfigError.on("parameters", "state O with no servers", 'server = "async" or "stale"')
            return
        kind = self.serving.kind
        if self.mesh.size > 1:
            axes = ", ".join(f"{axis.name} {axis.size}" for axis in self.mesh.axes if axis.size > 1)
            wrong = f'"{kind}" is not legal for a worker of several ranks ({axes})'
            raise ConfigError.on("server", wrong, '"sync", or workers of one rank each')
        if not served or len(served) < len(self.data.parameters) or most:
            raise ConfigError.on("server", f'"{kind}" needs state O of servers apart', "asynchronous_server(plan, …)")
        if self.numeric.precision == "fp16":
            wrong = f'"fp16" is not legal with server = "{kind}", as workers have no loss scale together'
            raise ConfigError.on("precision", wrong, '"fp32", "bf16", "fp64"')

    def _check_tables(self) -> None:
        """Raise :class:`ConfigError` if gradients by rows do not fit the rest of the plan."""
        against = {
            f'schedule = "{self.pipeline.schedule}" and norm = "{self.pipeline.norm}", where batches overlap': (
                self.overlaps
            ),
            f'offload = "{self.memory.offload}"': self.memory.offloads_optimizer,
            f"local_steps = {self.local.steps}": self.local.steps > 0,
        }
        if self.data.tables == "rows" and (found := next((what for what, is_so in against.items() if is_so), "")):
            raise ConfigError.on("sparse_gradients", f'"rows" is not legal with {found}', '"dense"')

    def _check_updates(self) -> None:
        """Raise :class:`ConfigError` if steps by whole tensors do not fit the rest of the plan."""
        against = {
            f'norm = "{self.pipeline.norm}", under which a step may be taken back': self.post_validates,
            f'server = "{self.serving.kind}", whose servers have parts of tensors': self.serving.apart,
        }
        if self.data.updates == "tensors" and (found := next((what for what, is_so in against.items() if is_so), "")):
            wrong = f"one that needs whole tensors is not legal with {found}"
            raise ConfigError.on("optimizer", wrong, "one that goes element by element, such as adamw")

    @staticmethod
    def of(mesh: Mesh = ONE_RANK, **options: Any) -> Plan:
        """Return a plan from flat options: ``Plan.of(Mesh.of(pp=2), microbatches=4, schedule="gpipe")``."""
        return Plan().replace(mesh=mesh, **options)

    def replace(self, **changes: Any) -> Plan:
        """Return the plan with some of its flat options changed, checked again."""
        check_keys("plan", changes, (*UNGROUPED, *OPTIONS))
        own = {key: value for key, value in changes.items() if key in UNGROUPED}
        groups: dict[str, dict[str, Any]] = {}
        for key, (group, option) in OPTIONS.items():
            if key in changes:
                groups.setdefault(group, {})[option.name] = changes[key]
        return replace(self, **own, **{group: replace(getattr(self, group), **new) for group, new in groups.items()})

    @property
    def _pipelined(self) -> bool:
        """Return whether there is a pipeline of several ranks."""
        return self.mesh.axis_size("pp") > 1

    @property
    def asynchronous(self) -> bool:
        """Return whether weights are updated while microbatches of other batches are in the pipeline."""
        return self._pipelined and traits(self.pipeline.schedule).asynchronous

    @property
    def stages_alone(self) -> bool:
        """Return whether each stage updates its weights by itself, without waiting for the others."""
        return self._pipelined and traits(self.pipeline.schedule).stages_alone

    @property
    def double_buffered(self) -> bool:
        """Return whether the next batch still uses the weights from before a batch's update, as 2BW does."""
        return self._pipelined and traits(self.pipeline.schedule).double_buffered

    @property
    def post_validates(self) -> bool:
        """Return whether stages update before the norm over all stages is known."""
        return self._pipelined and self.pipeline.norm == "post-validate"

    @property
    def exchanges_microbatches(self) -> bool:
        """Return whether microbatches exchange, as ranks do, where rows meet."""
        return self.data.rows == "batch" and self.microbatches > 1

    @property
    def overlaps(self) -> bool:
        """Return whether a program runs a window of batches, in which one begins before the last is over everywhere."""
        return self.asynchronous or self.post_validates

    def to_toml(self) -> str:
        """Return the plan as TOML; :meth:`from_toml` reads it back unchanged."""
        values = {key: getattr(getattr(self, group), option.name) for key, (group, option) in OPTIONS.items()}
        lines = [f"microbatches = {self.microbatches}", *(f"{key} = {values[key]}" for key in (*COUNTS, *NUMBERS))]
        lines += [f"vertical_sync = {str(self.pipeline.vertical_sync).lower()}"]
        lines += [f"stages = {list(self.pipeline.stages)}"]
        lines += ["timetable = [", *(f"    {_quote(text)}," for text in self.pipeline.timetable), "]"]
        lines += [f"{key} = {_quote(values[key])}" for key in CHOICES]
        if not self.mesh.axes:
            lines += ["mesh = []"]
        lines += ["", "[pins]", *(f"{_quote(pattern)} = {_quote(text)}" for pattern, text in self.tensor.pins)]
        for axis in self.mesh.axes:
            lines += ["", "[[mesh]]", f"name = {_quote(axis.name)}", f"size = {axis.size}"]
        for rule in self.data.parameters:
            lines += ["", "[[parameters]]"]
            values_of = {field.name: getattr(rule, field.name) for field in fields(ParameterRule)}
            lines += [f"{key} = {_quote(v) if isinstance(v, str) else v}" for key, v in values_of.items()]
        return "\n".join(lines) + "\n"

    @staticmethod
    def from_toml(text: str) -> Plan:
        """Read a plan; options that are left out have their defaults, unknown or wrong ones raise ConfigError."""
        try:
            values: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"plan: not TOML: {error}.") from error
        check_keys("plan", values, (*UNGROUPED, *OPTIONS))
        if "mesh" in values:
            values["mesh"] = Mesh(tuple(_records("mesh", values["mesh"], Axis)))
        if "parameters" in values:
            values["parameters"] = tuple(_records("parameters", values["parameters"], ParameterRule))
        return Plan.of(**values)


UNGROUPED = ("mesh", "microbatches")
"""These options are in no group."""

OPTIONS: Mapping[str, tuple[str, Field[Any]]] = {
    key_of(option): (group.name, option)
    for group in fields(Plan)
    if group.name not in UNGROUPED
    for option in fields(getattr(Plan(), group.name))
}
"""This maps the name that users write of every other option to its group and its field there."""

CHOICES: Mapping[str, tuple[str, ...]] = {
    key: option.metadata["legal"] for key, (_, option) in OPTIONS.items() if "legal" in option.metadata
}
"""These options each take one of the listed words."""

COUNTS = tuple(key for key, (_, option) in OPTIONS.items() if "least" in option.metadata)
"""These options are each an integer."""

NUMBERS = tuple(key for key, (_, option) in OPTIONS.items() if "below" in option.metadata)
"""These options are each a number."""


def check_asynchronous(schedule: str, precision: str, reduce: str, *, sharded: bool) -> None:
    """Raise :class:`ConfigError` if an asynchronous schedule cannot be combined with these other options."""
    kind, illegal = traits(schedule), f'not legal with schedule "{schedule}"'
    if not kind.asynchronous:
        return
    if sharded:
        wrong = f"sharded states are {illegal}, which keeps several versions of weights"
        raise ConfigError.on("zero", wrong, '0, or a schedule with one version, such as "1f1b".')
    if reduce not in ("auto", "fp64", "fp32"):
        raise ConfigError.on("reduce", f'"{reduce}" is {illegal}', '"auto".')
    if kind.stages_alone and precision == "fp16":
        wrong = f'"fp16" is {illegal}, for all stages decide on its loss scale together'
        raise ConfigError.on("precision", wrong, '"fp32", "bf16", "fp64".')


def _records(where: str, items: object, kind: type[Any]) -> list[Any]:
    """Return the records of type ``kind`` in the array of tables ``items``."""
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
    """Return ``text`` as a basic TOML string.  JSON and TOML escape alike, but for DEL, which only TOML escapes."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
