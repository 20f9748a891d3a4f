"""The model states of a number of parameters in one bucket, as published tables count them."""

from __future__ import annotations

from shardwise.core.flat import FlatBuffer
from shardwise.estimate.states import States, Widths, bucket_states
from shardwise.parallel.data import ZERO, held_range
from shardwise.units.share import Share, Span, Updated


def model_states(
    parameters: int, zero: int, dp: int, param_bytes: int = 2, grad_bytes: int = 2, state_bytes: int = 12
) -> States:  # fmt: skip
    """What the first of ``dp`` ranks holds of ``parameters`` elements in one bucket under ZeRO's stage ``zero``, 0 to
    3.

    By default of mixed-precision Adam as Rajbhandari et al. (2019, arXiv 1910.02054) count it: 2 + 2 + 12 bytes an
    element.
    """
    layout = FlatBuffer.pack([("all", (parameters,), "all")], dp, param_bytes)
    held = held_range(ZERO[zero], layout, dp, 0)
    spans = tuple(Span(start, stop, 1) for _, start, stop in held.segments(layout))
    return bucket_states(
        Share(layout, ZERO[zero], held, (Updated(spans),)), [Widths(param_bytes, grad_bytes, 0, state_bytes)]
    )[0]
