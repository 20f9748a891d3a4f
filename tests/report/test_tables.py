"""Tables for people."""

from __future__ import annotations

from shardwise.cli.show import OF_NAME
from shardwise.report.tables import count, folded, size


def test_words_are_broken_where_their_parts_end() -> None:
    assert folded("2:tp_j*32x2:tp_i*256x7", "(?<=x)", 14) == "2:tp_j*32x\n2:tp_i*256x7"
    assert folded("model.layers.10.self_attn", OF_NAME, 10) == "model.\nlayers.10.\nself_attn", "no line is a number"
    assert (
        folded("unbreakable", OF_NAME, 4) == "unbreakable"
        and folded("a.b", OF_NAME, 3) == "a.b"
        and folded("", OF_NAME, 3) == ""
    )


def test_numbers_that_round_up_to_the_next_unit() -> None:
    assert [count(n) for n in (999, 999.6, 999_949, 999_950, 999_999_999, 1e15, -999_999)] == [
        "999", "1.0 K", "999.9 K", "1.0 M", "1.0 G", "1.0 P", "-1.0 M",
    ]  # fmt: skip
    assert [size(n) for n in (1023, 1023.6, 1_048_524, 1_048_525, 1_048_575, 2**50, -1_048_575)] == [
        "1023 B", "1.0 KiB", "1023.9 KiB", "1.0 MiB", "1.0 MiB", "1024.0 TiB", "-1.0 MiB",
    ]  # fmt: skip
