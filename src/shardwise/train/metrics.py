"""Metrics: each adds up sums over rows on the rank that has these rows, and makes numbers of the sums of all ranks.

Every row counts exactly once, whatever ranks, microbatches and an uneven last batch make of the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.capture.in_form import InForm
from shardwise.core.errors import ConfigError
from shardwise.core.metrics import PERPLEXITY, READY, RESERVED, is_ready, top
from shardwise.core.structure import objects_of, structure_of
from shardwise.data.windows import IGNORED

Fields = Mapping[str, Tensor]
LABELS = ("labels", "label", "targets", "target", "y")
"""The fields that may have the labels; the first that a batch has counts."""


class Metric(ABC):
    """What is measured in an evaluation.  A *state* is what it has of some rows, on their rank."""

    name: str
    of_outputs = True  # whether it looks at the model's outputs

    @abstractmethod
    def begin(self, device: torch.device) -> Any:
        """Return the state of no rows."""

    @abstractmethod
    def add(self, state: Any, outputs: Any, batch: Fields) -> Any:
        """Return a state with the rows of ``batch`` added, whose ``outputs`` are given.  The host does not wait."""

    @abstractmethod
    def packed(self, state: Any) -> Any:
        """Return a state in a form that can be sent to other ranks."""

    @abstractmethod
    def values(self, states: Sequence[Any], loss: float) -> dict[str, float]:
        """Return numbers by name from the packed states of all rows; ``loss`` is the mean loss."""


class Sums(Metric):
    """A metric that follows from sums over rows."""

    @abstractmethod
    def sums(self, outputs: Any, batch: Fields) -> Mapping[str, Any]:
        """Return sums over the rows of a batch: numbers, or tensors of any shape."""

    @abstractmethod
    def numbers(self, sums: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        """Return the numbers that follow from the sums over all rows, which are fp64 on the host."""

    def begin(self, device: torch.device) -> dict[str, Tensor]:
        return {}

    def add(self, state: dict[str, Tensor], outputs: Any, batch: Fields) -> dict[str, Tensor]:
        device = next(iter(batch.values())).device
        new = self.sums(outputs, batch)
        wide = Backend.of(device).widest_float
        found = dict(state)  # a batch need not have all names
        for name, value in new.items():
            one = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
            # Counts stay integers: a device without fp64 would round them.
            one = one.to(wide if one.is_floating_point() else torch.int64)
            found[name] = one + state[name].to(one.device) if name in state else one
        return found

    def packed(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to("cpu").to(torch.float64) for name, value in state.items()}

    def values(self, states: Sequence[dict[str, Tensor]], loss: float) -> dict[str, float]:
        total: dict[str, Tensor] = {}
        for state in states:
            for name, value in state.items():
                total[name] = total[name] + value if name in total else value
        return self.numbers(total, loss)


@dataclass
class FunctionMetric(Sums):
    """A function of the user, called as ``function(outputs, batch)``.

    It returns ``(sum, count)`` of its rows, whose quotient over all rows counts under ``name``, or a dict of these by
    name.  Sums and counts are numbers or 0-d tensors.
    """

    name: str
    function: Callable[[Any, Fields], Any]

    def sums(self, outputs: Any, batch: Fields) -> Mapping[str, Any]:
        found = self.function(outputs, as_given(batch))
        each = found if isinstance(found, Mapping) else {self.name: found}
        out: dict[str, Any] = {}
        for name, pair in each.items():
            if not isinstance(name, str) or not _is_pair(pair):
                wrong = f"it returned {kind(found)}" + (f" with {name!r}: {kind(pair)}" if found is each else "")
                raise ConfigError.on(f"metric {self.name}", wrong, "(sum, count), or a dict of these by name")
            if name in RESERVED:
                wrong = f"it returned {name!r}, which each evaluation has"
                raise ConfigError.on(f"metric {self.name}", wrong, f"other names than {', '.join(RESERVED)}")
            out[f"{name} sum"], out[f"{name} count"] = pair
        return out

    def numbers(self, sums: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        names = [name.removesuffix(" sum") for name in sums if name.endswith(" sum")]
        return {name: _quotient(sums[f"{name} sum"], sums[f"{name} count"]) for name in names}


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, tuple | list) and len(value) == 2
    return numbers and all(
        (isinstance(one, Tensor) and one.numel() == 1 and not one.is_complex())
        or (isinstance(one, Real) and not isinstance(one, bool))  # numpy's numbers too
        for one in value
    )


def _quotient(total: Tensor, count: Tensor) -> float:
    return float(total) / float(count) if float(count) else float("nan")


@dataclass
class Accuracy(Sums):
    """The share of targets among the ``k`` classes with the largest logits; negative ones (-100) do not count.

    Logits are (rows, ..., classes) and labels (rows, ...); one logit for each label is for class 1, and labels of -100
    do not count then.  With ``shift`` the label of a position is that of the next one, as in causal language models of
    transformers.
    """

    name: str = "accuracy"
    k: int = 1
    shift: bool = False

    def sums(self, outputs: Any, batch: Fields) -> Mapping[str, Any]:
        logits, labels = logits_and_labels(self.name, outputs, batch, self.shift)
        counts = _counts(logits, labels)
        if logits.dim() == labels.dim():
            hits = (logits > 0) == (labels > 0)
        elif self.k == 1:
            hits = logits.argmax(-1) == labels
        else:
            places = logits.topk(min(self.k, logits.shape[-1]), -1).indices
            hits = (places == labels.unsqueeze(-1)).any(-1)
        return {"hits": (hits & counts).sum(), "count": counts.sum()}

    def numbers(self, sums: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        return {self.name: _quotient(sums["hits"], sums["count"]) if sums else float("nan")}


@dataclass
class F1(Sums):
    """The F1 score: the mean over classes that occur, in labels or predictions; ``binary``: that of class 1 alone."""

    name: str = "f1"
    binary: bool = False
    shift: bool = False

    def sums(self, outputs: Any, batch: Fields) -> Mapping[str, Any]:
        logits, labels = logits_and_labels(self.name, outputs, batch, self.shift)
        alone = logits.dim() == labels.dim()
        predicted = (logits > 0).long() if alone else logits.argmax(-1)
        classes = 2 if alone else logits.shape[-1]
        counts = _counts(logits, labels).flatten().long()
        actual, predicted = labels.flatten().long().clamp(min=0), predicted.flatten()

        def tally(places: Tensor, each: Tensor) -> Tensor:
            return torch.zeros(classes, dtype=torch.long, device=places.device).scatter_add_(0, places, each)

        hits = tally(actual, counts * (actual == predicted))
        return {"hits": hits, "actual": tally(actual, counts), "predicted": tally(predicted, counts)}

    def numbers(self, sums: Mapping[str, Tensor], loss: float) -> dict[str, float]:
        if not sums:
            return {self.name: float("nan")}
        both = sums["actual"] + sums["predicted"]
        score = 2 * sums["hits"] / both  # 0/0 where a class does not occur
        return {self.name: float(score[1] if self.binary else score[both > 0].mean())}


@dataclass
class Perplexity(Metric):
    """exp of the mean loss, which is meant to be a mean cross-entropy in nats."""

    name: str = PERPLEXITY
    of_outputs = False

    def begin(self, device: torch.device) -> None:
        return None

    def add(self, state: None, outputs: Any, batch: Fields) -> None:
        return None

    def packed(self, state: None) -> None:
        return None

    def values(self, states: Sequence[None], loss: float) -> dict[str, float]:
        return {self.name: float(torch.tensor(loss, dtype=torch.float64).clamp(max=700.0).exp())}


def logits_and_labels(name: str, outputs: Any, batch: Fields, shift: bool) -> tuple[Tensor, Tensor]:
    """Return the logits among the outputs, and the labels of the batch; :class:`ConfigError` where there are none."""
    logits = outputs if isinstance(outputs, Tensor) else None
    if isinstance(outputs, Mapping):
        logits = outputs.get("logits")
    elif isinstance(outputs, tuple) and outputs and isinstance(outputs[0], Tensor):
        logits = outputs[0]
    if not isinstance(logits, Tensor):
        found = ", ".join(outputs) if isinstance(outputs, Mapping) else kind(outputs)
        legal = "outputs with .logits, a tuple that begins with them, or a metric of yours (file.py:function)"
        raise ConfigError.on(f"metric {name}", f"the model's outputs are {found}", legal)
    field = label_of(batch)
    if field is None:
        wrong = f"the batch has the fields {', '.join(batch)}"
        legal = f"one of {', '.join(LABELS)}, a tuple that ends with the labels, or a metric of yours"
        raise ConfigError.on(f"metric {name}", wrong, legal)
    labels = batch[field]
    if shift and logits.dim() == labels.dim() + 1 and labels.dim() >= 2:
        logits, labels = logits[:, :-1], labels[:, 1:]
    if labels.shape not in (logits.shape, logits.shape[:-1]):
        wrong = f"logits are {tuple(logits.shape)} and {field} {tuple(labels.shape)}"
        raise ConfigError.on(f"metric {name}", wrong, "(rows, ..., classes) and (rows, ...), or equal shapes")
    if logits.dim() == labels.dim() + 1 and logits.shape[-1] == 1:  # one logit is for class 1
        logits = logits.squeeze(-1)
    return logits, labels


def label_of(batch: Fields) -> str | None:
    """Return the field that has the labels: one of :data:`LABELS`, or the last part of a tuple; None where none has."""
    form = structure_of(batch)
    if form is not None and not isinstance(form.tree, str) and form.tree.kind in (list, tuple) and form.tree.parts:
        last = form.tree.parts[-1]
        return last if isinstance(last, str) and form.kinds[last] == "rows" else None
    return next((one for one in LABELS if one in batch), None)


def as_given(batch: Fields) -> Any:
    """Return a batch in the form that it had, on the device of its fields."""
    form = structure_of(batch)
    if form is None or form.plain:
        return batch
    return InForm(None, form, objects_of(batch)).batch(batch, False)


def _counts(logits: Tensor, labels: Tensor) -> Tensor:
    """Return which labels count: a number of a class is not negative, whatever a loss ignores."""
    return labels != IGNORED if logits.dim() == labels.dim() else labels >= 0


def ready(name: str, module: nn.Module | None = None) -> Metric:
    """Return the ready-made metric ``name`` for outputs of ``module``; :class:`ConfigError` if there is none."""
    if not is_ready(name):
        raise ConfigError(f'metric "{name}": unknown; legal: {", ".join(READY)}, or a function')
    shift = getattr(module, "loss_type", None) == "ForCausalLM"  # such models of transformers shift labels themselves
    if name == PERPLEXITY:
        return Perplexity()
    if name.startswith("f1"):
        return F1(name, name == "f1-binary", shift)
    return Accuracy(name, top(name), shift)


def kind(value: Any) -> str:
    """Return what a value is, for people."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list) and len(value) <= 3:
        return f"({', '.join(map(kind, value))})"
    return "None" if value is None else f"an object of type {type(value).__name__}"
