"""Devices communicate through the memory of their hosts, which is slow, but works wherever hosts can communicate.

So several ranks can share one device, which NCCL refuses, and devices work for which torch has no backend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.backend import Backend
from shardwise.core.communicators import Members
from shardwise.runtime.call import Call
from shardwise.runtime.communicator import Communicator, OnWait
from shardwise.runtime.handles import Handle


class StagedCommunicator(Communicator):
    """This communicates tensors of ``device`` through ``inner``, a communicator of CPU tensors.

    Posting an operation blocks the host until the input is computed and copied; its handle's ``wait()`` blocks the host
    too.
    """

    def __init__(self, inner: Communicator, device: torch.device) -> None:
        self._inner = inner
        super().__init__(inner.mesh, inner.rank, device, inner.timeout, inner.on_wait)
        self.first_use_blocks = inner.first_use_blocks
        self._pins = Backend.of(device).pins

    @property
    def on_wait(self) -> OnWait | None:
        return self._inner.on_wait

    @on_wait.setter
    def on_wait(self, heard: OnWait | None) -> None:
        self._inner.on_wait = heard

    def _host(self) -> Communicator:
        return self._inner

    def _prepare(self, new: Sequence[Members]) -> None:
        self._inner.prepare(new)

    def progress(self) -> None:
        self._inner.progress()

    def close(self) -> None:
        self._inner.close()

    def _all_reduce(self, call: Call, x: Tensor) -> Handle:
        staged = self._down(x)
        return _Staged(self._inner._all_reduce(call, staged), staged, x)

    def _all_gather(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        staged = self._empty(out)
        return _Staged(self._inner._all_gather(call, staged, self._down(x)), staged, out)

    def _reduce_scatter(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        staged = self._empty(out)
        return _Staged(self._inner._reduce_scatter(call, staged, self._down(x)), staged, out)

    def _all_to_all(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        staged = self._empty(out)
        return _Staged(self._inner._all_to_all(call, staged, self._down(x)), staged, out)

    def _shift(self, call: Call, out: Tensor, x: Tensor) -> Handle:
        staged = self._empty(out)
        return _Staged(self._inner._shift(call, staged, self._down(x)), staged, out)

    def _broadcast(self, call: Call, x: Tensor, root: int) -> Handle:
        staged = self._down(x)
        return _Staged(self._inner._broadcast(call, staged, root), staged, x)

    def _send(self, call: Call, x: Tensor, to_rank: int) -> Handle:
        staged = self._down(x)
        return _Staged(self._inner._send(call, staged, to_rank), staged, None)

    def _receive(self, call: Call, x: Tensor, from_rank: int) -> Handle:
        staged = self._empty(x)
        return _Staged(self._inner._receive(call, staged, from_rank), staged, x)

    def _barrier(self, call: Call) -> None:
        self._inner._barrier(call)

    def _empty(self, x: Tensor) -> Tensor:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=self._pins)

    def _down(self, x: Tensor) -> Tensor:
        return self._empty(x).copy_(x)


class _Staged:
    """This waits for an operation on ``staged``, the host's copy, and copies the result to ``out`` on the device."""

    def __init__(self, handle: Handle, staged: Tensor, out: Tensor | None) -> None:
        self._handle, self._staged, self._out = handle, staged, out

    def wait(self) -> None:
        self._handle.wait()
        out, self._out = self._out, None
        if out is not None:
            out.copy_(self._staged)
