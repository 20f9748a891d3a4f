"""Read the values that training starts from one tensor at a time, so that no rank ever has to hold a whole model."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.core.errors import ConfigError, ShardwiseError, did_you_mean
from shardwise.core.layout import Box
from shardwise.initial.copies import copied
from shardwise.initial.initial import Recorded, named_tensors

LISTED = 3  # the most names in one error


class Values(Mapping[str, Tensor]):
    """These are the initial values of a module's parameters, buffers and tensor attributes, in its shapes and dtypes.

    Tied tensors are there under each of their names, and one of these is enough in what is given.  Nothing is held:
    each read replays, reads or looks up one tensor, which may be the module's own memory: copy it before writing.

    Args:
        module: the model; what it has on the meta device needs a value from elsewhere.
        given: values by name, read when they are needed; what the first of these lacks is looked for in the next, then
            in ``recorded``.
        recorded: a record whose tensors ``module`` has, and the seed; what it lacks has its value in
        ``module``.
        notes: what a user should know about where the values come from.

    Raises :class:`ConfigError` for given names that the module does not have.
    """

    def __init__(
        self,
        module: nn.Module,
        given: tuple[Mapping[str, Tensor], ...] = (),
        recorded: tuple[Recorded, int] | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.module, self.notes = module, notes
        self._given, self._recorded = given, recorded
        self._replaying = threading.Lock()  # torch's default dtype, which a replay may set, belongs to the process
        self._tensors = named_tensors(module)
        self._names = {id(tensor): name for name, tensor in recorded[0].tensors.items()} if recorded is not None else {}
        by_identity: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            by_identity.setdefault(id(tensor), []).append(name)
        self._tied = {name: by_identity[id(tensor)] for name, tensor in self._tensors.items()}
        for unknown in (name for source in given for name in source if name not in self._tensors):
            raise ConfigError(f'initial: "{unknown}" is no tensor of the model.{did_you_mean(unknown, self._tensors)}')

    @staticmethod
    def of_mapping(module: nn.Module, values: Mapping[str, Tensor]) -> Values:
        """Return ``values`` by name, such as a state dict, and those of the module for what it lacks."""
        if isinstance(values, Values):
            return values if values.module is module else Values(module, (values,), notes=values.notes)
        return Values(module, (values,))

    @staticmethod
    def of_recorded(recorded: Recorded, seed: int) -> Values:
        """Return what the constructor gives for ``seed``: replayed one tensor at a time, or held as a whole where it
        could not be recorded."""
        whole = (
            "initial weights: every rank builds the whole model, whose constructor cannot be recorded: "
            f"{recorded.reason}"
        )
        return Values(recorded.module, (), (recorded, seed), () if recorded.reason is None else (whole,))

    def with_weights(self, weights: Mapping[str, Tensor], notes: tuple[str, ...] = ()) -> Values:
        """Return these values, with those that ``weights`` has in their place."""
        return Values(self.module, (weights, *self._given), self._recorded, (*self.notes, *notes))

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        source = self._source(name)
        if source is not None:
            value = source[0][source[1]].detach()
            if value.shape != tensor.shape:
                raise ConfigError(f'initial: "{name}" is {list(value.shape)} instead of {list(tensor.shape)}')
            return value.to("cpu", tensor.dtype)
        if self._recorded is not None and id(tensor) in self._names:
            with self._replaying:
                return self._recorded[0].materialise(self._names[id(tensor)], self._recorded[1], "cpu")
        if tensor.is_meta:
            raise _without_values([name])
        return tensor.detach()

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def copy_boxes(self, name: str, goals: Sequence[tuple[Box, Tensor]]) -> None:
        """Copy boxes of a tensor into tensors of their shapes, of any dtype and device.

        The one tensor is made for as long as this takes, a large one in pieces where it can be, and not at all if all
        boxes are empty.  Raises :class:`ShardwiseError` for a box that does not fit."""
        shape = tuple(self._tensors[name].shape)
        everything = Box.whole(shape)
        for box, out in goals:
            if len(box.start) != len(shape) or not everything.contains(box) or tuple(out.shape) != box.shape:
                raise ShardwiseError(
                    f'box {box.start} to {box.stop} of "{name}", which is {list(shape)}, into {list(out.shape)}'
                )
        if any(box.numel for box, _ in goals):
            with torch.no_grad():
                for first, piece in self._pieces(name):
                    for box, out in goals:
                        _copy_part(box, out, first, piece)

    def _pieces(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) of a tensor."""
        known = self._names.get(id(self._tensors[name]))
        if self._recorded is None or known is None or self._source(name) is not None:
            yield 0, self[name]
            return
        with self._replaying:
            yield from self._recorded[0].pieces(known, self._recorded[1])

    @property
    def missing(self) -> list[str]:
        """Return the names for which there is no value."""
        bare = [name for name, tensor in self._tensors.items() if tensor.is_meta and id(tensor) not in self._names]
        return [name for name in bare if self._source(name) is None]

    def check(self) -> None:
        """Raise :class:`ConfigError` if there is a name without a value."""
        if missing := self.missing:
            raise _without_values(missing)

    def structure(self) -> nn.Module:
        """Return the module, for a look at its code, with values for all but its parameters: itself if it has them."""
        parameters = {id(parameter): parameter for parameter in self.module.parameters()}
        rest = {id(tensor): name for name, tensor in self._tensors.items() if id(tensor) not in parameters}
        if self._recorded is None and not any(
            self._tensors[n].is_meta or self._source(n) is not None for n in rest.values()
        ):
            return self.module
        return copied(self.module, {**parameters, **{at: self[name] for at, name in rest.items()}})

    def bare(self, kept: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
        """Return a copy of the module with its parameters on meta; buffers and tensor attributes share its memory.

        ``kept`` has what copies of other objects are, by id."""
        return self._copy(lambda parameter: torch.empty_like(parameter, device="meta"), kept)

    def beside(self, kept: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
        """Return a copy of the module whose tensors share its memory, but are others."""
        return self._copy(Tensor.detach, kept)

    def _copy(self, of: Callable[[Tensor], Tensor], kept: Mapping[int, Any]) -> nn.Module:
        memo: dict[int, Any] = {**kept, **{id(tensor): tensor for tensor in self._tensors.values()}}
        for parameter in self.module.parameters():
            memo[id(parameter)] = nn.Parameter(of(parameter), parameter.requires_grad)
        for buffer in self.module.buffers():
            memo[id(buffer)] = buffer.detach()
        return copied(self.module, memo)

    def whole(self) -> nn.Module:
        """Return a new, ordinary module with all of these values, on the CPU."""
        module = self._constructed()
        constructed = module is not None
        if module is None:
            self.check()
            memo: dict[int, Any] = {
                id(tensor): _memory_for(tensor) for tensor in self._tensors.values() if tensor.is_meta
            }
            module = copied(self.module, memo)
        with torch.no_grad():
            for name, tensor in named_tensors(module).items():
                if self._source(name) is not None or not constructed and self._tensors[name].is_meta:
                    tensor.copy_(self[name])
        return module

    def _constructed(self) -> nn.Module | None:
        """Return what the recorded constructor makes, if that is the module but for frozen parameters and modes."""
        if self._recorded is None:
            return None
        module = self._recorded[0].materialise_all(self._recorded[1], "cpu")
        modules, parameters = dict(module.named_modules()), dict(module.named_parameters())
        if (
            modules.keys() != dict(self.module.named_modules()).keys()
            or named_tensors(module).keys() != self._tensors.keys()
        ):
            return None
        for name, one in self.module.named_modules():
            modules[name].training = one.training
        for name, parameter in self.module.named_parameters():
            parameters[name].requires_grad_(parameter.requires_grad)
        return module

    def _source(self, name: str) -> tuple[Mapping[str, Tensor], str] | None:
        """Return which source has been given with a value of this tensor, and under which of its names."""
        return next(((source, one) for source in self._given for one in self._tied[name] if one in source), None)


def _copy_part(box: Box, out: Tensor, first: int, piece: Tensor) -> None:
    """Copy what a piece of a tensor, which begins at row ``first``, has of a box into ``out``, which is the box."""
    if not box.start:
        out.copy_(piece)
        return
    rows, rest = len(piece), (0,) * (piece.dim() - 1)
    if (both := box.intersect(Box((first, *rest), (first + rows, *piece.shape[1:])))) is not None:
        out[both.within(box.start).slices].copy_(piece[both.within((first, *rest)).slices])


def _memory_for(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="cpu")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _without_values(names: list[str]) -> ConfigError:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ConfigError(
        f"model: on the meta device, without values: {', '.join(names[:LISTED])}{more}; legal: a module with values, "
        "or "
        "recorded = shardwise.record(constructor), module = recorded.module, initial = "
        "shardwise.Values.of_recorded(recorded, seed)"
    )
