"""A mixture of experts in plain PyTorch (Shazeer et al., arXiv 1701.06538)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .grouped import grouped_mm


class _Activation(NamedTuple):
    function: Callable[[Tensor], Tensor]
    gated: bool  # the first half of the rows, activated, multiplies the second


ACTIVATIONS: Mapping[str, _Activation] = {
    "swiglu": _Activation(F.silu, True), "geglu": _Activation(F.gelu, True), "gelu": _Activation(F.gelu, False),
    "relu": _Activation(F.relu, False), "silu": _Activation(F.silu, False),
}  # fmt: skip
BALANCES = ("switch", "gshard", None)
SCORES = ("softmax", "sigmoid")


class MoE(nn.Module):
    """Send each token to the ``top_k`` of the experts that a router chooses, (..., S, width) -> (..., S, width).

    An expert is an MLP: ``down(silu(gate(x)) * up(x))`` with ``hidden`` elements inside for "swiglu" (gate and up are
    one weight), or ``down(gelu(up(x)))`` for "gelu".  The result of a token is the sum of its experts', weighed by
    their scores; those of ``shared`` more experts, which every token has, are added unweighed (DeepSeekMoE, arXiv
    2401.06066, section 3.2).  The last dim but one is the sequence, over which capacity and balance are taken, so
    that neither depends on what else is in a batch.  Router and losses are computed in fp32 at least (Switch, arXiv
    2101.03961, section 2.4).

    Weights are ``gate.weight`` (experts, width), ``up`` (experts, hidden or 2 * hidden, width) and ``down`` (experts,
    width, hidden), and those of the linear layers ``shared_up`` and ``shared_down``.

    Args:
        width: elements of a token.
        hidden: elements inside an expert.
        experts: the number of experts among which the router chooses.
        top_k: the number of experts that a token gets.
        activation: "swiglu", "geglu", "gelu", "relu" or "silu".
        scores: what makes scores of the router's logits, "softmax" over all experts or "sigmoid" of each.
        normalise: whether the scores of a token's experts are divided by their sum; by default if there are several.
        scale: a factor on these weights.
        capacity_factor: no expert takes more than ``ceil(capacity_factor * top_k * S / experts)`` tokens of a sequence:
            all first choices before all second ones, and earlier tokens before later ones (GShard, arXiv 2006.16668,
            algorithm 1); others get nothing of it.  None: no token is dropped.
        balance: the loss that grows as tokens gather at few experts: "switch" (Switch, equations 4 to 6, with all
            choices of a token), "gshard" (GShard, algorithm 1, with first choices alone) or None.  It is taken over
            each sequence (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20), and the mean is over sequences.
        balance_weight: the factor on that loss.
        z_weight: the factor on the mean square of the logits' log-sum-exp (ST-MoE, arXiv 2202.08906, equation 5).
        bias_rate: if not 0, a bias on each expert's score counts in the choice, but not in the weight; in training each
            forward adds this much to it where the expert got fewer tokens than the mean, and takes it away where it got
            more (arXiv 2408.15664, algorithm 1).  It is the buffer ``bias`` (experts).
        shared: the number of experts that every token has.

    ValueError names an argument that is not legal.
    """

    bias: Tensor | None

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        top_k: int = 2,
        *,
        activation: str = "swiglu",
        scores: str = "softmax",
        normalise: bool | None = None,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        balance: str | None = "switch",
        balance_weight: float = 0.01,
        z_weight: float = 0.0,
        bias_rate: float = 0.0,
        shared: int = 0,
    ) -> None:
        super().__init__()
        counts = {"width": width, "hidden": hidden, "experts": experts, "top_k": top_k}
        for name, size in counts.items():
            most = experts if name == "top_k" else None
            _check(name, size, size >= 1 and (most is None or size <= most), f"1 to {most}" if most else "1 or more")
        _check("activation", activation, activation in ACTIVATIONS, _listed(ACTIVATIONS))
        _check("scores", scores, scores in SCORES, _listed(SCORES))
        _check("balance", balance, balance in BALANCES, _listed(BALANCES))
        _check("capacity_factor", capacity_factor, capacity_factor is None or capacity_factor > 0, "more than 0, None")
        for name, number in {"balance_weight": balance_weight, "z_weight": z_weight, "bias_rate": bias_rate}.items():
            _check(name, number, number >= 0, "0 or more")
        _check("shared", shared, shared >= 0, "0 or more")
        alone = "False: the weight of a single expert would be 1, and the router would never learn"
        _check("normalise", normalise, not (normalise and top_k == 1), alone)
        self.experts, self.top_k, self.scores, self.scale = experts, top_k, scores, scale
        self.normalise = top_k > 1 if normalise is None else normalise
        self.capacity_factor, self.z_weight, self.bias_rate = capacity_factor, z_weight, bias_rate
        self.balance, self.balance_weight = balance, balance_weight
        self.activation, gated = ACTIVATIONS[activation]
        self.gated, inner = gated, (1 + gated) * hidden
        self.gate = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        if shared:
            self.shared_up = nn.Linear(width, shared * inner, bias=False)
            self.shared_down = nn.Linear(shared * hidden, width, bias=False)
        self.shared = shared
        self.register_buffer("bias", torch.zeros(experts) if bias_rate else None)
        for weight in (self.up, self.down):  # as nn.Linear does
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result for ``x`` (..., S, width), in its shape and dtype, and what is to be added to the model's
        loss, a scalar: the weighed balance loss and z-loss, 0 if there are none."""
        logits = F.linear(_wide(x), _wide(self.gate.weight))
        scores = logits.softmax(-1) if self.scores == "softmax" else logits.sigmoid()
        ids = self.route(scores)
        weights = scores.gather(-1, ids)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
        loss = self.loss(logits, scores, ids)
        self._count(ids)
        tokens = x.flatten(0, -2)
        found = self.compute(tokens, self._within_capacity(ids).flatten(0, -2))
        found = (found * (self.scale * weights).to(x.dtype).flatten(0, -2).unsqueeze(-1)).sum(1)
        if self.shared:
            found = found + self.shared_down(self._inside(self.shared_up(tokens)))
        return found.view(x.shape), loss

    @property
    def has_loss(self) -> bool:
        """Whether there is something to add to the model's loss."""
        return bool(self.z_weight or (self.balance is not None and self.balance_weight))

    def route(self, scores: Tensor) -> Tensor:
        """Return the experts that each token gets, (..., top_k) integers, the first choice first, for ``scores`` (...,
        experts).  A subclass may choose in another way."""
        if self.bias is not None:
            scores = scores + self.bias
        return scores.detach().topk(self.top_k, dim=-1).indices

    def loss(self, logits: Tensor, scores: Tensor, ids: Tensor) -> Tensor:
        """Return what is to be added to the loss for ``logits`` and ``scores`` (..., S, experts) and the experts that
        the tokens have chosen, ``ids`` (..., S, top_k)."""
        found = []
        if self.balance is not None and self.balance_weight:
            found.append(self.balance_weight * self._balance_loss(scores, ids))
        if self.z_weight:
            found.append(self.z_weight * logits.logsumexp(-1).square().mean())
        return sum(found[1:], found[0]) if found else logits.new_zeros(())

    def _balance_loss(self, scores: Tensor, ids: Tensor) -> Tensor:
        probabilities = scores if self.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        counted, factor = (ids, self.experts) if self.balance == "switch" else (ids[..., :1], 1 / self.experts)
        choices = counted.shape[-2] * counted.shape[-1]
        fractions = self._chosen(counted).sum((-3, -2)).to(scores.dtype) / choices
        return factor * (fractions * probabilities.mean(-2)).sum(-1).mean()

    def _chosen(self, ids: Tensor) -> Tensor:
        """Return which expert each choice is, (..., top_k, experts) booleans."""
        return ids.unsqueeze(-1) == torch.arange(self.experts, device=ids.device)

    def _count(self, ids: Tensor) -> None:
        """Move the bias of each expert towards as many tokens as the others have."""
        if self.bias is None or not self.training:
            return
        with torch.no_grad():
            load = self._chosen(ids).flatten(0, -2).sum(0)
            self.bias.add_(self.bias_rate * torch.sign(load.sum() - self.experts * load).to(self.bias.dtype))

    def _within_capacity(self, ids: Tensor) -> Tensor:
        """Return ``ids`` (..., S, top_k) with the number ``experts``, which is that of none, for tokens that an expert
        has no place for."""
        if self.capacity_factor is None:
            return ids
        length, top_k = ids.shape[-2:]
        capacity = math.ceil(self.capacity_factor * top_k * length / self.experts)
        turns = ids.transpose(-2, -1).flatten(-2)  # all first choices, then all second ones
        found, order = turns.sort(dim=-1, stable=True)
        places = torch.arange(top_k * length, device=ids.device) - torch.searchsorted(found, found)
        places = torch.zeros_like(order).scatter(-1, order, places)
        late = places.view(*ids.shape[:-2], top_k, length).transpose(-2, -1) >= capacity
        return ids.masked_fill(late, self.experts)

    def compute(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return what the experts ``ids`` (n, top_k) give for ``tokens`` (n, width), (n, top_k, width); 0 for the
        number ``experts``.

        Rows are sorted by expert and put back: shardwise finds the layer by this (``graph/experts.py``).
        """
        top_k = ids.shape[-1]
        found, order = ids.flatten().sort(stable=True)
        ends = torch.searchsorted(found, torch.arange(self.experts, device=found.device), right=True).int()
        missing = None if self.capacity_factor is None else (found >= self.experts).unsqueeze(-1)
        rows = _without(tokens[order // top_k].to(self.up.dtype), missing)  # no gradient comes from rows of no expert
        rows = self._inside(_without(grouped_mm(rows, self.up.mT, ends), missing))
        rows = _without(grouped_mm(rows, self.down.mT, ends), missing).to(tokens.dtype)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.shape[0], device=order.device)
        return rows[inverse].view(*ids.shape, rows.shape[-1])

    def _inside(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.activation(x)
        first, second = x.chunk(2, dim=-1)
        return self.activation(first) * second

    def extra_repr(self) -> str:
        """Return what the sizes of weights do not tell."""
        return f"top_k={self.top_k}, capacity_factor={self.capacity_factor}, balance={self.balance}"


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _without(rows: Tensor, missing: Tensor | None) -> Tensor:
    return rows if missing is None else rows.masked_fill(missing, 0.0)


def _listed(values: object) -> str:
    return ", ".join(f'"{one}"' if isinstance(one, str) else str(one) for one in values)  # type: ignore[attr-defined]


def _check(name: str, value: object, legal: bool, words: str) -> None:
    if not legal:
        raise ValueError(f"MoE: {name} = {value!r} is not legal; legal: {words}")


__all__ = ["ACTIVATIONS", "BALANCES", "SCORES", "MoE"]
