"""The configuration of a run: it is read from TOML and ``section.key=value``, checked, completed, written as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.core.errors import ConfigError

from .defaults import complete
from .draft import ConfigDraft, problem, reworded
from .hardware import Hardware
from .pretrained import TOKENIZER_JSON
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
    counts when configurations are compared.  With ``train.epochs`` the number of steps is not known yet:
    ``train.steps`` and what follows from it are defaults, until :meth:`for_samples`.
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
    _again: Callable[..., Config] | None = field(default=None, compare=False, repr=False)

    def for_samples(self, samples: int) -> Config:
        """Return the configuration for so many training samples: with ``train.steps`` in place of ``train.epochs``."""
        return self if self.train.epochs is None or self._again is None else self._again(samples=samples)

    @property
    def rows_of_step(self) -> int:
        """Return the rows of a step: a batch's, or those of all batches that a worker pushes together."""
        return self.data.batch_size * self.parallel.push_every

    @property
    def microbatches_of_step(self) -> int:
        """Return the microbatches of these rows."""
        return self.parallel.microbatches * self.parallel.push_every

    @property
    def rows_together(self) -> int:
        """Return how many of a step's rows one model trains on: all, or those of the largest island."""
        islands = self.parallel.dp_replicate if self.parallel.local_steps else 1
        return -(-self.rows_of_step // islands)

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
    path: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    hardware: Hardware | None = None,
    samples: int | None = None,
) -> Config:
    """Load the configuration in the TOML file ``path`` (None: all defaults) with ``section.key=value`` overrides.

    Relative paths in the file are relative to its folder, and in overrides to the current folder. ``hardware`` (by
    default this machine) sets the defaults and limits of devices. ``samples`` is the number of training samples, for
    ``train.epochs``. :class:`ConfigError` lists every problem, one on a
    line: the key, its value, where it comes from, and what is legal.
    """
    overrides, hardware = tuple(overrides), hardware or Hardware.here()
    draft = _drafted(path, overrides)
    complete(draft, hardware, samples)
    _refuse(draft)
    return Config(
        **{name: draft.section(name) for name in SECTIONS}, notices=tuple(draft.notices), origins=draft.origins,
        _again=partial(load_config, path, overrides, hardware=hardware),
    )  # fmt: skip


def given_values(path: str | Path | None, overrides: Iterable[str], keys: Iterable[str]) -> dict[str, Any]:
    """Return the values of ``keys`` as the file and the overrides give them, those of keys that are left out as their
    static defaults, or None where the default follows from other keys.

    :class:`ConfigError` lists every value that is wrong by itself; whether values go together is not looked at.
    """
    draft = _drafted(path, overrides)
    _refuse(draft)
    return {key: draft[key] for key in keys}


def _drafted(path: str | Path | None, overrides: Iterable[str]) -> ConfigDraft:
    draft = ConfigDraft()
    if path is not None:
        draft.add_tables(_read(Path(path)), str(path), Path(path).absolute().parent)
    for override in overrides:
        draft.add_override(override, "command line", Path.cwd())
    return draft


def _refuse(draft: ConfigDraft) -> None:
    if draft.problems:
        raise ConfigError("\n".join(line for _, line in draft.problems))


def load_model_config(text: str, pretrained: str | None = None) -> Config:
    """Return a configuration with the model and the tokenizer of ``text``, that of an earlier run, and otherwise the
    defaults of a single rank: neither the data of that run nor its devices need be here.

    ``pretrained`` replaces ``model.pretrained``.  :class:`ConfigError` lists what the model takes and is gone.
    """
    tables = tomllib.loads(text)
    model, data = dict(tables.get("model", {})), tables.get("data", {})
    if pretrained is not None:
        beside = str(Path(str(model.get("pretrained"))) / TOKENIZER_JSON)
        data = {name: value for name, value in data.items() if (name, value) != ("tokenizer", beside)}
        model["pretrained"] = pretrained
    kept = {name: data[name] for name in ("tokenizer", "end_token", "sequence_length", "attention") if name in data}
    draft = ConfigDraft()
    draft.add_tables({"model": model, "data": kept}, "the run", Path.cwd())
    complete(draft, Hardware(cores=1))
    _refuse(draft)
    return Config(**{name: draft.section(name) for name in SECTIONS})


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config: {error.strerror}; legal: a TOML file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
