"""What workers push may be compressed: bfloat16, 8-bit integers, or the largest elements alone.

The last two leave out so much that a worker adds what it has left out to its next gradient, so that nothing is lost but
delayed (error feedback: Seide et al. 2014, "1-bit stochastic gradient descent", section 2; Stich et al. 2018, arXiv
1809.07599, for the largest elements).  A part of a gradient that would not get shorter is sent as it is.

=========  =========================================================================  =====================
encoding   payload of n elements                                                      bytes
=========  =========================================================================  =====================
bf16       each rounded to bfloat16                                                   2 n
int8       for each block of 256 a scale, the largest magnitude / 127, as fp32; then  n + 4 ⌈n / 256⌉
           each element divided by its scale, rounded to the nearest integer
top-k      positions of the k = ⌈share · n⌉ largest magnitudes, as int32, ascending;  (4 + itemsize) k
           then their values
rows       of a table: numbers of the rows that were looked up, as int32, ascending;  (4 + width · itemsize) k
           then their elements
=========  =========================================================================  =====================
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.core.frames import RAW, ROWS, FrameError
from shardwise.core.server_options import Push

BF16, INT8, TOP_K = 1, 2, 3
ENCODINGS = {"whole": RAW, "bf16": BF16, "int8": INT8, "top-k": TOP_K}
BLOCK = 256


def encode(x: Tensor, kind: Push, share: float) -> tuple[int, Tensor]:
    """Return the encoding and the payload, as uint8, of the elements ``x``, 1-d; top-k keeps a ``share`` of them."""
    raw = RAW, x.contiguous().view(torch.uint8)
    match ENCODINGS[kind]:
        case 1:
            found = x.to(torch.bfloat16).view(torch.uint8)
        case 2:
            scales = _blocks(x).abs().amax(1).div(127).to(torch.float32)
            steps = torch.where(scales > 0, scales, 1.0).to(x.dtype).repeat_interleave(BLOCK)[: x.numel()]
            whole = (x / steps).round_().clamp_(-127, 127).to(torch.int8)
            found = torch.cat([scales.view(torch.uint8), whole.view(torch.uint8)])
        case 3:
            k = min(x.numel(), max(1, math.ceil(share * x.numel())))
            places = x.abs().topk(k).indices.sort().values
            found = torch.cat([places.to(torch.int32).view(torch.uint8), x[places].view(torch.uint8)])
        case _:
            return raw
    return (ENCODINGS[kind], found) if found.numel() < x.numel() * x.itemsize else raw


def decode(payload: memoryview | bytes, encoding: int, count: int, dtype: torch.dtype) -> Tensor:
    """Return the ``count`` elements of a payload; raise FrameError where it is none of this encoding."""
    size, length = torch.empty(0, dtype=dtype).itemsize, len(payload)
    wrong = FrameError(f"a part of {count} elements in {length} bytes of encoding {encoding}")
    if encoding == RAW:
        if length != count * size:
            raise wrong
        return torch.frombuffer(payload, dtype=dtype, count=count)
    if encoding == BF16:
        if length != 2 * count:
            raise wrong
        return torch.frombuffer(payload, dtype=torch.bfloat16, count=count).to(dtype)
    if encoding == INT8:
        blocks = -(-count // BLOCK)
        if length != count + 4 * blocks:
            raise wrong
        scales = torch.frombuffer(payload, dtype=torch.float32, count=blocks)
        whole = torch.frombuffer(payload, dtype=torch.int8, count=count, offset=4 * blocks)
        if not bool(scales.isfinite().all()):
            raise wrong
        steps = torch.where(scales > 0, scales, 1.0).to(dtype).repeat_interleave(BLOCK)[:count]
        return whole.to(dtype) * steps
    if encoding != TOP_K or not length or length % (4 + size):
        raise wrong
    k = length // (4 + size)
    places = torch.frombuffer(payload, dtype=torch.int32, count=k).to(torch.int64)
    values = torch.frombuffer(bytearray(payload[4 * k :]), dtype=dtype, count=k)
    if bool((places < 0).any()) or bool((places >= count).any()) or bool((places.diff() <= 0).any()):
        raise wrong
    found = torch.zeros(count, dtype=dtype)
    found[places] = values
    return found


def encode_rows(numbers: Tensor, values: Tensor, count: int) -> tuple[int, Tensor]:
    """Return the encoding and the payload, as uint8, of a part of a table, of ``count`` elements: of those rows (n,)
    with these ``values`` (n, width), or of all rows, the others as zeros, where that is shorter."""
    found = torch.cat([numbers.to(torch.int32).view(torch.uint8), values.contiguous().view(-1).view(torch.uint8)])
    if found.numel() < count * values.itemsize:
        return ROWS, found
    whole = values.new_zeros(count // values.shape[1], values.shape[1])
    whole[numbers] = values
    return RAW, whole.view(-1).view(torch.uint8)


def put_rows(place: memoryview, payload: memoryview, width: int) -> None:
    """Write the rows of a payload, of ``width`` bytes, to their place in a part of a table; raise FrameError where the
    payload is not of that encoding."""
    numbers, values = decode_rows(payload, ROWS, len(place), width, torch.uint8)
    torch.frombuffer(place, dtype=torch.uint8).view(-1, width)[numbers] = values


def decode_rows(
    payload: memoryview | bytes, encoding: int, count: int, row: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the numbers and the values of the rows in a part of ``count`` elements of a table, whose rows have ``row``
    each; raise FrameError where it is none."""
    size, length = torch.empty(0, dtype=dtype).itemsize, len(payload)
    wrong = FrameError(f"a part of {count} elements in {length} bytes of encoding {encoding}, of rows of {row}")
    if encoding == RAW:
        return torch.arange(count // row), decode(payload, RAW, count, dtype).view(-1, row)
    if encoding != ROWS or not length or length % (4 + row * size):
        raise wrong
    n = length // (4 + row * size)
    numbers = torch.frombuffer(payload, dtype=torch.int32, count=n).to(torch.int64)
    values = torch.frombuffer(bytearray(payload[4 * n :]), dtype=dtype).view(n, row)
    if bool((numbers < 0).any()) or bool((numbers >= count // row).any()) or bool((numbers.diff() <= 0).any()):
        raise wrong
    return numbers, values


@dataclass
class Feedback:
    """This compresses what one worker pushes, part by part, and keeps of each part what it has left out."""

    kind: Push
    share: float
    left: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)  # by server, bucket and offset

    def encoded(self, place: tuple[int, int, int], x: Tensor) -> tuple[int, Tensor]:
        """Return the encoding and the payload of the part ``x`` at this place, with what was left out of it before."""
        if self.kind in ("whole", "bf16"):
            return encode(x, self.kind, self.share)
        given = x + self.left[place] if place in self.left else x.clone()
        if not bool(given.isfinite().all()):  # the norm will say so, and nothing will be committed
            return encode(x, "whole", self.share)
        encoding, payload = encode(given, self.kind, self.share)
        self.left[place] = given - decode(payload.numpy().data, encoding, x.numel(), x.dtype)
        return encoding, payload


def _blocks(x: Tensor) -> Tensor:
    """Return ``x`` as rows of :data:`BLOCK` elements, the last filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
