"""A parameter server or a worker as a process, to be killed at any point: `serving_process.py server|worker …`.

All elements of a gradient are one number that follows from its ticket, so parameters of which all elements are equal
are those of whole pushes.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from serving import RUN, Numbers, shared_out

from shardwise.core.clocks import Clocks
from shardwise.core.frames import MAX_PAYLOAD
from shardwise.core.ledger import Ledger
from shardwise.core.tickets import Tickets
from shardwise.runtime.secret import read_secret
from shardwise.runtime.server import Server
from shardwise.runtime.server_client import ServerClient

SERVERS, WORKERS, TICKETS, BOUND = 2, 3, 500, 2
EVERY = 7  # pushes between snapshots
NUMELS = {0: SERVERS * (MAX_PAYLOAD // 8 + 1000), 1: 10}
SHARES = shared_out(NUMELS, SERVERS)


def value(ticket: int) -> float:
    """Every element of the gradient of a batch."""
    return float(np.sin(1.0 + ticket))


def save(path: Path, store: Numbers, values: Mapping[str, Any]) -> None:
    """Write a snapshot; it is there whole or not at all."""
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        np.savez(file, values=json.dumps(values), **{str(b): array for b, array in store.arrays.items()})
    os.replace(part, path)


def load(path: Path) -> tuple[dict[int, Any], Any]:
    with np.load(path) as found:
        return {b: found[str(b)] for b in NUMELS}, json.loads(str(found["values"]))


def serve(folder: Path, number: int, port: int) -> None:
    snapshot, path = None, folder / f"server_{number}.npz"
    arrays = {b: np.zeros(share.numel) for b, share in SHARES[number].items()}
    if path.exists():
        arrays, snapshot = load(path)
    store = Numbers(arrays)
    lines = os.open(folder / f"record_{number}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def record(line: str) -> None:
        os.write(lines, f"{line}\n".encode())
        event = json.loads(line)
        if event["event"] == "push" and event["version"] % EVERY == 0:
            server.call(lambda: save(path, store, ledger.snapshot()))

    tickets = Tickets(TICKETS) if number == 0 else None
    ledger = Ledger(
        Clocks(BOUND), tickets, record, server=number, start=1 + secrets.randbits(60), snapshot=snapshot
    )  # fmt: skip
    server = Server(store, SHARES[number], ledger, read_secret(folder / "secret"), RUN, port=port, timeout=20.0)
    signal.signal(signal.SIGTERM, lambda *_: server.close())
    server.run()
    save(folder / f"end_{number}.npz", store, ledger.snapshot())


def work(folder: Path, number: int, *ports: int) -> None:
    client = ServerClient(
        [("127.0.0.1", port) for port in ports], SHARES, read_secret(folder / "secret"), RUN, number, patience=60.0
    )
    parameters = {b: np.empty(n) for b, n in NUMELS.items()}
    while (ticket := client.ticket()) is not None:
        versions = client.pull(parameters).wait()
        for shares in SHARES:
            found = {float(x) for b, s in shares.items() for x in np.unique(parameters[b][s.start : s.stop])}
            assert len(found) == 1, "a pull of parts of pushes"
        time.sleep(0.03)
        for b, n in NUMELS.items():
            client.push(b, np.full(n, value(ticket)))
        client.commit(ticket, versions).wait()
    client.close()


if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    {"server": serve, "worker": work}[role](Path(where), *map(int, numbers))
