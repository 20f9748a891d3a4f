"""Convolutions of channels in pieces, of which a rank may have none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.core.layout import shard_range
from shardwise.ops.local_ops import convolution


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("op", "rows", "dims", "options"),
    [(F.conv1d, 1, 1, {"padding": 1}), (F.conv2d, 1, 2, {"stride": 2}), (F.conv_transpose2d, 0, 2, {"padding": 1})],
)
@pytest.mark.parametrize("lead", [(2,), (), (0,)], ids=["rows", "one", "none"])
def test_pieces_of_channels_make_the_whole(
    op: Any, rows: int, dims: int, options: dict[str, Any], lead: tuple[int, ...], biased: bool
) -> None:
    """3 channels that come in and 2 that go out, over 4 ranks each: sums of the first, pieces of the second, and both
    gradients.
    """
    torch.manual_seed(3)
    ins, outs, parts = 3, 2, 4
    x = torch.randn(*lead, ins, *[6] * dims, dtype=torch.float64, requires_grad=True)
    shape = [outs, outs]
    shape[rows] = ins
    weight = torch.randn(*shape, *[3] * dims, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(outs, dtype=torch.float64, requires_grad=True) if biased else None
    truth = op(x, weight, bias, **options)
    spans = [(shard_range(ins, parts, i), shard_range(outs, parts, i)) for i in range(parts)]
    channels = len(lead)
    columns = [
        convolution(op, rows, x, weight.narrow(1 - rows, a, b - a), None if bias is None else bias[a:b], **options)
        for _, (a, b) in spans
    ]
    summands = [
        convolution(
            op, rows, x.narrow(channels, a, b - a), weight.narrow(rows, a, b - a), bias if i == 0 else None, **options
        )
        for i, ((a, b), _) in enumerate(spans)
    ]
    given = [x, weight, *([] if bias is None else [bias])]
    seed = torch.randn_like(truth)
    wanted = torch.autograd.grad(truth, given, seed)
    for found in (torch.cat(columns, channels), torch.stack(summands).sum(0)):
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-13)
        for mine, theirs in zip(torch.autograd.grad(found, given, seed), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
