"""Notice a script that knows nothing of other ranks: started several times, it does the whole work several times.

Whoever shares work with other ranks, through shardwise, ``torch.distributed`` or by themselves, first asks the
environment which rank they are.  A process that nobody in it has asked this, and that has started no other, was a copy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import ItemsView
from typing import Any

from shardwise.core.errors import ConfigError

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
CHILDREN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn")  # they inherit the environment


class Copies:
    """From now on this notes whether somebody in this process asks for its rank."""

    def __init__(self) -> None:
        self._size = int(os.environ.get("WORLD_SIZE", "1"))
        self._asked = False
        note = self._note

        class Watched(type(os.environ)):  # type: ignore[misc]  # a class that typeshed does not know as one
            def __getitem__(self, name: str) -> Any:
                if name in NAMES:
                    note()
                return super().__getitem__(name)

            def items(self) -> ItemsView[str, str]:
                """Return all variables: whoever looks at all of them (tqdm, for its own) asks for none."""
                plain = {name: super(Watched, self).__getitem__(name) for name in self}
                return plain.items()

        os.environ.__class__ = Watched
        sys.addaudithook(lambda event, arguments: note() if event in CHILDREN else None)

    def _note(self) -> None:
        self._asked = True

    def check(self, script: str) -> None:
        """Raise :class:`ConfigError` at the end of a script that was a copy of the others."""
        if self._asked or self._size == 1:
            return
        raise ConfigError(
            f"{script} ran {self._size} times, each time as a whole: it does not share its work with other ranks; "
            "legal: `model, optimizer = shardwise.distribute(model, optimizer)` behind the optimizer (or "
            "shardwise.Trainer, ShardwiseTrainer, torch.distributed), or --ranks 1"
        )
