"""Training can start from saved weights: a Hugging Face folder, a safetensors file, or a checkpoint of shardwise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, did_you_mean

from .container import Entry, opened, read_header
from .folder import MANIFEST
from .manifest import TensorRecord
from .reader import Checkpoint
from .strict import Fields, FileError, parse_json, read_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL = "model."  # the prefix of the model's tensors in a checkpoint
EMA = "ema."  # the prefix of the averages of its parameters, and of the numbers of steps in them
LISTED = 12  # the most names in one error


@dataclass(frozen=True)
class Weights:
    """Named tensors of a file or folder, read one at a time; ``path`` is what the user named.

    Args:
        shapes: the shape of each name.
        dtypes: the dtype of each name.
        aliases: the other names of tied tensors, each with the name that is held.
        source: returns the tensor of a held name, on the CPU.
    """

    path: Path
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    aliases: Mapping[str, str]
    source: Callable[[str], Tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The names without aliases."""
        return tuple(self.shapes)

    def read(self, name: str) -> Tensor:
        """Return the tensor of a name or alias, on the CPU; raise ConfigError where there is none."""
        known = self.aliases.get(name, name)
        if known not in self.shapes:
            raise ConfigError(f"{self.path}: holds no tensor {name!r}.{did_you_mean(name, self.shapes)}")
        return self.source(known)


def read_weights(path: Path) -> Weights:
    """Open a Hugging Face folder, a safetensors file, or a checkpoint's folder, whose files are verified.

    Raises:
        ConfigError: a file is missing, damaged, or a pickle; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        if (path / MANIFEST).exists():
            return _from_checkpoint(path)
        if (path / SINGLE).exists():
            return _from_files(path, [path / SINGLE], None)
        if (path / INDEX).exists():
            return _from_index(path)
        raise FileError(path, _why_not(path))
    if not path.exists():
        raise FileError(
            path, f"does not exist; legal: a folder with {SINGLE}, a .safetensors file, or a checkpoint's folder"
        )
    if path.suffix != ".safetensors":
        raise FileError(path, f"not a .safetensors file.{_pickled([path.name])}")
    return _from_files(path, [path], None)


def _why_not(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    runs = [f"{path}/checkpoints/{one.name}" for one in sorted((path / "checkpoints").glob("step_*"))]
    if runs:
        return f"the folder of a run; legal: one of its checkpoints, such as {runs[-1]}"
    held = ", ".join(names[:LISTED]) or "nothing"
    return f"has neither {SINGLE} nor {INDEX} nor {MANIFEST}; it has {held}.{_pickled(names)}"


def _pickled(names: Iterable[str]) -> str:
    """Return what to do about weights that only unpickling could read; nothing if there are none."""
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if not pickles:
        return ""
    return (
        f" {pickles[0]} is a pickle, which may run any code when it is read, so shardwise does not read it."
        " Where you trust it, convert it once: AutoModel.from_pretrained(folder).save_pretrained(new_folder),"
        " or safetensors.torch.save_file(torch.load(file, weights_only=True), new_file)"
    )


def _from_checkpoint(path: Path) -> Weights:
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    held = model_tensors(checkpoint)
    shapes = {name: one.shape for name, one in held.items()}
    dtypes = {name: one.dtype for name, one in held.items()}
    return Weights(path, shapes, dtypes, aliases_of(checkpoint), lambda name: checkpoint.read(MODEL + name))


def model_tensors(checkpoint: Checkpoint) -> dict[str, TensorRecord]:
    """Return the records of the model's tensors by their names in the model; raise ConfigError where there are none."""
    held = {name.removeprefix(MODEL): one for name, one in checkpoint.tensors.items() if name.startswith(MODEL)}
    if not held:
        raise FileError(checkpoint.path, f"holds no tensor whose name begins with {MODEL!r}: there is no model")
    return held


def aliases_of(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the other names of tied tensors, each with the name that the checkpoint holds, without ``model.``."""
    model = checkpoint.meta.get("model")
    aliases = model.get("aliases") if isinstance(model, Mapping) else None
    if not isinstance(aliases, Mapping):
        return {}
    return {
        alias: name for alias, name in aliases.items() if isinstance(name, str) and MODEL + name in checkpoint.tensors
    }


def _from_index(path: Path) -> Weights:
    index = path / INDEX
    fields = Fields(index, "", parse_json(index, read_bytes(index)))
    where = fields.take("weight_map", dict)
    for name, file in where.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise FileError(
                index, f"the file of {name!r} is {file!r}; legal: the name of a .safetensors file beside the index"
            )
    return _from_files(path, [path / file for file in sorted(set(where.values()))], where)


def _from_files(path: Path, files: list[Path], where: Mapping[str, str] | None) -> Weights:
    """Open the tensors of files; ``where`` says which file has to hold each name, None for one file with all."""
    held: dict[str, tuple[Path, Entry]] = {}
    aliases: dict[str, str] = {}
    for file in files:
        entries, metadata = read_header(file)
        chosen = entries.keys() if where is None else [name for name in entries if where.get(name) == file.name]
        held.update({name: (file, entries[name]) for name in chosen})
        aliases.update({alias: name for alias, name in metadata.items() if name in chosen and alias not in entries})
    for name, one in (where or {}).items():
        if name not in held:
            raise FileError(path / one, f"holds no tensor {name!r}, which {INDEX} says is there")
    if not held:
        raise FileError(path, "holds no tensor")
    shapes = {name: entry.shape for name, (_, entry) in held.items()}
    dtypes = {name: entry.dtype for name, (_, entry) in held.items()}
    return Weights(path, shapes, dtypes, aliases, lambda name: _read(held[name][0], name))


def _read(file: Path, name: str) -> Tensor:
    with opened(file) as read:
        return read(name)


class Fitting(Mapping[str, Tensor]):
    """The saved weights for a module, under all names of its state; each is read when it is asked for.

    ``whole`` says that all are in memory already, since only the model's own class could read them.
    """

    def __init__(self, names: Mapping[str, str], read: Callable[[str], Tensor], whole: bool = False) -> None:
        self._names, self._read, self.whole = names, read, whole

    def __getitem__(self, name: str) -> Tensor:
        return self._read(self._names[name])

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def fit_weights(path: Path, module: nn.Module, key: str = "model.weights") -> Fitting:
    """Return the weights of a file or folder for the parameters and persistent buffers of ``module``, on any device.

    Each of these has to be in the file, and nothing else may be; of tied tensors one name is enough.  The prefix under
    which a Hugging Face model keeps its base model (``base_model_prefix``), or one that all names share, may be there
    on one side only.  Floating dtypes may differ.  Where the names differ otherwise, but the elements are as many, and
    the class has a ``from_pretrained``, that loads the folder, as a whole, and is taken if it finds all names.

    Raises:
        ConfigError: beginning with ``model.weights = "path"``, or with another ``key``: names that are missing or
            unexpected, shapes and dtypes that differ, tied names with different values, or a file that cannot be read.
    """
    match = _Match.of(Path(path), module, key)
    if match.faults:
        converted = _converted(match.weights.path, module) if match.convertible else None
        if converted is None:
            raise match.error
        return Fitting({name: name for name in converted}, converted.__getitem__, whole=True)
    state: dict[str, Tensor] = module.state_dict(keep_vars=True)
    tied = {id(state[name]): source for name, source in match.found.items() if source is not None}
    return Fitting({name: tied[id(value)] for name, value in state.items()}, match.weights.read)


def check_weights(path: Path, module: nn.Module, key: str = "model.weights") -> Weights:
    """Compare names, shapes and dtypes as :func:`fit_weights` does, from the headers of files alone, and return what is
    there; raise the same ConfigError, unless the class of the model may be able to convert the names."""
    match = _Match.of(Path(path), module, key)
    if match.faults and not match.convertible:
        raise match.error
    return match.weights


@dataclass(frozen=True)
class _Match:
    """What saved weights are for a module: ``found`` has the file's name of each name in its state, ``faults`` says in
    words what does not fit, and ``convertible`` whether the class of the module may know better."""

    key: str
    weights: Weights
    found: Mapping[str, str | None]
    faults: list[str]
    convertible: bool

    @staticmethod
    def of(path: Path, module: nn.Module, key: str) -> _Match:
        try:
            weights = read_weights(path)
        except ConfigError as error:
            raise ConfigError(f'{key} = "{path}": {error}') from error
        state: dict[str, Tensor] = module.state_dict(keep_vars=True)
        names = _match(weights, state, module)
        found = {name: weights.aliases.get(names.get(name, ""), names.get(name)) for name in state}
        faults = _faults(weights, state, names, found, module)
        return _Match(key, weights, found, faults, _convertible(weights, state, names, found, module))

    @property
    def error(self) -> ConfigError:
        path = self.weights.path
        sizes = self.key == "model.weights" and (path / "config.json").is_file()
        hint = (
            "; legal: a model of their sizes (model.pretrained takes the sizes from its config.json)" if sizes else ""
        )
        return ConfigError(f'{self.key} = "{path}": {"; ".join(self.faults)}{hint}')


def _convertible(
    weights: Weights,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    found: Mapping[str, str | None],
    module: nn.Module,
) -> bool:
    """Whether the class of ``module`` may load the weights under other names: then names differ, but all tensors
    together have as many elements, with tied ones counted once or under each name."""
    if all(source is not None for source in found.values()) or not hasattr(type(module), "from_pretrained"):
        return False
    ignored = _ignored(module)
    held = sum(
        math.prod(weights.shapes[file])
        for name, file in names.items()
        if file in weights.shapes and (name in state or not ignored(name))
    )
    once = sum(value.numel() for value in {id(value): value for value in state.values()}.values())
    return held in (once, sum(value.numel() for value in state.values()))


def _converted(path: Path, module: nn.Module) -> dict[str, Tensor] | None:
    """Return the state that a transformers model's own loader makes of a folder; None where it does not fit exactly.

    Some models (Mixtral, ViT) have other names, and fused tensors, in memory than in their files; only their class
    knows which.  The loader may only use safetensors on this disk.
    """
    load, config = getattr(type(module), "from_pretrained", None), getattr(module, "config", None)
    if load is None or config is None or not (path / "config.json").is_file() or (path / MANIFEST).exists():
        return None
    dtype = next((one.dtype for one in module.parameters()), torch.float32)
    options = {"use_safetensors": True, "local_files_only": True, "output_loading_info": True, "dtype": dtype}
    try:
        loaded, report = load(path, config=config, **options)
    except Exception:  # whatever it is, the caller reports what does not fit
        return None
    if any(
        report.get(kind)
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs", "conversion_errors")
    ):
        return None
    values, state = loaded.state_dict(), module.state_dict()
    fits = values.keys() == state.keys() and all(values[name].shape == state[name].shape for name in state)
    return dict(values) if fits else None


def _match(weights: Weights, state: Mapping[str, Tensor], module: nn.Module) -> dict[str, str]:
    """Return the module's name → the file's, for the one way of adding or taking a prefix that leaves fewest over."""
    known = [*weights.names, *weights.aliases]
    ways = [{name: name for name in known}]
    for prefix in _prefixes(known, state, module):
        ways.append({name if name in state else prefix + name: name for name in known})
        ways.append({name if name in state else name.removeprefix(prefix): name for name in known})
    return min(ways, key=lambda way: len(way.keys() ^ state.keys()) + len(known) - len(way))  # on a tie, no prefix


def _prefixes(known: Iterable[str], state: Iterable[str], module: nn.Module) -> list[str]:
    """Return the prefixes that one side may have and the other not."""
    base = getattr(module, "base_model_prefix", None)
    found = [f"{base}."] if isinstance(base, str) and base else []
    for names in (known, state):
        heads = {name.partition(".")[0] for name in names if "." in name} | {"" for name in names if "." not in name}
        if len(heads) == 1 and (head := heads.pop()) and f"{head}." not in found:
            found.append(f"{head}.")
    return found


def _faults(
    weights: Weights,
    state: Mapping[str, Tensor],
    names: Mapping[str, str],
    found: Mapping[str, str | None],
    module: nn.Module,
) -> list[str]:
    """Return everything that keeps ``weights`` from being those of the module, in words."""
    tied: dict[int, list[str]] = {}
    for name, value in state.items():
        tied.setdefault(id(value), []).append(name)
    missing = [group[0] for group in tied.values() if all(found[name] is None for name in group)]
    ignored = _ignored(module)
    unexpected = [
        file for name, file in names.items() if name not in state and file in weights.shapes and not ignored(name)
    ]
    shapes, dtypes = [], []
    for name, source in found.items():
        value = state[name]
        if source is not None and weights.shapes[source] != tuple(value.shape):
            shapes.append(f"{name} is {list(weights.shapes[source])} instead of {list(value.shape)}")
        elif source is not None and weights.dtypes[source].is_floating_point != value.dtype.is_floating_point:
            dtypes.append(f"{name} is {weights.dtypes[source]} instead of {value.dtype}")
    listed = [("missing", missing), ("unexpected", unexpected), ("other shapes", shapes), ("other dtypes", dtypes)]
    faults = [f"{word}: {_few(items)}" for word, items in listed if items]
    return faults or [
        f"tied in the model, but different in the file: {' and '.join(group)}"
        for group in tied.values()
        if _differ(weights, sorted({source for name in group if (source := found[name]) is not None}))
    ]


def _differ(weights: Weights, sources: list[str]) -> bool:
    first = weights.read(sources[0]) if len(sources) > 1 else None
    return first is not None and any(not torch.equal(first, weights.read(other)) for other in sources[1:])


def _ignored(module: nn.Module) -> Callable[[str], bool]:
    """Return a test for names that a Hugging Face model says to ignore: buffers that older versions saved."""
    patterns: Any = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    listed = [str(pattern) for pattern in patterns] if isinstance(patterns, list | tuple | set) else []
    return lambda name: any(re.search(pattern, name) for pattern in listed)


def _few(items: list[str]) -> str:
    more = f" and {len(items) - LISTED} more" if len(items) > LISTED else ""
    return ", ".join(items[:LISTED]) + more
