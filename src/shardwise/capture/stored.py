"""Captures on disk, so that a second start of a run does not export its model again.

A capture is found by a hash of what it depends on: versions, the sources of the module's classes and of the loss, the
module's structure, the shapes of the batch, and all that forward could read in Python; and by what it reads of the
batch there, which is found out anew.  It is believed only where the environment variables that forward has read are
what they were, and one forward without values, in which every tensor is named by how it was computed
(:mod:`shardwise.capture.trial`), gives the names that it gave when the capture was made: so what no hash sees (a file
that forward reads) cannot change what is computed for such a batch unseen.  Where forward changes something in Python,
as many forwards as a trial has must do so.

A file begins with a digest of the rest of it, which shows damage.  Its folder is
``$XDG_CACHE_HOME/shardwise/captures``, else ``~/.cache/shardwise/captures``; ``SHARDWISE_CAPTURES`` names another, or
is "off".  The :data:`KEPT` files that were used last stay.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.capture.computation import Computation
from shardwise.capture.eager_calls import EagerCalls
from shardwise.capture.encoding import NotEncoded, decoded, encoded
from shardwise.capture.environment import digests, environment_read, same
from shardwise.capture.example import example_of
from shardwise.capture.forms import Dims, Form, form_of, resized
from shardwise.capture.functions import shown_by_ops
from shardwise.capture.hooks import tensor_hooks_refused
from shardwise.capture.in_form import InForm
from shardwise.capture.known import AS_IT_IS, Tried, Way
from shardwise.capture.named import name_of, named
from shardwise.capture.reads import Read
from shardwise.capture.snapshot import file_digest
from shardwise.capture.trial import runs
from shardwise.capture.wrapped import Watched, WithOutputs
from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured
from shardwise.graph.torch_private import function_calls

FORMAT = 2  # of the files
KEPT = 200
SWITCH = "SHARDWISE_CAPTURES"
WAY = ".way"  # ends the name of a file that says in which way a capture is made
HEAD = 8  # the bytes of the length of the first part of a file, which come behind its digest
DIGEST = hashlib.sha256().digest_size
OWN = re.compile(r"[0-9a-f]{40}[-0-9a-z]*(\.way)?|\.capture-\w+")
"""The names of files that are removed when there are too many; the folder may have others."""

Answers = Sequence[tuple[frozenset[Any], bool]]
"""What a way has beside its functions, in all the ways that are tried."""


def folder() -> Path | None:
    """Return the folder of captures; None where there is to be none."""
    asked = os.environ.get(SWITCH)
    if asked in ("off", "0"):
        return None
    if asked:
        return Path(asked).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardwise" / "captures"


def key_of(module: nn.Module, batch: Mapping[str, Tensor], loss: Any, varies: Dims, *options: Any) -> str | None:
    """Return the hash of what a capture depends on, as far as it can be told beforehand; None where nothing is kept."""
    if folder() is None:
        return None
    try:
        return _hash_of(module, batch, loss, varies, *options)
    except Exception:  # what a user's class says of itself may raise anything
        return None


def _hash_of(module: nn.Module, batch: Mapping[str, Tensor], loss: Any, varies: Dims, *options: Any) -> str:
    parts: list[Any] = [FORMAT, sys.version_info[:2], torch.__version__, _own_sources(), *map(str, options)]
    parts += [torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), Backend.here().type]
    for name, shape, dtype in form_of(batch):
        first, symbolic = (1 if has_rows(name) else 0), varies.get(name, ())
        parts.append((name, ["any" if d in symbolic else size for d, size in enumerate(shape, first)], str(dtype)))
    for name, one in module.named_modules(remove_duplicate=False):
        parts.append((name, one.training, type(one).__qualname__, one.extra_repr()))
    for name, value in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        parts.append((name, tuple(value.shape), str(value.dtype), value.requires_grad))
    classes = dict.fromkeys(base for one in module.modules() for base in type(one).__mro__)
    parts += [_source(one) for one in classes if not one.__module__.startswith(("torch.", "builtins"))]
    parts.append(_loss(loss))
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:40]


def _loss(loss: Any) -> Any:
    if isinstance(loss, InForm):
        form = loss.form
        return _loss(loss.loss), repr(form.tree), sorted(form.kinds.items()), repr(form.key)
    if isinstance(loss, Computation):
        return [_loss(getattr(one, "function", one)) for one in getattr(loss, "calls", ())]
    if isinstance(loss, FunctionType):
        return loss.__module__, loss.__qualname__, _source(loss)
    return str(type(loss)), getattr(loss, "__qualname__", "")


@cache
def _source(thing: Any) -> str:
    try:
        path = inspect.getsourcefile(thing)
    except TypeError:
        return str(thing)
    return f"{path} {file_digest(path)}" if path is not None else str(thing)


@cache
def _own_sources() -> str:
    home = Path(__file__).parents[1]
    found = hashlib.sha256()
    for part in ("capture", "graph", "ops", "nn", "models"):
        for path in sorted((home / part).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def way_of(key: str, model: nn.Module, answers: Answers) -> Way:
    """Return the way in which the last capture of a ``key``, of ``model``, was made, with one of these ``answers``; as
    it is where nothing is known."""
    path = _path(f"{key}{WAY}")
    if path is None or not path.is_file():
        return AS_IT_IS
    try:
        written = json.loads(path.read_text())
        os.utime(path)
        return Way(tuple(named(one, model) for one in written["functions"]), *answers[written["answers"]])
    except Exception:  # whatever is wrong with a file
        return AS_IT_IS


def keep_way(key: str, way: Way, model: nn.Module, answers: Answers) -> None:
    """Write to disk in which way, with one of ``answers``, a capture of a ``key`` was made; raise :class:`NotNamed`
    where that has no form there."""
    path = _path(f"{key}{WAY}")
    if path is not None and (way != AS_IT_IS or path.is_file()):
        written = {"functions": [name_of(one, model) for one in way.functions], "answers": answers.index(way[1:])}
        _write(path, json.dumps(written).encode())


def name_with(key: str, reads: Sequence[Read]) -> str:
    """Return the name on disk of the capture of a ``key`` for what forward reads of the batch."""
    if not reads:
        return key
    told = [(one.function.__qualname__, *map(repr, one[1:3]), *one[3:]) for one in reads]
    return f"{key}-{hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]}"


def is_kept(name: str) -> bool:
    """Whether there is a capture of a name on disk."""
    path = _path(name)
    return path is not None and path.is_file()


def _path(name: str) -> Path | None:
    place = folder()
    return None if place is None else place / name


def find(
    name: str, made: Callable[[], Watched], batch: Mapping[str, Tensor], calls: EagerCalls | None = None
) -> Captured | None:  # fmt: skip
    """Return the capture on disk of a ``name``, if a forward of the model that ``made`` makes, around ``calls``, gives
    the names that it gave when it was captured; else None.  ``batch`` is of a form that the name is of."""
    path = _path(name)
    if path is None or not path.is_file():
        return None
    try:
        written, constants = _parts(path.read_bytes())
        model = made()
        tried, example = (
            example_of(model, resized(batch, _read(written[form])), written["rows"]) for form in ("tried", "form")
        )
        if not _computes(model, tried, written):
            return None
        buffers = dict(model.module.named_buffers())
        found = decoded(written, example, constants, buffers, () if calls is None else calls.calls)
        if isinstance(model, WithOutputs) and model.outputs.structure != found.outputs:
            return None
        os.utime(path)
    except Exception:  # whatever is wrong with a file, the model is captured as if it were not there
        return None
    return found


def _parts(data: bytes) -> tuple[Any, dict[str, Tensor]]:
    """Return what is written in a file, and its constants; raise ValueError where it is damaged."""
    digest, data = data[:DIGEST], data[DIGEST:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("a digest of something else")
    size = int.from_bytes(data[:HEAD], "big")
    return json.loads(zlib.decompress(data[HEAD : HEAD + size])), load(data[HEAD + size :])


def _computes(model: Watched, example: Mapping[str, Tensor], written: Mapping[str, Any]) -> bool:
    """Whether as many forwards as are ``written`` give results of the names that are, read no other environment
    variables, draw nothing, and change numbers and words alone, where they did.

    None of it may have a gradient that its ops do not show."""
    functions, before = list[type](), model.state()

    def called(original: Any, function: type, args: Sequence[Any]) -> Any:
        if not shown_by_ops(function):
            functions.append(function)
        return original(*args)

    with function_calls(called), tensor_hooks_refused(), environment_read() as names:
        found = runs(model, model.module, example, False, written["runs"], calls=model.calling)
    changes = before.changes()
    if functions or before.drawn() or not all(one.plain and written["runs"] > 1 for one in changes):
        return False
    return same(written["environment"], names) and all(dict(one.results) == written["results"] for one in found)


def keep(
    name: str, captured: Captured, batch: Mapping[str, Tensor], trial: Tried, environment: Iterable[str]
) -> None:  # fmt: skip
    """Write a capture of batches like ``batch`` to disk, with the names of what its model computes in a ``trial``, and
    of the variables of the ``environment`` that it has read; where that is not possible, do nothing."""
    path = _path(name)
    if path is None:
        return
    try:
        forms = {"form": _written(form_of(batch)), "tried": _written(trial.form)}
        written = {**encoded(captured), "results": dict(trial.results), "runs": trial.again, **forms}
        written["environment"] = digests(environment)
        head = zlib.compress(json.dumps(written).encode(), 1)
        tail = save({name: value.detach().contiguous().clone() for name, value in captured.constants.items()})
    except (NotEncoded, TypeError, ValueError):
        return
    data = len(head).to_bytes(HEAD, "big") + head + tail
    _write(path, hashlib.sha256(data).digest() + data)


def _write(path: Path, data: bytes) -> None:
    """Write a file at once, where that is possible, and remove those that were not used for longest."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".capture-", delete=False) as file:
            file.write(data)
        os.replace(file.name, path)
        for old in sorted(_files(path.parent), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)


def _written(form: Form) -> list[tuple[str, tuple[int, ...], str]]:
    return [(name, shape, str(dtype).removeprefix("torch.")) for name, shape, dtype in form]


def _read(written: Any) -> Form:
    return tuple((name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in written)


def _files(place: Path) -> Iterator[Path]:
    return (path for path in place.iterdir() if OWN.fullmatch(path.name) and path.is_file())
