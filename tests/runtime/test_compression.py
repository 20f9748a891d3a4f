"""What workers push, compressed: how far it is from what it was, that nothing is lost, and what a server refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise.core.frames import RAW, FrameError
from shardwise.runtime.compression import BF16, BLOCK, INT8, TOP_K, Feedback, decode, encode

SIZES = (1, 2, 5, 255, 256, 257, 1000, 4096)
DTYPES = (torch.float32, torch.float64)


def there_and_back(x: torch.Tensor, kind: Any, share: float = 0.1) -> torch.Tensor:
    encoding, payload = encode(x, kind, share)
    assert payload.numel() <= x.numel() * x.itemsize  # frames allow no more
    assert encoding == RAW or payload.numel() < x.numel() * x.itemsize
    return decode(payload.numpy().data, encoding, x.numel(), x.dtype)


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_comes_out(numel: int, dtype: torch.dtype) -> None:
    x = torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(numel)) * 3
    assert torch.equal(there_and_back(x, "whole"), x)
    assert torch.equal(there_and_back(x, "bf16"), x.to(torch.bfloat16).to(dtype))
    rounded = there_and_back(x, "int8")
    for block, own in zip(x.split(BLOCK), rounded.split(BLOCK), strict=True):
        assert float((block - own).abs().max()) <= float(block.abs().max()) / 127 * 0.5001
    largest = there_and_back(x, "top-k", 0.3)
    kept = largest != 0
    if numel > 5:
        assert int(kept.sum()) == -(-numel * 3 // 10)
        assert float(x[kept].abs().min()) >= float(x[~kept].abs().max())
    assert torch.equal(largest[kept], x[kept])


@pytest.mark.parametrize("kind", ["bf16", "int8", "top-k"])
def test_zeros_stay_zeros(kind: Any) -> None:
    assert torch.equal(there_and_back(torch.zeros(700), kind), torch.zeros(700))


@pytest.mark.parametrize("kind", ["int8", "top-k"])
def test_what_is_left_out_comes_later(kind: Any) -> None:
    """All that has been sent and what is left out now are all gradients together."""
    feedback, generator = Feedback(kind, 0.05), torch.Generator().manual_seed(0)
    sent, given = torch.zeros(900, dtype=torch.float64), torch.zeros(900, dtype=torch.float64)
    for _ in range(40):
        x = torch.randn(900, dtype=torch.float64, generator=generator)
        encoding, payload = feedback.encoded((0, 1, 2), x)
        sent += decode(payload.numpy().data, encoding, 900, x.dtype)
        given += x
    (left,) = feedback.left.values()
    assert float((sent + left - given).abs().max()) <= 1e-12
    assert float(left.abs().max()) > 0


def test_parts_do_not_share_what_is_left_out() -> None:
    feedback = Feedback("top-k", 0.1)
    one = torch.arange(20, dtype=torch.float64)
    first = feedback.encoded((0, 0, 0), one)
    assert torch.equal(first[1], feedback.encoded((0, 0, 20), one)[1])
    assert not torch.equal(first[1], feedback.encoded((0, 0, 0), one)[1])


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        (RAW, bytes(39)), (BF16, bytes(19)), (BF16, bytes(22)), (INT8, bytes(13)), (INT8, bytes(15)),
        (INT8, torch.tensor([float("nan")]).numpy().tobytes() + bytes(10)), (TOP_K, b""), (TOP_K, bytes(9)),
        (TOP_K, torch.tensor([10], dtype=torch.int32).numpy().tobytes() + bytes(4)),
        (TOP_K, torch.tensor([-1], dtype=torch.int32).numpy().tobytes() + bytes(4)),
        (TOP_K, torch.tensor([3, 3], dtype=torch.int32).numpy().tobytes() + bytes(8)),
        (TOP_K, torch.tensor([4, 3], dtype=torch.int32).numpy().tobytes() + bytes(8)), (4, bytes(40)), (65535, b"x"),
    ],
)  # fmt: skip
def test_what_is_no_payload_is_refused(encoding: int, payload: bytes) -> None:
    with pytest.raises(FrameError, match="a part of 10 elements"):
        decode(memoryview(bytearray(payload)), encoding, 10, torch.float32)
