"""Checks of keys for what is not one device: parameter servers, and islands that train apart."""

from __future__ import annotations

from dataclasses import fields

from shardwise.core.server_options import APART

from .draft import ConfigDraft
from .sections import SECTIONS

TOGETHER_ONLY = (
    "validation.metrics", "validation.patience", "checkpoint.best", "train.trace_steps", "train.loggers",
    "train.callbacks",
)  # fmt: skip
"""The keys of what ranks do together, which workers of parameter servers apart do not."""

KEYS = tuple(
    f"parallel.{name}" for name in ("server", "server_ranks", "server_host", "staleness", "pull_every", "push_every",
                                    "server_rate", "push", "push_share")
)  # fmt: skip
"""The keys of parameter servers."""

NEEDS = (
    ("parallel.staleness", 0, ("stale",)), ("parallel.pull_every", 1, APART), ("parallel.push_every", 1, APART),
    ("parallel.server_rate", "fixed", APART), ("parallel.push", "whole", APART),
)  # fmt: skip
"""The keys that only some kinds of servers have: key, what it is elsewhere, and the kinds."""


def serves(draft: ConfigDraft) -> bool:
    """Return whether there are parameter servers."""
    return bool(draft["parallel.server"] != "none")


def check_servers(draft: ConfigDraft, ranks: int) -> None:
    """Check that the keys of parameter servers make sense with groups of this many data-parallel ranks."""
    key, kind = "parallel.server_ranks", draft["parallel.server"]
    if not draft.sound("parallel.server", key):
        return
    for one, plain, kinds in NEEDS:
        if draft.sound(one) and draft[one] != plain and kind not in kinds:
            shown_kinds = " or ".join(f'"{word}"' for word in kinds)
            draft.refuse(one, f"left out, or parallel.server = {shown_kinds}")
    share = "parallel.push_share"
    if draft.sound(share) and draft[share] != 0.01 and draft["parallel.push"] != "top-k":
        draft.refuse(share, 'left out, or parallel.push = "top-k"')
    if not serves(draft):
        if draft[key] > 1:
            draft.refuse(key, '1, or parallel.server = "sync"', "There is no server")
        return
    if draft["parallel.zero"]:
        draft.refuse("parallel.server", '"none", or parallel.zero = 0', "ZeRO shards what servers have")
    if kind in APART:
        _apart(draft)
    elif ranks == 1:
        draft.refuse("parallel.server", '"none", or parallel.dp of at least 2', "One rank has nobody to serve")
    elif draft[key] > ranks:
        draft.refuse(key, f"1 to the {ranks} ranks of a group of parallel.dp")


def _apart(draft: ConfigDraft) -> None:
    """Check what workers that do not wait for each other cannot have: they are one rank each."""
    single = [f"parallel.{name}" for name in ("pp", "tp", "cp", "ep", "dp_replicate")]
    for key in single:
        if draft.sound(key) and draft[key] != 1:
            why = f'With parallel.server = "{draft["parallel.server"]}" each worker is one rank'
            draft.refuse(key, '1, or parallel.server = "sync"', why)
    if draft.sound("parallel.local_steps") and draft["parallel.local_steps"]:
        draft.refuse("parallel.local_steps", "0", "Workers of parameter servers do not meet")
    if draft.sound("parallel.precision") and draft["parallel.precision"] == "fp16":
        draft.refuse("parallel.precision", '"fp32", "bf16", "fp64"', "Workers have no loss scale together")
    if draft.sound("train.clip_value") and draft["train.clip_value"] is not None:
        draft.refuse("train.clip_value", 'left out, or parallel.server = "sync"', "Gradients go to servers unclipped")
    for key in TOGETHER_ONLY:
        section, _, name = key.partition(".")
        default = next(one.default for one in fields(SECTIONS[section]) if one.name == name)
        if draft.sound(key) and draft[key] and draft[key] != default:
            draft.refuse(key, 'left out, or parallel.server = "sync"', "Nobody has all of a step")
    if draft["train.sample_every"]:
        draft.notices.append("train.sample_every: no samples are written while workers train apart")


def check_islands(draft: ConfigDraft, groups: int) -> None:
    """Check that the keys of local training make sense with this many groups of data-parallel ranks."""
    steps, fragments = "parallel.local_steps", "parallel.local_fragments"
    if not draft.sound(steps, fragments):
        return
    if draft[steps] and groups == 1:
        draft.refuse(steps, "0, or parallel.dp_replicate of at least 2", "There is one group of ranks")
    for key, plain in (("parallel.outer_lr", 0.7), ("parallel.outer_momentum", 0.9), ("parallel.local_mix", 0.5)):
        if draft.sound(key) and draft[key] != plain and not draft[steps]:
            draft.refuse(key, f"left out, or {steps} of at least 1", "Nothing meets")
    if draft[steps] and draft.sound("train.steps") and draft["train.epochs"] is None:
        total = draft["train.steps"]
        if draft[steps] > total:
            draft.refuse(steps, f"at most train.steps = {total}", "Islands would never meet")
        elif total % draft[steps] and draft[fragments] == 1:
            draft.notices.append(
                f"{steps} = {draft[steps]}: islands meet last after step {total - total % draft[steps]} of {total}; "
                "what comes after it counts for the first island alone"
            )
    if draft[fragments] > max(1, draft[steps]):
        draft.refuse(fragments, f"1 to parallel.local_steps = {draft[steps]}", "Each meets once in so many steps")
