"""The options of a plan for data parallelism: who holds what, and when it is gathered and reduced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, get_args

from shardwise.core.errors import ConfigError, check_choice, check_text
from shardwise.core.options import check_options, count, word

Gathered = Literal["use", "forward", "step"]
Reduced = Literal["microbatch", "step"]
ReduceDtype = Literal["auto", "fp64", "fp32", "bf16", "fp16"]

DATA_PARALLEL_ROWS: Mapping[tuple[str, str, str], str] = {
    ("R", "P", "R"): "DDP",
    ("R", "P", "S"): "ZeRO-1",
    ("R", "S", "S"): "ZeRO-2",
    ("S", "S", "S"): "ZeRO-3",
}
"""The data-parallel table: (rest, gradient between microbatches, optimizer state) and its usual name."""


@dataclass(frozen=True, slots=True)
class ParameterRule:
    """One row of the data-parallel table for the parameters whose name matches ``pattern`` (as in
    :mod:`fnmatch`).

    R is replicated, P a partial sum, S a flat shard over ``dp`` (replicated, or a partial sum, over ``dp_replicate``).
    ``rest`` is the parameter between steps, ``grad`` its gradient between microbatches, ``state`` the optimizer's.
    """

    pattern: str
    rest: Literal["R", "S"] = "R"
    grad: Literal["P", "S"] = "P"
    state: Literal["R", "S"] = "R"

    def __post_init__(self) -> None:
        check_text("parameters.pattern", self.pattern)
        where = f'parameters "{self.pattern}"'
        for field, legal in (("rest", "RS"), ("grad", "PS"), ("state", "RS")):
            check_choice(f"{where}: {field}", getattr(self, field), legal)
        row = (self.rest, self.grad, self.state)
        if row not in DATA_PARALLEL_ROWS:
            legal_rows = ", ".join(f"{', '.join(legal_row)} ({name})" for legal_row, name in DATA_PARALLEL_ROWS.items())
            wrong = f"rest, grad, state = {', '.join(row)} is no row of the data-parallel table"
            raise ConfigError.on(where, wrong, f"{legal_rows}.")

    @property
    def sharded(self) -> bool:
        """Whether anything of these parameters is sharded over ``dp``."""
        return self.state == "S"


@dataclass(frozen=True, slots=True)
class DataOptions:
    """Who holds which shards of parameters, gradients and optimizer states, and when they travel.

    The first of ``parameters`` whose pattern matches a parameter's name is its rule.  ``gathered`` says how long
    parameters that rest sharded stay whole: for one use, from a microbatch's forward to its backward, or for the whole
    step; they are gathered ``prefetch`` units ahead.  ``reduced`` says when gradients that are sharded between
    microbatches are reduced: after the unit's backward of every microbatch, or of the last.  ``reduce`` is the dtype in
    which gradients are summed over ranks; "auto" is that in which they are kept, fp32 or fp64.
    """

    parameters: tuple[ParameterRule, ...] = (ParameterRule("*"),)
    gathered: Gathered = word("use", get_args(Gathered))
    prefetch: int = count(1, least=0)
    reduced: Reduced = word("microbatch", get_args(Reduced))
    reduce: ReduceDtype = word("auto", get_args(ReduceDtype))

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
        """The rule of the parameter called ``name``: the first that matches."""
        for rule in self.parameters:
            if fnmatchcase(name, rule.pattern):
                return rule
        patterns = ", ".join(f'"{rule.pattern}"' for rule in self.parameters)
        raise ConfigError(
            f'parameters: no rule matches "{name}"; legal: a rule for each, such as "*"; found: {patterns}.'
        )
