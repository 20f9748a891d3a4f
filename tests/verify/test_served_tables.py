"""Of tables whose lookups are sparse only touched rows go to servers apart and come back, and the record replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sparse_tables import ADAGRAD, SGD, Clicks, batch, clicked

from shardwise.core.errors import ConfigError
from shardwise.core.frames import RAW, ROWS, FrameError
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.parallel.server import asynchronous_server
from shardwise.runtime.compression import decode_rows, encode_rows, put_rows
from shardwise.runtime.served_store import masters_of
from shardwise.runtime.wire import Wire
from shardwise.units.served import served_ranges
from shardwise.verify.served import run_served
from shardwise.verify.verify import verify


def planned(kind: Any = "async", servers: int = 1, workers: int = 2, **options: Any) -> Plan:
    plan = Plan.of(microbatches=2, precision="fp64")
    return asynchronous_server(plan, kind, servers, workers, **options).replace(sparse_gradients="rows")


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("kind", "servers", "workers", "options", "optimizer"),
    [
        ("async", 1, 1, {}, ADAGRAD), ("async", 2, 3, {}, ADAGRAD), ("async", 3, 2, {"pull_every": 2}, SGD),
        ("stale", 2, 3, {"staleness": 1}, ADAGRAD), ("async", 2, 2, {"rate": "staleness"}, SGD),
        ("async", 2, 2, {"push": "int8"}, ADAGRAD), ("async", 1, 2, {"push": "top-k", "push_share": 0.2}, SGD),
    ],
)  # fmt: skip
def test_the_record_replayed(
    kind: str, servers: int, workers: int, options: dict[str, Any], optimizer: OptimizerChoice
) -> None:
    torch.manual_seed(servers)
    batches = [batch(rows, rows) for rows in (13, 12, 7, 5, 9, 4)]
    plan = planned(kind, servers, workers, **options)
    report = verify(Clicks(), batches, plan, loss=clicked, optimizer=optimizer, clip_norm=0.5)
    assert report.passed, report.worst[:3]


def test_bf16() -> None:
    report = verify(
        Clicks(), [batch(9, 1), batch(8, 2)], planned().replace(precision="bf16"), loss=clicked, optimizer=ADAGRAD
    )
    assert report.passed


def test_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a table of 100,000 rows the first pull has all, and what comes after is a thousandth of it."""
    sent = [0]
    write = Wire.write

    def counted(self: Wire) -> int:
        found = write(self)
        sent[0] += found
        return found

    monkeypatch.setattr(Wire, "write", counted)

    class Wide(Clicks):
        def __init__(self) -> None:
            super().__init__()
            self.users = torch.nn.Embedding(100_000, 5, sparse=True)

    torch.manual_seed(0)
    given = [batch(9, step, users=100_000) for step in range(12)]
    table = 100_000 * 5 * 8
    traffic = {}
    for number in (1, 12):
        sent[0] = 0
        made = Compiled(Wide(), planned(servers=2, workers=1), given[0], clicked)
        assert sum(b.table for b in made.buckets) == 2
        served = run_served(made, given[:number], ADAGRAD, seed=1)
        traffic[number] = sent[0]
        assert len(served.losses) == number
    assert table < traffic[1] < 1.02 * table
    assert traffic[12] - traffic[1] < 0.03 * table  # eleven batches, with the parameters of all else


def test_stores_update_and_send_only_what_has_changed() -> None:
    torch.manual_seed(0)
    made = Compiled(Clicks(), planned(servers=2, workers=1), batch(9, 0), clicked)
    served = run_served(made, [batch(9, 1), batch(9, 2)], ADAGRAD, seed=1)
    users = next(b.index for b in made.buckets if b.table and b.parameters[0].shape[0] == 101)
    looked_up = {step: set(batch(9, step)["user"].tolist()) for step in (1, 2)}
    start = made.values["users.weight"].double()
    found = masters_of(served.stores)["users.weight"]
    moved = (found != start).any(1).nonzero()[:, 0].tolist()
    assert set(moved) == looked_up[1] | looked_up[2]
    for since, expected in ((-1, set(range(101))), (0, looked_up[1] | looked_up[2]), (1, looked_up[2]), (2, set())):
        rows: set[int] = set()
        for store, shares in zip(served.stores, served_ranges(made.buckets, made.plan, ADAGRAD), strict=True):
            share = shares[users]
            for part in store.changed(users, since):
                numbers, values = decode_rows(part.payload, part.encoding, part.count, 5, torch.float64)
                first = (share.start + part.offset) // 5
                mine = [int(n) + first for n in numbers if int(n) + first < 101]
                torch.testing.assert_close(values[: len(mine)], found[mine], rtol=0, atol=0)
                rows |= set(mine)
        assert rows == expected, since


def test_rows_as_bytes() -> None:
    numbers, values = torch.tensor([1, 4]), torch.arange(6, dtype=torch.float64).view(2, 3)
    encoding, payload = encode_rows(numbers, values, 30)
    assert encoding == ROWS and payload.numel() == 2 * (4 + 24)
    back = decode_rows(payload.numpy().data, ROWS, 30, 3, torch.float64)
    assert torch.equal(back[0], numbers) and torch.equal(back[1], values)
    place = bytearray(30 * 8)
    put_rows(memoryview(place), payload.numpy().data, 3 * 8)
    whole = torch.frombuffer(place, dtype=torch.float64).view(10, 3)
    assert torch.equal(whole[numbers], values) and int(whole.any(1).sum()) == 2
    encoding, payload = encode_rows(torch.arange(10), torch.ones(10, 3, dtype=torch.float64), 30)
    assert encoding == RAW and payload.numel() == 240
    assert torch.equal(decode_rows(payload.numpy().data, RAW, 30, 3, torch.float64)[0], torch.arange(10))


@pytest.mark.parametrize(
    ("numbers", "length", "encoding"),
    [([4, 1], 56, ROWS), ([1, 1], 56, ROWS), ([1, 10], 56, ROWS), ([-1, 4], 56, ROWS), ([1, 4], 55, ROWS),
     ([1, 4], 0, ROWS), ([1, 4], 56, 3), ([1, 4], 56, RAW)],
)  # fmt: skip
def test_rows_that_are_none(numbers: list[int], length: int, encoding: int) -> None:
    values = torch.zeros(6, dtype=torch.float64)
    payload = torch.cat([torch.tensor(numbers, dtype=torch.int32).view(torch.uint8), values.view(torch.uint8)])
    with pytest.raises(FrameError, match="a part of 30 elements"):
        decode_rows(payload.numpy().data[:length], encoding, 30, 3, torch.float64)


def test_rows_that_no_frame_can_carry() -> None:
    class Wide(Clicks):
        def __init__(self) -> None:
            super().__init__()
            self.users = torch.nn.Embedding(3, 140_000, sparse=True)
            self.deep = torch.nn.Sequential(torch.nn.Linear(140_000 + 10, 1))

    made = Compiled(Wide(), planned(), batch(3, 0, users=3), clicked)
    with pytest.raises(ConfigError, match=r"rows of 1120000 bytes; legal: at most 1048576, or sparse_gradients"):
        run_served(made, [batch(3, 0, users=3)], ADAGRAD)
