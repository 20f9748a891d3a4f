"""Train islands that meet every so many steps on one device, in the ordinary way: one ordinary run for each island, and
``torch.optim.SGD`` as the outer optimizer (DiLoCo: arXiv 2311.08105, algorithm 1; fragments that stream: arXiv
2501.18512, sections 2.2 and 2.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardwise.capture.wrapped import rows_in
from shardwise.core.fields import has_rows
from shardwise.core.layout import shard_range
from shardwise.core.local_options import LocalOptions
from shardwise.verify.oracle import Oracle, OracleStep, Settings, on_host

Fields = Mapping[str, Tensor]


class Islands:
    """One island, or several that train apart and meet as ``options`` say.

    ``fragments`` gives the fragment of each parameter that learns, by name.  A single island never meets another.
    """

    def __init__(self, oracles: Sequence[Oracle], options: LocalOptions, fragments: Mapping[str, int]) -> None:
        self.oracles, self.options, self.fragments = oracles, options, fragments
        self._step = 0
        self._base = {name: nn.Parameter(oracles[0].masters[name].detach().clone()) for name in fragments}
        momentum = options.outer_momentum
        self._outer = {
            name: torch.optim.SGD([one], lr=options.outer_lr, momentum=momentum, nesterov=momentum > 0, foreach=False)
            for name, one in self._base.items()
        }

    @property
    def promotions(self) -> int:
        return self.oracles[0].promotions

    def step(self, batch: Fields, given: float | Settings | None = None) -> list[OracleStep]:
        """Let each island take a step on its rows of ``batch``, and return what each has after it."""
        streams, steps = self.options.fragments > 1, self.options.steps
        before = self._step % steps if steps else -1
        meeting = [
            name
            for name, fragment in self.fragments.items()
            if (streams and self._step and before == fragment * steps // self.options.fragments)
            or (not streams and before == steps - 1)
        ]
        old = self._differences(meeting) if streams else {}
        found = [
            oracle.step(part, given) for oracle, part in zip(self.oracles, self.parts(batch), strict=True)
        ]  # fmt: skip
        for name, difference in (old or self._differences(meeting)).items():
            self._meet(name, difference, self.options.mix if streams else 0.0)
        self._step += 1
        return [
            replace(one, parameters=on_host(oracle.parameters()))
            for one, oracle in zip(found, self.oracles, strict=True)
        ]

    def parts(self, batch: Fields) -> list[dict[str, Tensor]]:
        """Return the rows of each island."""
        ranges = [shard_range(rows_in(batch), len(self.oracles), i) for i in range(len(self.oracles))]
        return [
            {name: value[start:stop] if has_rows(name) else value for name, value in batch.items()}
            for start, stop in ranges
        ]

    @torch.no_grad()
    def _differences(self, names: Sequence[str]) -> dict[str, Tensor]:
        masters = {name: torch.stack([oracle.masters[name] for oracle in self.oracles]) for name in names}
        return {name: self._base[name] - each.mean(0) for name, each in masters.items()}

    @torch.no_grad()
    def _meet(self, name: str, difference: Tensor, mix: float) -> None:
        self._base[name].grad = difference
        self._outer[name].step()
        for oracle in self.oracles:
            own = oracle.masters[name]
            own.copy_(mix * own + (1 - mix) * self._base[name])
