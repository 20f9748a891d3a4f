"""Frames as bytes: what is packed is unpacked, and nothing else gets through."""

from __future__ import annotations

import random
import struct

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.frames import (
    HEADER,
    MAX_PAYLOAD,
    NUMBERS,
    ROWS,
    FrameError,
    Header,
    Kind,
    Share,
    bits_of,
    check_shares,
    unpack,
    weight_of,
)

SHARES = {0: Share(10, 17, 4, 8), 3: Share(0, 3 * MAX_PAYLOAD // 4 + 5, 2, 4), 4: Share(6, 300_000, 4, 8, row=3)}
ALL = frozenset(Kind)


def headers(draw: random.Random) -> Header:
    kind = draw.choice(list(Kind))
    numbers = tuple(draw.choice([0, 1, -1, 2**63 - 1, -(2**63), draw.getrandbits(40)]) for _ in NUMBERS.get(kind, ()))
    if kind in (Kind.PART, Kind.PARAMETERS):
        bucket = draw.choice(list(SHARES))
        share = SHARES[bucket]
        size = share.gradient if kind == Kind.PART else share.parameter
        offset, count = draw.choice(list(share.cuts(size)))
        encoding = draw.choice([0, 0, 7]) if kind == Kind.PART else draw.choice([0, ROWS]) if share.row else 0
        length = draw.randint(0, count * size) if encoding else count * size
        return Header(kind, numbers, length, bucket, offset, count, encoding)
    return Header(kind, numbers, {Kind.HELLO: 64, Kind.CHALLENGE: 32}.get(kind, 0))


def test_round_trips() -> None:
    for seed in range(3000):
        header = headers(random.Random(seed))
        data = header.pack()
        assert len(data) == HEADER == 64
        assert unpack(memoryview(data)) == header
        header.check(ALL, SHARES)
        for name, number in zip(NUMBERS.get(header.kind, ()), header.numbers, strict=True):
            assert header[name] == number


def test_every_changed_byte_is_an_error_or_another_legal_header() -> None:
    """What gets through is within the bounds that a server reserves memory for."""
    through = 0
    for seed in range(4000):
        draw = random.Random(seed)
        data = bytearray(headers(draw).pack())
        for _ in range(draw.randint(1, 3)):
            data[draw.randrange(HEADER)] = draw.randrange(256)
        try:
            header = unpack(data)
            header.check(ALL, SHARES)
        except FrameError:
            continue
        through += 1
        assert header.pack() == data
        assert header.length <= MAX_PAYLOAD
        if header.kind in (Kind.PART, Kind.PARAMETERS):
            share = SHARES[header.bucket]
            size = share.gradient if header.kind == Kind.PART else share.parameter
            assert header.length <= header.count * size and (header.offset, header.count) in share.cuts(size)
        else:
            assert header.length == {Kind.HELLO: 64, Kind.CHALLENGE: 32}.get(header.kind, 0)
    assert 0 < through < 2000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"bucket": 1}, "bucket 1, which is not here"),
        ({"offset": 1}, "7 elements from 1 on"),
        ({"count": 8, "length": 32}, "8 elements from 0 on"),
        ({"count": 0, "length": 0}, "0 elements from 0 on"),
        ({"count": 2**64 - 1}, "elements from 0 on; 7 are sent"),
        ({"length": 29}, "29 bytes for 7 elements of 4 bytes"),
        ({"length": 27}, "27 bytes for 7 elements of 4 bytes"),
        ({"length": 29, "encoding": 1}, "29 bytes for 7 elements"),
        ({"kind": Kind.PARAMETERS}, "a PARAMETERS came where only PART may come"),
    ],
)
def test_parts_that_no_range_has(change: dict[str, int], said: str) -> None:
    legal = {"kind": Kind.PART, "length": 28, "bucket": 0, "offset": 0, "count": 7, "encoding": 0}
    Header(**legal).check({Kind.PART}, SHARES)  # type: ignore[arg-type]
    Header(**{**legal, "length": 3, "encoding": 1}).check({Kind.PART}, SHARES)  # type: ignore[arg-type]
    with pytest.raises(FrameError, match=said):
        Header(**{**legal, **change}).check({Kind.PART}, SHARES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (0, b"HTTP", "begins with b'HTTP'"),
        (4, b"\x01", "protocol version 1; this is version 2"),
        (5, b"\x63", "unknown kind 99"),
        (12, struct.pack("<I", 1), "a PING with a payload"),
        (32, struct.pack("<q", 1), "a PING has more numbers than 0"),
    ],
)
def test_headers_that_nobody_sends(place: int, value: bytes, said: str) -> None:
    data = bytearray(Header.of(Kind.PING).pack())
    data[place : place + len(value)] = value
    with pytest.raises(FrameError, match=said):
        unpack(data)


def test_a_payload_beyond_the_limit() -> None:
    data = Header(Kind.PART, (), MAX_PAYLOAD + 1, 3, 0, 1).pack()
    with pytest.raises(FrameError, match="at most 1048576"):
        unpack(data)


def test_cuts_and_weights() -> None:
    assert list(SHARES[0].cuts(4)) == [(0, 7)]
    most = MAX_PAYLOAD // 8
    assert list(Share(3, 2 * most + 4, 8, 8).cuts(8)) == [(0, most), (most, most), (2 * most, 1)]
    most = MAX_PAYLOAD // 8 - MAX_PAYLOAD // 8 % 3
    assert list(SHARES[4].cuts(8)) == [(0, most), (most, most), (2 * most, 299_994 - 2 * most)]
    for weight in (0.0, -0.0, 1.5, 1e-300, -3.25):
        assert str(weight_of(bits_of(weight))) == str(weight)


def test_rows_come_of_tables_alone() -> None:
    rows = {"kind": Kind.PARAMETERS, "numbers": (0,), "length": 28, "encoding": ROWS}
    count = next(SHARES[4].cuts(8))[1]
    Header(**rows, bucket=4, offset=0, count=count).check(ALL, SHARES)  # type: ignore[arg-type]
    with pytest.raises(FrameError, match="28 bytes for 7 elements of 8 bytes"):
        Header(**rows, bucket=0, offset=0, count=7).check(ALL, SHARES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "share",
    [
        Share(3, 3, 4, 4), Share(-1, 3, 4, 4), Share(0, 3, 3, 4), Share(0, 7, 4, 4, row=3), Share(1, 7, 4, 4, row=3),
        Share(0, MAX_PAYLOAD, 4, 4, row=MAX_PAYLOAD // 2),
    ],
)  # fmt: skip
def test_shares_that_no_server_has(share: Share) -> None:
    with pytest.raises(ConfigError, match="server 0, bucket 5: "):
        check_shares("server 0", {5: share})
