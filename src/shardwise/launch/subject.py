"""A config's model, plan and data in one process, for commands that do not train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from shardwise.config import Config, Hardware, build_dataset, build_model, build_plan, load_config
from shardwise.config.build import LossFunction
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.data import Loader
from shardwise.runtime.initial_values import Values
from shardwise.trace.initial import record


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
    """Build what ``config`` describes, with the first so many batches of its data.

    Without ``weights`` the module stays on the meta device where its constructor can be recorded.
    """
    constructor, loss = build_model(config)
    recorded = record(constructor, seed=config.train.seed)
    initial = Values.of_recorded(recorded, config.train.seed)
    module = initial.whole() if weights else initial.structure()
    dataset, _ = build_dataset(config)
    with Loader(dataset, Mesh.of(dp=1), 0, config.data.batch_size, seed=config.train.seed) as loader:
        return Subject(build_plan(config), module, loss, [next(loader).fields for _ in range(batches)])
