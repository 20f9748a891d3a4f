"""Those who look on while a run trains: the loggers and the callbacks of its config, on rank 0.

An observer has any of the hooks :data:`HOOKS`, each a method of one argument, a dict of its own:

- ``on_start``: the run, once its first step has worked: ``run_dir``, ``config`` (sections of keys), ``steps``,
  ``first_step``, ``ranks``, ``device``, ``parameters``.
- ``on_step``: a line of ``metrics.jsonl``, one step late.
- ``on_evaluation``, ``on_sample``: a line of ``evaluations.jsonl`` or ``samples.jsonl``.
- ``on_checkpoint``: ``step``, ``path``, ``bytes`` and ``seconds`` of a checkpoint that is on disk.
- ``on_end``: ``status`` ("finished", "stopped" or "failed"), with the result of a run that has finished, or the
  ``error``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.core.errors import describe

HOOKS = ("on_start", "on_step", "on_evaluation", "on_sample", "on_checkpoint", "on_end")

log = logging.getLogger("shardwise")


class Observers:
    """Calls the hooks of named observers.

    Observers change nothing: what they get is a copy, and an exception in one does not end the run.  The user is told
    with its line (by ``warn``), the log gets the traceback, and that observer is not called again.
    """

    def __init__(self, each: Sequence[tuple[str, Any]] = (), warn: Callable[[str], object] = print) -> None:
        self._each, self._warn = list(each), warn
        self._ended = False

    def tell(self, hook: str, values: Mapping[str, Any]) -> None:
        """Call ``hook`` of all observers that have it."""
        for name, observer in tuple(self._each):
            call = getattr(observer, hook, None)
            if call is None:
                continue
            try:
                call(copy.deepcopy(dict(values)))
            except Exception as error:
                log.exception("%s: %s failed", name, hook)
                self._each.remove((name, observer))
                self._warn(f"{name}: {describe(error)}; it is not called again, and the run goes on")

    def end(self, status: str, values: Mapping[str, Any] | None = None) -> None:
        """Call ``on_end``; only the first call counts."""
        if not self._ended:
            self._ended = True
            self.tell("on_end", {"status": status, **(values or {})})
