"""The configuration of a run: it is read from TOML and ``section.key=value``, checked, completed, written as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

from .defaults import complete
from .draft import ConfigDraft, problem, reworded
from .hardware import Hardware
from .sections import (
    SECTIONS,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
    ValidationConfig,
)
from .toml import dumps


@dataclass(frozen=True)
class Config:
    """A valid configuration with every default filled in; :func:`load_config` makes one.

    ``notices`` are remarks for the user, and ``origins`` says where each key that the user set comes from; neither
    counts when configurations are compared.
    """

    model: ModelConfig
    data: DataConfig
    validation: ValidationConfig
    optimizer: OptimizerConfig
    parallel: ParallelConfig
    train: TrainConfig
    checkpoint: CheckpointConfig
    notices: tuple[str, ...] = field(default=(), compare=False)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def resolved(self) -> str:
        """Return the whole configuration as TOML with absolute paths; loading it gives this configuration again."""
        sections = {name: getattr(self, name) for name in SECTIONS}
        return dumps(
            {name: {f.name: getattr(section, f.name) for f in fields(section)} for name, section in sections.items()}
        )

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Reword each :class:`ConfigError` on a field of the plan that is raised inside this context: it names the key,
        its value and where that comes from, as the errors of :func:`load_config` do."""
        try:
            yield
        except ConfigError as error:
            if error.field not in {f.name for f in fields(self.parallel)}:
                raise
            key, value = f"parallel.{error.field}", getattr(self.parallel, error.field)
            raise ConfigError(problem(key, value, self.origins.get(key), *reworded(error))) from error


def load_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), *, hardware: Hardware | None = None
) -> Config:
    """Load the configuration in the TOML file ``path`` (None: all defaults) with ``section.key=value`` overrides.

    Relative paths in the file are relative to its folder, and in overrides to the current folder. ``hardware`` (by
    default this machine) sets the defaults and limits of devices. :class:`ConfigError` lists every problem, one on a
    line: the key, its value, where it comes from, and what is legal.
    """
    draft = ConfigDraft()
    if path is not None:
        draft.add_tables(_read(Path(path)), str(path), Path(path).absolute().parent)
    for override in overrides:
        draft.add_override(override, "command line", Path.cwd())
    complete(draft, hardware or Hardware.here())
    if draft.problems:
        raise ConfigError("\n".join(line for _, line in draft.problems))
    return Config(
        **{name: draft.section(name) for name in SECTIONS}, notices=tuple(draft.notices), origins=draft.origins
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config: {error.strerror}; legal: a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
