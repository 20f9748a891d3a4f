"""Streams without a device: ranks that are threads each have one, and what is read or written before its turn is found.

Tensors are the CPU's, so every value is right whatever the order.  What would go wrong on a device is found by clocks:
each stream counts its ops, an event holds what its stream knew when it was recorded, and a stream that waits for it
knows that too.  An op may read only what its stream knows to be written, may write only what it knows to be read, and
may read memory of another stream's only if the allocator was told, which would give it away otherwise while the op is
pending.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwise.backend import Backend
from shardwise.core.mesh import Mesh
from shardwise.runtime import stream_tensors, threads
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

Clock = dict["Stream", int]


class Stream:
    """A queue: ``clock`` has how many ops of each stream are known to be over before its next one."""

    def __init__(self) -> None:
        self.clock: Clock = {self: 0}


@dataclass
class Memory:
    """Who has used a storage last, and when; ``told``: the streams that its allocator knows of."""

    storage: torch.UntypedStorage  # is kept, so that no other gets its address
    home: Stream
    written: Clock = field(default_factory=dict)
    read: Clock = field(default_factory=dict)
    told: set[Stream] = field(default_factory=set)


class Streams:
    """Those of one run, and in ``found`` what was wrong; ``deaf``: waiting for an event does nothing, ``mute``: nor
    does telling the allocator.
    """

    def __init__(self, deaf: bool = False, mute: bool = False) -> None:
        self.found: list[str] = []
        self.waits = 0
        self.deaf, self.mute = deaf, mute
        self._lock = threading.Lock()
        self._here = threading.local()
        self._memory: dict[int, Memory] = {}

    @property
    def current(self) -> Stream | None:
        return getattr(self._here, "stream", None)

    @contextmanager
    def queue(self) -> Iterator[None]:
        """A stream of its own for this thread, whose ops are watched."""
        self._here.stream = Stream()
        try:
            with _Watched(self):
                yield
        finally:
            self._here.stream = None

    def event(self) -> Event:
        assert self.current is not None, "an event is recorded in a rank's stream"
        return Event(self, dict(self.current.clock))

    def keep(self, x: Tensor) -> None:
        assert self.current is not None
        with self._lock:
            known = self._memory.get(x.untyped_storage()._cdata)
            if known is not None and not self.mute:
                known.told.add(self.current)

    def op(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        stream = self.current
        assert stream is not None
        with self._lock:
            stream.clock[stream] += 1
            for x in reads:
                known = self._memory.get(x.untyped_storage()._cdata)
                if known is not None:  # else of the host, from before the ranks
                    self._check(name, "reads what is not known to be written", stream, known.written)
                    if known.home is not stream and stream not in known.told:
                        self._note(name, "reads another stream's memory, of which the allocator does not know")
                    known.read[stream] = stream.clock[stream]
            for x in writes:
                storage = x.untyped_storage()
                known = self._memory.setdefault(storage._cdata, Memory(storage, stream))
                self._check(name, "writes what is not known to be written", stream, known.written)
                self._check(name, "writes what is not known to be read", stream, known.read)
                known.written[stream] = stream.clock[stream]

    def _check(self, name: str, what: str, stream: Stream, others: Clock) -> None:
        if any(other is not stream and stream.clock.get(other, 0) < at for other, at in others.items()):
            self._note(name, what)

    def _note(self, name: str, what: str) -> None:
        frames = [f for f in traceback.extract_stack() if "/shardwise/" in f.filename]
        where = f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""
        self.found.append(f"{name} {what}{where}")


class Event:
    """A point in a stream."""

    def __init__(self, streams: Streams, clock: Clock) -> None:
        self._streams, self._clock = streams, clock

    def wait(self) -> None:
        """The current stream's next ops come after the point."""
        self._streams.waits += 1
        if self._streams.deaf:
            return
        stream = self._streams.current
        assert stream is not None
        for other, at in self._clock.items():
            stream.clock[other] = max(stream.clock.get(other, 0), at)


class _Watched(TorchDispatchMode):
    """Tells the streams of every op in this thread."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given = list(zip(func._schema.arguments, args, strict=False))
        given += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in kwargs]
        written = [x for one, value in given if _writes(one) for x in tree_leaves(value) if isinstance(x, Tensor)]
        read = [x for one, value in given if not _writes(one) for x in tree_leaves(value) if isinstance(x, Tensor)]
        result = func(*args, **kwargs)
        known = {x.untyped_storage()._cdata for x in (*read, *written)}
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.untyped_storage()._cdata not in known]
        if func.is_view:
            return result
        self._streams.op(str(func), read, [*written, *made])
        return result


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@dataclass(frozen=True)
class Queued(Backend):
    """What ranks that are threads ask of a device with streams."""

    streams: Streams = field(default_factory=Streams)

    @property
    def asynchronous(self) -> bool:
        return True

    def synchronize(self, device: torch.device) -> None:
        """Nothing is pending: the tensors are the CPU's."""

    def queue(self, device: torch.device) -> Any:
        return self.streams.queue()

    def event(self, device: torch.device, *, timing: bool = False) -> Any:
        return self.streams.event()

    def keep(self, x: Tensor) -> None:
        self.streams.keep(x)


def run_in_streams(streams: Streams, mesh: Mesh, fn: Callable[[ThreadCommunicator], Any], **options: Any) -> list[Any]:
    """:func:`run_ranks`, whose threads take the CPU for a device with streams."""

    class Ours:
        @staticmethod
        def of(device: torch.device | str) -> Backend:
            return Queued("cpu", streams)

    with ExitStack() as patched:
        for module in (threads, stream_tensors):
            patched.enter_context(patch.object(module, "Backend", Ours))
        return run_ranks(mesh, fn, **options)
