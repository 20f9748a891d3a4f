"""Translate the variables of ``srun``, which has started one task per device, into torchrun's.

=====================  ================================================================================
``RANK``               ``SLURM_PROCID``
``WORLD_SIZE``         ``SLURM_STEP_NUM_TASKS``, else ``SLURM_NTASKS``
``LOCAL_RANK``         ``SLURM_LOCALID``
``LOCAL_WORLD_SIZE``   this node's entry of ``SLURM_STEP_TASKS_PER_NODE``, else of ``SLURM_TASKS_PER_NODE``,
                       else ``SLURM_NTASKS_PER_NODE``
``GROUP_RANK``         ``SLURM_NODEID``
``MASTER_ADDR``        the first of ``SLURM_STEP_NODELIST``, else of ``SLURM_JOB_NODELIST``; 127.0.0.1 on one node
``MASTER_PORT``        :func:`port_of` job and step
``TORCHELASTIC_RUN_ID``  ``slurm-JOB.STEP``
=====================  ================================================================================

No agent of torchelastic runs, so rank 0 hosts the store.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from itertools import product

from shardwise.core.errors import ConfigError

# According to slurm.h, the steps of batch scripts, interactive allocations and the like count from here.
SPECIAL_STEPS = 0xFFFFFFF0
PORTS = range(20000, 32768)  # above the usual services, below the ports that Linux gives to outgoing connections
STEP_STRIDE = 8191  # prime, so that the steps of a job get ports far from those of the jobs started just after it
MOST_HOSTS = 1 << 16  # the limit of SLURM itself

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def adopt(environment: MutableMapping[str, str], terminal: bool | None = None) -> bool:
    """Make this process a rank if it is one of several tasks of a SLURM step, and return whether it is.

    ``environment`` gets torchrun's variables.  It is left alone under torchrun, outside of SLURM, in batch scripts and
    allocations (without a step there are no other tasks), in the shell of ``srun --pty``, and in a step of one task,
    where the local launcher starts a rank for each device.  The user's ``MASTER_ADDR`` and ``MASTER_PORT`` stay.

    Args:
        environment: ``os.environ``.
        terminal: whether standard input is a terminal (default: look).  All processes inside the shell of
            ``srun --pty`` inherit ``SLURM_PTY_PORT``, also the tasks of a second ``srun``; only the shell's own
            commands also have its terminal.

    Raise :class:`ConfigError` naming the variable if one is missing, malformed or contradicts another.
    """
    if (
        "TORCHELASTIC_RUN_ID" in environment
        or not environment.get("SLURM_PROCID")
        or not environment.get("SLURM_STEP_ID")
    ):
        return False
    step = _number(environment, "SLURM_STEP_ID")
    tasks = _number(environment, _first(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), least=1)
    if step >= SPECIAL_STEPS or tasks == 1:
        return False
    if "SLURM_PTY_PORT" in environment and (sys.stdin.isatty() if terminal is None else terminal):
        return False
    job = _number(environment, "SLURM_JOB_ID")
    ranks = _ranks(environment, tasks)
    for name, value in ranks.items():
        if environment.get(name, value) != value:
            wrong = f"{environment[name]!r} contradicts SLURM's"
            raise ConfigError.on(f"environment variable {name}", wrong, f"{value}, or leave it unset.")
    one_node = ranks["LOCAL_WORLD_SIZE"] == ranks["WORLD_SIZE"]
    master = {
        "MASTER_ADDR": environment.get("MASTER_ADDR") or ("127.0.0.1" if one_node else _nodes(environment)[0]),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(port_of(job, step)),
    }
    environment.update(ranks, **master, TORCHELASTIC_RUN_ID=f"slurm-{job}.{step}")
    environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    return True


def port_of(job: int, step: int) -> int:
    """Return the port of a step's store, from 20000 to 32767; 12768 jobs or steps in a row have different ones."""
    return PORTS[(job + STEP_STRIDE * step) % len(PORTS)]


def expand_nodes(nodes: str, name: str) -> list[str]:
    """Return the hosts of ``node[01-03,07],gpu5``, in that order; the last of several brackets varies fastest.

    Raise :class:`ConfigError`, which calls the variable ``name``, if ``nodes`` is malformed.
    """
    error = ConfigError(
        f"environment variable {name}: {nodes!r} is not legal; legal: hosts such as node[01-03,07],gpu5."
    )
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", nodes):  # commas outside of brackets
        pieces = re.split(r"\[([^\[\]]*)\]", part)  # every second piece is the inside of a bracket
        if not part or any(set(text) & set("[] \t\n") for text in pieces):
            raise error
        choices = [_numbers(piece, error) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        count = 1
        for choice in choices:
            count *= len(choice)
        if len(hosts) + count > MOST_HOSTS:
            raise error
        hosts += ["".join(words) for words in product(*choices)]
    return hosts


def expand_tasks(tasks: str, name: str) -> list[int]:
    """Return ``[4, 4, 3]`` for ``4(x2),3``; :class:`ConfigError` calls the variable ``name``."""
    counts: list[int] = []
    for part in tasks.split(","):
        match = _TASKS.fullmatch(part)
        times = int(match[2] or 1) if match else 0
        if match is None or not 1 <= times <= MOST_HOSTS:
            raise ConfigError(
                f"environment variable {name}: {tasks!r} is not legal; legal: tasks of each node, such as 4(x2),3."
            )
        counts += [int(match[1])] * times
    return counts


def _numbers(ranges: str, error: ConfigError) -> list[str]:
    """Return 01, 02, 03, 07 for ``01-03,07``: the numbers have at least as many digits as the first of their range."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise error
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_HOSTS:
            raise error
        numbers += [str(number).zfill(len(match[1])) for number in range(first, last + 1)]
    return numbers


def _ranks(environment: Mapping[str, str], tasks: int) -> dict[str, str]:
    """Return torchrun's variables for this process."""
    node = _number(environment, "SLURM_NODEID")
    counts, source = _tasks_per_node(environment)
    if sum(counts) != tasks or node >= len(counts):
        where = f"SLURM_NODEID = {node}" if sum(counts) == tasks else f"{tasks} tasks"
        raise ConfigError(
            f"environment variable {source}: {environment[source]!r} does not fit {where}; start with srun."
        )
    return {
        "RANK": str(_number(environment, "SLURM_PROCID", below=tasks)),
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": str(_number(environment, "SLURM_LOCALID", below=counts[node])),
        "LOCAL_WORLD_SIZE": str(counts[node]),
        "GROUP_RANK": str(node),
    }


def _tasks_per_node(environment: Mapping[str, str]) -> tuple[list[int], str]:
    """Return the number of tasks on each node of the step, and the variable that says so."""
    lists = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = _first(environment, *lists, "SLURM_NTASKS_PER_NODE")
    if name in lists:
        return expand_tasks(environment[name], name), name
    return [_number(environment, name, least=1)] * len(_nodes(environment)), name


def _nodes(environment: Mapping[str, str]) -> list[str]:
    name = _first(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    return expand_nodes(environment[name], name)


def _first(environment: Mapping[str, str], *names: str) -> str:
    """Return the name of the first variable that has a value."""
    found = next((name for name in names if environment.get(name)), None)
    if found is None:
        raise ConfigError(
            f"environment variable {names[0]} is not set in this SLURM step, nor {' nor '.join(names[1:])}."
        )
    return found


def _number(environment: Mapping[str, str], name: str, least: int = 0, below: int | None = None) -> int:
    text = environment.get(name, "")
    if (
        text.isascii()
        and text.isdigit()
        and len(text) < 20
        and least <= int(text)
        and (below is None or int(text) < below)
    ):
        return int(text)
    bound = f"of at least {least}" if below is None else f"from {least} to {below - 1}"
    raise ConfigError(f"environment variable {name}: {text!r} is not legal; legal: an integer {bound}.")
