"""Threads hand tensors to each other, where each has a stream of its own on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.backend import Backend


class StreamTensors:
    """This has ``tensors`` of ``device`` that the current stream will have written, for threads that issue their work
    to other streams.

    On a CPU, where a call returns when its work is done, it only keeps the tensors.
    """

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self._tensors, self._backend = tuple(tensors), Backend.of(device)
        self._written = self._backend.event(device) if self._backend.asynchronous else None

    def read(self, index: int = 0) -> Tensor:
        """Return the tensor at ``index`` for the current stream: work issued there from now on runs after the writing;
        the host does not wait.

        The tensor's memory belongs to the stream in which it was made.  If it were freed before the current stream has
        read it, the allocator could give it to that stream again; so the allocator is told of the reader.
        """
        tensor = self._tensors[index]
        if self._written is not None:
            self._written.wait()
            self._backend.keep(tensor)
        return tensor
