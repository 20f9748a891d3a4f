"""Random calls of a capture for a fixed number of rows: which row each is for, where forward loops over rows.

The graph has a node for each call, in the order in which forward makes them.  A trial with values, of this number of
rows and of another, tells them apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import fx

from shardwise.capture.draws import Draw, batch_dims
from shardwise.capture.keyed_calls import KeyedRandom
from shardwise.capture.known import Known
from shardwise.core.errors import ConfigError
from shardwise.graph.aliases import is_random
from shardwise.graph.captured import Captured, Uncapturable
from shardwise.graph.schema import op_name

JOINT = ("randperm", "multinomial")  # what they draw may belong together, so that no dim is that of the batch


def assign_rows(captured: Captured, forward: Callable[[int, KeyedRandom], None], known: Known) -> None:
    """Tell a capture of its random calls in loops over rows; ``forward`` runs for a number of rows under a layer.

    Raises :class:`ConfigError` or :class:`Uncapturable` where it draws what cannot be keyed without that."""
    rows = captured.rows
    if rows is None or known.keys is not None and not known.keys.loops:
        return
    nodes = [node for part in captured.owner.modules() if isinstance(part, fx.GraphModule)
             for node in part.graph.nodes if node.op == "call_function" and is_random(node)]  # fmt: skip
    joint = any(op_name(node) in JOINT for node in nodes)
    if not joint and max(Counter(map(_place, nodes)).values(), default=0) < rows:
        return

    def draws(rows: int) -> list[Draw]:
        random = KeyedRandom(0)
        random.begin(0, 0)
        forward(rows, random)
        return random.draws

    try:
        keys = known.keys or batch_dims(draws, (rows,), whole=True, several=True)
        mine = draws(rows) if keys.loops else []
    except ConfigError:
        if joint:
            raise
        return
    except Exception as error:  # the user's code may take no other number of rows
        if joint:
            raise Uncapturable("it draws random numbers in a way that a trial with values does not show") from error
        return
    known.keys = keys
    if len(mine) not in (0, len(nodes)):
        raise Uncapturable("it draws other random numbers where there are no values")
    captured.draws = keys.assigned(mine)


def _place(node: fx.Node) -> str:
    """Return which function a module calls."""
    return f"{node.target} {list(node.meta.get('nn_module_stack') or ())}"


__all__ = ["assign_rows"]
