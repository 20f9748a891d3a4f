"""What every communicator must do, as functions of one rank; a program that runs them in a process of a run.

    python communicator_cases.py conformance dp=2,tp=2    a line of JSON per backend: {case: problem or ""}
    python communicator_cases.py missing shared dp=3      rank 1 stays away: what the others raise
    python communicator_cases.py killed gloo dp=3         rank 1 dies: likewise
    python communicator_cases.py disagree shared dp=3     rank 1 has a tensor of another size: likewise

Values are small integers, exact in every dtype, so that results are compared for equality.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import torch
from torch import Tensor

from shardwise.core.communicators import CONTROL, Members, groups
from shardwise.core.errors import ShardwiseError
from shardwise.core.flat import FlatShard
from shardwise.core.instruction import CHANNELS
from shardwise.core.mesh import Mesh
from shardwise.parallel.data import SHARDS
from shardwise.runtime.call import CommunicationError, CommunicationTimeout
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.distributed import DistributedCommunicator
from shardwise.runtime.served import pull, push
from shardwise.runtime.shared import SharedMemoryCommunicator
from shardwise.runtime.staged import StagedCommunicator
from shardwise.runtime.threads import ThreadCommunicator

Case = Callable[[Communicator], None]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 2, 3, 65, 1009, 4099)
KINDS = [(dtype, SIZES[(i + j) % len(SIZES)]) for i, dtype in enumerate(DTYPES) for j in (0, 2, 4)]
"""Each dtype with half of the sizes: aligned or not, of less than a cache line, and of several blocks."""
TIMEOUT = 2.0  # seconds, in the runs that fail
STACKS_AFTER = 120.0  # seconds, after which a process that still runs shows where it is
BACKENDS = ("shared", "gloo", "staged")
LANES = ("compute", "gather", "reduce")


def value(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """What ``rank`` contributes; different for every rank, position and salt, and at most 16."""
    return ((torch.arange(numel) * (salt + 3) + rank * 5 + salt) % 17).to(dtype)


def large(c: Communicator) -> int:
    """A number of fp32 elements that real backends cut into pieces (9 MB)."""
    return 50_021 if isinstance(c, ThreadCommunicator) else 2_300_003


def axes_of(c: Communicator) -> list[tuple[str, ...]]:
    """Every axis, all together, and all in the other order, in which groups are not sorted by rank."""
    names = c.mesh.names
    return list(dict.fromkeys([*((name,) for name in names), names, names[::-1]]))


def members(c: Communicator, axes: tuple[str, ...]) -> tuple[int, ...]:
    return c.mesh.group(c.rank, axes)


def same(found: Tensor, expected: Tensor, where: object) -> None:
    assert found.dtype == expected.dtype, where
    assert found.shape == expected.shape, where
    wrong = (found != expected).sum().item()  # NaN counts as wrong
    assert wrong == 0, f"{where}: {wrong} of {found.numel()} wrong: {found[:8]} instead of {expected[:8]}"


def summed(ranks: tuple[int, ...], numel: int, dtype: torch.dtype, salt: int = 0) -> Tensor:
    return sum((value(rank, numel, dtype, salt) for rank in ranks[1:]), value(ranks[0], numel, dtype, salt))


def all_reduce(c: Communicator) -> None:
    for axes in axes_of(c):
        for dtype, numel in KINDS:
            for make in (c.allocate, lambda numel, dtype: torch.empty(numel, dtype=dtype)):
                x = make(numel, dtype)
                x.copy_(value(c.rank, numel, dtype))
                given, out = x.clone(), make(numel, dtype)
                c.all_reduce(x, axes, out=out).wait()
                same(x, given, (axes, dtype, numel))
                c.all_reduce(x, axes).wait()
                same(x, summed(members(c, axes), numel, dtype), (axes, dtype, numel))
                same(out, x, (axes, dtype, numel))


def all_reduce_large(c: Communicator) -> None:
    numel = large(c)
    for x in (c.allocate(numel, torch.float32), torch.empty(numel)):
        x.copy_(value(c.rank, numel, torch.float32))
        out = torch.empty_like(x)
        c.all_reduce(x, c.mesh.names, out=out).wait()
        c.all_reduce(x, c.mesh.names).wait()
        same(x, summed(tuple(range(c.mesh.size)), numel, torch.float32), "large")
        same(out, x, "large, apart")


def all_reduce_is_the_same_everywhere(c: Communicator) -> None:
    """Bitwise, and close to the sum in fp64."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        inputs = [torch.randn(10_007, generator=torch.Generator().manual_seed(rank)) for rank in range(c.mesh.size)]
        x = inputs[c.rank].to(dtype, copy=True)
        c.all_reduce(x, c.mesh.names).wait()
        everywhere = torch.empty(c.mesh.size * x.numel(), dtype=dtype)
        c.all_gather(everywhere, x, c.mesh.names).wait()
        for other in everywhere.view(c.mesh.size, -1):
            same(other, x, dtype)
        truth = sum(part.to(dtype).double() for part in inputs)
        assert (x.double() - truth).abs().max().item() <= tolerance * truth.abs().max().item()


def all_gather(c: Communicator) -> None:
    for axes in axes_of(c):
        ranks = members(c, axes)
        mine = ranks.index(c.rank)
        for dtype, numel in KINDS:
            expected = torch.cat([value(rank, numel, dtype) for rank in ranks])
            out = torch.zeros(len(ranks) * numel, dtype=dtype)
            c.all_gather(out, value(c.rank, numel, dtype), axes).wait()
            same(out, expected, (axes, dtype, numel))
            for out in (
                c.allocate(len(ranks) * numel, dtype),
                torch.zeros(len(ranks) * numel, dtype=dtype),
            ):
                x = out[mine * numel : (mine + 1) * numel]
                x.copy_(value(c.rank, numel, dtype))
                c.all_gather(out, x, axes).wait()
                same(out, expected, ("in place", axes, dtype, numel))


def reduce_scatter(c: Communicator) -> None:
    for axes in axes_of(c):
        ranks = members(c, axes)
        mine = ranks.index(c.rank)
        for dtype, numel in KINDS:
            part = slice(mine * numel, (mine + 1) * numel)
            expected = summed(ranks, len(ranks) * numel, dtype)[part]
            x, out = value(c.rank, len(ranks) * numel, dtype), torch.zeros(numel, dtype=dtype)
            c.reduce_scatter(out, x, axes).wait()
            same(out, expected, (axes, dtype, numel))
            same(x, value(c.rank, len(ranks) * numel, dtype), "the input is only read")
            x = c.allocate(len(ranks) * numel, dtype)
            x.copy_(value(c.rank, len(ranks) * numel, dtype))
            c.reduce_scatter(x[part], x, axes).wait()
            same(x[part], expected, ("in place", axes, dtype, numel))


def complex_numbers(c: Communicator) -> None:
    """Are summed as pairs of real ones."""
    n, ranks = c.mesh.size, members(c, c.mesh.names)
    for dtype in (torch.complex64, torch.complex128):
        x = torch.complex(*(value(c.rank, 3 * n, dtype.to_real(), salt) for salt in (0, 1)))
        expected = torch.complex(*(summed(ranks, 3 * n, dtype.to_real(), salt) for salt in (0, 1)))
        out, own = torch.zeros_like(x), torch.zeros(3, dtype=dtype)
        c.all_reduce(x, c.mesh.names, out=out).wait()
        same(out, expected, dtype)
        c.reduce_scatter(own, x, c.mesh.names).wait()
        same(own, expected[3 * ranks.index(c.rank) :][:3], dtype)
        c.all_reduce(x, c.mesh.names).wait()
        same(x, expected, dtype)


def progress(c: Communicator) -> None:
    """A backend without a thread works in progress(); after that, wait() finds nothing left to do."""
    if not isinstance(c, SharedMemoryCommunicator):
        return
    for x in (c.allocate(2000, torch.float64), torch.empty(2000, dtype=torch.float64)):
        x.copy_(value(c.rank, 2000, torch.float64))
        handle = c.all_reduce(x, c.mesh.names, what="in the background")
        expected = summed(tuple(range(c.mesh.size)), 2000, torch.float64)
        deadline = time.monotonic() + 10
        while not torch.equal(x, expected):
            c.progress()
            assert time.monotonic() < deadline
        handle.wait()
        same(x, expected, "progress")


def all_to_all(c: Communicator) -> None:
    for axes in axes_of(c):
        ranks = members(c, axes)
        mine = ranks.index(c.rank)
        for dtype, numel in KINDS:
            out = torch.zeros(len(ranks) * numel, dtype=dtype)
            c.all_to_all(out, value(c.rank, len(ranks) * numel, dtype), axes).wait()
            sent = [value(rank, len(ranks) * numel, dtype).view(len(ranks), numel)[mine] for rank in ranks]
            same(out, torch.cat(sent), (axes, dtype, numel))


def shift(c: Communicator) -> None:
    for axes in axes_of(c):
        ranks = members(c, axes)
        before = ranks[ranks.index(c.rank) - 1]
        for dtype, numel in (*KINDS, (torch.float32, large(c))):
            outs = [torch.zeros(numel, dtype=dtype) for _ in range(3)]
            sent = [value(c.rank, numel, dtype, salt) for salt in range(3)]
            posted = [c.shift(out, x, axes) for out, x in zip(outs, sent, strict=True)]
            for salt, handle in enumerate(posted):
                handle.wait()
                same(outs[salt], value(before, numel, dtype, salt), (axes, dtype, numel, salt))


def large_parts(c: Communicator) -> None:
    """Operations whose parts are cut into pieces."""
    n, numel = c.mesh.size, large(c) // c.mesh.size
    x, out = value(c.rank, n * numel, torch.float32), torch.zeros(n * numel)
    part = slice(c.rank * numel, (c.rank + 1) * numel)
    c.all_to_all(out, x, c.mesh.names).wait()
    same(out, torch.cat([value(rank, n * numel, torch.float32)[part] for rank in range(n)]), "all_to_all")
    c.reduce_scatter(out[:numel], x, c.mesh.names).wait()
    same(out[:numel], summed(tuple(range(n)), n * numel, torch.float32)[part], "reduce_scatter")
    c.all_gather(out, x[:numel], c.mesh.names).wait()
    same(out, torch.cat([value(rank, n * numel, torch.float32)[:numel] for rank in range(n)]), "all_gather")


def broadcast(c: Communicator) -> None:
    for axes in axes_of(c):
        ranks = members(c, axes)
        for root in range(len(ranks)):
            for dtype in (*DTYPES, torch.bool, torch.float8_e4m3fn):
                x = value(c.rank, 333, torch.uint8).to(dtype)
                c.broadcast(x, axes, root).wait()
                same(x.float(), value(ranks[root], 333, torch.uint8).to(dtype).float(), (axes, root, dtype))


def messages(c: Communicator) -> None:
    """Around a ring, receives posted early; what one rank sends another arrives in the order of posting."""
    n = c.mesh.size
    if n == 1:
        return
    after, before = (c.rank + 1) % n, (c.rank - 1) % n
    kinds = (
        (torch.float64, 1009, 6),
        (torch.bfloat16, 1, 6),
        (torch.bool, 7, 6),
        (torch.float32, large(c), 3),
    )
    for dtype, numel, count in kinds:
        numbers = range(count)
        outs = [torch.zeros(numel, dtype=dtype) for _ in numbers]
        receives = [c.receive(out, before, what=f"message {i}") for i, out in enumerate(outs)]
        inputs = [value(c.rank, numel, torch.int64, salt).to(dtype) for salt in numbers]
        sends = [c.send(x, after, lane=LANES[i % 3]) for i, x in enumerate(inputs)]
        for handle in (*receives, *sends):
            handle.wait()
        for salt, out in enumerate(outs):
            same(out, value(before, numel, torch.int64, salt).to(dtype), (dtype, numel, salt))


def a_receive_does_not_wait_for_what_the_sender_does_next(c: Communicator) -> None:
    """It computes until it hears, by a file, that the other has received, and looks after its messages only then."""
    processes = os.environ.get("MASTER_PORT")  # one for each set of ranks
    told = Path(tempfile.gettempdir()) / f"shardwise-received-{processes or os.getpid()}"
    in_time = True
    told.unlink(missing_ok=True)  # of a run that was killed
    c.barrier()
    if c.rank == 0 and c.mesh.size > 1:
        sent = c.send(value(0, 100, torch.float32), 1)
        limit = time.monotonic() + 10.0
        while not told.exists() and time.monotonic() < limit:
            time.sleep(0.01)
        in_time = told.exists()
        sent.wait()
    if c.rank == 1:
        time.sleep(0.3)
        x = torch.zeros(100)
        c.receive(x, 0).wait()
        told.touch()
        same(x, value(0, 100, torch.float32), "message")
    c.barrier()
    told.unlink(missing_ok=True)
    assert in_time


def messages_both_ways(c: Communicator) -> None:
    """Each pair of ranks exchanges, both of them waiting for their receive first."""
    for peer in range(c.mesh.size):
        if peer != c.rank:
            x, out = c.allocate(501, torch.float32), c.allocate(501, torch.float32)
            x.copy_(value(c.rank, 501, torch.float32, peer))
            send, receive = c.send(x, peer), c.receive(out, peer)
            receive.wait()
            send.wait()
            same(out, value(peer, 501, torch.float32, c.rank), peer)


def many_outstanding(c: Communicator) -> None:
    """Lanes are independent: every rank posts and waits in an order of its own; a lane keeps its order."""
    axes = c.mesh.names
    choice = random.Random(c.rank)
    pending, counts = [], dict.fromkeys(LANES, 0)
    while any(count < 40 for count in counts.values()):
        lane = choice.choice([lane for lane in LANES if counts[lane] < 40])
        numel = 100 + 10 * counts[lane]
        x = value(c.rank, numel, torch.float32, counts[lane])
        pending.append((c.all_reduce(x, axes, lane=lane), x, counts[lane]))
        counts[lane] += 1
        c.progress()
    choice.shuffle(pending)
    for handle, x, salt in pending:
        handle.wait()
        handle.wait()  # a second time does nothing
        same(x, summed(members(c, axes), x.numel(), torch.float32, salt), salt)


def a_long_queue(c: Communicator) -> None:
    """One rank is far ahead of the others."""
    if c.rank != 0:
        time.sleep(0.05)
    posted = []
    for salt in range(150):
        x = c.allocate(50 + salt, torch.float32)
        x.copy_(value(c.rank, x.numel(), torch.float32, salt))
        posted.append((c.all_reduce(x, c.mesh.names), x))
    for salt, (handle, x) in reversed(list(enumerate(posted))):
        handle.wait()
        same(x, summed(tuple(range(c.mesh.size)), x.numel(), torch.float32, salt), salt)


def subgroups_side_by_side(c: Communicator) -> None:
    """Pending operations on several groups of a mesh at once."""
    every = [(axes, lane) for axes in axes_of(c) for lane in ("compute", "reduce")]
    posted = []
    for i, (axes, lane) in enumerate(every * 3):
        x = c.allocate(777, torch.float64)
        x.copy_(value(c.rank, 777, torch.float64, i))
        posted.append((c.all_reduce(x, axes, lane=lane, what=f"x{i}"), x, axes, i))
    for handle, x, axes, i in reversed(posted):
        handle.wait()
        same(x, summed(members(c, axes), 777, torch.float64, i), (axes, i))


def buffers(c: Communicator) -> None:
    """Zeroed, aligned, apart from each other; views of them work at any offset."""
    made = [c.allocate(numel, dtype) for dtype in DTYPES for numel in (1, 100, 70_001)]
    for x in made:
        assert x.data_ptr() % 64 == 0
        assert x.device == c.device
        assert not x.any()
        x.fill_(1)
    assert all(int(x.count_nonzero()) == x.numel() for x in made)
    made[3].fill_(0)
    assert sum(int(x.count_nonzero()) for x in made) == sum(x.numel() for x in made) - made[3].numel()
    flat = c.allocate(1000, torch.float32)
    flat.copy_(value(c.rank, 1000, torch.float32))
    c.all_reduce(flat[13:114].view(1, 101), c.mesh.names).wait()
    expected = value(c.rank, 1000, torch.float32)
    expected[13:114] = summed(tuple(range(c.mesh.size)), 1000, torch.float32)[13:114]
    same(flat, expected, "only the view changes")


def common_memory(c: Communicator) -> None:
    """What one member writes in its part the others see after a gather, which copies nothing."""
    for axes in axes_of(c):
        ranks = members(c, axes)
        buffers = [c.common(len(ranks) * 50, dtype, axes) for dtype in (torch.float32, torch.bfloat16)]
        assert all(b is None for b in buffers) or len(ranks) > 1
        for turn in range(3):
            for whole in buffers:
                if whole is None:
                    continue
                mine = whole[ranks.index(c.rank) * 50 :][:50]
                mine.copy_(value(c.rank, 50, whole.dtype, turn))
                c.all_gather(whole, mine, axes, lane="gather").wait()
                same(
                    whole, torch.cat([value(rank, 50, whole.dtype, turn) for rank in ranks]), (axes, whole.dtype, turn)
                )
                c.barrier()  # the others have looked


def gradients_and_shapes(c: Communicator) -> None:
    """Tensors that take part in autograd, have several dims or none."""
    x = torch.nn.Parameter(value(c.rank, 12, torch.float32).view(3, 4))
    c.all_reduce(x, c.mesh.names).wait()
    same(x.detach().view(-1), summed(tuple(range(c.mesh.size)), 12, torch.float32), "parameter")
    assert x.requires_grad
    assert x.is_leaf
    scalar = torch.tensor(float(c.rank + 1))
    c.all_reduce(scalar, c.mesh.names).wait()
    assert scalar.item() == c.mesh.size * (c.mesh.size + 1) / 2


def trivial_groups(c: Communicator) -> None:
    """An absent axis has size 1; nothing to do is no communication, even on one rank alone."""
    if c.rank == 0:
        x, out = value(3, 8, torch.float32), torch.zeros(8)
        c.all_reduce(x, "absent").wait()
        c.broadcast(x, ()).wait()
        for collective in (c.all_gather, c.reduce_scatter, c.all_to_all, c.shift):
            collective(out.zero_(), x, ("absent",)).wait()
            same(out, x, collective)
        c.all_reduce(torch.zeros(0), c.mesh.names).wait()


def barrier(c: Communicator) -> None:
    """Nobody leaves before the last has come; the clock is one for all processes of the machine."""
    for _ in range(3):
        time.sleep(0.02 * c.rank)
        came = time.monotonic()
        c.barrier()
        left = time.monotonic()
        times = torch.empty(2 * c.mesh.size, dtype=torch.float64)
        c.all_gather(times, torch.tensor([came, left], dtype=torch.float64), c.mesh.names).wait()
        assert times[0::2].max() <= times[1::2].min()


def waits_are_told(c: Communicator) -> None:
    """`on_wait` hears what is waited for, and None when that ends."""
    told: list[str | None] = []
    c.on_wait = told.append
    try:
        if c.rank == 0:
            time.sleep(0.1)
        x = torch.ones(5)
        c.all_reduce(x, c.mesh.names, lane="reduce", what="the sum").wait()
    finally:
        c.on_wait = None
    if c.rank != 0:
        assert told[-1] is None
        assert told[0] is not None
        assert all(word in told[0] for word in ("all_reduce", "the sum", "reduce"))
        assert len(told) % 2 == 0


def bad_arguments(c: Communicator) -> None:
    """Refused before anything is posted: the communicator still works after."""
    x = torch.ones(6)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("not contiguous", lambda: c.all_reduce(torch.ones(4, 4)[:, 1], c.mesh.names)),
        ("cannot sum", lambda: c.all_reduce(torch.ones(4, dtype=torch.bool), c.mesh.names)),
        ("do not fit", lambda: c.all_gather(torch.ones(6 * c.mesh.size + 1), x, c.mesh.names)),
        ("do not fit", lambda: c.reduce_scatter(torch.ones(7), x, c.mesh.names)),
        ("do not fit", lambda: c.all_to_all(torch.ones(6, dtype=torch.float64), x, c.mesh.names)),
        ("do not fit", lambda: c.shift(torch.ones(x.numel() + 1, dtype=x.dtype), x, c.mesh.names)),
        ("root", lambda: c.broadcast(x, c.mesh.names, root=c.mesh.size)),
        ("no peer", lambda: c.send(x, c.rank)),
        ("no peer", lambda: c.receive(x, c.mesh.size)),
        ("the tensor is on meta", lambda: c.all_reduce(torch.ones(3, device="meta"), c.mesh.names)),
    ]
    for message, call in calls:
        refused = "nothing"
        try:
            call()
        except ShardwiseError as error:
            refused = str(error)
        assert message in refused, f"{refused} instead of {message}"
    c.all_reduce(x, c.mesh.names).wait()
    assert x.tolist() == [c.mesh.size] * 6


def pushes_and_pulls(c: Communicator) -> None:
    """Servers have uneven ranges, some of them empty; buffers lie in the communicator's memory or elsewhere."""
    ranks, own = members(c, (SHARDS,)), c.mesh.index(c.rank, SHARDS)
    for (dtype, numel), servers in ((kind, n) for kind in KINDS for n in range(1, len(ranks) + 1)):
        cuts = [0, *(min(numel, k * (numel // servers + 2)) for k in range(1, servers)), numel]
        ranges = [FlatShard(start, stop) for start, stop in pairwise(cuts)]
        mine = ranges[own] if own < servers else FlatShard(0, 0)
        whole = torch.stack([value(rank, numel, dtype) for rank in ranks]).sum(0).to(dtype)
        for x in (value(c.rank, numel, dtype), c.allocate(numel, dtype)):
            x.copy_(value(c.rank, numel, dtype))
            push(c, x, ranges, lane="reduce", what="a push").wait()
            same(x[mine.start : mine.stop], whole[mine.start : mine.stop], (dtype, numel, servers))
            others = torch.full_like(x, -1)
            others[mine.start : mine.stop] = x[mine.start : mine.stop]
            x.copy_(others)
            pull(c, x, ranges, lane="gather", what="a pull").wait()
            same(x, whole, (dtype, numel, servers))


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        all_reduce, all_reduce_large, all_reduce_is_the_same_everywhere, progress,
        all_gather, reduce_scatter, complex_numbers,
        all_to_all, shift, large_parts, broadcast, pushes_and_pulls, messages, messages_both_ways, many_outstanding,
        a_receive_does_not_wait_for_what_the_sender_does_next, a_long_queue,
        subgroups_side_by_side, buffers, common_memory, gradients_and_shapes, trivial_groups, barrier, waits_are_told,
        bad_arguments,
    )
}  # fmt: skip


STAGED = (
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    shift,
    broadcast,
    messages_both_ways,
    barrier,
    waits_are_told,
    bad_arguments,
)
"""Of these what a copy in between could spoil."""


def parse_mesh(text: str) -> Mesh:
    return Mesh.of(**{name: int(size) for name, size in (word.split("=") for word in text.split(","))})


def connect(backend: str, mesh: Mesh, timeout: float) -> Communicator:
    if backend == "shared":
        return SharedMemoryCommunicator.from_environment(mesh, timeout)
    gloo = DistributedCommunicator.from_environment(mesh, torch.device("cpu"), timeout)
    return StagedCommunicator(gloo, torch.device("cpu")) if backend == "staged" else gloo


def prepare(c: Communicator) -> None:
    """All that the cases use."""
    lanes = (*LANES, CONTROL)
    pairs = [Members((a, b), channel, True) for a, b in permutations(range(c.mesh.size), 2) for channel in CHANNELS]
    c.prepare([*(one for axes in axes_of(c) for lane in lanes for one in groups(c.mesh, axes, lane)), *pairs])


def conformance(mesh: Mesh) -> None:
    for backend in BACKENDS:
        c = connect(backend, mesh, 30.0)
        prepare(c)
        results = {}
        for name, case in (CASES if backend != "staged" else {one.__name__: one for one in STAGED}).items():
            try:
                case(c)
                results[name] = ""
            except Exception:
                results[name] = traceback.format_exc()
                break  # the ranks may no longer agree on what comes next
        print(json.dumps({backend: results}), flush=True)
        c.barrier()
        c.close()


def lose_a_rank(how: str, backend: str, mesh: Mesh) -> None:
    """All meet, then rank 1 stays away or dies; the others report what they raise, and after how long."""
    c = connect(backend, mesh, TIMEOUT)
    prepare(c)
    x = torch.ones(1000)
    c.all_reduce(x, c.mesh.names, what="warm up").wait()
    if c.rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if c.rank == 1 and how == "disagree":
        x = torch.ones(1001)
    if c.rank == 1 and how == "missing":
        time.sleep(3 * TIMEOUT)
    else:
        start = time.monotonic()
        try:
            c.all_reduce(x, c.mesh.names, what="the sum").wait()
        except CommunicationError as error:
            seconds, timed_out = time.monotonic() - start, isinstance(error, CommunicationTimeout)
            found = {"rank": error.rank, "missing": error.missing, "what": error.what, "text": str(error)}
            print(json.dumps({**found, "seconds": seconds, "timed_out": timed_out}), flush=True)
    # A process group that has failed is not left in order: end at once, as a launcher would see to.
    os._exit(0)


def main(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    torch.set_default_device("cpu")
    faulthandler.enable()
    faulthandler.dump_traceback_later(STACKS_AFTER, exit=False)
    if arguments[0] == "conformance":
        conformance(parse_mesh(arguments[1]))
    else:
        lose_a_rank(arguments[0], arguments[1], parse_mesh(arguments[2]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    main(sys.argv[1:])
