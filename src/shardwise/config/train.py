"""The checks and defaults of ``[train]`` that depend on several keys."""

from __future__ import annotations

import math
import os

from .draft import ConfigDraft
from .files import there
from .sections import rules


def count_epochs(draft: ConfigDraft, samples: int | None) -> None:
    """Count the steps of ``train.epochs``: each epoch ends with a step on the rows that are left."""
    steps, epochs, batch = "train.steps", "train.epochs", "data.batch_size"
    if not draft.given(epochs) or not draft.sound(epochs):
        return
    if draft.given(steps):
        draft.refuse(epochs, f"left out, or {steps} left out: each says how long the run is")
    elif samples is not None and draft.sound(batch, "parallel.push_every"):
        rows = draft[batch] * draft["parallel.push_every"]
        each = math.ceil(samples / rows)
        islands = draft["parallel.dp_replicate"] if draft["parallel.local_steps"] else 1
        if each > 1 and 0 < samples % rows < islands:
            each -= 1  # an epoch ends where there is not a row for each island
        number = max(1, math.ceil(round(draft[epochs] * each, 6)))
        left = samples % rows
        last = f", the last of an epoch with {left} rows" if left >= islands and each > 1 else ""
        draft.notices.append(f"{epochs} = {draft[epochs]:g}: {number} steps, {each} an epoch{last}")
        draft.put_for(epochs, steps, number)


def complete_train(draft: ConfigDraft) -> None:
    """Fill in the defaults of ``[train]`` that follow from other keys, and check its folder and files."""
    key = "train.run_dir"
    if draft.sound(key) and there(draft[key], os.path.lexists) and not there(draft[key], os.path.isdir):
        draft.refuse(key, rules("train")["run_dir"].legal, "It is a file")
    _sample_prompt(draft)
    draft.default("train.expert_load_every", 10 if draft.given("model.experts") else 0)
    for reference in draft["train.callbacks"] if draft.sound("train.callbacks") else ():
        place = reference.rpartition(":")[0]
        if draft.sound("train.callbacks") and place.endswith(".py") and not there(place, os.path.isfile):
            draft.refuse("train.callbacks", "Python files that exist", f"There is no {place}")


def _sample_prompt(draft: ConfigDraft) -> None:
    key = "train.sample_prompt"
    if any(draft.given(one) for one in ("data.factory", "model.factory", "model.transformers", "model.pretrained")):
        if draft.given(key) and draft.sound(key):
            draft.refuse(key, "left out, for only the models of model.name on text write samples")
    elif not draft.given("data.sft"):
        draft.default(key, "\ndef " if draft["data.source"] == "stdlib" else "\n")
