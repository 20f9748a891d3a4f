"""What captures of one computation have shown of its forward, so that later ones need not find it again.

A trial shows the same for all sizes with which forward runs the same code. Which sizes these are a capture with
symbolic sizes tells, for it notes what forward has asked of them. So where that holds for the sizes of an earlier
trial, and neither what forward may read in Python nor the answers to what it reads of tensors have changed since, this
trial ran the code that was captured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple

from shardwise.capture.draws import Keys
from shardwise.capture.forms import Form, differing
from shardwise.core.fields import has_rows
from shardwise.graph.captured import Captured
from shardwise.graph.specialised import holds_for


class Tried(NamedTuple):
    """A trial in which a forward changed nothing in Python but numbers and words, and computed the same in each run:
    what it could read there (``PythonState.plain``) and what it read of tensors, the rows and the form of its batch,
    the names of its results, and how many runs show ``again`` that they are these."""

    state: Any
    reads: tuple[Any, ...]
    rows: int | None
    form: Form
    results: Mapping[str, str]
    again: int = 1  # more where forward changes something

    def serves(self, captured: Captured, state: Any, form: Form) -> bool:
        """Whether a trial of ``captured``, made of a batch of ``form`` where forward could read ``state``, would show
        the same."""
        alike = self.rows == captured.rows and self.reads == captured.reads and self.state == state
        if not alike or differing(self.form, form) is None:
            return False
        return holds_for(captured, {name: (0, *shape) if has_rows(name) else shape for name, shape, _ in self.form})


class Way(NamedTuple):
    """How a forward is captured: around calls of these ``functions``, which run as they are written, and with answers
    to its ``reads`` of tensors by these functions of torch; ``assumes`` says that checks of values that depend on
    parameters are taken for granted, and made in each step."""

    functions: tuple[FunctionType, ...] = ()
    reads: frozenset[Any] = frozenset()
    assumes: bool = False


AS_IT_IS = Way()


@dataclass
class Known:
    """The ``trials`` of a forward, the ``way`` in which it was captured, why it is captured for fixed numbers of rows
    (None: for any), the ``keys`` of its random calls, where these were looked into, and the ``forms`` of batches that
    have come."""

    trials: list[Tried] = field(default_factory=list)
    way: Way = AS_IT_IS
    fixed_rows: str | None = None
    keys: Keys | None = None
    forms: list[Form] = field(default_factory=list)
