"""Collectives of local graphs, of tensors that are not as their memory has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwise.core.mesh import Mesh
from shardwise.ops import collectives
from shardwise.ops.env import Env
from shardwise.runtime.threads import ThreadCommunicator, run_ranks


def on_two_ranks(check: object) -> None:
    def rank(comm: ThreadCommunicator) -> None:
        check(Env(comm, tensor={"tp": (2, comm.rank)}), comm.rank)  # type: ignore[operator]

    run_ranks(Mesh.of(tp=2), rank, timeout=30)


LAZY = {"conjugate": lambda x: x.conj(), "negative": lambda x: x[..., :1, :1].conj().imag[0]}
"""A flag says what is to be done to what is in memory; the second has one number, the memory of which is contiguous."""


@pytest.mark.parametrize("name", LAZY)
def test_what_is_not_computed_yet_travels_as_it_reads(name: str) -> None:
    def check(env: Env, rank: int) -> None:
        x: Tensor = LAZY[name](torch.randn(2, 4, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)))
        assert x.is_conj() or x.is_neg()
        cut = (("tp",), (), 0, 1, 2 * len(x), 1)
        whole = torch.cat([x, 2 * x])
        piece = x if rank == 0 else x.clone() * 2
        assert torch.equal(collectives.gather(env, piece, cut), whole)
        assert torch.equal(collectives.all_reduce(env, x, ("tp",)), 2 * x)
        cut = (("tp",), (), 0, 1, len(x), 1)
        assert torch.equal(collectives.scatter(env, x, cut), 2 * collectives.shard(env, x, cut))

    on_two_ranks(check)
