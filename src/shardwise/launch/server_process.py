"""``python -m shardwise.launch.server_process RUN_DIR K`` is parameter server K of a run, started by its launcher.

In ``RUN_DIR/servers/K`` it has its ``address.json``, its ``record.jsonl`` (``core/ledger.py``), and the last
``snapshot.safetensors`` of its parameters, optimizer state and ledger, from which it goes on if it is there.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.core.errors import ShardwiseError
from shardwise.core.garbage import without_gc
from shardwise.report.files import CONFIG, current

from .rank import rank_process, stop_on

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.lower.compiled import Compiled
    from shardwise.runtime.served_store import ServedStore
    from shardwise.runtime.server import Server

    from .snapshots import Writing

SERVERS, SNAPSHOT = "servers", "snapshot.safetensors"
ADDRESS, RECORD, SECRET_FILE, RUN_FILE = "address.json", "record.jsonl", "secret", "run"
LOOK = 0.2  # seconds between two looks at whether a snapshot is due


def serve(run_dir: Path, number: int) -> None:
    """Serve until a SIGTERM, and leave a snapshot."""
    import torch

    from shardwise.config import build_data, build_optimizer, build_plan, load_config
    from shardwise.core.clocks import Clocks
    from shardwise.core.ledger import Ledger
    from shardwise.core.tickets import Tickets
    from shardwise.runtime.secret import read_secret
    from shardwise.runtime.served_store import ServedStore
    from shardwise.runtime.server import Server
    from shardwise.units.served import served_ranges

    from .snapshots import load_snapshot, remove_parts, write_snapshot

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a launcher's parent may ignore it, and then no fork can be awaited
    asked = stop_on([signal.SIGTERM], then=signal.getsignal(signal.SIGTERM))
    config = load_config(current(run_dir, CONFIG))
    torch.set_num_threads(config.train.threads)
    plan, folder = build_plan(config), run_dir / SERVERS / str(number)
    compiled = compiled_of(config, build_data(config).train)
    choice = build_optimizer(config, compiled.module)
    store = ServedStore(compiled.buckets, plan, choice, number)
    remove_parts(folder / SNAPSHOT)
    facts = load_snapshot(store, folder / SNAPSHOT)
    if facts is None:
        if (folder / RECORD).exists() and '"push"' in (folder / RECORD).read_text(encoding="utf-8"):
            raise ShardwiseError(f"server {number} has served, and its snapshot is gone: {folder / SNAPSHOT}")
        store.load(compiled.values)
    with (folder / RECORD).open("a", buffering=1, encoding="utf-8") as record:
        tickets = Tickets(config.train.steps, True) if number == 0 else None
        ledger = Ledger(
            Clocks(plan.serving.bound), tickets, lambda line: print(line, file=record), server=number,
            start=1 + secrets.randbits(48), snapshot=facts,
        )  # fmt: skip
        if facts is None:  # a server that is lost soon starts again with what workers have seen
            write_snapshot(folder / SNAPSHOT, store.state(), ledger.snapshot()).wait()
        server = Server(
            store, served_ranges(compiled.buckets, plan, choice)[number], ledger,
            read_secret(run_dir / SERVERS / SECRET_FILE), run_name(run_dir), host=config.parallel.server_host,
            port=_port(folder), log=print,
        )  # fmt: skip
        (folder / f"{ADDRESS}.part").write_text(json.dumps(server.address), encoding="utf-8")
        os.replace(folder / f"{ADDRESS}.part", folder / ADDRESS)
        every = config.checkpoint.every or config.train.steps
        failed: list[Exception] = []

        def save() -> None:
            try:
                _save_now_and_then(server, store, folder, every, asked)
            except Exception as error:  # a full disk: a server that cannot save must not go on as if it could
                failed.append(error)
                server.close()

        saver = threading.Thread(target=save, daemon=True)
        saver.start()
        server.run()
        saver.join()
    if failed:
        raise ShardwiseError(f"server {number} cannot save its snapshot: {failed[0]}") from failed[0]


def compiled_of(config: Config, dataset: Any) -> Compiled:
    """Return the model of a run for its plan, with the values that it starts from."""
    from shardwise.config import build_model, build_plan
    from shardwise.lower.compiled import Compiled

    from .subject import example_of, start_values

    constructor, loss = build_model(config)
    initial = start_values(config, constructor)
    with without_gc():
        return Compiled(
            initial.module, build_plan(config), example_of(dataset), loss, initial=initial,
            batch_rows=config.rows_together, loss_weight=config.model.loss_weight, varies=config.data.varies or {},
        )  # fmt: skip


def run_name(run_dir: Path) -> str:
    """Return what tells the run apart from others, whatever path leads to its folder."""
    return (run_dir / SERVERS / RUN_FILE).read_text(encoding="utf-8")


def _port(folder: Path) -> int:
    """Return the port of an earlier start, where workers look for this server; 0 takes any."""
    try:
        return int(json.loads((folder / ADDRESS).read_text(encoding="utf-8"))[1])
    except (OSError, ValueError):
        return 0


def _save_now_and_then(server: Server, store: ServedStore, folder: Path, every: int, asked: Any) -> None:
    """Save a snapshot after ``every`` updates and at the end, which comes when it is ``asked`` for; then close."""
    from .snapshots import write_snapshot

    saved, wait = store.version, threading.Event()

    def begin() -> tuple[int, Writing]:
        return store.version, write_snapshot(folder / SNAPSHOT, store.state(), server.ledger.snapshot())

    while True:
        wait.wait(LOOK)
        last = asked()
        if last or store.version // every > saved // every:
            saved, writing = server.call(begin).result()
            writing.wait()
        if last:
            server.close()
            return


def main() -> None:
    """Serve as the number that the command line names."""
    run_dir, number = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    with rank_process(run_dir) as progress:
        progress.phase("starting a parameter server")
        serve(run_dir, number)


if __name__ == "__main__":
    main()
