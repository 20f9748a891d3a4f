"""Parameter servers under data parallelism: some ranks of ``dp`` have the optimizer's state, and update for all.

Every rank computes on its rows with whole parameters and pushes the gradient of each bucket to the servers, each of
which has a range of it; a server adds up what came and updates its range, and before their next use of a bucket all
ranks pull it.  In the data-parallel table (``parallel/data.py``) that is one row more: at rest R, as a gradient P, as
the optimizer's state O, a range on each of the owners and nothing on the other ranks.  P → O is a PUSH and O → R a
PULL.

With one server this is the oldest way: gather all gradients on one device, update, and send the parameters back.  Of n
ranks, k of them servers, a server receives (n - 1)/k of the model's bytes a step and sends as many, and a worker sends
and receives about the model's bytes once; a ring sends 2·(n - 1)/n of them on every rank (Li et al. 2014, "Scaling
Distributed Machine Learning with the Parameter Server"; Patarasuk and Yuan 2009 for the ring).
"""

from __future__ import annotations

from shardwise.core.data_options import ParameterRule
from shardwise.core.errors import ConfigError, check_count
from shardwise.core.plan import Plan
from shardwise.core.server_options import Push, Rate, Server
from shardwise.parallel.data import SHARDS


def parameter_server(plan: Plan, servers: int = 1) -> Plan:
    """Return ``plan`` with the first ``servers`` ranks of each group over ``dp`` as its servers.

    Raises :class:`ConfigError` where there are fewer ranks, or where the plan shards already.
    """
    check_count("server_ranks", servers)
    ranks = plan.mesh.axis_size(SHARDS)
    if servers > ranks:
        raise ConfigError.on("server_ranks", f"{servers} are more than the {ranks} ranks of dp", f"1 to {ranks}")
    if any(rule.sharded for rule in plan.data.parameters):
        wrong = '"sync" is not legal with zero, which shards what servers have'
        raise ConfigError.on("server", wrong, '"none", or zero = 0')
    return plan.replace(parameters=(ParameterRule("*", "R", "P", "O", servers),), server="sync", server_ranks=servers)


def asynchronous_server(
    plan: Plan, kind: Server = "async", servers: int = 1, workers: int = 1, *, staleness: int = 0,
    pull_every: int = 1, rate: Rate = "fixed", push: Push = "whole", push_share: float = 0.01
) -> Plan:  # fmt: skip
    """Return the plan of each of ``workers`` of one rank, whose parameters are updated by ``servers`` servers apart, as
    :class:`~shardwise.core.server_options.ServerOptions` says.

    Raises :class:`ConfigError` for a plan of several ranks.
    """
    return plan.replace(
        parameters=(ParameterRule("*", "R", "P", "O"),), server=kind, server_ranks=servers, workers=workers,
        staleness=staleness,
        pull_every=pull_every, server_rate=rate, push=push, push_share=push_share,
    )  # fmt: skip
