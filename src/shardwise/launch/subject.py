"""Build a config's model, plan and data in one process, for commands that do not train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.backend import Backend, Kind
from shardwise.capture.outputs import Wanted
from shardwise.checkpoint.weights import check_weights, fit_weights
from shardwise.config import Config, Hardware, build_data, build_model, build_plan, load_config
from shardwise.config.build import Constructor, LossFunction, build_base_model
from shardwise.config.lora import UnderAdapters
from shardwise.core.devices import DeviceModel
from shardwise.core.errors import ConfigError
from shardwise.core.garbage import without_gc
from shardwise.core.links import LEGAL_PROFILE, LinkProfile
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.core.structure import Fields
from shardwise.data.forming import fields_of, kind_of, rows_of
from shardwise.data.padding import Padded
from shardwise.data.samples import Samples
from shardwise.data.stream_loader import open_loader, open_pass
from shardwise.data.streams import is_dataset, samples_of, source_of
from shardwise.estimate.devices import Device, here
from shardwise.initial.initial import record
from shardwise.initial.values import Values
from shardwise.lower.compiled import Compiled
from shardwise.lower.versions import steady_batches
from shardwise.train.expert_loads import layers_of_experts

from .forecast import Forecast
from .left_open import left_open
from .ordering import settle_by_costs, unordered


@dataclass(frozen=True)
class LoadedModel:
    """This holds a plan with its model, its loss, and whole batches of its data, whose tensors have rows in dim 0."""

    plan: Plan
    module: nn.Module
    loss: LossFunction | None
    batches: list[Mapping[str, Tensor]]


def load_anywhere(path: Path | None, overrides: Sequence[str]) -> Config:
    """Load a config for a command that does not train: this machine's devices set defaults, and are no limit."""
    config = load_config(path, overrides, hardware=Hardware(cores=Hardware.here().devices))
    return config if config.train.epochs is None else config.for_samples(_samples(config))


def _samples(config: Config) -> int:
    return samples_of(build_data(config).train, config.data.batch_size)


def subject(config: Config, batches: int, *, weights: bool = True) -> LoadedModel:
    """Build what ``config`` describes, with the weights to start from and the first ``batches`` batches of its data.

    Without ``weights`` the module stays on the meta device where its constructor can be recorded.
    """
    constructor, loss = build_model(config)
    module = start_values(config, constructor).whole() if weights else initial_values(config, constructor).structure()
    data, one = build_data(config).train, Mesh.of(dp=1)
    with open_loader(data, one, 0, config.rows_of_step, 1, config.train.seed) as loader:
        return LoadedModel(build_plan(config), module, loss, [next(loader).fields for _ in range(batches)])


def initial_values(config: Config, constructor: Constructor) -> Values:
    """Return the initial values that the constructor gives under the seed of ``config``; nothing is computed yet."""
    return Values.of_recorded(record(constructor, seed=config.train.seed), config.train.seed)


def start_values(config: Config, constructor: Constructor, trained: Path | None = None) -> Values:
    """Return what training starts from: the values of the constructor, or those of ``model.weights`` or
    ``model.pretrained``, which must fit; nothing is read yet.

    The adapters of ``model.lora`` are not in the file: they start as peft makes them.  Weights that the run itself has
    ``trained``, its checkpoint for one, count more; they have the adapters.
    """
    initial, given = initial_values(config, constructor), given_weights(config)
    if trained is not None:
        return initial.with_weights(fit_weights(trained, initial.module, "weights"), ())
    if given is None:
        return initial
    key, path = given
    if config.model.lora is None:
        found: Mapping[str, Tensor] = fit_weights(path, initial.module, key)
        whole = getattr(found, "whole", False)
    else:
        fitting = fit_weights(path, initial_values(config, build_base_model(config)).module, key)
        found, whole = UnderAdapters(fitting, initial), fitting.whole
    note = f'initial weights: every rank reads all of "{path}" at once, as only the class of the model can'
    return initial.with_weights(found, (note,) if whole else ())


def given_weights(config: Config) -> tuple[str, Path] | None:
    """Return the key that gives weights to start from, and their path; None if there is none."""
    for key, path in (("model.weights", config.model.weights), ("model.pretrained", config.model.pretrained)):
        if path is not None:
            return key, Path(path)
    return None


def compare_weights(config: Config) -> None:
    """Raise :class:`ConfigError` if the names or shapes of the weights to start from are not those of the model, or the
    targets of ``model.lora`` not among its layers.

    Before any rank starts: the headers of the files are compared with the structure of the model, without its weights.
    """
    given = given_weights(config)
    if given is not None:
        key, path = given
        check_weights(path, initial_values(config, build_base_model(config)).module, key)
    if config.model.lora is not None:
        initial_values(config, build_model(config)[0])


LOOKED_AT = 256  # samples


def example_of(dataset: Any) -> Fields:
    """Return the first two rows of a dataset, or the only one; the model is captured with them.  Of rows of different
    lengths it is the longest of the first :data:`LOOKED_AT`, since memory is predicted for them."""
    if isinstance(dataset, Padded) and is_dataset(dataset.data):
        return fields_of(dataset.padding(dataset.longest(LOOKED_AT)[:2]))
    if source_of(dataset, 2) is None:
        samples = Samples(dataset)
        return samples.read(range(min(2, samples.size)))
    first = next(open_pass(dataset, Mesh.of(dp=1), 0, 2, batches=1), None)
    if first is None:
        raise ConfigError.on("data", f"{kind_of(dataset)} gave no batch", "one batch or more")
    assert isinstance(first.fields, Fields)
    return rows_of(first.fields, [(0, 2)])


def compiled_here(
    config: Config, found: LoadedModel, per_host: int | None = None, device: torch.device | None = None
) -> Compiled:
    """Compile the model for its plan and for devices like those of this machine, ``per_host`` of them on each host.

    What is compiled runs on ``device``, by default the CPU.
    """
    per_host, device = per_host or default_ranks_per_host(found.plan.mesh), device or torch.device("cpu")
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
        links=links_of(config),
        loss_weight=config.model.loss_weight,
        wanted=wanted_of(config),
        varies=config.data.varies or {},
    )


def links_of(config: Config) -> LinkProfile | None:
    """Return what ``parallel.links`` says was measured; None where nothing was."""
    path = config.parallel.links
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError.on("parallel.links", f"cannot read {path}: {reason}", LEGAL_PROFILE) from None
    return LinkProfile.of_json(text, f"parallel.links {path}")


def wanted_of(config: Config) -> Wanted:
    """Return what units give for a step of training."""
    return "load" if config.train.expert_load_every else "loss"


def check_loads(config: Config, compiled: Compiled) -> None:
    """Raise :class:`ConfigError` where loads are asked for and no layer of experts was found."""
    if config.train.expert_load_every and not layers_of_experts(compiled.general):
        wrong = "no layer of experts was found in the model"
        raise ConfigError.on(f"train.expert_load_every = {config.train.expert_load_every}", wrong, "0")


def default_ranks_per_host(mesh: Mesh) -> int:
    """Return the number of ranks on one host: one for each GPU of this machine, or all ranks if it has none."""
    return Hardware.here().gpus or mesh.size


def with_device_choices(config: Config, compiled: Compiled) -> Compiled:
    """Return ``compiled`` under the plan that this machine would train, with a note on what the config leaves open."""
    if not depends_on_device(config):
        return compiled
    found = Forecast.of(config, compiled, _device(config))
    settle_by_costs(found)
    found.compiled.general.notes += [found.note] if found.note is not None else []
    return found.compiled


def depends_on_device(config: Config) -> bool:
    """Return whether the plan that would be trained depends on the device."""
    return (
        bool(left_open(config))
        or unordered(config)
        or (config.parallel.tensor_plan == "auto" and config.parallel.tp > 1)
    )


def _device(config: Config) -> Device:
    """Return this machine's device, as one of the ranks that would share this machine has it."""
    return here(ranks=min(config.train.devices, Hardware.here().devices))


def forecast(config: Config, device: Device | None = None) -> Forecast:
    """Predict the memory that ``config`` needs on ``device``, by default the device of this machine.

    Only the structure of the model is made, without weights, and two rows of its data are read.
    """
    with config.answering():
        device = device or _device(config)
        found = Forecast.of(config, _compiled(config, device.kind, device.model), device)
        settle_by_costs(found)
        return found


def check_plan(config: Config, device: torch.device) -> None:
    """Raise :class:`ConfigError` if a capture of the model shows that the plan of ``config`` does not suit it.

    Only plans with tensor or pipeline parallelism are checked, before any rank starts.  ``device`` stands for the
    devices that ranks train on, and is not touched.  Only the structure of the model is made, without weights, and two
    rows of its data are read.
    """
    if config.parallel.tp == config.parallel.pp == 1:
        return
    with config.answering():
        compiled = _compiled(config, Backend.of(device).kind, device=device)
        compiled.programs(compiled.general, compiled.plan.microbatches, steady_batches(compiled.plan))


def _compiled(
    config: Config, kind: Kind, model: DeviceModel | None = None, device: torch.device | None = None
) -> Compiled:
    """Compile the model without weights for its plan, with the rates of the device ``model``, else of its ``kind``."""
    constructor, loss = build_model(config)
    example = example_of(build_data(config).train)
    with without_gc():
        module = initial_values(config, constructor).structure()
        plan = build_plan(config)
        return Compiled(
            module, plan, example, loss, device or torch.device("cpu"), batch_rows=config.rows_together, kind=kind,
            model=model, per_host=default_ranks_per_host(plan.mesh), links=links_of(config),
            loss_weight=config.model.loss_weight, wanted=wanted_of(config), varies=config.data.varies or {},
        )  # fmt: skip
