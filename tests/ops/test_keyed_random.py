"""Keyed random numbers: good as random numbers, and the same wherever they are computed."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from shardwise.capture.draws import Keys
from shardwise.capture.intercept import Intercept
from shardwise.capture.keyed_calls import KeyedRandom
from shardwise.core.errors import ShardwiseError
from shardwise.ops import keyed_random as keyed
from shardwise.ops.env import Env
from shardwise.ops.keyed_random import (
    between,
    keyed_bernoulli,
    keyed_dropout,
    keyed_exponential,
    keyed_mask,
    keyed_normal,
    keyed_randint,
    keyed_uniform,
    keyed_uniform_bits,
)
from shardwise.ops.random_ops import random_of

KNOWN = [
    [1638147788, 1369853783, 1121141474],
    [-1397280770, 30514529, 1927963457],
]  # printed by the first version

KEYS = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (1234567890123, 99_999, 71)]


def _z(count: int, total: int, p: float) -> float:
    """How many standard deviations a binomial count is from its mean."""
    return (count - total * p) / math.sqrt(total * p * (1 - p))


def _chi_square_z(observed: torch.Tensor) -> float:
    """Chi-square of equally likely cells, as a z-score (Wilson and Hilferty 1931)."""
    expected = observed.sum() / observed.numel()
    chi, k = float(((observed - expected) ** 2 / expected).sum()), observed.numel() - 1
    return ((chi / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


def _bits(words: torch.Tensor) -> torch.Tensor:
    """(…, 32) bits of int32 words, as 0 and 1."""
    return (words[..., None] >> torch.arange(32, dtype=torch.int32)) & 1


# ---- quality -------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("shape", [(1, 1 << 17), (1 << 17, 1), (362, 362)])
def test_words_are_uniform(key: tuple[int, int, int], shape: tuple[int, int]) -> None:
    words = keyed_uniform_bits(*key, 0, *shape)
    for shift in (0, 12, 24):  # low, middle and high bytes
        byte = (words >> shift) & 255
        assert abs(_chi_square_z(torch.bincount(byte.flatten(), minlength=256).double())) < 5
    counts = _bits(words).reshape(-1, 32).sum(0)
    assert max(abs(_z(int(c), words.numel(), 0.5)) for c in counts) < 5


def test_neighbours_are_independent() -> None:
    """Every bit against every bit of the neighbour in the row, column, seed, step, ordinal: balanced XORs."""
    base = keyed_uniform_bits(3, 4, 5, 0, 257, 257)
    others = {
        "column": (base[:, :-1], base[:, 1:]),
        "row": (base[:-1], base[1:]),
        "seed": (base, keyed_uniform_bits(4, 4, 5, 0, 257, 257)),
        "step": (base, keyed_uniform_bits(3, 5, 5, 0, 257, 257)),
        "ordinal": (base, keyed_uniform_bits(3, 4, 6, 0, 257, 257)),
        "seed and step swapped": (base, keyed_uniform_bits(4, 3, 5, 0, 257, 257)),
    }
    for name, (a, b) in others.items():
        x, y = (_bits(t).reshape(-1, 32).double().mul_(2).sub_(1) for t in (a, b))
        correlation = (x.T @ y).abs().max().item() / math.sqrt(len(x))
        assert correlation < 5.5, name


def test_rectangles_are_independent() -> None:
    """A row word joined to a column word by XOR alone would make the XOR of a rectangle's four corners
    zero.
    """
    words = keyed_uniform_bits(7, 1, 2, 0, 400, 400)
    corners = words[:-1, :-1] ^ words[:-1, 1:] ^ words[1:, :-1] ^ words[1:, 1:]
    counts = _bits(corners).reshape(-1, 32).sum(0)
    assert max(abs(_z(int(c), corners.numel(), 0.5)) for c in counts) < 5
    assert int((corners == 0).sum()) <= 2


def test_words_rarely_repeat() -> None:
    """As many repetitions as 2^18 draws from 2^32 words have: Poisson with mean 8."""
    words = keyed_uniform_bits(0, 0, 0, 0, 512, 512).flatten()
    repeated = words.numel() - words.unique().numel()
    assert repeated <= 24


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_mask_drops_with_probability_p(p: float) -> None:
    masks = torch.stack([keyed_mask(p, seed, 0, o, (64, 999), (0, 1)) for seed in range(3) for o in range(3)])
    dropped = ~masks
    assert abs(_z(int(dropped.sum()), masks.numel(), p)) < 4.5
    z_rows = [_z(int(n), 999, p) for n in dropped.sum(-1).flatten()]
    assert 0.8 < sum(z * z for z in z_rows) / len(z_rows) < 1.2  # neither too even nor too uneven over samples
    together = int((dropped[..., 1:] & dropped[..., :-1]).sum())
    assert abs(together / masks[..., 1:].numel() - p * p) < 5 * p / math.sqrt(masks.numel())


def test_uniform_normal_exponential_randint_bernoulli() -> None:
    shape, batch = (300, 7, 50), (0, 1)
    u = keyed_uniform(1, 2, 3, shape, batch)
    assert abs(_chi_square_z(torch.histc(u, 100, 0, 1).double())) < 5
    assert u.min() >= 0 and u.max() < 1
    n = keyed_normal(1, 2, 3, shape, batch, dtype=torch.float64)
    cells = torch.special.ndtr(n).mul(100).long().flatten().bincount(minlength=100)
    assert abs(_chi_square_z(cells.double())) < 5
    serial = (n.flatten()[1:] * n.flatten()[:-1]).sum() / math.sqrt(n.numel())
    assert abs(float(serial)) < 5
    e = keyed_exponential(1, 2, 3, shape, batch, dtype=torch.float64)
    cells = (1 - (-e).exp()).mul(100).long().flatten().bincount(minlength=100)
    assert abs(_chi_square_z(cells.double())) < 5 and float(e.min()) > 0
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert bool(keyed_exponential(1, 2, 3, shape, batch, dtype=dtype).log().isfinite().all())
    i = keyed_randint(-3, 8, 1, 2, 3, shape, batch)
    assert i.dtype is torch.int64 and abs(_chi_square_z((i + 3).flatten().bincount(minlength=11).double())) < 5
    b = keyed_bernoulli(torch.full((100_000,), 0.3), 1, 2, 3)
    assert abs(_z(int(b.sum()), b.numel(), 0.3)) < 5 and set(b.tolist()) == {0.0, 1.0}


def last_below(bound: float, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize == 2:
        every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        return every[every.double() < bound].max()
    last = torch.tensor(bound, dtype=dtype)
    return last if last.double() < bound else torch.nextafter(last, torch.tensor(-math.inf, dtype=dtype))


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 2), (-1, 0), (-3, -2.5), (0, 0.1), (100, 100.3), (-7, 9)])
def test_uniform_values_stay_below_the_upper_bound(dtype: torch.dtype, low: float, high: float) -> None:
    """What torch's arithmetic rounds up to the bound is the number before it, and nothing else changes."""
    u = torch.tensor([0.0, 0.3, 1 - torch.finfo(dtype).eps / 2], dtype=dtype)
    plain, values = u * (high - low) + low, between(u.clone(), low, high)
    assert torch.equal(values, plain.where(plain.double() < high, last_below(high, dtype)))
    assert bool((values.double() < high).all())
    assert torch.equal(between(u.clone(), 0, 1), u)


def test_uniform_draws_of_models_stay_below_the_upper_bound() -> None:
    """Of a local graph, and of a forward that is run as it is: the same."""
    shape = (4096, 8)
    local = random_of(Env(seed=1), "uniform", 0, (0, 1), (), None, shape, torch.bfloat16, None, 1.0, 2.0)
    random = KeyedRandom(1, Keys((("uniform_", (0, 1)),)))
    random.begin(0, 0)
    with Intercept(random):
        assert torch.equal(torch.empty(shape, dtype=torch.bfloat16).uniform_(1, 2), local)
    assert (float(local.min()), float(local.max())) == (1, last_below(2, torch.bfloat16))


# ---- the same everywhere -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "batch"),
    [((7, 5, 4), (0, 1)), ((5, 7, 4), (1, 1)), ((21, 4), (0, 3)), ((2, 14, 3), (1, 2)), ((3, 4, 7), (2, 1))],
)
@pytest.mark.parametrize("cuts", [(0, 7), (0, 3, 7), (0, 1, 2, 7), (0, 2, 4, 6, 7)])
def test_any_split_of_rows_gives_the_same_mask(
    shape: tuple[int, ...], batch: tuple[int, int], cuts: tuple[int, ...]
) -> None:
    dim, minor = batch
    whole = keyed_mask(0.5, 9, 8, 7, shape, batch, row_start=10)
    pieces = []
    for a, b in pairwise(cuts):
        local = (*shape[:dim], (b - a) * minor, *shape[dim + 1 :])
        pieces.append(keyed_mask(0.5, 9, 8, 7, local, batch, row_start=10 + a))
    assert torch.equal(torch.cat(pieces, dim), whole)
    assert not torch.equal(keyed_mask(0.5, 9, 8, 7, shape, batch, row_start=11), whole)


def test_index_in_the_sample_is_row_major_over_the_other_dims() -> None:
    """The batch dim elsewhere, or with a minor part: the same sample's values in another arrangement."""
    first = keyed_mask(0.5, 1, 2, 3, (6, 4, 5), (0, 1))
    assert torch.equal(keyed_mask(0.5, 1, 2, 3, (4, 6, 5), (1, 1)), first.transpose(0, 1))
    assert torch.equal(keyed_mask(0.5, 1, 2, 3, (24, 5), (0, 4)), first.reshape(24, 5))
    inner = keyed_mask(0.5, 1, 2, 3, (6, 2, 4, 5), (0, 1)).transpose(0, 1).reshape(2, 24, 5)
    assert torch.equal(keyed_mask(0.5, 1, 2, 3, (2, 24, 5), (1, 4)), inner)


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = keyed_uniform_bits(1, 2, 3, 5, 33, 70)
    for block in (1, 7, 64, 70, 210):
        monkeypatch.setattr(keyed, "_CPU_BLOCK", block)
        assert torch.equal(keyed_uniform_bits(1, 2, 3, 5, 33, 70), whole)


def test_known_values() -> None:
    """The hash is a promise: a checkpoint continued with another version must draw the same masks."""
    assert keyed_uniform_bits(1, 2, 3, 4, 2, 3).tolist() == KNOWN
    assert keyed_uniform_bits(1, 2, 3, 2**31 - 2, 4, 1).unique().numel() == 4  # row indices beyond int32 go on


def test_without_a_batch_dim_a_tensor_is_that_of_one_row() -> None:
    rows = keyed_mask(0.5, 1, 2, 3, (9, 50), (0, 1), 0)
    assert torch.equal(keyed_mask(0.5, 1, 2, 3, (50,), None, 7), rows[7])


def test_values_do_not_depend_on_the_dtype() -> None:
    args = (1, 2, 3, (40, 30), (0, 1))
    u64, n64 = (f(*args, dtype=torch.float64) for f in (keyed_uniform, keyed_normal))
    assert torch.equal(keyed_uniform(*args).double(), u64)
    assert torch.equal(keyed_normal(*args), n64.float())
    for dtype in (torch.bfloat16, torch.float16):
        low = keyed_uniform(*args, dtype=dtype)
        assert low.max() < 1 and (low.double() - u64).abs().max() < 2.0**-7
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        dropped = keyed_dropout(torch.ones(40, 30, dtype=dtype), 0.5, 1, 2, 3, (0, 1))
        assert torch.equal(dropped != 0, keyed_mask(0.5, *args))


# ---- dropout -------------------------------------------------------------------------------------


def test_dropout_and_its_gradient() -> None:
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, 0.25, 1, 2, 3, (0, 1))
    mask = keyed_mask(0.25, 1, 2, 3, (6, 8), (0, 1)).double()
    torch.testing.assert_close(y, x * mask / 0.75)
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 2 * x * mask / 0.75**2)
    (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(second, 2 * mask / 0.75**2)


def test_dropout_saves_only_the_mask() -> None:
    saved = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        keyed_dropout(torch.randn(10, 10, requires_grad=True), 0.5, 1, 2, 3, (0, 1))
    assert [(t.dtype, t.numel()) for t in saved] == [(torch.bool, 100)]


def test_dropout_at_the_ends() -> None:
    x = torch.randn(4, 5)
    assert keyed_dropout(x, 0.0, 1, 2, 3) is x
    assert torch.equal(keyed_dropout(x, 1.0, 1, 2, 3), torch.nn.functional.dropout(x, 1.0))
    assert keyed_mask(0.0, 1, 2, 3, (3, 3)).all() and not keyed_mask(1.0, 1, 2, 3, (3, 3)).any()
    assert keyed_dropout(torch.empty(0, 5), 0.5, 1, 2, 3, (0, 1)).shape == (0, 5)


def test_mask_shape_drops_whole_channels() -> None:
    y = keyed_dropout(torch.ones(4, 6, 5, 5), 0.5, 1, 2, 3, (0, 1), mask_shape=(4, 6, 1, 1))
    per_channel = (y != 0).flatten(2).sum(-1)
    assert set(per_channel.flatten().tolist()) == {0, 25}


def test_meta_tensors_cost_nothing() -> None:
    mask = keyed_mask(0.5, 1, 2, 3, (1 << 20, 1 << 10), (0, 1), device="meta")
    assert mask.is_meta and mask.shape == (1 << 20, 1 << 10)


@pytest.mark.parametrize(
    "call",
    [
        lambda: keyed_mask(1.5, 1, 2, 3, (4,)),
        lambda: keyed_mask(math.nan, 1, 2, 3, (4,)),
        lambda: keyed_mask(0.5, 1, 2, 3, (4, 5), (2, 1)),
        lambda: keyed_mask(0.5, 1, 2, 3, (4, 5), (0, 3)),
        lambda: keyed_randint(5, 5, 1, 2, 3, (4,)),
        lambda: keyed_randint(0, 1 << 40, 1, 2, 3, (4,)),
    ],
)
def test_impossible_requests_are_refused(call: object) -> None:
    with pytest.raises(ShardwiseError):
        call()  # type: ignore[operator]
