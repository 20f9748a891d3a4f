"""Modules around models of transformers that want their inputs in another form or return no loss, and the loss of
those without a head."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class WithLossOf(nn.Module):
    """A model that makes its loss itself where it is asked to (``return_loss``)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **fields: Tensor) -> Any:
        """Return the loss of a batch."""
        return self.model(**fields, return_loss=True).loss


class Packed(nn.Module):
    """A model that takes the rows of one input, ``name``, one after the other: all patches of all images."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, wanted: Tensor | None = None, **fields: Tensor) -> Any:
        """Return what the model gives; ``wanted`` is for the loss."""
        return self.model(**{**fields, self.name: fields[self.name].flatten(0, 1)})


class Pixels(nn.Module):
    """A model of images whose forward hands on all that it is given."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Any:
        """Return what the model gives."""
        return self.model(pixel_values)


class Picked(nn.Module):
    """A model of whose outputs some, ``names``, are taken, as one vector of each row if they are several."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, wanted: Tensor | None = None, **fields: Tensor) -> Any:
        """Return the output; ``wanted`` is for the loss."""
        output = self.model(**fields)
        several = [output[name] for name in self.names]
        return torch.cat([one.flatten(1) for one in several], 1) if len(several) > 1 else several[0]


class Strip(nn.Module):
    """A model that takes the patches of all images side by side, as one image of one row of patches."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, target_sizes: Tensor, wanted: Tensor | None = None) -> Any:
        """Return what the model gives; ``wanted`` is for the loss."""
        strip = pixel_values.permute(1, 2, 0, 3).flatten(2)[None]
        return self.model(pixel_values=strip, target_sizes=target_sizes).last_hidden_state[0]


class Assistant(nn.Module):
    """A model that attends to keys and values of another one, which are fields of the batch here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, full: Tensor, sliding: Tensor, wanted: Tensor | None = None, **fields: Tensor) -> Any:
        """Return the logits; ``full`` and ``sliding`` are of shape (rows, 2, heads, length, width): keys and values."""
        states = {"full_attention": full.unbind(1), "sliding_attention": sliding.unbind(1)}
        return self.model(**fields, shared_kv_states=states).logits


class Detector(nn.Module):
    """A detector whose targets, a dict for each image, are two tensors here: classes and boxes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, classes: Tensor, boxes: Tensor, **fields: Tensor) -> Any:
        """Return the loss of a batch; ``classes`` are of shape (rows, n), ``boxes`` of (rows, n, 4)."""
        labels = [{"class_labels": c, "boxes": b} for c, b in zip(classes.unbind(), boxes.unbind(), strict=True)]
        return self.model(**fields, labels=labels).loss


class Regression:
    """The mean square of what a model without a head gives for a batch, less the batch's field ``wanted``."""

    @staticmethod
    def output(found: Any) -> Tensor:
        """Return the first tensor of numbers that depends on parameters."""
        values = found.values() if isinstance(found, Mapping) else found if isinstance(found, tuple | list) else [found]
        for value in values:
            if isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad and value.dim():
                return value
        for value in values:
            if isinstance(value, Mapping | tuple | list):
                return Regression.output(value)
        raise ValueError("the model gives no tensor that depends on its parameters")

    def __call__(self, output: Any, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the loss."""
        found, wanted = Regression.output(output), fields["wanted"]
        found = found if found.shape == wanted.shape else found.reshape(wanted.shape)
        return (found - wanted).square().mean()

    @staticmethod
    def wanted(output: Any, rows: int) -> tuple[int, ...]:
        """Return the shape of what is wanted for one of ``rows``, which the output may have one after the other."""
        shape = tuple(Regression.output(output).shape)
        if shape[0] == rows:
            return shape[1:]
        flat = math.prod(shape[:-1])
        if flat % rows or len(shape) < 2 or shape[1] == rows:
            raise ValueError(f"there is no loss, and an output of shape {shape} for {rows} rows")
        return flat // rows, shape[-1]
