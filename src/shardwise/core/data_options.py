"""This module has the options of a plan for data parallelism: which ranks hold what, and when it is communicated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from shardwise.core.errors import ConfigError, check_choice, check_count, check_text
from shardwise.core.options import check_options, count, word

Gathered = Literal["use", "forward", "step"]
Reduced = Literal["microbatch", "step"]
Rest = Literal["R", "S"]
Gradient = Literal["P", "S"]
State = Literal["R", "S", "O"]
ReduceDtype = Literal["auto", "fp64", "fp32", "bf16", "fp16"]
Rows = Literal["microbatch", "batch"]
Tables = Literal["dense", "rows"]
Updates = Literal["elements", "tensors"]

DATA_PARALLEL_ROWS: Mapping[tuple[Rest, Gradient, State], str] = {
    ("R", "P", "R"): "DDP",
    ("R", "P", "S"): "ZeRO-1",
    ("R", "S", "S"): "ZeRO-2",
    ("S", "S", "S"): "ZeRO-3",
    ("R", "P", "O"): "parameter server",
}
"""The data-parallel table maps (rest, gradient between microbatches, optimizer state) to its usual name."""


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """A rule is one row of the data-parallel table, for parameters whose name matches ``pattern`` (:mod:`fnmatch`).

    R means replicated, P a partial sum, and S a flat shard over ``dp`` (over ``dp_replicate`` S is replicated, or a
    partial sum).  O is a range on each of the first ``servers`` ranks of ``dp``, and nothing on the others; with 0
    ``servers`` it is elsewhere.  ``rest``
    says this of the parameter between steps, ``grad`` of its gradient between microbatches, and ``state`` of its
    optimizer state.
    """

    pattern: str
    rest: Rest = "R"
    grad: Gradient = "P"
    state: State = "R"
    servers: int = 0

    def __post_init__(self) -> None:
        check_text("parameters.pattern", self.pattern)
        where = f'parameters "{self.pattern}"'
        check_count(f"{where}: servers", self.servers, least=0)
        if self.servers and self.state != "O":
            raise ConfigError.on(f"{where}: servers", f'{self.servers} with state "{self.state}"', '0, or state "O"')
        for field, legal in (("rest", "RS"), ("grad", "PS"), ("state", "RSO")):
            check_choice(f"{where}: {field}", getattr(self, field), legal)
        row = (self.rest, self.grad, self.state)
        if row not in DATA_PARALLEL_ROWS:
            legal_rows = ", ".join(f"{', '.join(legal_row)} ({name})" for legal_row, name in DATA_PARALLEL_ROWS.items())
            wrong = f"rest, grad, state = {', '.join(row)} is no row of the data-parallel table"
            raise ConfigError.on(where, wrong, f"{legal_rows}.")

    @property
    def sharded(self) -> bool:
        """Return whether anything that belongs to these parameters differs over ``dp``."""
        return self.state != "R"


@dataclass(frozen=True, slots=True)
class DataOptions:
    """These options say which ranks hold which shards, and when these are communicated.

    The first of ``parameters`` whose pattern matches a parameter's name is its rule.  ``gathered`` says how long
    parameters that rest sharded stay whole: for one use, from a microbatch's forward to its backward, or for the whole
    step; they are gathered ``prefetch`` units ahead.  ``reduced`` says when gradients that are sharded between
    microbatches are reduced: after a unit's backward of every microbatch, or only of the last one.  ``reduce`` is the
    dtype in which gradients are summed over ranks; "auto" is the dtype in which they are kept, fp32 or fp64.  ``rows``
    says which rows meet where a model lets rows meet (BatchNorm, in-batch negatives): those of a microbatch, or those
    of the whole batch, for which all microbatches run up to there before any of them goes on.  ``tables`` says whether
    the gradient of a table whose lookups are sparse (``nn.Embedding(sparse=True)``) is as large as the table, or has
    the rows that were looked up, which alone are communicated and updated.  ``updates`` says whether the optimizer goes
    element by element, or needs whole tensors, which a step then puts together.
    """

    parameters: tuple[ParameterRule, ...] = (ParameterRule("*"),)
    gathered: Gathered = word("use", get_args(Gathered))
    prefetch: int = count(1, least=0)
    reduced: Reduced = word("microbatch", get_args(Reduced))
    reduce: ReduceDtype = word("auto", get_args(ReduceDtype))
    rows: Rows = word("microbatch", get_args(Rows))
    tables: Tables = word("dense", get_args(Tables), key="sparse_gradients")
    updates: Updates = word("elements", get_args(Updates))

    def __post_init__(self) -> None:
        check_options(self)
        rules = self.parameters
        if (
            not isinstance(rules, tuple | list)
            or not rules
            or not all(isinstance(rule, ParameterRule) for rule in rules)
        ):
            raise ConfigError(f"parameters: {rules!r} is not legal; legal: one ParameterRule or more.")
        object.__setattr__(self, "parameters", tuple(rules))

    def rule(self, name: str) -> ParameterRule:
        """Return the first rule that matches the parameter called ``name``; raise ConfigError if none does."""
        for rule in self.parameters:
            if fnmatchcase(name, rule.pattern):
                return rule
        patterns = ", ".join(f'"{rule.pattern}"' for rule in self.parameters)
        raise ConfigError(
            f'parameters: no rule matches "{name}"; legal: a rule for each, such as "*"; found: {patterns}.'
        )
