"""What came of a model under a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

PLAIN = "plain torch"
PASSES, REFUSED, WRONG, CRASH, TIMEOUT, UNTRAINED = "passes", "refused", "wrong", "crash", "time-out", "does not train"
TRAINS = "trains"
OUTCOMES = (PASSES, REFUSED, WRONG, CRASH, TIMEOUT)


@dataclass
class Outcome:
    """What a model did under a plan: ``outcome`` is one of ``OUTCOMES``, or, in plain torch, "trains" or "does not
    train".

    ``text`` is the sentence of a refusal, the worst difference, or where it crashed; ``capture`` the seconds until the
    model was captured; ``sharded`` the share of the parameters outside of experts that tensor parallelism shards;
    ``whole`` the ops that every rank computes whole, with their number; ``opaque`` why it was not captured.
    """

    model: str
    plan: str
    outcome: str
    text: str = ""
    error: float | None = None
    seconds: float = 0.0
    capture: float | None = None
    sharded: float | None = None
    whole: dict[str, int] = field(default_factory=dict)
    opaque: str | None = None
    parameters: int | None = None
