"""The checks and defaults of ``[validation]``, and of the keys of ``[checkpoint]`` that depend on it."""

from __future__ import annotations

import os

from shardwise.core.metrics import LOSS, PERPLEXITY, RESERVED, is_ready

from .data import refuse_missing
from .draft import ConfigDraft
from .files import there

SHARE = 0.01  # the share of documents that is set apart by default
OWN = ("validation.source", "validation.factory")


def complete_validation(draft: ConfigDraft) -> None:
    """Fill in the defaults of ``[validation]``, and refuse all values that do not go together."""
    text = not draft.given("data.factory")
    _data(draft, text)
    _how_often(draft)
    _metrics(draft, text)
    _compared(draft, text)
    averages = draft["optimizer.ema"] is not None
    draft.default("validation.ema", True if averages else None)
    if draft.sound("validation.ema") and draft["validation.ema"] is not None and not averages:
        draft.refuse("validation.ema", "left out, for there is no optimizer.ema")


def _data(draft: ConfigDraft, text: bool) -> None:
    own = [key for key in OWN if draft.given(key)]
    if len(own) > 1:
        draft.refuse(own[1], f"{' or '.join(OWN)}, not both")
    if not text and "validation.source" in own:
        draft.refuse("validation.source", "left out, for the data are those of data.factory: validation.factory")
    if draft.given("validation.arguments") and draft.sound("validation.arguments") and OWN[1] not in own:
        draft.refuse("validation.arguments", "left out, for it belongs to validation.factory")
    _file_exists(draft, "validation.factory", draft["validation.factory"])
    refuse_missing(draft, {"validation.source": draft["validation.source"]})
    draft.default("validation.share", SHARE if text and not own else 0.0)
    if own and draft.sound("validation.share") and draft["validation.share"]:
        draft.refuse("validation.share", f"0 or left out, for {own[0]} gives the data to evaluate on")


def _how_often(draft: ConfigDraft) -> None:
    steps, key = draft["train.steps"], "validation.every"
    if not draft.sound("validation.share", "train.steps", *OWN):
        return
    there_is = bool(draft["validation.share"]) or any(draft.given(one) for one in OWN)
    draft.default(key, max(1, steps // 10) if there_is else 0)
    if draft.sound(key) and draft[key] and not there_is:
        own = "there is no validation.source or validation.factory"
        draft.refuse(key, f"0, for validation.share = 0 sets no data apart, and {own}")


def _metrics(draft: ConfigDraft, text: bool) -> None:
    key = "validation.metrics"
    if not draft.sound(key) or draft[key] is None:
        return
    names = [_name(one) for one in draft[key]]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        draft.refuse(key, "each metric once", f"{twice} is there twice")
        return
    if taken := [name for name in names if name in RESERVED]:
        draft.refuse(key, f"functions with other names than {', '.join(RESERVED)}", f"{taken[0]} is one of these")
        return
    for one in draft[key]:
        if draft.sound(key) and not is_ready(one):
            _file_exists(draft, key, one)
    if draft.sound(key, "validation.every") and draft[key] and not draft["validation.every"]:
        draft.refuse(key, "left out, for validation.every = 0: there are no evaluations")


def _name(metric: str) -> str:
    return metric if is_ready(metric) else metric.rpartition(":")[2]


def _compared(draft: ConfigDraft, text: bool) -> None:
    """Check the keys by which evaluations are compared."""
    best = draft["checkpoint.best"] if draft.sound("checkpoint.best") else None
    patience = draft["validation.patience"]
    if patience is not None:
        draft.default("validation.watch", best or LOSS)
    elif draft.given("validation.watch") and draft.sound("validation.watch", "validation.patience"):
        draft.refuse("validation.watch", "left out, for it belongs to validation.patience")
    for goal, metric in (("checkpoint.goal", "checkpoint.best"), ("validation.goal", "validation.watch")):
        if draft.given(goal) and draft.sound(goal, metric) and draft[metric] is None:
            draft.refuse(goal, f"left out, for it belongs to {metric}")
    for key in ("checkpoint.best", "validation.watch"):
        _measured(draft, key, text)
    for key in ("checkpoint.best", "validation.patience"):
        if draft.sound(key, "validation.every") and draft[key] is not None and not draft["validation.every"]:
            draft.refuse(key, "left out, for validation.every = 0: there are no evaluations")


def _measured(draft: ConfigDraft, key: str, text: bool) -> None:
    """Refuse the name of a metric that is not measured; what functions measure is known once they are called."""
    metrics = draft["validation.metrics"] or ()
    if not draft.sound(key, "validation.metrics") or draft[key] is None or not all(map(is_ready, metrics)):
        return
    known = dict.fromkeys((LOSS, *((PERPLEXITY,) if text else ()), *metrics))
    if draft[key] not in known:
        draft.refuse(key, f"one of {', '.join(known)}", "A metric has to be in validation.metrics")


def _file_exists(draft: ConfigDraft, key: str, reference: str | None) -> None:
    """Refuse a reference to a function in a file that does not exist."""
    place = (reference or "").rpartition(":")[0]
    if draft.sound(key) and place.endswith(".py") and not there(place, os.path.isfile):
        draft.refuse(key, "a Python file that exists", f"There is no {place}")
