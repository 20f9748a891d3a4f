"""Tables whose lookups are sparse: of their gradients, under data parallelism, the rows that were looked up travel.

``nn.Embedding(sparse=True)`` says so of a table; on one device its gradient is then a sparse tensor, and the optimizer
updates the rows that it has.  Under this plan the same holds over ranks.  In the table of ``parallel/data.py`` nothing
changes but what travels (``runtime/tables.py``): P → R gathers the rows of all ranks instead of an all-reduce, P → S
and P → O send each row to the rank that updates it, and S → R and O → R send what has been updated.  Every rank has
such a table whole, under ZeRO-2 and 3 as well, so these are ZeRO-1 for it.
"""

from __future__ import annotations

from shardwise.core.errors import ConfigError
from shardwise.core.optim import BY_ROWS, OptimizerChoice
from shardwise.core.optimizers import ROWS
from shardwise.core.plan import Plan


def table_gradients(plan: Plan, optimizer: OptimizerChoice, wanted: str = "auto") -> Plan:
    """Return ``plan`` with gradients of tables as ``wanted``: "rows" or "dense", or, with "auto", by rows where the
    optimizer leaves rows without a gradient as they are, or takes rows alone, and the plan allows it.

    Raises :class:`ConfigError` for "rows" where the plan or the optimizer does not allow it.
    """
    if wanted == "rows" and not any(part.by_rows for part in optimizer.parts):
        wrong = f'"rows" is not legal with optimizer "{optimizer.name}" as it is, which updates all rows'
        raise ConfigError.on("sparse_gradients", wrong, f'"auto", "dense", or {BY_ROWS}')
    if wanted != "auto":
        return plan.replace(sparse_gradients=wanted)
    if not optimizer.by_rows and not any(part.name in ROWS for part in optimizer.parts):
        return plan
    try:
        return plan.replace(sparse_gradients="rows")
    except ConfigError:
        return plan
