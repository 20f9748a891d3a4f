"""Tables for people."""

from __future__ import annotations

from shardwise.cli.show import OF_NAME
from shardwise.report.tables import folded


def test_words_are_broken_where_their_parts_end() -> None:
    assert folded("2:tp_j*32x2:tp_i*256x7", "(?<=x)", 14) == "2:tp_j*32x\n2:tp_i*256x7"
    assert folded("model.layers.10.self_attn", OF_NAME, 10) == "model.\nlayers.10.\nself_attn", "no line is a number"
    assert (
        folded("unbreakable", OF_NAME, 4) == "unbreakable"
        and folded("a.b", OF_NAME, 3) == "a.b"
        and folded("", OF_NAME, 3) == ""
    )
