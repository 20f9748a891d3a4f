"""Replace the random functions of a forward pass by keyed ones, as the model calls them, without a captured graph.

The *ordinal* of a draw counts, from 0 and in order of execution, the random calls of one forward pass of one
microbatch.  It counts every dropout of any kind that runs with training on (p = 0 included), attention with a dropout
probability above 0, and every other random function.  Dropout outside training is not counted.  All calls of a loop
over rows count as one: the i-th is that of row i (:mod:`shardwise.capture.draws` finds such loops by trials).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.backend import Backend
from shardwise.capture.draws import NOWHERE, Draw, Keys, depth, site, unkeyed
from shardwise.capture.intercept import Proceed
from shardwise.capture.picked_rows import Picked, PickedRows
from shardwise.capture.running import here
from shardwise.core.errors import ConfigError
from shardwise.graph.torch_private import TorchDispatchMode, inside_vmap, schema
from shardwise.ops import keyed_random as keyed
from shardwise.ops.keyed_choices import keyed_multinomial, keyed_permutation

_ALPHA = 1.7580993408473766  # the negative of SELU's limit at minus infinity: what alpha dropout sets elements to


class KeyedRandom:
    """This layer answers random functions; ``keys`` say how, or are None where it records ``draws`` only."""

    def __init__(self, seed: int, keys: Keys | None = None) -> None:
        self.seed = seed
        self.keys = keys
        self.draws: list[Draw] = []
        self.step = 0
        self.row_start: keyed.Rows = 0
        self.rows = 0
        self._depth = 0
        self._ordinal = 0
        self._called: dict[int, int] = {}  # how often forward has come to a loop over rows, by its ordinal
        self._picked = PickedRows()
        self.refused: ConfigError | None = None  # what the code inside may have caught
        self._answers: dict[Any, Callable[..., Any]] = {
            **dict.fromkeys((torch.dropout, torch.dropout_), self._dropout),
            **dict.fromkeys((torch.feature_dropout, torch.feature_dropout_), self._feature_dropout),
            **dict.fromkeys((torch.alpha_dropout, torch.alpha_dropout_), self._alpha_dropout),
            **dict.fromkeys((torch.feature_alpha_dropout, torch.feature_alpha_dropout_), self._feature_alpha_dropout),
            torch.native_dropout: self._native_dropout,
            F.scaled_dot_product_attention: self._attention,
            **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), self._bernoulli),
            Tensor.bernoulli_: self._bernoulli_,
            Tensor.uniform_: self._uniform_,
            Tensor.normal_: self._normal_,
            Tensor.exponential_: self._exponential_,
            torch.rand: self._rand,
            torch.randn: self._randn,
            torch.randint: self._randint,
            torch.rand_like: self._rand_like,
            torch.randn_like: self._randn_like,
            torch.randint_like: self._randint_like,
            torch.normal: self._normal,
            torch.randperm: self._randperm,
            **dict.fromkeys((torch.multinomial, Tensor.multinomial), self._multinomial),
        }

    def begin(self, step: int, row_start: keyed.Rows, rows: int = 0, ordinal: int = 0) -> None:
        """Start the forward pass of a microbatch of ``rows`` rows.  Its first is the global row ``row_start``, unless
        that has the global rows of all.  The first draw has the ``ordinal``."""
        self.step, self.row_start, self.rows = step, row_start, rows
        self.draws, self._ordinal, self._depth, self.refused = [], ordinal, depth(), None
        self._called = {} if self.keys is None else dict.fromkeys(self.keys.loops.values(), 0)
        self._picked = PickedRows()

    def end(self) -> None:
        """End a forward pass; raise :class:`ConfigError` where it has not come once for each row to a loop, or has
        caught another."""
        if self.refused is not None:
            raise self.refused
        for ordinal, number in self._called.items():
            if number != self.rows and self.keys is not None:
                raise _not_for_each_row(self.keys.calls[ordinal][0], "", number, self.rows)

    def __call__(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        try:
            found = self._answer(func, args, kwargs, proceed)
        except ConfigError as error:
            self.refused = error
            raise
        self._picked.see(func, args, kwargs, found)
        return found

    def _answer(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], proceed: Proceed) -> Any:
        answer = self._answers.get(func)
        if answer is None:
            return proceed(func, args, kwargs)
        if kwargs.pop("generator", None) is not None:
            raise ConfigError(
                f"model: {func.__name__}{here()} draws from a torch.Generator of its own, whose numbers other devices "
                "would draw again; legal: draws without generator=, which are keyed by sample"
            )
        result = answer(func.__name__, *args, **kwargs)
        return proceed(func, args, kwargs) if result is NotImplemented else result

    def counts(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call draws, and so has an ordinal."""
        answer = self._answers.get(func)
        if answer is None:
            return False
        named = {name: value for name, value in kwargs.items() if name != "generator"}
        given = inspect.signature(answer).bind(func.__name__, *args, **named).arguments
        if func is F.scaled_dot_product_attention:
            return bool(given.get("dropout_p"))
        return given.get("train") is not False

    def _key(
        self, name: str, shape: Sequence[int], joint: bool = False, picked: Picked | None = None
    ) -> tuple[int, int, int, keyed.Batch | None, keyed.Rows]:
        """Count a draw, if it is not one that an earlier turn of a loop over experts has made; return (seed, step,
        ordinal, batch, row_start)."""
        if inside_vmap():
            raise ConfigError(
                f"model: {name}{here()} draws inside torch.vmap, where it does not see which rows it draws for: all "
                "would get the same; legal: to draw before that, for all rows"
            )
        at = site(self._depth) if picked is None and (self.keys is None or self.keys.loops) else NOWHERE
        if self.keys is not None and (loop := self.keys.loop(at)) is not None:
            self.draws.append(Draw(name, tuple(shape)))
            row = self._row_of(loop, name)
            start = self.row_start + row if isinstance(self.row_start, int) else self.row_start[row]
            return self.seed, self.step, loop, None, start
        following = self._following()
        ordinal = following if picked is None else picked.ordinal(following)
        if ordinal == following:
            self._ordinal += 1
            self.draws.append(Draw(name, tuple(shape), here() if self.keys is None else "", at, joint))
        if self.keys is None:
            return self.seed, self.step, ordinal, None, 0
        expected, batch = self.keys.calls[ordinal] if ordinal < len(self.keys.calls) else ("none", None)
        if name != expected:
            raise ConfigError(
                f"model: random call {ordinal} of this forward is {name}{here()}; in the trial run it was {expected}; "
                "legal: the same random calls in every forward"
            )
        return self.seed, self.step, ordinal, batch, 0 if batch is None else self.row_start

    def _following(self) -> int:
        """Return the ordinal of the next call that is in no loop over rows."""
        while self._ordinal in self._called:
            self._ordinal += 1
        return self._ordinal

    def _row_of(self, loop: int, name: str) -> int:
        """Return the row of the next call in a loop over rows."""
        row = self._called[loop]
        if row >= self.rows:
            raise _not_for_each_row(name, here(), row + 1, self.rows)
        self._called[loop] = row + 1
        return row

    # ---- dropout ---------------------------------------------------------------------------------

    def _keep(
        self, name: str, p: float, shape: Sequence[int], device: torch.device, picked: Picked | None = None
    ) -> Tensor:
        if picked is not None:
            shape = (picked.size, *shape[1:])
        seed, step, ordinal, batch, start = self._key(name, shape, picked=picked)
        keep = keyed.keyed_mask(p, seed, step, ordinal, shape, batch, start, device)
        return keep if picked is None else keep[picked.places]

    def _drop(self, name: str, x: Tensor, p: float, train: bool, shape: Sequence[int]) -> Any:
        if not train:
            return NotImplemented
        picked = self._picked.of(x)
        fits = picked is not None and tuple(shape) == tuple(x.shape) and len(x) == len(picked.places)
        if p == 0:  # torch returns x too: a write would invalidate what a backward has saved of it
            self._key(name, (0,), picked=picked if fits else None)  # it has its ordinal, and draws nothing
            return x
        keep = self._keep(name, p, shape, x.device, picked if fits else None)
        noise = keep.to(x.dtype) / (1 - p) if p < 1 else torch.zeros_like(keep, dtype=x.dtype)
        return x.mul_(noise) if name.endswith("_") else x * noise

    def _drop_alpha(self, name: str, x: Tensor, p: float, train: bool, shape: Sequence[int]) -> Any:
        """Set dropped elements to -alpha; then an affine map keeps mean and variance (Klambauer et al. 2017)."""
        if not train or p in (0, 1):
            return self._drop(name, x, p, train, shape)
        keep = self._keep(name, p, shape, x.device).to(x.dtype)
        a = 1 / math.sqrt((_ALPHA * _ALPHA * p + 1) * (1 - p))
        b = (keep - 1) * (_ALPHA * a) + _ALPHA * a * p
        return x.mul_(keep * a).add_(b) if name.endswith("_") else x * (keep * a) + b

    def _dropout(self, name: str, input: Tensor, p: float, train: bool) -> Any:
        return self._drop(name, input, p, train, input.shape)

    def _feature_dropout(self, name: str, input: Tensor, p: float, train: bool) -> Any:
        return self._drop(name, input, p, train, _feature_shape(input))

    def _alpha_dropout(self, name: str, input: Tensor, p: float, train: bool) -> Any:
        return self._drop_alpha(name, input, p, train, input.shape)

    def _feature_alpha_dropout(self, name: str, input: Tensor, p: float, train: bool) -> Any:
        return self._drop_alpha(name, input, p, train, _feature_shape(input))

    def _native_dropout(self, name: str, input: Tensor, p: float, train: bool | None) -> Any:
        if train is False:
            return NotImplemented
        keep = self._keep(name, p, input.shape, input.device)
        return input * (keep.to(input.dtype) / (1 - p) if p < 1 else 0), keep

    def _attention(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if not dropout_p:
            return NotImplemented
        if enable_gqa:
            key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
        scores = (query @ key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        blind = (scores == -math.inf).all(-1, keepdim=True)
        chances = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
        return self._drop(name, chances, dropout_p, True, scores.shape) @ value

    # ---- everything else -------------------------------------------------------------------------

    def _bernoulli(self, name: str, input: Tensor, p: float | None = None) -> Tensor:
        seed, step, ordinal, batch, start = self._key(name, input.shape)
        return keyed.keyed_bernoulli(
            input if p is None else torch.full_like(input, p), seed, step, ordinal, batch, start
        )

    def _bernoulli_(self, name: str, input: Tensor, p: Tensor | float = 0.5) -> Tensor:
        wide = Backend.of(input.device).widest_float
        chance = torch.as_tensor(p, dtype=wide, device=input.device).expand(input.shape)
        seed, step, ordinal, batch, start = self._key(name, input.shape)
        return input.copy_(keyed.keyed_bernoulli(chance, seed, step, ordinal, batch, start))

    def _values(self, draw: Callable[..., Tensor], name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        seed, step, ordinal, batch, start = self._key(name, like.shape)
        values = draw(seed, step, ordinal, like.shape, batch, start, like.device, dtype=dtype or like.dtype)
        return values.requires_grad_() if like.requires_grad and like.is_leaf else values

    def _uniform_(self, name: str, input: Tensor, *bounds: float, **named: float) -> Tensor:
        low, high = named.get("from", 0.0), named.get("to", 1.0)
        low, high = (*bounds, *(low, high)[len(bounds) :])
        return input.copy_(keyed.between(self._values(keyed.keyed_uniform, name, input.detach()), low, high))

    def _normal_(self, name: str, input: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
        return input.copy_(self._values(keyed.keyed_normal, name, input.detach()) * std + mean)

    def _exponential_(self, name: str, input: Tensor, lambd: float = 1.0) -> Tensor:
        return input.copy_(self._values(keyed.keyed_exponential, name, input.detach()).div_(lambd))

    def _rand(self, name: str, *size: Any, **options: Any) -> Tensor:
        return self._values(keyed.keyed_uniform, name, torch.empty(*size, **options), options.get("dtype"))

    def _randn(self, name: str, *size: Any, **options: Any) -> Tensor:
        return self._values(keyed.keyed_normal, name, torch.empty(*size, **options), options.get("dtype"))

    def _rand_like(self, name: str, input: Tensor, **options: Any) -> Tensor:
        return self._values(
            keyed.keyed_uniform, name, torch.empty_like(input.detach(), **options), options.get("dtype")
        )

    def _randn_like(self, name: str, input: Tensor, **options: Any) -> Tensor:
        return self._values(keyed.keyed_normal, name, torch.empty_like(input.detach(), **options), options.get("dtype"))

    def _integers(self, low: int, high: int) -> Callable[..., Tensor]:
        return lambda *key, **options: keyed.keyed_randint(int(low), int(high), *key, **options)

    def _randint(
        self, name: str, *args: Any, size: Any = None, low: int = 0, high: int | None = None, **options: Any
    ) -> Tensor:
        numbers = list(args)
        if size is None:
            size = numbers.pop()
        if high is None:
            high = numbers.pop()
        low = numbers.pop() if numbers else low
        like = torch.empty(size, **{"dtype": torch.int64, **options})
        return self._values(self._integers(low, high), name, like)

    def _randint_like(
        self, name: str, input: Tensor, *args: Any, low: int = 0, high: int | None = None, **options: Any
    ) -> Tensor:
        numbers = list(args)
        if high is None:
            high = numbers.pop()
        low = numbers.pop() if numbers else low
        return self._values(self._integers(low, high), name, torch.empty_like(input.detach(), **options))

    def _randperm(self, name: str, n: int, *, out: Tensor | None = None, **options: Any) -> Tensor:
        like = torch.empty(n, **{"dtype": torch.int64, **options}) if out is None else out
        seed, step, ordinal, _, start = self._key(name, (n,), joint=True)
        return like.resize_(n).copy_(keyed_permutation(seed, step, ordinal, n, start, like.device))

    def _multinomial(
        self,
        name: str,
        input: Tensor,
        num_samples: int,
        replacement: bool = False,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        number = int(num_samples)
        shape = (*input.shape[:-1], number)
        key = self._key(name, shape, joint=input.dim() == 1)
        found = keyed_multinomial(input.detach(), number, replacement, *key)
        return found if out is None else out.resize_(shape).copy_(found)

    def _normal(self, name: str, mean: Any, std: Any = 1.0, size: Any = None, **options: Any) -> Tensor:
        tensors = [t.detach() for t in (mean, std) if isinstance(t, Tensor)]
        like = torch.empty_like(sum(tensors, 0 * tensors[0])) if tensors else torch.empty(size, **options)
        values: Tensor = self._values(keyed.keyed_normal, name, like, options.get("dtype")) * std + mean
        return values


def _not_for_each_row(name: str, place: str, number: int, rows: int) -> ConfigError:
    return ConfigError(
        f"model: {name}{place} is called {number} times in a loop over {rows} rows; in the trial run it was called "
        "once for each row; legal: one call for each row, in every forward"
    )


def _feature_shape(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *(1 for _ in x.shape[2:]))


class RefuseRandom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse, by name, random ops that reach ATen: those that :class:`KeyedRandom` has no answer for.  At its end it
    raises that again, where the code inside has caught it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refused: ConfigError | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if self.refused is not None and error is None:
            raise self.refused

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            self.refused = ConfigError(unkeyed(func, here()))
            raise self.refused
        return func(*args, **kwargs)


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a random op will draw: attention without dropout, or anything outside training, does not."""
    given = dict(zip((a.name for a in schema(func).arguments), args, strict=False)) | kwargs
    for argument in schema(func).arguments:
        value = given.get(argument.name, argument.default_value)
        if argument.name in ("dropout_p", "dropout") and not value:
            return False
        if argument.name in ("train", "training") and value is False:
            return False
    return True
