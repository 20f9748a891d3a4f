"""The table of kernels against the CPU: what autograd keeps for an op on meta tensors is what it keeps for the op
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from measured import Keeping, storages
from shardwise.graph.aten_ops import Fact, named
from shardwise.graph.schema import tensors_in
from shardwise.kernels.device_kernels import COMPOSED, attention, dropout, is_known, rms_norm
from shardwise.kernels.flop_counter import Meter

aten = torch.ops.aten
Op = Callable[..., Any]


def kept_sizes(op: Op, operands: Sequence[Any]) -> list[int]:
    """The sizes of the storages that the graph of ``op`` keeps beside its operands', sorted."""
    keeping = Keeping()
    with keeping:
        results = [r for r in tensors_in(op(*operands)) if r.requires_grad]
    own = storages(o for o in operands if isinstance(o, Tensor))
    assert results
    return sorted(s for key, s in keeping.storages().items() if key not in own)


def meta(tensor: Any) -> Any:
    """The same without memory; views become views."""
    if not isinstance(tensor, Tensor):
        return tensor
    base = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="meta")
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).requires_grad_(tensor.requires_grad)


def x(*shape: int, grad: bool = True) -> Tensor:
    return torch.rand(shape).requires_grad_(grad)


def labels(count: int, *shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % count


SAMES: dict[str, tuple[Op, Sequence[Any]]] = {
    "linear": (F.linear, (x(3, 5, 8), x(4, 8), x(4))),
    "linear of a transposed": (lambda a, w, b: F.linear(a.transpose(0, 1), w, b), (x(3, 5, 8), x(4, 8), x(4))),
    "linear without bias": (F.linear, (x(3, 5, 8), x(4, 8))),
    "linear, frozen": (F.linear, (x(3, 5, 8), x(4, 8, grad=False), x(4))),
    "linear of data": (F.linear, (x(3, 5, 8, grad=False), x(4, 8), x(4))),
    "matmul": (torch.matmul, (x(2, 3, 4, 5), x(2, 3, 5, 6))),
    "matmul of views": (lambda a, b: a.permute(0, 2, 1, 3) @ b, (x(2, 4, 3, 5), x(2, 3, 5, 6))),
    "matmul broadcast": (torch.matmul, (x(2, 3, 4, 5), x(5, 6))),
    "einsum": (lambda a, b: torch.einsum("bij,jk->bki", a, b), (x(2, 3, 4), x(4, 5))),
    "bilinear": (F.bilinear, (x(3, 4), x(3, 5), x(2, 4, 5))),
    "conv1d": (F.conv1d, (x(2, 3, 8), x(4, 3, 3), x(4))),
    "conv2d": (lambda a, w: F.conv2d(a, w, padding="same"), (x(2, 4, 8, 8), x(6, 4, 3, 3))),
    "conv_transpose2d": (lambda a, w: F.conv_transpose2d(a, w, stride=2), (x(2, 3, 4, 4), x(3, 4, 2, 2))),
    "conv2d of groups": (lambda a, w: F.conv2d(a, w, groups=2), (x(2, 4, 8, 8), x(6, 2, 3, 3))),
    "batch_norm": (
        lambda a, r, w, b: F.batch_norm(a, r.clone(), r + 1, w, b, True),
        (x(4, 3, 5), x(3, grad=False), x(3), x(3)),
    ),
    "batch_norm, fixed": (lambda a, r, w: F.batch_norm(a, r, r, w), (x(4, 3, 5), x(3, grad=False), x(3))),
    "instance_norm": (F.instance_norm, (x(4, 3, 5),)),
    "group_norm": (lambda a, w, b: F.group_norm(a, 2, w, b), (x(3, 4, 5), x(4), x(4))),
    "group_norm, plain": (lambda a: F.group_norm(a, 2), (x(3, 4, 5),)),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (4,), w, b), (x(3, 5, 4), x(4), x(4))),
    "layer_norm, plain": (lambda a: F.layer_norm(a, (5, 4)), (x(3, 5, 4),)),
    "softmax": (lambda a: a.softmax(-1), (x(3, 4),)),
    "softmax in doubles": (lambda a: F.softmax(a * 2, -1, dtype=torch.float64), (x(3, 4),)),
    "log_softmax": (lambda a: F.log_softmax(a, -1), (x(3, 4),)),
    "cross_entropy_loss": (F.cross_entropy, (x(6, 7), labels(7, 6))),
    "cross_entropy_loss, smooth": (
        lambda a, t: F.cross_entropy(a, t, label_smoothing=0.1),
        (x(6, 7, 2), labels(7, 6, 2)),
    ),
    "cross_entropy_loss of probabilities": (F.cross_entropy, (x(6, 7), x(6, 7, grad=False))),
    "nll_loss": (F.nll_loss, (x(6, 7), labels(7, 6))),
    "kl_div": (lambda a, t: F.kl_div(a, t, reduction="batchmean"), (x(6, 7), x(6, 7))),
    "l1_loss": (F.l1_loss, (x(6, 7), x(6, 7))),
    "cosine_embedding_loss": (F.cosine_embedding_loss, (x(6, 7), x(6, 7), torch.ones(6))),
    "cosine_similarity": (F.cosine_similarity, (x(6, 7), x(6, 7))),
    "log_sigmoid": (F.logsigmoid, (x(5, 6),)),
    "prelu": (F.prelu, (x(5, 6), x(6))),
    "selu": (F.selu, (x(5, 6),)),
    "square": (torch.square, (x(5, 6),)),
    "where": (lambda a, b: torch.where(a > 0.5, a, b), (x(5, 6), x(6))),
    "var": (lambda a: a.var(-1), (x(5, 6),)),
    "std": (lambda a: a.std((0, 1)), (x(5, 6),)),
    "max": (lambda a: a.max(-1), (x(5, 6),)),
    "max_pool1d": (lambda a: F.max_pool1d(a, 2), (x(2, 3, 8),)),
    "max_pool2d": (lambda a: F.max_pool2d(a, 3, 2), (x(2, 3, 8, 8),)),
    "avg_pool1d": (lambda a: F.avg_pool1d(a, 2), (x(2, 3, 8),)),
    "adaptive_avg_pool2d": (lambda a: F.adaptive_avg_pool2d(a, 1), (x(2, 3, 8, 8),)),
    "adaptive_avg_pool1d": (lambda a: F.adaptive_avg_pool1d(a, 3), (x(2, 3, 8),)),
    "upsample_bilinear2d": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), (x(2, 3, 8, 8),)),
    "pad": (lambda a: F.pad(a, (1, 2), mode="circular"), (x(2, 3, 8),)),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, 1).square(), (x(2, 3, 8),)),
    "reshape of a view": (lambda a, w: a.transpose(1, 2).reshape(2, -1) * w, (x(2, 3, 8), x(24))),
    "chunk": (lambda a: [c.exp() for c in a.chunk(3, -1)], (x(2, 7),)),
    "to": (lambda a: a.to(torch.float64).sin(), (x(2, 7),)),
    "feature_dropout": (lambda a: F.dropout2d(a, 0.3), (x(2, 7, 3, 3),)),
    "linalg_vecdot": (torch.linalg.vecdot, (x(6, 7), x(6, 7))),
    "kron": (torch.kron, (x(2, 3), x(3, 2))),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SAMES)
def test_what_composite_ops_keep_on_meta_they_keep_here(name: str, dtype: torch.dtype) -> None:
    op, operands = SAMES[name]
    cast = [o.detach().to(dtype).requires_grad_(o.requires_grad) if o.is_floating_point() else o for o in operands]
    truth = kept_sizes(op, cast)
    with Meter("cpu"):
        assert kept_sizes(op, [meta(o) for o in cast]) == truth


def test_statistics_of_bf16_activations_and_fp32_parameters() -> None:
    """Where the dtypes differ, CPU kernels keep statistics in the parameters' dtype, and CUDA's always in fp32 at
    least.
    """
    low, wide = x(4, 6, 5).detach().bfloat16().requires_grad_(), x(6)
    for op in (lambda a, w: F.group_norm(a, 2, w), lambda a, w: F.batch_norm(a, None, None, w, training=True)):
        truth = kept_sizes(op, (low, wide))
        with Meter("cpu"):
            assert kept_sizes(op, (meta(low), meta(wide))) == truth
    norm = lambda a, w: F.layer_norm(a, (5,), w)  # noqa: E731
    with Meter("gpu"):
        assert kept_sizes(norm, (meta(low), meta(x(5).detach().bfloat16()))) == [4 * 24, 4 * 24]
    with Meter("cpu"):
        assert kept_sizes(norm, (meta(low), meta(x(5).detach().bfloat16()))) == [2 * 24, 2 * 24]


def heads(queries: int, keys: int, size: int, values: int, heads_of_keys: int = 4) -> tuple[Tensor, ...]:
    """q, k, v as models make them: views of (batch, sequence, heads, size)."""
    shapes = ((queries, 4, size), (keys, heads_of_keys, size), (keys, heads_of_keys, values))
    return tuple(x(2, *s).detach().transpose(1, 2).requires_grad_() for s in shapes)


ATTENTION: dict[str, tuple[Sequence[Tensor], dict[str, Any]]] = {
    "plain": (heads(6, 6, 8, 8), {}),
    "causal": (heads(6, 6, 8, 8), {"is_causal": True, "scale": 0.3}),
    "cross": (heads(6, 9, 8, 8), {}),
    "boolean mask": (heads(6, 6, 8, 8), {"attn_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool)}),
    "expanded mask": (heads(6, 6, 8, 8), {"attn_mask": torch.ones(2, 1, 1, 6, dtype=torch.bool).expand(2, 4, 6, 6)}),
    "bias": (heads(6, 6, 8, 8), {"attn_mask": torch.zeros(6, 6)}),
    "bias of three dims": (heads(6, 6, 8, 8), {"attn_mask": torch.zeros(4, 6, 6)}),
    "learnt bias": (heads(6, 6, 8, 8), {"attn_mask": x(1, 4, 6, 6)}),
    "dropout": (heads(6, 6, 8, 8), {"dropout_p": 0.2}),
    "wider values": (heads(6, 6, 8, 12), {}),
    "groups": (heads(6, 6, 8, 8, 2), {"enable_gqa": True}),
    "groups and dropout": (heads(6, 6, 8, 8, 2), {"enable_gqa": True, "dropout_p": 0.1}),
    "three dims": (tuple(t.detach()[0].requires_grad_() for t in heads(6, 6, 8, 8)), {}),
    "strided": (tuple(t.detach().mT.contiguous().mT.requires_grad_() for t in heads(6, 6, 8, 8)), {}),
    "odd size": (heads(5, 5, 7, 7), {"is_causal": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_keeps_what_the_cpu_kernel_keeps(name: str, dtype: torch.dtype) -> None:
    operands, arguments = ATTENTION[name]
    low = [o.detach().to(dtype).requires_grad_() for o in operands]
    mask = arguments.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.detach().to(dtype).requires_grad_(mask.requires_grad)
    rest = {k: v for k, v in arguments.items() if k != "attn_mask"}
    truth = kept_sizes(lambda *o: F.scaled_dot_product_attention(*o, **rest), (*low, mask))
    with Meter("cpu"):
        assert kept_sizes(lambda *o: attention("cpu", *o, **rest), [meta(o) for o in (*low, mask)]) == truth


def test_attention_on_cuda() -> None:
    """Flash in half precision, padded to sizes of 8; memory-efficient in fp32 or with a mask; probabilities in fp64."""

    def kept(operands: Sequence[Any], dtype: torch.dtype, **rest: Any) -> list[int]:
        with Meter("gpu"):
            cast = [meta(o.detach().to(dtype).requires_grad_()) for o in operands]
            return kept_sizes(lambda *o: attention("gpu", *o, **rest), cast)

    out, pairs = 2 * 4 * 6 * 8, 2 * 4 * 6 * 6
    flash = kept(heads(6, 6, 8, 8), torch.bfloat16)
    assert flash[-2:] == [4 * 2 * 4 * 6, 2 * out] and sum(flash[:-2]) <= 32  # logsumexp, output; the generator's state
    padded = kept(heads(6, 6, 7, 7), torch.bfloat16)
    assert padded[-4:] == [2 * out] * 4  # q, k, v and the output, all of size 8
    efficient = kept(heads(6, 6, 8, 8), torch.float32)
    assert efficient[-2:] == [4 * out, 4 * 2 * 4 * 32] or efficient[-2:] == [4 * 2 * 4 * 32, 4 * out]
    masked = kept(heads(6, 6, 8, 8), torch.bfloat16, attn_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool, device="meta"))
    assert 2 * 2 * 6 * 8 in masked  # the mask as a bias in rows of 8
    assert 8 * pairs in kept(heads(6, 6, 8, 8), torch.float64)


def test_dropout_and_rms_norm_per_device() -> None:
    a, w = x(3, 4, 6), x(6)
    assert kept_sizes(lambda t: F.dropout(t, 0.2), (a,)) == [4 * 72]
    for device, mask in (("cpu", 4 * 72), ("gpu", 72)):
        with Meter(device):
            assert kept_sizes(lambda t, d=device: dropout(d, t, 0.2, True), (meta(a),)) == [mask]
    truth = kept_sizes(lambda t, s: F.rms_norm(t, (6,), s), (a, w))
    with Meter("cpu"):
        assert kept_sizes(lambda t, s: rms_norm("cpu", t, (6,), s), (meta(a), meta(w))) == truth
    with Meter("gpu"):
        assert kept_sizes(lambda t, s: rms_norm("gpu", t, (6,), s), (meta(a), meta(w))) == [4 * 12]


def test_names_in_the_table_are_ops() -> None:
    missing = [n for n in named(Fact.ALIKE) if not hasattr(aten, n)]
    assert not missing
    assert not {t._schema.name.removeprefix("aten::") for t in COMPOSED} & named(Fact.ALIKE)


@pytest.mark.parametrize(
    ("target", "known"),
    [
        (aten.mul.Tensor, True), (aten.linear.default, True), (aten.scaled_dot_product_attention.default, True),
        (itertools.chain, True), (aten.cdist.default, False), (aten.lstm.input, False), (aten.ctc_loss.Tensor, False),
    ],
)  # fmt: skip
def test_composite_ops_without_an_entry_are_unknown(target: Any, known: bool) -> None:
    assert is_known(target) is known
