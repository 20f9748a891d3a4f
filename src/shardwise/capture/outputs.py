"""What a model returns besides its loss, as a list of tensors with a row for each row of the batch.

The *outputs* of a model are what its forward returned, without the loss and without what has no rows.  A model whose
forward returns the loss alone is called a second time without its labels; what the two calls share is computed once.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from shardwise.capture.in_form import InForm, parameters_of
from shardwise.core.errors import ConfigError
from shardwise.graph.sizes import expression

Wanted = Literal["loss", "both", "outputs", "load"]
"""What is computed of a batch: the loss, the loss and the outputs, the outputs alone, or the loss and the load of
experts."""

LABELS = "labels"
"""The field that a model which returns its loss alone is called without, to get its outputs."""

T = TypeVar("T")
Structure = Any
"""What a model returned, with numbers of tensors in place of them: a number, a dict of structures, or a tuple."""


class Outputs(dict[str, Any]):
    """Outputs by name, which are attributes too: ``outputs.logits`` is ``outputs["logits"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the outputs have no {name}; they have {', '.join(self)}") from None


@dataclasses.dataclass
class Found:
    """The structure of the outputs.  It is an object of its own, for export puts back the attributes of a module."""

    structure: Structure = None


def flatten(output: Any, rows: Any) -> tuple[Structure, list[Tensor]]:
    """Return the structure and the tensors of ``output`` whose first dim is ``rows``, a size; the rest is left out.

    The structure is None where there is no such tensor."""
    found: list[Tensor] = []
    return _walk(output, expression(rows), found), found


def _walk(value: Any, rows: Any, found: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        if not value.dim() or expression(value.shape[0]) != rows:
            return None
        found.append(value)
        return len(found) - 1
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        parts = [part for item in value if (part := _walk(item, rows, found)) is not None]
        return tuple(parts) or None
    named = _named(value)
    parts_by_name = {name: part for name, item in named.items() if (part := _walk(item, rows, found)) is not None}
    return parts_by_name or None


def _named(value: Any) -> Mapping[str, Any]:
    """Return the parts of an output by name: of a mapping, a named tuple, a dataclass or a plain namespace."""
    if isinstance(value, Mapping):
        named = {str(name): item for name, item in value.items()}
    elif hasattr(value, "_asdict"):
        named = dict(value._asdict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    elif type(value).__module__ not in ("builtins", "torch") and not isinstance(value, nn.Module):
        named = dict(getattr(value, "__dict__", {})) if not hasattr(value, "__iter__") else {}
    else:
        named = {}
    return {name: item for name, item in named.items() if name != "past_key_values"}


def number_of(structure: Structure) -> int:
    """Return the number of tensors of a structure."""
    if isinstance(structure, int):
        return 1
    return sum(map(number_of, structure if isinstance(structure, tuple) else structure.values()))


def rebuilt(structure: Structure, tensors: Sequence[T]) -> Any:
    """Return outputs of a structure: ``tensors`` has one of each tensor."""
    if isinstance(structure, int):
        return tensors[structure]
    if isinstance(structure, tuple):
        return tuple(rebuilt(part, tensors) for part in structure)
    return Outputs({name: rebuilt(part, tensors) for name, part in structure.items()})


def without_labels(module: nn.Module, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fields without the labels, with which a module that returns its loss alone gives its outputs; raise
    :class:`ConfigError` where it cannot be called so."""
    _check_optional(module, fields)
    return {name: value for name, value in fields.items() if name != LABELS}


def unlabelled(form: InForm, module: nn.Module) -> InForm:
    """Return the same of batches in a form: what makes those without labels."""
    tree = form.form.tree
    _check_optional(module, () if isinstance(tree, str) else tree.keys)
    return form.without(LABELS)


def _check_optional(module: nn.Module, names: Collection[Any]) -> None:
    """Raise :class:`ConfigError` unless the module can be called without the labels that are among these names."""
    parameters = parameters_of(module)
    known = parameters.get(LABELS)
    optional = known is None or known.default is not inspect.Parameter.empty
    if LABELS not in names or not optional:
        legal = (
            f'a forward that returns an output with .loss and .logits, one that does without "{LABELS}", or '
            "model.loss = a function of (output, batch)"
        )
        raise ConfigError(f"model: forward returns its loss alone, so it has no outputs for metrics; legal: {legal}")


def no_rows(output: Any, rows: Any) -> ConfigError:
    """Return the error for outputs of which none has a row for each row of the batch."""
    shapes = [tuple(str(s) for s in one.shape) for one in _tensors(output)]
    found = ", ".join(f"({', '.join(shape)})" for shape in shapes) or f"an object of type {type(output).__name__}"
    legal = f"tensors with a row for each of the {expression(rows)} rows of the batch in their first dim"
    return ConfigError(f"model: no output of forward has rows (it returned {found}); legal: {legal}")


def is_one_number(output: Any) -> bool:
    """Whether a module has returned a single number, which must be its loss."""
    tensors = _tensors(output)
    return len(tensors) == 1 and tensors[0].numel() == 1


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = value if isinstance(value, tuple | list) else _named(value).values()
    return [one for part in parts for one in _tensors(part)]


def scalar(tensors: Sequence[Tensor]) -> Tensor:
    """Return one number that depends on all ``tensors``, in place of a loss."""
    return torch.stack([one.detach().to(torch.float32).sum() for one in tensors]).sum()
