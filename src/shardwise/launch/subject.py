"""A config's model, plan and data in one process, for commands that do not train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from shardwise.backend import Backend, Kind
from shardwise.config import Config, Hardware, build_dataset, build_model, build_plan, load_config
from shardwise.config.build import LossFunction
from shardwise.core.devices import DeviceModel
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.data import Loader
from shardwise.data.samples import Samples
from shardwise.estimate.devices import Device, here
from shardwise.initial.initial import record
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady

from .forecast import Forecast, uncollected
from .left_open import left_open
from .ordering import settle_by_costs, unordered

EXAMPLE_ROWS = 2


@dataclass(frozen=True)
class Subject:
    """What a plan is applied to: a model, its loss, and whole batches of its data, rows first."""

    plan: Plan
    module: nn.Module
    loss: LossFunction | None
    batches: list[dict[str, Tensor]]


def load_anywhere(path: Path | None, overrides: Sequence[str]) -> Config:
    """A config for which this machine's devices are no limit, only the default: nothing trains."""
    return load_config(path, overrides, hardware=Hardware(cores=Hardware.here().devices))


def subject(config: Config, batches: int, *, weights: bool = True) -> Subject:
    """Build what ``config`` describes, with the first ``batches`` batches of its data.

    Without ``weights`` the module stays on the meta device where its constructor can be recorded.
    """
    constructor, loss = build_model(config)
    recorded = record(constructor, seed=config.train.seed)
    initial = Values.of_recorded(recorded, config.train.seed)
    module = initial.whole() if weights else initial.structure()
    dataset, _ = build_dataset(config)
    with Loader(dataset, Mesh.of(dp=1), 0, config.data.batch_size, seed=config.train.seed) as loader:
        return Subject(build_plan(config), module, loss, [next(loader).fields for _ in range(batches)])


def compiled_here(
    config: Config, found: Subject, per_host: int | None = None, device: torch.device | None = None
) -> Compiled:
    """Made ready for its plan, as devices like those of this machine, ``per_host`` of them on a host, would train it;
    on ``device``, by default the CPU."""
    per_host, device = per_host or ranks_of_a_host(found.plan.mesh), device or torch.device("cpu")
    there = _device(config)
    return Compiled(
        found.module,
        found.plan,
        found.batches[0],
        found.loss,
        device,
        kind=there.kind,
        model=there.model,
        per_host=per_host,
    )


def ranks_of_a_host(mesh: Mesh) -> int:
    """As many as this machine has GPUs; of CPUs all."""
    return Hardware.here().gpus or mesh.size


def settled(config: Config, compiled: Compiled) -> Compiled:
    """``compiled`` under the plan that would be trained on this machine: with a note, where something is open."""
    if not opens(config):
        return compiled
    found = _ordered(Forecast.of(config, compiled, _device(config)))
    found.compiled.general.notes += [found.note] if found.note is not None else []
    return found.compiled


def opens(config: Config) -> bool:
    """Whether the plan that would be trained depends on the device."""
    return (
        bool(left_open(config))
        or unordered(config)
        or (config.parallel.tensor_plan == "auto" and config.parallel.tp > 1)
    )


def _device(config: Config) -> Device:
    """The one here, for as many ranks as this machine would have."""
    return here(ranks=min(config.train.devices, Hardware.here().devices))


def forecast(config: Config, device: Device | None = None) -> Forecast:
    """Predict the memory of what ``config`` describes; of the model only the structure is made, of its data two rows
    are read.

    The device is by default the one here.
    """
    with config.answering():
        device = device or _device(config)
        return _ordered(Forecast.of(config, _compiled(config, device.kind, device.model), device))


def check_plan(config: Config, device: torch.device) -> None:
    """:class:`ConfigError` where the plan of ``config`` does not suit its model, as far as a capture shows and before
    anything starts.

    That are plans that cut the model, by layers or within them: nothing is looked at for others.  Ranks train on
    devices like ``device``, which is not touched; of the model only the structure is made, of its data two rows are
    read.
    """
    if config.parallel.tp == config.parallel.pp == 1:
        return
    with config.answering():
        compiled = _compiled(config, Backend.of(device).kind, device=device)
        compiled.programs(compiled.general, compiled.plan.microbatches, steady(compiled.plan))


def _compiled(
    config: Config, kind: Kind, model: DeviceModel | None = None, device: torch.device | None = None
) -> Compiled:
    """The model under its plan, from its structure alone, with the rates of a ``kind`` of device, or of a ``model``."""
    constructor, loss = build_model(config)
    dataset, _ = build_dataset(config)
    samples = Samples(dataset)
    example = samples.read(range(min(EXAMPLE_ROWS, samples.size)))
    with uncollected():
        module = Values.of_recorded(record(constructor, seed=config.train.seed), config.train.seed).structure()
        plan = build_plan(config)
        return Compiled(
            module, plan, example, loss, device or torch.device("cpu"), batch_rows=config.data.batch_size, kind=kind,
            model=model, per_host=ranks_of_a_host(plan.mesh),
        )  # fmt: skip


def _ordered(found: Forecast) -> Forecast:
    """With an order, where the config leaves that open."""
    if unordered(found.config):
        settle_by_costs(found)
    return found
