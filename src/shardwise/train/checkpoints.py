"""Save a Trainer and its loader in checkpoints while training goes on, and resume from them on any number of ranks."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from shardwise.checkpoint.reader import Checkpoint, latest
from shardwise.checkpoint.writer import CheckpointWriter, Saved
from shardwise.core.errors import ConfigError
from shardwise.data.stream_loader import AnyLoader
from shardwise.runtime.background import Background
from shardwise.runtime.call import CommunicationError
from shardwise.train import state
from shardwise.train.trainer import Trainer


class Checkpoints:
    """Save and restore ``trainer`` in ``folder``; every rank has one and calls the same methods in the same order.

    Args:
        folder: the folder that gets one folder per checkpoint; all ranks must reach it.
        keep_last: the number of newest checkpoints that stay.
        keep_every: checkpoints whose step is a multiple of it stay too.
        staging_bytes: the bytes for copies of what is being saved, on each rank; by default as many as a rank saves.
        meta: further facts to keep with each checkpoint (JSON).
        warn: called with a message when a checkpoint could not be written; the run goes on.
    """

    def __init__(
        self,
        trainer: Trainer,
        folder: str | Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        staging_bytes: int | None = None,
        meta: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.trainer, self.folder, self.meta = trainer, Path(folder), dict(meta or {})
        trainer.before_close.append(self.close)
        self._step = self._good = -1  # the last step that was to be saved, and the last that has been
        self._ended: list[Saved] = []
        self._background = Background(trainer.comm)
        self._check_shared()
        self._writer = CheckpointWriter(
            self.folder, trainer.comm.rank, trainer.comm.mesh.size, self._background.gather,
            staging_bytes=staging_bytes,
            keep_last=keep_last, keep_every=keep_every, warn=warn,
        )  # fmt: skip

    def _check_shared(self) -> None:
        """Raise :class:`ConfigError` unless all ranks see what rank 0 writes; else no checkpoint could be whole."""
        rank, gather = self.trainer.comm.rank, self._background.gather
        probe = self.folder / f".seen-{uuid.uuid4().hex}"
        refused: list[str] = []
        try:
            if rank == 0:
                try:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    probe.touch()
                except OSError as error:
                    refused = [str(self.folder), f"cannot be written: {error.strerror}", "a folder to write to"]
            # The other ranks wait for what rank 0 has to say, even if that is that it cannot go on.
            name, refused = json.loads(gather(json.dumps([probe.name, refused]).encode())[0])
            if refused:
                raise ConfigError.on(*refused)
            seen = gather(b"1" if (self.folder / name).exists() else b"0")
        finally:
            if rank == 0:
                with suppress(OSError):
                    probe.unlink()
        blind = [index for index, answer in enumerate(seen) if answer != b"1"]
        if blind:
            wrong = f"rank {', '.join(map(str, blind))} does not see what rank 0 writes there"
            legal = "a folder on a file system that all hosts share (train.run_dir)"
            raise ConfigError.on(str(self.folder), wrong, legal)

    def prepare(self) -> int:
        """Take the memory that saving needs now, so that the first save does not; return its bytes.

        No save takes more."""
        return self._writer.prepare(state.owned(self.trainer.engine))

    def save(self, loader: AnyLoader | None = None) -> None:
        """Save the state after the last step: return as soon as it is copied, and write in the background.

        The loader's position is that after the last batch it handed out.
        """
        self.trainer.finish()
        for function in self.trainer.before_save:
            function()
        step = self.trainer.engine.step_index
        if step == self._step:  # at the end of a run, or when asked to stop, this step may just have been saved
            self.wait()
            if self._good == step:
                return
        self._step = step
        self._writer.save(step, state.owned(self.trainer.engine), self._meta(step, loader))

    def _meta(self, step: int, loader: AnyLoader | None) -> dict[str, Any]:
        meta = {"step": step, "seed": self.trainer.seed, "plan": self.trainer.plan.to_toml(), **self.meta}
        meta["model"] = {"aliases": state.aliases(self.trainer.engine), **self.meta.get("model", {})}
        if loader is not None:
            meta["data"] = loader.state_dict()
        return meta

    def restore(self, loader: AnyLoader | None = None, path: Path | None = None) -> int | None:
        """Resume from the newest checkpoint of the folder (or from ``path``); return its step, or None without one.

        Checkpoints of later steps stay, and are newer for the next ``restore`` without a path.  Raises ConfigError,
        naming the file, where a checkpoint is damaged or of another model, optimizer, seed or data.
        """
        path = latest(self.folder) if path is None else path
        if path is None:
            return None
        trainer, found = self.trainer, Checkpoint.open(path)
        seed = found.meta.get("seed")
        if seed != trainer.seed:
            wrong = f"made with the seed {seed}; this run has {trainer.seed}"
            legal = "the same seed, for dropout and the order of samples follow from it"
            raise ConfigError.on(str(path), wrong, legal)
        found.verify(trainer.comm.rank, trainer.comm.mesh.size)
        trainer.comm.barrier(what="the check of the checkpoint")
        self.wait()
        self._step = self._good = -1
        state.restore(trainer.engine, found)
        if loader is not None and "data" in found.meta:
            loader.load_state_dict(found.meta["data"])
        return found.step

    def keep(self, *steps: int) -> None:
        """Keep the checkpoints of these steps too, once the next is saved, instead of those of an earlier call."""
        self._writer.chosen = frozenset(steps)

    @property
    def under_way(self) -> bool:
        """Return whether a checkpoint is being written."""
        return self._writer.under_way

    def poll(self) -> list[Saved]:
        """Return what has been saved, or could not be, since the last call."""
        self._collect()
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk."""
        self._writer.wait()
        self._collect()

    def _collect(self) -> None:
        new = self._writer.poll()
        self._ended += new
        self._good = next((one.step for one in reversed(new) if one.error is None), self._good)

    def close(self) -> None:
        """Wait, then leave the background group; all ranks call it together."""
        self._writer.close()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, CommunicationError):  # a rank that is gone would be waited for in vain
            self.close()
