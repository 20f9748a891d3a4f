"""One table states what passes have to know of an ATen op, whatever its overload; each takes its set of ops from it.

An op that is not in it has none of these facts: passes then do what is right for any op.  The rules (``shard/rules/``)
say how dims are sharded, ``kernels/device_kernels.py`` says which results depend on a device, and the op's schema says
whether it writes in place, draws random numbers, or returns a view.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from enum import Flag, auto
from typing import Any

import torch
from torch import fx

from shardwise.graph import torch_private
from shardwise.graph.schema import op_name
from shardwise.ops.own_op import facts_of


class Fact(Flag):
    """This is one fact about an op."""

    # ---- what its result is made of
    SPLIT = auto()  # it cuts a dim into pieces
    REGROUPS = auto()  # it has the elements in their order, in other dims
    PERMUTES = auto()  # it has the dims in another order, with the same elements or their conjugates
    CASTS = auto()  # it changes the dtype, or the device
    LIKE = auto()  # it has the shape of its operand, whose values it does not read
    UNWRITTEN = auto()  # it is uninitialised memory
    HIDDEN_VIEW = auto()  # it shares the memory of its operand, which its schema does not say
    ITSELF = auto()  # it returns its operand itself where the result would be like it
    BY_STRIDE = auto()  # it depends on where a tensor's elements lie in memory, which differs from rank to rank
    LOOKUP = auto()  # it is rows of a table
    NUMBERS = auto()  # it counts, or puts in order, elements of its operand; integers that it gives number those
    # ---- what it computes
    # What it computes.
    MATRIX_PRODUCT = auto()
    GROUPED_PRODUCT = auto()
    CONVOLUTION = auto()
    ATTENTION = auto()
    CLASS_LOSS = auto()  # a loss of scores, or log-probabilities, of classes
    DROPOUT = auto()
    RECURRENT = auto()
    # ---- how it is computed
    ALIKE = auto()  # it is composed of other ops, in the same way on every device
    HOST_READ = auto()  # it reads values on the host
    BLIND = auto()  # its backward needs only the shapes of its inputs; that holds for views without being stated
    # ---- in which dtype it computes under low precision, as under torch.autocast
    LOW = auto()  # in the low one, where its operands differ: a buffer or a field meets a parameter
    WIDE = auto()  # in fp32
    OVERFLOWS = auto()  # in fp32 where the low one is fp16, because the result easily leaves its range


def _table() -> Mapping[str, Fact]:
    f = Fact
    shape, product, loss = f.ALIKE, f.MATRIX_PRODUCT | f.LOW, f.ALIKE
    rows = {
        # ---- views, and other shapes
        "split tensor_split chunk": f.SPLIT | shape,
        "unsafe_chunk": f.SPLIT | f.HIDDEN_VIEW | shape,
        "split_with_sizes": f.SPLIT,
        "unsafe_split unsafe_split_with_sizes": f.SPLIT | f.HIDDEN_VIEW,
        "ravel reshape reshape_as unflatten view_as": f.REGROUPS | shape,
        "flatten": f.REGROUPS | f.ITSELF | shape,
        "view": f.REGROUPS,
        "_unsafe_view": f.REGROUPS | f.HIDDEN_VIEW,
        "adjoint matrix_H mH movedim moveaxis mT numpy_T swapaxes swapdims": f.PERMUTES | shape,
        "permute t transpose": f.PERMUTES,
        "atleast_1d atleast_2d atleast_3d broadcast_tensors": f.HIDDEN_VIEW | f.ITSELF | shape,
        "meshgrid": f.HIDDEN_VIEW | shape,
        "as_strided as_strided_scatter as_strided_copy _reshape_alias": f.BY_STRIDE,
        "cat neg clone stack add sub rsub": f.BLIND,
        "concat concatenate negative subtract": f.BLIND | shape,
        "to type_as": f.CASTS | f.ITSELF | shape,
        "conj real": f.ITSELF,
        "conj_physical contiguous positive resolve_conj resolve_neg sum_to_size": f.ITSELF | shape,
        "_to_copy": f.CASTS | f.BLIND,
        """broadcast_to column_stack diagflat dsplit dstack expand_as fliplr flipud hsplit hstack
        narrow one_hot pad repeat_interleave row_stack
        take_along_dim tile vsplit vstack""": shape,
        # ---- new tensors
        "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full": f.LIKE,
        "empty_like new_empty new_empty_strided": f.LIKE | f.UNWRITTEN,
        "empty empty_strided empty_permuted": f.UNWRITTEN,
        # ---- rows of tables
        "embedding index index_select gather": f.LOOKUP,
        "argmax argmin argsort sort topk kthvalue median mode nonzero nonzero_static searchsorted bucketize": f.NUMBERS,
        "unique_dim unique_consecutive _unique2": f.NUMBERS,
        # ---- products
        """linear matmul einsum tensordot bilinear inner linalg_matmul linalg_multi_dot chain_matmul""":
            product | f.ALIKE,
        "mm bmm addmm addbmm baddbmm": product,
        "mv dot addmv": f.LOW,
        "linalg_vecdot": f.LOW | f.ALIKE,
        "outer ger kron": f.ALIKE,
        "_grouped_mm": f.GROUPED_PRODUCT | f.LOW,
        "transformers::grouped_mm_fallback shardwise::grouped_mm": f.GROUPED_PRODUCT | f.HOST_READ,  # in turn
        "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d": f.CONVOLUTION | f.LOW | f.ALIKE,
        "convolution": f.CONVOLUTION | f.LOW,
        "scaled_dot_product_attention": f.ATTENTION | f.LOW,
        # ---- norms; the reserve space of cuDNN's BatchNorm is not counted
        "layer_norm group_norm": f.LOW | f.ALIKE,
        "rms_norm": f.LOW,
        "batch_norm instance_norm": f.ALIKE,
        # ---- losses
        "cross_entropy_loss nll_loss nll_loss_nd": f.CLASS_LOSS | f.WIDE | loss,
        "nll_loss2d": f.CLASS_LOSS | loss,
        """kl_div l1_loss poisson_nll_loss hinge_embedding_loss margin_ranking_loss cosine_embedding_loss
        triplet_margin_loss multilabel_margin_loss""": f.WIDE | loss,
        """mse_loss smooth_l1_loss huber_loss soft_margin_loss multi_margin_loss binary_cross_entropy
        binary_cross_entropy_with_logits""": f.WIDE,
        # ---- elementwise
        "prelu": f.LOW | f.ALIKE,
        "square": f.OVERFLOWS | f.ALIKE,
        "pow exp exp2 expm1 sinh cosh reciprocal rsqrt": f.OVERFLOWS,
        """__and__ __or__ __xor__ absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip divide fix
        float_power greater greater_equal isclose isfinite isreal less less_equal log_sigmoid multiply not_equal relu6
        selu true_divide where special_erf special_erfc special_exp2 special_expit special_expm1 special_log1p
        special_round special_sinc""": f.ALIKE,
        "dropout alpha_dropout feature_alpha_dropout": f.DROPOUT,
        "feature_dropout": f.DROPOUT | f.ALIKE,
        # ---- reductions
        "var": f.OVERFLOWS | f.ALIKE,
        "cumsum": f.OVERFLOWS | f.NUMBERS,
        "sum nansum prod cumprod norm logsumexp cdist dist linalg_norm linalg_vector_norm linalg_matrix_norm":
            f.OVERFLOWS,
        "max min": f.NUMBERS | f.ALIKE,
        """std std_mean var_mean nanmean frobenius_norm norm_except_dim softmax log_softmax special_softmax
        special_log_softmax cosine_similarity pairwise_distance""": f.ALIKE,
        # ---- pooling and resizing
        """max_pool1d max_pool2d max_pool3d avg_pool1d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d
        upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d""": f.ALIKE,
        # ---- recurrent networks
        "lstm gru rnn_tanh rnn_relu": f.RECURRENT,
    }  # fmt: skip
    return {name: facts for names, facts in rows.items() for name in names.split()}


FACTS = _table()
"""This maps the name that :func:`~shardwise.graph.schema.op_name` gives to an op's facts."""


def named(fact: Fact) -> frozenset[str]:
    """Return the names of the ops with at least one of some facts."""
    return frozenset(name for name, facts in FACTS.items() if facts & fact)


FACTORS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("linear", "mm", "matmul", "bmm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm"), (1, 2)),
    **dict.fromkeys(named(Fact.CONVOLUTION | Fact.GROUPED_PRODUCT), (0, 1)),
    "embedding": (1, 0),
}
"""These are the positions of X and of the weight among a product's arguments; an embedding multiplies one-hot rows."""


def has(op: Any, fact: Fact) -> bool:
    """Return whether an op, or the op that a node calls, has at least one of some facts."""
    return bool(FACTS.get(op_name(op), Fact(0)) & fact)


def regroups(node: fx.Node) -> bool:
    """Return whether a node gives the elements of its first operand in their order, in dims that may be others."""
    others = op_name(node) in ("squeeze", "unsqueeze")  # without REGROUPS, because their rules go by dims
    return (has(node, Fact.REGROUPS) or others) and node.target is not torch.ops.aten.view.dtype


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """Return the order in which a node has the dims of its first operand; None if it does anything else."""
    if not has(node, Fact.PERMUTES):
        return None
    cube = torch.empty([2] * node.args[0].meta["val"].dim(), device="meta")  # its strides name the dims
    target: Any = node.target
    return tuple(cube.stride().index(s) for s in target(cube, *node.args[1:], **node.kwargs).stride())


def may_share(node: fx.Node) -> bool:
    """Return whether a node's result may share memory with its first operand; an op of ATen says so in its schema."""
    schema = torch_private.schema(node.target)
    view = schema is not None and any(r.alias_info is not None for r in schema.returns)
    return view or node.target is operator.getitem or has(node, Fact.HIDDEN_VIEW) or facts_of(node.target).shares


def is_blind(node: fx.Node) -> bool:
    """Return whether the backward of a node needs only the shapes of its inputs; that of a dropout has its mask."""
    return may_share(node) or has(node, Fact.BLIND) or facts_of(node.target).blind
