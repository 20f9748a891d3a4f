"""Make initial weights, one parameter at a time.

A constructor runs once, on meta tensors, while every operation that computes or writes a value is recorded.  The value
of a parameter is then its own backward slice of that record, run again on real memory: a rank makes only the parameters
that it owns, and to record a 70B model takes no memory.

Random operations draw on the CPU, each from a generator of its own, keyed by the seed, the name of the first tensor
that needs it and its position among that tensor's draws.  So what a parameter starts from depends neither on the other
parameters nor on layout or device, and what the constructor copied (a layer, a teacher's weights) stays equal.
"""

from __future__ import annotations

import copy
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.core.errors import ShardwiseError, did_you_mean
from shardwise.initial.pieces import in_pieces
from shardwise.initial.recorder import ConstructorRecorder, Disguise, KeyedDraws, truncated_normals
from shardwise.initial.recording import ConstructorRecord, Memory, RecordedOperand, RecordedOperation, Unrecordable


def record(constructor: Callable[[], nn.Module], plain: bool = False, seed: int = 0) -> Recorded:
    """Return the initial weights of what ``constructor`` builds: recorded, or made as torch does.

    The constructor must build a new module each time it is called, the same but for torch's random numbers.  With
    ``plain``, or where recording is not possible (:attr:`Recorded.reason` says why: it reads random values, has a
    generator of its own, loads a checkpoint, …), it runs as usual after ``torch.manual_seed``: at once with the
    ``seed`` given here, again for any other asked for later.  The generators of the process are left as they are.
    """
    reason = "plain construction was asked for"
    if not plain:
        try:
            return _recorded(constructor)
        except Exception as error:  # whatever the constructor raises, it may not raise with real tensors
            text = str(error).strip().splitlines()
            kind = "" if isinstance(error, Unrecordable) else f"{type(error).__name__}: "
            reason = kind + (text[0] if text else "no message")
    return Recorded(constructor, _plain(constructor, seed), reason, None, seed)


class Recorded:
    """These are the initial weights of what a constructor builds; :func:`record` makes them.

    ``module`` is on the meta device when recorded, else on the CPU with the weights of the seed given to :func:`record`
    (leave it as it is: they are read from there).  ``reason`` is None, or says why recording was not possible.
    ``tensors`` are the tensors of ``module`` by name: parameters, then buffers, then plain attributes, tied ones under
    each of their names.
    """

    def __init__(
        self,
        constructor: Callable[[], nn.Module],
        module: nn.Module,
        reason: str | None,
        replay: Replay | None,
        seed: int,
    ) -> None:
        self.module = module
        self.reason = reason
        self.tensors: Mapping[str, Tensor] = named_tensors(module)
        self._constructor = constructor
        self._replay = replay
        self._plain = (seed, self.tensors)

    def materialise(self, name: str, seed: int, device: torch.device | str) -> Tensor:
        """Return the initial value of one parameter, buffer or tensor attribute, on ``device``.

        It depends on the seed, the name and its slice of the record only.  Raises :class:`ShardwiseError` for an
        unknown name.
        """
        if name not in self.tensors:
            raise ShardwiseError(f'"{name}" is no tensor of the module.{did_you_mean(name, self.tensors)}')
        value = self._replay.value(name, seed) if self._replay is not None else self._plain_value(name, seed)
        return value.to(device)

    def pieces(self, name: str, seed: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of what :meth:`materialise` gives, on the CPU: of a large tensor some rows at a time,
        which the next overwrite, where its initialisation allows that, else all at once."""
        found = self._replay.pieces(name, seed) if self._replay is not None else None
        yield from ((0, self.materialise(name, seed, "cpu")),) if found is None else found

    def materialise_all(self, seed: int, device: torch.device | str) -> nn.Module:
        """Return a new, ordinary module on ``device``, with the weights that :meth:`materialise` gives.

        Tied parameters are tied; tensors that are plain attributes are on ``device`` too.
        """
        if self._replay is None:
            module = _plain(self._constructor, seed)
        else:
            keyed = KeyedDraws(self._replay.draws(seed))
            with _own_random_numbers(seed), truncated_normals(keyed.truncated_normal), keyed:
                module = self._constructor()
        module.to(device)
        replace_attributes(module, lambda name, tensor: tensor.to(device))
        return module

    def _plain_value(self, name: str, seed: int) -> Tensor:
        if self._plain[0] != seed:
            self._plain = (seed, named_tensors(_plain(self._constructor, seed)))
        return self._plain[1][name].detach().clone()


@dataclass(frozen=True)
class Replay:
    """This is what is kept of a record: the slice of each name, and the key of each random operation."""

    operations: Mapping[int, RecordedOperation]
    nbytes: list[int]
    operands: Mapping[str, RecordedOperand]
    slices: Mapping[str, list[int]]
    keys: Mapping[int, tuple[str, int]]
    functions: tuple[tuple[int, Any], ...]  # all random operations of the record, needed or not

    @staticmethod
    def of(record: ConstructorRecord, tensors: Mapping[str, Tensor]) -> Replay:
        """Return the replay of a finished record for these tensors."""
        operands = {name: record.operand(tensor) for name, tensor in tensors.items()}
        slices = {name: record.slice(operand.storage) for name, operand in operands.items()}
        functions = tuple((i, op.function) for i, op in enumerate(record.operations) if op.is_random)
        needed = {index for indices in slices.values() for index in indices}
        keys: dict[int, tuple[str, int]] = {}
        for name, indices in slices.items():
            draws = [index for index in indices if record.operations[index].is_random]
            for position, index in enumerate(draws):
                keys.setdefault(index, (name, position))
        operations = {index: record.operations[index] for index in sorted(needed)}
        return Replay(operations, record.nbytes, operands, slices, keys, functions)

    def value(self, name: str, seed: int) -> Tensor:
        """Return the initial value of one tensor, on the CPU, in memory of its own."""
        memory = Memory(self.nbytes)
        for index in self.slices[name]:
            operation = self.operations[index]
            memory.run(operation, self._generator(seed, index) if operation.is_random else None)
        operand = self.operands[name]
        value = memory.tensor(operand)
        return value if operand.covers(self.nbytes[operand.storage]) else value.clone()

    def pieces(self, name: str, seed: int) -> Iterator[tuple[int, Tensor]] | None:
        """Yield the value of one tensor as :func:`~shardwise.initial.pieces.in_pieces` does."""
        steps = []
        for index in self.slices[name]:
            operation = self.operations[index]
            steps.append((operation, partial(self._generator, seed, index) if operation.is_random else None))
        operand = self.operands[name]
        return in_pieces(steps, operand, self.nbytes[operand.storage])

    def draws(self, seed: int) -> Iterator[tuple[Any, Callable[[], torch.Generator]]]:
        """Yield the random functions of the record in order, each with the maker of its generator."""
        for index, function in self.functions:
            yield function, lambda index=index: self._generator(seed, index)

    def _generator(self, seed: int, index: int) -> torch.Generator:
        name, position = self.keys.get(index, ("", index))
        digest = hashlib.sha256(f"{seed} {position} {name}".encode()).digest()
        generator = torch.Generator(device="cpu")
        generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        return generator


def _recorded(constructor: Callable[[], nn.Module]) -> Recorded:
    recorder = ConstructorRecorder(ConstructorRecord())
    with (
        _own_random_numbers(0) as drawn,
        truncated_normals(recorder.truncated_normal),
        Disguise(recorder),
        recorder,
    ):
        module = constructor()
        if recorder.refusal is not None:
            raise recorder.refusal
        if drawn():
            raise Unrecordable("it draws from Python's or numpy's generator, or seeds torch's")
    parameters = list(module.parameters())
    if parameters and all(parameter.device.type != "meta" for parameter in parameters):
        raise Unrecordable("its parameters exist already, or come from a file")
    _detach_from_memory(module, recorder.record)
    return Recorded(constructor, module, None, Replay.of(recorder.record, named_tensors(module)), 0)


def _detach_from_memory(module: nn.Module, record: ConstructorRecord) -> None:
    """Replace the real tensors that a constructor may have left in ``module`` by meta tensors."""
    stand_ins: dict[int, Tensor] = {}

    def stand_in(name: str, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta":
            return tensor
        if id(tensor) not in stand_ins:
            bare = record.stand_in(tensor)
            if isinstance(tensor, nn.Parameter):
                bare = nn.Parameter(bare, requires_grad=tensor.requires_grad)
                bare.__dict__.update(tensor.__dict__)
            stand_ins[id(tensor)] = bare
        return stand_ins[id(tensor)]

    for owner in module.modules():
        for tensors in (owner._parameters, owner._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = stand_in(name, tensor)
    replace_attributes(module, stand_in)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters, buffers, then other tensors that are plain attributes, by name; tied ones under each name."""
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors.update(module.named_buffers(remove_duplicate=False))
    registered = {id(tensor) for tensor in tensors.values()}

    def see(name: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in registered:
            tensors.setdefault(name, tensor)
        return tensor

    replace_attributes(module, see)
    return tensors


def replace_attributes(module: nn.Module, function: Callable[[str, Tensor], Tensor]) -> None:
    """Replace each tensor t that is a plain attribute of ``module``, called n, by ``function(n, t)``.

    It looks into lists, tuples, dicts and objects that are attributes of modules, and replaces those that change by
    copies; ``"layer.cache.0"`` is the first item of the attribute ``cache`` of the module ``layer``.
    """
    done: dict[int, Any] = {}
    for prefix, owner in module.named_modules():
        for key, value in list(vars(owner).items()):
            if key not in ("_parameters", "_buffers", "_modules"):
                changed = _replaced(f"{prefix}.{key}" if prefix else key, value, function, done)
                if changed is not value:
                    vars(owner)[key] = changed


def _replaced(
    name: str, value: Any, function: Callable[[str, Tensor], Tensor], done: dict[int, Any], depth: int = 5
) -> Any:
    if isinstance(value, Tensor):
        return function(name, value)
    if id(value) in done:
        return done[id(value)]
    if depth == 0 or callable(value) or isinstance(value, str | ModuleType | nn.Module):
        return value
    done[id(value)] = value
    holder: Any = value if isinstance(value, list | tuple | dict) else getattr(value, "__dict__", {})
    pairs = list(holder.items()) if isinstance(holder, Mapping) else list(enumerate(holder))
    new = {key: _replaced(f"{name}.{key}", item, function, done, depth - 1) for key, item in pairs}
    changed = {key: new[key] for key, item in pairs if new[key] is not item}
    if changed:
        done[id(value)] = _with_items(value, new, changed)
    return done[id(value)]


def _with_items(value: Any, new: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a container or an object with some items, or attributes, changed."""
    if isinstance(value, tuple):
        return type(value)(*new.values()) if hasattr(value, "_fields") else type(value)(new.values())
    result = copy.copy(value)
    for key, item in changed.items():
        if isinstance(value, list | dict):
            result[key] = item
        else:
            vars(result)[key] = item
    return result


def _plain(constructor: Callable[[], nn.Module], seed: int) -> nn.Module:
    with _own_random_numbers(seed):
        return constructor()


@contextmanager
def _own_random_numbers(seed: int) -> Iterator[Callable[[], bool]]:
    """Seed the generators of torch, Python and numpy, and put them back at the end.

    This yields a function that tells whether any of them has been used since.
    """
    python, arrays = random.getstate(), numpy.random.get_state()
    with Backend.here().forked_generator():
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        start = _positions()
        try:
            yield lambda: _positions() != start
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


def _positions() -> tuple[Any, ...]:
    """Return the states of the generators of torch (on the CPU), Python and numpy."""
    state = numpy.random.get_state(legacy=False)
    place = (state["state"]["key"].tobytes(), state["state"]["pos"], state["has_gauss"])
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), place
