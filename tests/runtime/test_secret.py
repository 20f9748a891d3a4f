"""The file of a run's secret, and the keys of a connection."""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from pathlib import Path

import pytest

from shardwise.core.errors import ConfigError
from shardwise.core.frames import FrameError
from shardwise.runtime.secret import SECRET, Keys, Seal, make_secret, read_secret, run_digest


def test_a_secret_is_written_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = make_secret(tmp_path / "secret")
    finally:
        os.umask(before)
    assert len(made) == SECRET and made != make_secret(tmp_path / "another")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path / "secret") == made
    with pytest.raises(FileExistsError):
        make_secret(tmp_path / "secret")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602, 0o700])
def test_a_file_that_others_may_use(tmp_path: Path, mode: int) -> None:
    make_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(ConfigError, match=r"secret: its mode is .*; legal: .*0600"):
        read_secret(tmp_path / "secret")


def test_files_that_are_none(tmp_path: Path) -> None:
    for size in (0, SECRET - 1, SECRET + 1):
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="it does not have 32 bytes; legal: a file of 32"):
            read_secret(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_secret(tmp_path)
    if os.geteuid() == 0:
        make_secret(tmp_path / "theirs")
        os.chown(tmp_path / "theirs", 12345, -1)
        with pytest.raises(ConfigError, match="user 12345 owns it"):
            read_secret(tmp_path / "theirs")


def test_a_mac_is_the_hmac_of_everything() -> None:
    """Spelled out once more: whoever writes another client has to make these bytes."""
    secret, run, nonces = bytes(range(32)), run_digest("x"), (b"w" * 32, b"s" * 32)
    keys = Keys.of(secret, run, 7, *nonces)
    said = struct.pack("<IIQ", 2, 1, 7) + hashlib.sha256(b"x").digest() + nonces[0] + nonces[1]
    key = hmac.new(secret, b"shardwise from worker\0" + said, "sha256").digest()
    for number in range(3):
        mac = keys.of_worker.begin()
        mac.update(b"a frame")
        assert mac.digest() == hmac.new(key, struct.pack("<Q", number) + b"a frame", "sha256").digest()
    other = Keys.of(secret, run, 7, *nonces).of_server.begin()
    other.update(b"a frame")
    first = Keys.of(secret, run, 7, *nonces).of_worker.begin()
    first.update(b"a frame")
    assert first.digest() != other.digest()
    Seal.check(first, first.digest())
    with pytest.raises(FrameError, match="a wrong MAC"):
        Seal.check(first, other.digest())


def test_keys_depend_on_all_that_was_said() -> None:
    base = (bytes(32), run_digest("x"), 7, b"w" * 32, b"s" * 32)
    changes = (bytes([1] * 32), run_digest("y"), 8, b"v" * 32, b"t" * 32)
    found = {Keys.of(*base).of_worker.begin().digest()}
    for place, change in enumerate(changes):
        found.add(Keys.of(*base[:place], change, *base[place + 1 :]).of_worker.begin().digest())  # type: ignore[arg-type]
    assert len(found) == 6
