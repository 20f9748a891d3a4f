"""SLURM's variables as torchrun's.  The environments are those that srun, sbatch and salloc of SLURM 23 set."""

from __future__ import annotations

import pytest

from shardwise.core.errors import ConfigError
from shardwise.launch.slurm import PORTS, adopt, expand_nodes, expand_tasks, port_of

JOB = {"SLURM_JOB_ID": "815", "SLURM_JOB_NODELIST": "node[01-03]", "SLURM_TASKS_PER_NODE": "8(x3)", "HOME": "/root"}
STEP = {
    **JOB,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[02-03]",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OURS = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node02",
    "MASTER_PORT": str(port_of(815, 2)),
    "TORCHELASTIC_RUN_ID": "slurm-815.2",
}


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,07],gpu5", ["node01", "node02", "node03", "node07", "gpu5"]),
        ("gpu5,node[01-02]", ["gpu5", "node01", "node02"]),
        ("a,b,c", ["a", "b", "c"]),
        ("n[8-11]", ["n8", "n9", "n10", "n11"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
        ("n[001,5,10-11]", ["n001", "n5", "n10", "n11"]),
        ("n[3]", ["n3"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("rack[1-2]n[09-10]", ["rack1n09", "rack1n10", "rack2n09", "rack2n10"]),
        ("r[1,3]c[0-1]b[7]x", ["r1c0b7x", "r1c1b7x", "r3c0b7x", "r3c1b7x"]),
        ("a[1-2],b[1,3],c", ["a1", "a2", "b1", "b3", "c"]),
        ("[1-2]", ["1", "2"]),
        ("ip-10-0-0-[9-11].ec2.internal", [f"ip-10-0-0-{n}.ec2.internal" for n in (9, 10, 11)]),
    ],
)
def test_expand_nodes(nodes: str, hosts: list[str]) -> None:
    assert expand_nodes(nodes, "SLURM_STEP_NODELIST") == hosts


@pytest.mark.parametrize(
    "nodes",
    ["", ",", "a,", ",a", "a,,b", "n[", "n]", "n[]", "n[1", "n1]", "n[1-2", "n[3-1]", "n[1-]", "n[-1]", "n[a-b]",
    "n[1,]",
     "n[[1-2]]", "n[1[2]]", "n[1-99999999999]", "r[1-9999]n[1-9999]", "a b", "n[1-2-3]", "n[²]"],
)  # fmt: skip
def test_malformed_nodes_are_refused(nodes: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_JOB_NODELIST: .* is not legal"):
        expand_nodes(nodes, "SLURM_JOB_NODELIST")


def test_expand_tasks() -> None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    for tasks, counts in (("4", [4]), ("4(x2),3", [4, 4, 3]), ("1,2(x3),10(x2)", [1, 2, 2, 2, 10, 10])):
        assert expand_tasks(tasks, name) == counts
    for wrong in ("", "4(x2", "4(x0)", "x2", "4,", "-1", "4(2)", "1(x99999999)"):
        with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE: "):
            expand_tasks(wrong, name)


def test_a_task_of_a_step_becomes_a_rank() -> None:
    environment = dict(STEP)
    assert adopt(environment)
    assert environment == {**STEP, **OURS}
    assert not adopt(environment)  # it is one already


def test_all_tasks_get_different_ranks_and_one_master() -> None:
    counts, ranks, masters = [4, 3], [], set()
    for node, count in enumerate(counts):
        for local in range(count):
            number = sum(counts[:node]) + local
            environment = {**STEP, "SLURM_PROCID": str(number), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node)}
            assert adopt(environment)
            ranks.append(int(environment["RANK"]))
            masters.add((environment["MASTER_ADDR"], environment["MASTER_PORT"], environment["WORLD_SIZE"]))
            assert environment["LOCAL_WORLD_SIZE"] == str(count)
    assert ranks == list(range(7)) and len(masters) == 1


def test_older_variables_do() -> None:
    """Without those of the step."""
    old = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP_") or name == "SLURM_STEP_ID"}
    environment = {**old, "SLURM_TASKS_PER_NODE": "2(x2),3"}
    assert adopt(environment)
    assert (environment["LOCAL_WORLD_SIZE"], environment["MASTER_ADDR"], environment["WORLD_SIZE"]) == (
        "2",
        "node01",
        "7",
    )
    del old["SLURM_TASKS_PER_NODE"]
    environment = {**old, "SLURM_NTASKS": "9", "SLURM_NTASKS_PER_NODE": "3"}
    assert adopt(environment) and environment["LOCAL_WORLD_SIZE"] == "3"
    with pytest.raises(ConfigError, match="SLURM_NTASKS_PER_NODE: '3' does not fit 7 tasks"):
        adopt({**old, "SLURM_NTASKS_PER_NODE": "3"})


def test_one_node_needs_no_name() -> None:
    environment = {**STEP, "SLURM_STEP_NODELIST": "node02", "SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    assert adopt(environment)
    assert (environment["MASTER_ADDR"], environment["LOCAL_WORLD_SIZE"]) == ("127.0.0.1", "7")


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "/root"},
        JOB,  # salloc
        {
            **JOB,
            "SLURM_NTASKS": "24",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
        },  # the script of sbatch
        {
            **STEP,
            "SLURM_STEP_ID": str(0xFFFFFFFA),
            "SLURM_PROCID": "0",
        },  # the shell of salloc with use_interactive_step
        {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFB), "SLURM_PROCID": "0"},  # a batch script that knows its step
        {
            **STEP,
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_STEP_TASKS_PER_NODE": "1",
            "SLURM_PROCID": "0",
        },  # srun of one task
        {**STEP, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"},  # srun torchrun
    ],
)
def test_what_is_no_rank_is_left_alone(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert not adopt(environment)
    assert environment == before


def test_the_shell_of_a_pseudo_terminal() -> None:
    shell = {**STEP, "SLURM_PTY_PORT": "40123"}
    assert not adopt(shell, terminal=True)
    assert adopt(shell, terminal=False)  # another srun, typed there


def test_what_the_user_says_stays() -> None:
    environment = {**STEP, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500", "RANK": "5", "WORLD_SIZE": "7"}
    assert adopt(environment)
    assert environment == {**STEP, **OURS, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}
    with pytest.raises(ConfigError, match="WORLD_SIZE: '2' contradicts SLURM's; legal: 7"):
        adopt({**STEP, "WORLD_SIZE": "2"})


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("SLURM_PROCID", "x", "an integer from 0 to 6"),
        ("SLURM_PROCID", "7", "an integer from 0 to 6"),
        ("SLURM_LOCALID", "", "an integer from 0 to 2"),
        ("SLURM_LOCALID", "3", "an integer from 0 to 2"),
        ("SLURM_NODEID", "-1", "an integer of at least 0"),
        ("SLURM_STEP_NUM_TASKS", "seven", "an integer of at least 1"),
        ("SLURM_STEP_NUM_TASKS", "0", "an integer of at least 1"),
        ("SLURM_STEP_ID", "batch", "an integer of at least 0"),
        ("SLURM_JOB_ID", "815_3", "an integer of at least 0"),
        ("SLURM_STEP_TASKS_PER_NODE", "4;3", "tasks of each node"),
        ("SLURM_STEP_TASKS_PER_NODE", "4,4", "does not fit 7 tasks"),
        ("SLURM_STEP_TASKS_PER_NODE", "7", "does not fit SLURM_NODEID = 1"),
        ("SLURM_STEP_NODELIST", "node[02-", "hosts such as"),
    ],
)
def test_malformed_variables_are_named(name: str, value: str, legal: str) -> None:
    environment = {**STEP, name: value}
    before = dict(environment)
    with pytest.raises(ConfigError, match=f"environment variable {name}: .*{legal}"):
        adopt(environment)
    assert environment == before


def test_missing_variables_are_named() -> None:
    gone = {name: value for name, value in STEP.items() if "NODELIST" not in name}
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST is not set .*, nor SLURM_JOB_NODELIST"):
        adopt(gone)


def test_ports() -> None:
    """Jobs and steps that may share a node differ, and all stay in the range."""
    ports = [port_of(job, 0) for job in range(123456, 123456 + len(PORTS))]
    assert sorted(ports) == list(PORTS)
    near = {port_of(job, step) for job in range(1000, 1100) for step in range(20)}
    assert len(near) == 100 * 20
    assert port_of(4_000_000_000, 4_000_000_000) in PORTS
