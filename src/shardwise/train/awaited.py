"""A module between a call that is recorded and the first step, which captures it: what a loop does to it meanwhile, by
its own names for the module and its tensors, would act on what was called before, and has to raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardwise.capture.state import PythonState
from shardwise.capture.tensor_facts import FACTS, GRAD, SET_GRAD
from shardwise.core.errors import ShardwiseError
from shardwise.data.checksum import checksum
from shardwise.graph.torch_private import module_hooks, without_torch_functions


class _Awaiting:
    """Mixed into the classes of a module's own tensors, whose values are noted before anything is done with them."""

    _awaited: Awaited

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (GRAD, SET_GRAD) and args[0]._awaited.backward:
            legal = "model.parameters() of what distribute returned, whose gradients a look computes; clip_norm=..."
            raise ShardwiseError(
                f"grad of a tensor of the module under distribute(): the step computes it; legal: {legal}"
            )
        if func not in FACTS:
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, _Awaiting):
                    one._awaited.looked_at(one)
        with without_torch_functions():
            return func(*args, **(kwargs or {}))


class AwaitingParameter(_Awaiting, nn.Parameter):
    """A parameter that a recorded call has read."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        made: nn.Parameter = memo[id(self)]
        return made


class AwaitingBuffer(_Awaiting, Tensor):
    """A buffer that a recorded call has read."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            memo[id(self)] = self.detach().clone()
        made: Tensor = memo[id(self)]
        return made


class _Noted(NamedTuple):
    """What a module was at a call, of which version of the weights; the checksums of the tensors that somebody has
    looked at since, by id."""

    version: int
    state: PythonState
    parts: dict[str, Any]
    modes: list[bool]
    sums: dict[int, int]


class Awaited:
    """A ``module`` whose recorded calls wait for their first step, and the ``loss`` function, if it has one."""

    def __init__(self, module: nn.Module, loss: Any = None) -> None:
        self.module, self.loss = module, loss
        self.backward = False  # whether a backward was called, after which one device has gradients
        self.written: frozenset[str] = frozenset()  # the buffers that the calls write to
        self._noted: _Noted | None = None

    def note(self, version: int, written: Iterable[str]) -> None:
        """Note what the module is at a call that writes to some buffers; raise :class:`ShardwiseError` where it is
        another than at a call before, with the same version of the weights."""
        self.written = frozenset(written)
        if self._noted is not None and self._noted.version == version:
            self.check()
        else:
            modes = [one.training for one in self.module.modules()]
            self._noted = _Noted(version, PythonState(self.module, self.loss), parts_of(self.module), modes, {})
        self._set(True)

    def looked_at(self, tensor: Any) -> None:
        """Note the value of a tensor, before it may change; raise :class:`ShardwiseError` where on one device it has
        changed by itself."""
        name = next((name for name, one in self.module.named_buffers() if one is tensor), None)
        if name in self.written:
            what = f"{name} of the module under distribute(): forward writes to it, and runs in the step"
            raise ShardwiseError(f"{what}; legal: model.buffers() of what distribute returned, after optimizer.step()")
        if self._noted is not None and id(tensor) not in self._noted.sums:
            self._noted.sums[id(tensor)] = checksum(tensor)

    def check(self) -> None:
        """Raise :class:`ShardwiseError` where the module has changed since it was noted."""
        if what := self.change():
            legal = "before the call, or to model.parameters() and model.buffers() of what distribute returned"
            raise ShardwiseError(
                f"model: {what} between a call of the model and the first step, which computes the call; legal: {legal}"
            )

    def change(self) -> str | None:
        """Return what has changed since the module was noted, if anything."""
        return None if self._noted is None else next(self._changes(self._noted), None)

    def _changes(self, noted: _Noted) -> Iterator[str]:
        for name in changed_parts(self.module, noted.parts):
            yield f"{name} became another, or got other hooks or another requires_grad"
        modes = [one.training for one in self.module.modules()]
        if modes != noted.modes and (any(modes) or not all(noted.modes)):
            yield "the mode of a part (training or evaluation) changed"
        for change in noted.state.changes():
            yield f"{change} changed"
        for name, tensor in tensors_of(self.module):
            if id(tensor) in noted.sums and noted.sums[id(tensor)] != checksum(tensor):
                yield f"{name} was written to"

    def forget(self) -> None:
        """Note that no call waits any more."""
        self._noted, self.backward, self.written = None, False, frozenset()
        self._set(False)

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let the module's tensors be ordinary ones inside the context, for whoever computes what the loop wants."""
        if self._noted is None:  # as in all steps after the first
            yield
            return
        self._set(False)
        try:
            yield
        finally:
            self._set(True)

    def _set(self, awaiting: bool) -> None:
        for _, one in tensors_of(self.module):
            kinds = (nn.Parameter, AwaitingParameter) if isinstance(one, nn.Parameter) else (Tensor, AwaitingBuffer)
            if type(one) is kinds[not awaiting]:
                one.__class__ = kinds[awaiting]
                vars(one).pop("_awaited", None)
                if awaiting:
                    vars(one)["_awaited"] = self


def parts_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module is made of: its modules with their hooks, its parameters and buffers, by name."""
    found: dict[str, Any] = {
        name or "the module": (id(one), *module_hooks(one)) for name, one in module.named_modules()
    }
    return found | {name: (id(one), one.requires_grad) for name, one in tensors_of(module)}


def changed_parts(module: nn.Module, before: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of the parts that are others than ``before``, which :func:`parts_of` returned."""
    now = parts_of(module)
    yield from (name for name in {**before, **now} if now.get(name) != before.get(name))


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers of a module with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()
