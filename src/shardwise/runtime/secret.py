"""The secret of a run, and the keys that the two ends of a connection make of it.

Whoever has the secret may talk to the run's parameter servers, and nobody else.  It never goes over the wire: each end
sends a nonce, and both derive from secret and nonces two keys, one a direction, with which every later frame has a MAC.
The first such frame of each end proves that it has the secret.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from shardwise.core.errors import ConfigError
from shardwise.core.frames import MAC, PROTOCOL, WORKER, FrameError

SECRET = 32
"""The bytes of a secret."""
_LEGAL = f"a file of {SECRET} random bytes that only its owner can read (mode 0600), as `make_secret` writes it"


def make_secret(path: Path) -> bytes:
    """Write a new secret to a new file that only its owner can read or write, and return it.

    Raises FileExistsError where there is a file: another process may use its secret.
    """
    secret = secrets.token_bytes(SECRET)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, 0o600)  # whatever the umask is
        file.write(secret)
    return secret


def read_secret(path: Path) -> bytes:
    """Return the secret in a file.

    Raises :class:`ConfigError` where there is none, where others than this user own it or may read or write it, and
    where it does not have :data:`SECRET` bytes.
    """
    where = f"secret {path}"
    try:
        with open(path, "rb") as file:
            facts = os.fstat(file.fileno())
            if facts.st_uid != os.geteuid():
                raise ConfigError.on(where, f"user {facts.st_uid} owns it, not {os.geteuid()}", _LEGAL)
            if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o177:
                raise ConfigError.on(where, f"its mode is {stat.filemode(facts.st_mode)}", _LEGAL)
            secret = file.read(SECRET + 1)
    except OSError as error:
        raise ConfigError.on(where, f"cannot be read: {error.strerror}", _LEGAL) from None
    check_secret(where, secret)
    return secret


def check_secret(where: str, secret: bytes) -> None:
    """Raise :class:`ConfigError`, which names ``where``, for a secret of another length."""
    if len(secret) != SECRET:
        raise ConfigError.on(where, f"it does not have {SECRET} bytes", _LEGAL)


def run_digest(run: str) -> bytes:
    """Return the name of a run as a HELLO carries it."""
    return hashlib.sha256(run.encode()).digest()


class Seal:
    """This makes the MACs of the frames of one direction of a connection, in order.

    A MAC is HMAC-SHA256 (RFC 2104) over the frame's number in its direction, its header and its payload.  So a frame
    that was changed, left out, repeated, moved, or taken from another connection or direction has a wrong one.
    """

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")
        self._number = 0

    def begin(self) -> hmac.HMAC:
        """Return the MAC of the next frame, which header and payload have to be added to."""
        found = self._keyed.copy()
        found.update(struct.pack("<Q", self._number))
        self._number += 1
        return found

    @staticmethod
    def check(found: hmac.HMAC, came: bytes | bytearray | memoryview) -> None:
        """Raise :class:`FrameError` unless the MAC that came is the one that was found."""
        if not hmac.compare_digest(found.digest(), came):
            raise FrameError("a frame with a wrong MAC")


@dataclass(frozen=True)
class Keys:
    """These are the seals of a connection: of what the worker sends, and of what the server sends."""

    of_worker: Seal
    of_server: Seal

    @staticmethod
    def of(secret: bytes, run: bytes, worker: int, worker_nonce: bytes, server_nonce: bytes) -> Keys:
        """Derive the two keys: HMAC-SHA256 with the secret over all that both ends have said, and the direction."""
        said = struct.pack("<IIQ", PROTOCOL, WORKER, worker) + run + worker_nonce + server_nonce
        first, second = (
            hmac.digest(secret, b"shardwise " + direction + b"\0" + said, "sha256")
            for direction in (b"from worker", b"from server")
        )
        return Keys(Seal(first), Seal(second))


assert hashlib.sha256().digest_size == MAC
