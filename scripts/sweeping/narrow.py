"""Nets of convolutions at a fraction of their width: what is built inside :func:`narrowed` has fewer channels
everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

from torch import nn

KEPT = 4  # so many channels or classes stay as they are: colours, labels
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def narrowed(factor: int) -> Iterator[None]:
    """Let layers that are made meanwhile have 1/``factor`` of their channels."""

    def small(size: int) -> int:
        return size if size <= KEPT else max(math.ceil(size / factor), 2)

    def convolution(self: Any, *args: Any, plain: Callable[..., None], **kwargs: Any) -> None:
        inputs, outputs, *others = _first(args, kwargs, "in_channels", "out_channels")
        groups = kwargs.get("groups", 1)
        wide = small(inputs) * (outputs // inputs) if groups == inputs and outputs % inputs == 0 else small(outputs)
        if groups > 1:
            kwargs["groups"] = small(inputs) if groups == inputs else math.gcd(groups, small(inputs), wide)
        plain(self, small(inputs), wide, *others, **kwargs)

    def linear(self: Any, *args: Any, plain: Callable[..., None], **kwargs: Any) -> None:
        inputs, outputs, *others = _first(args, kwargs, "in_features", "out_features")
        plain(self, small(inputs), small(outputs), *others, **kwargs)

    def norm(self: Any, *args: Any, plain: Callable[..., None], **kwargs: Any) -> None:
        features, *others = _first(args, kwargs, "num_features")
        plain(self, small(features), *others, **kwargs)

    with ExitStack() as patched:
        for kinds, changed in ((CONVOLUTIONS, convolution), ((nn.Linear,), linear), (NORMS, norm)):
            for kind in kinds:
                own = partialmethod(changed, plain=kind.__init__)
                patched.enter_context(mock.patch.object(kind, "__init__", own))
        yield


def _first(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """Return positional arguments, before which those of ``names`` that are keywords are put."""
    return [*args[: len(names)], *(kwargs.pop(name) for name in names[len(args) :]), *args[len(names) :]]
