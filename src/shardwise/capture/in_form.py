"""A batch in the form that the user's code takes it in, made of fields in front of the model's forward and its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from shardwise.capture.casts import cast_field
from shardwise.capture.computation import Computation
from shardwise.core.errors import ConfigError
from shardwise.core.fields import WHOLE
from shardwise.core.structure import Fields, Node, Structure, objects_of, opened, parts_of, rebuilt

UserLoss = Callable[[Any, Any], Tensor] | Computation
"""What makes the loss of what the model returned and of the batch, or calls the model too."""

POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class InForm:
    """A loss function, or none, of batches of a ``form``; ``objects`` are those of the example, by their numbers.

    It stands where a loss function does: what calls a model (:class:`~shardwise.capture.wrapped.WithLoss`) asks it for
    the batch."""

    def __init__(self, loss: UserLoss | None, form: Structure, objects: Mapping[int, Any]) -> None:
        self.loss, self.form, self.objects = loss, form, objects
        # The number of an object of each field, for rows that stand in for none.
        self.first: Mapping[str, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @staticmethod
    def of(loss: UserLoss | InForm | None, fields: Mapping[str, Tensor]) -> UserLoss | InForm | None:
        """Return ``loss`` for batches like ``fields``."""
        if not isinstance(fields, Fields) or fields.form is None or fields.form.plain:
            return loss
        found = InForm(loss.loss if isinstance(loss, InForm) else loss, fields.form, fields.objects)
        kinds = {name: kind for name, kind in fields.form.kinds.items() if kind == "objects"}
        found.first = {name: int(fields[name][0]) for name in kinds if len(fields[name])}
        return found

    @staticmethod
    def of_all(loss: UserLoss | InForm | None, batches: Sequence[Mapping[str, Tensor]]) -> UserLoss | InForm | None:
        """Return ``loss`` for these batches, whose constants are those of the first."""
        found = InForm.of(loss, batches[0])
        if isinstance(found, InForm):
            found.objects = {number: one for batch in batches for number, one in objects_of(batch).items()}
        return found

    def batch(self, fields: Mapping[str, Tensor], captured: bool, precision: str = "fp32") -> Any:
        """Return the batch that has these fields; while it is ``captured`` numbers are tensors, and objects cannot be
        read."""
        objects = {**self.objects, **(fields.objects if isinstance(fields, Fields) else {})}
        leaves: dict[str, Any] = {}
        for name, kind in self.form.kinds.items():
            if kind == "constant":
                leaves[name] = self.form.constants[name]
                continue
            field = fields[name if kind in ("rows", "objects") else f"{WHOLE}{name}"]
            if kind in ("int", "float"):
                leaves[name] = field if captured else field.item()
            elif kind not in ("object", "objects"):
                leaves[name] = field
            elif captured:
                leaves[name] = Unread(name, kind)
            else:
                numbers = [one or self.first[name] for one in field.reshape(-1).tolist()]
                found = [_there(objects[one], field, precision) for one in numbers]
                leaves[name] = found if kind == "objects" else found[0]
        return rebuilt(self.form.tree, leaves)

    def without(self, name: str) -> InForm:
        """Return the same without a part of a batch that has names; self if there is none such."""
        tree = self.form.tree
        if isinstance(tree, str) or name not in tree.keys:
            return self
        pairs = [(key, part) for key, part in zip(tree.keys, tree.parts, strict=True) if key != name]
        fixed = issubclass(tree.kind, tuple) or is_dataclass(tree.kind)
        smaller = type(tree)(
            dict if fixed else tree.kind, tuple(key for key, _ in pairs), tuple(part for _, part in pairs)
        )
        kinds = {one: kind for one, kind in self.form.kinds.items() if one.partition(".")[0] != name}
        constants = {one: value for one, value in self.form.constants.items() if one in kinds}
        found = InForm(self.loss, Structure(smaller, kinds, constants), self.objects)
        found.first = self.first
        return found

    def call(self, module: nn.Module, batch: Any) -> Any:
        """Call the module with what it takes of a batch (:func:`arguments`)."""
        args, kwargs = arguments(module, batch, self.loss is None)
        return module(*args, **kwargs)

    def notes(self, module: nn.Module) -> list[str]:
        """Return what a user should know of how the module is called."""
        tree = self.form.tree
        if isinstance(tree, str) or self.loss is None or not issubclass(tree.kind, list | tuple):
            return []
        required, optional = _positional(module)
        left = optional[: max(len(tree.keys) - len(required), 0)]
        if hasattr(tree.kind, "_fields") or not left:
            return []
        return [
            f"batch: forward gets the first {len(required)} of {len(tree.keys)} parts, those that it requires, and "
            f"{', '.join(left)} has its default; a dict gives parts by name"
        ]


def parameters_of(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of forward by name; one that does not say them, as of ``torch.jit.trace``, takes any."""
    try:
        return inspect.signature(module.forward).parameters
    except ValueError:
        return {"fields": inspect.Parameter("fields", inspect.Parameter.VAR_KEYWORD)}


def _positional(module: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the parameters of forward that go by position: those that it requires, and the others."""
    known = [one for one in parameters_of(module).values() if one.kind in POSITIONAL]
    required = [one.name for one in known if one.default is one.empty]
    return required, [one.name for one in known if one.default is not one.empty]


def arguments(module: nn.Module, batch: Any, every: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the module is called for a batch.

    Parts with names go by name where they have all that forward requires; parts of a list or tuple go by position. With
    a loss function (not ``every``) it gets those that it takes by name, and of a tuple as many as it requires. A
    forward that requires one argument, by position, gets the whole batch where that does not fit, if it could take no
    part by name; and a batch without parts."""
    parameters = parameters_of(module).values()
    required = [one.name for one in parameters if one.default is one.empty and one.kind not in VARIABLE]
    parts = parts_of(batch)
    parts = opened(batch) if parts is None else parts
    if parts is None:
        return (batch,), {}
    named = not isinstance(batch, list | tuple) or hasattr(batch, "_fields")
    known, takes_any = {one.name for one in parameters}, any(one.kind is one.VAR_KEYWORD for one in parameters)
    if named and all(name in parts for name in required):
        return (), {str(name): part for name, part in parts.items() if every or takes_any or name in known}
    if not named:
        args = tuple(parts.values())
        least, more = (len(one) for one in _positional(module))
        most = len(args) if any(one.kind is one.VAR_POSITIONAL for one in parameters) else least + more
        if not every and 0 < max(least, 1) <= len(args):
            return args[: max(least, 1)], {}
        if every and least <= len(args) <= most:
            return args, {}
    by_name = named and (takes_any or not known.isdisjoint(parts))
    if len(required) == 1 and required == _positional(module)[0] and not by_name:
        return (batch,), {}
    found = ", ".join(str(name) for name in parts) if named else f"{len(parts)} parts"
    legal = "the parts that it requires, by name or by position, or a forward that takes the batch alone"
    raise ConfigError(f"batch: it has {found}, and forward requires {', '.join(required) or 'nothing'}; legal: {legal}")


def _there(value: Any, field: Tensor, precision: str) -> Any:
    """Return an object with its tensors where the field is, as fields are cast."""
    parts = None if isinstance(value, Tensor) else parts_of(value)
    if isinstance(value, Tensor):
        return cast_field(value.to(field.device), precision)
    if parts is None or not any(_has_tensors(one) for one in parts.values()):
        return value
    names = tuple(map(str, range(len(parts))))
    moved = {name: _there(one, field, precision) for name, one in zip(names, parts.values(), strict=True)}
    return rebuilt(Node(type(value), tuple(parts), names), moved)


def _has_tensors(value: Any) -> bool:
    parts = None if isinstance(value, Tensor) else parts_of(value)
    return isinstance(value, Tensor) or any(map(_has_tensors, (parts or {}).values()))


class Unread:
    """This stands for objects of a batch while a model is captured: a graph cannot have what would be read here."""

    def __init__(self, name: str, kind: str) -> None:
        object.__setattr__(self, "_said", (name, kind))

    def _refuse(self, *_: Any) -> NoReturn:
        name, kind = object.__getattribute__(self, "_said")
        what = "a list of an object for each row" if kind == "objects" else "no tensor"
        # join() and the like would replace a TypeError by one of their own.
        raise RuntimeError(f'forward or the loss reads "{name}" of the batch, which is {what}')

    # isinstance() asks for the class, and operators ask the type
    __class__ = property(_refuse)
    __getattr__ = __setattr__ = __delattr__ = _refuse
    __len__ = __iter__ = __reversed__ = __getitem__ = __contains__ = __bool__ = _refuse
    __eq__ = __ne__ = __hash__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __str__ = __repr__ = __format__ = _refuse
    __enter__ = __next__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = _refuse
