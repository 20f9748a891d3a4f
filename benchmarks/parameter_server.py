"""What a worker and a parameter server on this machine push and pull in a second, with the MACs of frames and without.

    python benchmarks/parameter_server.py --mib 64

Server and worker are processes of their own.  MB/s are the best of several; the CPU time is the mean.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import time
from multiprocessing.connection import Connection
from unittest.mock import patch

import psutil

from shardwise.core.clocks import Clocks
from shardwise.core.frames import MAC, Share
from shardwise.core.ledger import Ledger
from shardwise.runtime.secret import Seal
from shardwise.runtime.server import Server
from shardwise.runtime.server_client import ServerClient
from shardwise.runtime.staging import Push

SECRET = secrets.token_bytes(32)


class Kept:
    """A store that keeps the last push as its parameters."""

    def __init__(self, size: int) -> None:
        self.data = memoryview(bytearray(size))

    def apply(self, push: Push) -> None:
        for part in push.parts:
            self.data[part.offset : part.offset + part.count] = part.payload

    def parameters(self, bucket: int) -> memoryview:
        return self.data


class NoMac:
    """This stands where a MAC is, and costs nothing."""

    def update(self, data: object) -> None: ...

    def digest(self) -> bytes:
        return bytes(MAC)


def serve(size: int, tell: Connection) -> None:
    share = {0: Share(0, size, 1, 1)}
    server = Server(Kept(size), share, Ledger(Clocks(), None, lambda line: None, start=1), SECRET, "benchmark")
    tell.send(server.address)
    server.run()


def measure(size: int, times: int) -> tuple[float, float, float]:
    """Return bytes per second of a push, until it has been applied, and of a pull; and the mean CPU seconds of a push
    and a pull, of both processes together."""
    hear, tell = multiprocessing.Pipe()
    process = multiprocessing.Process(target=serve, args=(size, tell), daemon=True)
    process.start()
    client = ServerClient([hear.recv()], [{0: Share(0, size, 1, 1)}], SECRET, "benchmark", 0)
    client.join()
    sent, got = secrets.token_bytes(size), bytearray(size)
    push, pull, server = [], [], psutil.Process(process.pid)
    busy = time.process_time() + sum(server.cpu_times()[:2])
    for _ in range(times):
        began = time.perf_counter()
        client.push(0, sent)
        client.commit(None, [0]).wait()
        middle = time.perf_counter()
        client.pull({0: got}).wait()
        push.append(middle - began)
        pull.append(time.perf_counter() - middle)
    busy = time.process_time() + sum(server.cpu_times()[:2]) - busy
    assert got == sent
    client.close()
    process.terminate()
    process.join()
    return size / min(push), size / min(pull), busy / times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="MiB that are pushed and pulled")
    parser.add_argument("--times", type=int, default=7)
    given = parser.parse_args()
    size = given.mib << 20
    rows = [("with MAC", measure(size, given.times))]
    with patch.object(Seal, "begin", lambda seal: NoMac()):
        rows.append(("without", measure(size, given.times)))
    print(f"{given.mib} MiB             push    pull   CPU of both")
    for name, (push, pull, busy) in rows:
        print(f"{name:<12}{push / 1e6:7.0f}{pull / 1e6:8.0f} MB/s {busy * 1e3:8.0f} ms")


if __name__ == "__main__":
    main()
