"""Trials of Functions on random numbers: whether parts of what they are given are independent, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.core.errors import ConfigError
from shardwise.graph.captured import Uncapturable
from shardwise.graph.torch_private import TorchDispatchMode

ROWS = 4  # of a trial
MANY_ROWS, MANY_ELEMENTS = 512, 1 << 20  # at most, of the trial that finds what depends on the number of rows
OPERANDS, GRADIENTS = 1e6, 1e12  # the largest sizes of random numbers; the inverse is the smallest


class Sample(NamedTuple):
    """The sizes of random numbers, in the first part along a dim and in the rest, and the sign of all, if one.

    A threshold of anything that is reduced lies between what the parts have, unless it is beyond all sizes."""

    first: float = 1.0
    rest: float = 1.0
    sign: int = 0

    def applied(self, numbers: Tensor, dim: int, first: int) -> Tensor:
        """Return random numbers as the sample says, where ``first`` along ``dim`` are the first part."""
        numbers = numbers.abs() * self.sign if self.sign else numbers
        numbers.narrow(dim, 0, first).mul_(self.first)
        numbers.narrow(dim, first, numbers.shape[dim] - first).mul_(self.rest)
        return numbers


PLAIN = Sample()
_aten = torch.ops.aten
COMPARES = frozenset({
    _aten.eq, _aten.ne, _aten.lt, _aten.le, _aten.gt, _aten.ge, _aten.any, _aten.all, _aten.isnan, _aten.isinf,
    _aten.isfinite, _aten.isin, _aten.index, _aten.index_put, _aten.index_put_, _aten.where, _aten.bucketize,
    _aten.searchsorted, _aten.count_nonzero, _aten.masked_fill, _aten.masked_fill_, _aten.masked_scatter,
})  # fmt: skip
"""Ops by which a part may decide without a branch, or pick what counts."""


def tagged(func: Any) -> bool:
    """Whether values say how large the result of an op is."""
    return torch.Tag.dynamic_output_shape in getattr(func, "tags", ())


class Cut(NamedTuple):
    """A part of what is ``size`` long along ``dim``, of which ``first`` are the first part of samples."""

    dim: int
    size: int
    first: int
    start: int
    stop: int

    def of(self, one: Tensor) -> Tensor:
        """Return the part of a tensor."""
        return one.narrow(self.dim, self.start, self.stop - self.start)

    def parts(self) -> tuple[Cut, Cut]:
        """Return the first part and the rest."""
        return self._replace(stop=self.first), self._replace(start=self.first)


class Trial:
    """Calls a Function with random operands of these dtypes and shapes: all together, and in two parts.

    ``cut`` says which operands have rows in dim 0, in any number, and ``each`` how many elements of that dim a row
    has.  The first operand is ``test``, if that is given, and may be read."""

    def __init__(
        self, function: Callable[..., Sequence[Tensor]], operands: Sequence[tuple[torch.dtype, Sequence[int]]],
        cut: Sequence[bool], each: int, device: torch.device, test: bool | None = None,
    ) -> None:  # fmt: skip
        self.function, self.operands, self.cut, self.each, self.device = function, operands, cut, each, device
        self.test = test
        wide = max((torch.Size(s[1:]).numel() for (_, s), c in zip(operands, cut, strict=True) if c), default=1) * each
        self.many = min(max(MANY_ELEMENTS // max(wide, 1), ROWS), MANY_ROWS)
        found = [torch.finfo(d).max for d, _ in operands if d.is_floating_point or d.is_complex]
        self.room = min(found, default=1.0) ** (1 / 3)  # products of two such numbers are finite

    def check(self) -> None:
        """Raise :class:`Uncapturable` if the Function draws random numbers, and :class:`ConfigError` if it gives
        another result each time without."""
        watch, whole = _Watch(), self.whole(0, ROWS)
        try:
            once, again = (self.run(self.given(whole, PLAIN), whole, PLAIN, watch) for _ in range(2))
        except Exception:  # a Function may take none of these numbers, and then nothing is known of it
            return
        if all(_close(*pair) for pair in zip(once, again, strict=True)):
            return
        what = f"{self.function} gives another result each time"
        if watch.draws:
            raise Uncapturable(what)
        legal = "a Function that keeps nothing from call to call, and draws from torch's generator alone"
        raise ConfigError(f"model: {what} of the same numbers; legal: {legal}")

    def passes(self, dim: int) -> bool:
        """Whether a first part along ``dim`` and the rest give the same as all, forward and backward."""
        whole = self.whole(dim, ROWS)
        if not 0 < whole.first < whole.size:
            return False
        try:
            others = [*((s, PLAIN) for s in self.samples(OPERANDS)), *((PLAIN, s) for s in self.samples(GRADIENTS))]
            return self.same(self.whole(dim, self.many), PLAIN, PLAIN) and all(self.same(whole, *two) for two in others)
        except Exception:  # it takes none of these numbers
            return False

    def finite(self) -> bool:
        """Whether all numbers that the Function gives for random operands are finite."""
        whole = self.whole(0, ROWS)
        try:
            found = self.run(self.given(whole, PLAIN), whole, PLAIN, _Watch())
        except Exception:  # it takes none of these numbers
            return False
        return all(bool(one.isfinite().all()) for one in found if one is not None)

    def adds(self) -> bool:
        """Whether the gradients that the Function returns are linear in those that it is given."""
        whole, watch = self.whole(0, ROWS), _Watch()
        given, large = self.given(whole, PLAIN), min(self.room, GRADIENTS)

        def found(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
            every = self.run(given, whole, PLAIN, watch, change)[-len(given) :]
            return [one for one in every if one is not None]

        try:
            one, other, both = found(torch.abs), found(torch.sin), found(lambda x: x.abs() + x.sin())
            pairs = [(c, a + b) for a, b, c in zip(one, other, both, strict=True)]
            for size in (large, 1 / large, -large, -1 / large):
                scaled = found(lambda x, size=size: x.abs() * size)
                pairs += [(a, b / size) for a, b in zip(one, scaled, strict=True)]
        except Exception:  # it takes none of these numbers
            return False
        return not watch.reads and all(_close(*pair) for pair in pairs)

    def whole(self, dim: int, rows: int) -> Cut:
        """Return all of ``rows`` rows, of which one is the first part, or of another dim, of which a third is."""
        if dim == 0:
            return Cut(0, rows * self.each, self.each, 0, rows * self.each)
        size = next(shape[dim] for (_, shape), cut in zip(self.operands, self.cut, strict=True) if cut)
        return Cut(dim, size, size // 3, 0, size)

    def samples(self, limit: float) -> list[Sample]:
        """Return samples whose sizes reach to ``limit``, if products have room."""
        large = min(self.room, limit)
        both = [(1 / large, large), (large, 1 / large)]
        return [*(Sample(*sizes, sign) for sizes in both for sign in (0, 1, -1)), Sample(0.0, 0.0)]

    def given(self, whole: Cut, sample: Sample) -> list[Tensor]:
        """Return random operands."""
        draw, found = torch.Generator().manual_seed(0), []
        for (dtype, shape), cut in zip(self.operands, self.cut, strict=True):
            rows = whole.size if whole.dim == 0 else ROWS * self.each
            shape = (rows, *shape[1:]) if cut else tuple(shape)
            if dtype.is_floating_point or dtype.is_complex:
                numbers = torch.randn(shape, generator=draw, dtype=dtype)
                numbers = sample.applied(numbers, whole.dim, whole.first) if cut else numbers
            else:
                numbers = torch.randint(0, 2, shape, generator=draw).to(dtype)
            found.append(numbers.to(self.device))
        return found if self.test is None else [torch.tensor(self.test, device=self.device), *found[1:]]

    def same(self, whole: Cut, operands: Sample, gradients: Sample) -> bool:
        """Whether two parts give what the whole gives, for numbers of these samples."""
        given, watch = self.given(whole, operands), _Watch()
        every = self.run(given, whole, gradients, watch)
        cuts = [[part.of(one) if cut else one for one, cut in zip(given, self.cut, strict=True)]
                for part in whole.parts()]  # fmt: skip
        parts = [self.run(one, part, gradients, watch) for one, part in zip(cuts, whole.parts(), strict=True)]
        results = len(every) - len(given)
        for i, (all_of_it, *pair) in enumerate(zip(every, *parts, strict=True)):
            if all_of_it is None or None in pair:
                same = all_of_it is pair[0] is pair[1]
            elif i < results or self.cut[i - results]:
                same = all(_close(part.of(all_of_it), one) for part, one in zip(whole.parts(), pair, strict=True))
            else:
                same = _close(all_of_it, pair[0] + pair[1])
            if not same:
                return False
        return not watch.reads

    def run(
        self, given: Sequence[Tensor], part: Cut, sample: Sample, watch: _Watch,
        change: Callable[[Tensor], Tensor] = torch.clone,
    ) -> list[Tensor | None]:  # fmt: skip
        """Return the results, and the gradients of the operands for random ones of the results, of a part of these.
        Those random gradients are what ``change`` makes of them."""
        leaves = [g.detach().clone().requires_grad_(g.is_floating_point() or g.is_complex()) for g in given]
        seeds, ends = torch.Generator().manual_seed(1), []
        watch.test = leaves[0] if self.test is not None else None
        with torch.enable_grad(), watch:
            results = self.function(*leaves)
        for one in results:
            if one.requires_grad:
                shape, split = list(one.shape), any(self.cut) and change is torch.clone
                if split:
                    shape[part.dim] = part.size
                full = torch.randn(shape, generator=seeds, dtype=one.dtype)
                full = part.of(sample.applied(full, part.dim, part.first)) if split else change(full)
                ends.append((one, full.to(self.device)))
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if ends:
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            with watch:
                got = torch.autograd.grad([r for r, _ in ends], wanted, [b for _, b in ends], allow_unused=True)
            feed = iter(got)
            found = [next(feed) if leaf.requires_grad else None for leaf in leaves]
        return [*(r.detach() for r in results), *found]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether a Function ``draws`` random numbers, and whether it ``reads`` numbers from tensors, on which the
    ops that it calls may depend in any way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws = self.reads = False
        self.test: Tensor | None = None  # what may be read

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        reads = func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
        self.reads |= reads and args[0] is not self.test
        # What it compares with is seldom among random numbers, nor what it picks.
        self.reads |= self.test is not None and (func.overloadpacket in COMPARES or tagged(func))
        return func(*args, **(kwargs or {}))


def _close(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two tensors are the same but for rounding, which is small beside the largest of their numbers."""
    if one is None or other is None:
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    eps, finite = torch.finfo(one.dtype).eps, one.abs().nan_to_num(0.0, 0.0, 0.0)
    largest = float(finite.max()) if one.numel() else 0.0
    return bool(torch.allclose(one, other, rtol=1e3 * eps, atol=1e2 * eps * largest, equal_nan=True))


__all__ = ["Trial"]
