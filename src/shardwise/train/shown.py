"""The parameters and buffers that a loop sees of a distributed model: their values and gradients come from the engine
when it looks at them, and what it writes goes back before the next program runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwise.capture.running import at_line
from shardwise.capture.tensor_facts import FACTS, GRAD, SET_GRAD, UNSEEN
from shardwise.core.errors import ShardwiseError
from shardwise.graph.torch_private import has_storage, storage_key, without_torch_functions
from shardwise.train.optimizers import MAY_CHANGE


class Look(ABC):
    """It knows where the values of a model are; ``unseen`` says whether the loop may write to them without autograd's
    knowledge."""

    unseen: bool

    @abstractmethod
    def show(self, buffers: bool) -> None:
        """Bring what the loop sees up to date, for a look at ``buffers`` or at parameters alone; all ranks call it
        together."""

    @abstractmethod
    def show_gradients(self) -> None:
        """Bring the gradients that the loop sees up to date; all ranks call it together."""

    @abstractmethod
    def drop_gradients(self) -> None:
        """Note that the loop sets gradients to None."""


class _Shown:
    """Mixed into the classes of the tensors that the loop sees."""

    _look: Look

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = [one for one in _flat((args, kwargs)) if isinstance(one, _Shown)]
        for look in {id(one._look): one._look for one in own}.values():
            if func == GRAD:
                look.show_gradients()
            elif func == SET_GRAD and args[1] is None:
                look.drop_gradients()
            elif func not in FACTS:
                look.unseen |= func in UNSEEN
                look.show(any(isinstance(one, ShownBuffer) for one in own if one._look is look))
        with without_torch_functions():
            result = func(*args, **(kwargs or {}))
            return result if func in FACTS or func in (GRAD, SET_GRAD) else tree_map_only(Tensor, _views(own), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        made: Tensor = memo[id(self)]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> Tensor:
        """Return an ordinary tensor with the values as they are now."""
        assert isinstance(self, Tensor)
        found = self.detach().clone().requires_grad_(self.requires_grad)
        return nn.Parameter(found, found.requires_grad) if isinstance(self, nn.Parameter) else found


class ShownParameter(_Shown, nn.Parameter):
    """A parameter."""


class ShownView(_Shown, Tensor):
    """A view of a parameter."""


class ShownBuffer(_Shown, Tensor):
    """A buffer, or a view of one."""


def _views(own: Sequence[_Shown]) -> Callable[[Tensor], Tensor]:
    """Return what lets a result be shown like those of ``own`` whose memory it has: the loop may keep it."""

    def of(result: Tensor) -> Tensor:
        if isinstance(result, _Shown) or not has_storage(result):
            return result
        key = storage_key(result)
        base = next((one for one in own if storage_key(one) == key), None)  # type: ignore[arg-type]
        if base is None:
            return result
        return _as(ShownBuffer if isinstance(base, ShownBuffer) else ShownView, result, base._look)

    return of


def _as(kind: type[ShownView | ShownBuffer], tensor: Any, look: Look) -> Tensor:
    """Return a new tensor as one of a kind; ``as_subclass`` would make another one with the same memory."""
    tensor.__class__ = kind
    tensor._look = look
    return cast("Tensor", tensor)


def _flat(tree: Any) -> Iterator[Any]:
    if isinstance(tree, list | tuple):
        for one in tree:
            yield from _flat(one)
    elif isinstance(tree, dict):
        yield from _flat(list(tree.values()))
    else:
        yield tree


def shown(module: nn.Module, look: Look) -> dict[str, Tensor]:
    """Return what the loop sees of a module, by name, in the module's own memory."""
    found: dict[str, Tensor] = {}
    with without_torch_functions():
        for name, parameter in module.named_parameters():
            found[name] = made = ShownParameter(parameter.detach().as_subclass(Tensor), parameter.requires_grad)
            made._look = look
        for name, buffer in module.named_buffers():
            found[name] = _as(ShownBuffer, buffer.detach(), look)
    return found


@torch.no_grad()
def fill(seen: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy a state to what the loop sees."""
    with without_torch_functions():
        for name, tensor in seen.items():
            if name in state:
                tensor.copy_(state[name])


@torch.no_grad()
def written(seen: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what the loop has written since :func:`fill`, by name."""
    with without_torch_functions():
        return {
            name: tensor.detach().as_subclass(Tensor).clone()
            for name, tensor in seen.items()
            if name in state and not _same(tensor.to(state[name].device, state[name].dtype), state[name])
        }


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values; one that is no number is the same as another."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


class Fixed(list[Any]):
    """A list, called ``name`` in messages, which nothing may be written to: the optimizer has another."""

    def __init__(self, name: str, members: Iterable[Any] = ()) -> None:
        super().__init__(members)
        self.name = name

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ShardwiseError(f"{self.name} is written to{at_line()} under distribute(); legal: {MAY_CHANGE}")

    append = extend = insert = pop = remove = clear = sort = reverse = refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = refuse


class ShownGroup(MutableMapping[str, Any]):
    """A group of an optimizer whose ``params`` are those that the loop sees; all else is read and written there."""

    def __init__(self, group: dict[str, Any], seen: Callable[[Tensor], Tensor]) -> None:
        self._group, self._seen = group, seen

    def __getitem__(self, key: str) -> Any:
        value = self._group[key]
        return Fixed("group['params']", map(self._seen, value)) if key == "params" else value

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            Fixed("group['params']").refuse()
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)
