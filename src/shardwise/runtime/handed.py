"""Tensors that threads hand to each other, where each has a stream of its own on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.backend import Backend


class Handed:
    """``tensors`` of ``device`` that the current stream has been told to write, for threads that issue their work to
    other streams.

    On a CPU, where what has been called is done, they are no more than tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self._tensors, self._backend = tuple(tensors), Backend.of(device)
        self._written = self._backend.event(device) if self._backend.asynchronous else None

    def read(self, index: int = 0) -> Tensor:
        """One of them, for the current stream: what is issued there from now on comes after the writing, while the host
        goes on.

        Its memory belongs to the stream in which it was made.  Were it let go of while the current stream has yet to
        read it, that stream would get it for something else; so the allocator is told.
        """
        tensor = self._tensors[index]
        if self._written is not None:
            self._written.wait()
            self._backend.keep(tensor)
        return tensor
