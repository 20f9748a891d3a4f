"""Several hosts: two network namespaces under torchrun, and tasks with SLURM's variables.  Real processes, as a user
starts them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from shardwise.checkpoint import checkpoints
from shardwise.runtime.network import source_towards

TINY = [
    "model.width=16",
    "model.layers=1",
    "model.heads=2",
    "data.sequence_length=16",
    "data.batch_size=4",
    "train.devices=2",
]
STEPS = 5
TIMEOUT = 100.0  # seconds for a run
GRACE = 10.0  # seconds that the others have once one has failed
NETWORK = "10.213.7"  # of the two hosts; nobody else sees it
PORT = 29517
# GLOO_SOCKET_IFNAME is unset: the namespaces share /etc/hosts, where the host's name is the loopback, and shardwise has
# to find the interface by itself.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "GLOO_", "NCCL_"))}

Curve = list[tuple[int, float, float]]
"""Step, loss and gradient norm of each step."""

Start = tuple[list[str], dict[str, str]]
"""A command and its variables."""


@dataclass(frozen=True)
class Host:
    """A network namespace with one interface and an address of its own."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """``words``, run on this host."""
        return ["ip", "netns", "exec", self.name, *words]


@dataclass(frozen=True)
class Done:
    returncode: int
    output: str


def run_all(folder: Path, starts: Sequence[Start]) -> list[Done]:
    """Run commands at the same time, each with variables added to the environment; none of their processes outlives the
    call.
    """
    logs = [folder / f"output_{index}.txt" for index in range(len(starts))]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for (command, variables), log in zip(starts, logs, strict=True):
            with log.open("wb") as file:
                started.append(
                    subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env={**ENVIRONMENT, **variables})
                )
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline and any(process.poll() is None for process in started):
            if any(process.returncode for process in started):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(0.05)
    finally:
        for process in started:
            end(process)
    return [
        Done(process.returncode, log.read_text(errors="replace")) for process, log in zip(started, logs, strict=True)
    ]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, if it still runs, and all that it has started."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    for one in family:  # torchrun's workers have sessions of their own
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    process.kill()
    process.wait()
    psutil.wait_procs(family, timeout=GRACE)


def train(text: str, folder: Path) -> list[str]:
    """The arguments of ``shardwise`` to train in a folder."""
    return ["train", *TINY, text, f"train.steps={STEPS}", f"train.run_dir={folder}", "--json"]


def check(done: Sequence[Done], folder: Path, local: Curve, communicator: str) -> None:
    """All ended well, and what rank 0 has written is what two local ranks write."""
    assert [one.returncode for one in done] == [0] * len(done), "\n".join(one.output for one in done)
    assert [one.output.count('"loss_last"') for one in done] == [
        1,
        *[0] * (len(done) - 1),
    ]  # only rank 0 tells the result
    assert json.loads((folder / "about.json").read_text())["communicator"] == communicator
    found = curve(folder)
    assert [step for step, *_ in found] == list(range(STEPS))
    for ours, theirs in zip(found, local, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert (folder / "weights.safetensors").exists()


def curve(folder: Path) -> Curve:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 40)
    return f"data.source={path}"


@pytest.fixture(scope="module")
def local(text: str, tmp_path_factory: pytest.TempPathFactory) -> Curve:
    """The curve of two local ranks, which communicate through shared memory."""
    folder = tmp_path_factory.mktemp("local")
    (done,) = run_all(folder, [([sys.executable, "-m", "shardwise", *train(text, folder / "run")], {})])
    assert done.returncode == 0, done.output
    return curve(folder / "run")


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with a cable between them; an interface is called as its host is."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("two hosts need root and the command ip")
    a, b = (Host(f"sw{letter}{os.getpid()}", f"{NETWORK}.{number}") for number, letter in enumerate("ab", 1))
    try:
        for host in (a, b):
            made = ip(f"netns add {host.name}")
            if made.returncode:
                pytest.skip(f"two hosts need network namespaces: {made.stderr.strip()}")
        commands = [f"link add {a.name} netns {a.name} type veth peer name {b.name} netns {b.name}"]
        for host in (a, b):
            commands += [f"addr add {host.address}/24 dev {host.name}", "link set lo up", f"link set {host.name} up"]
            commands[-3:] = [f"-n {host.name} {command}" for command in commands[-3:]]
        for command in commands:
            made = ip(command)
            if made.returncode:
                pytest.skip(f"two hosts need virtual cables: ip {command}: {made.stderr.strip()}")
        yield a, b
    finally:
        for host in (a, b):  # the cable goes with them
            ip(f"netns delete {host.name}")


def ip(arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments.split()], capture_output=True, text=True, check=False)


def torchrun(hosts: tuple[Host, Host], folders: Sequence[Path], text: str, tmp_path: Path, port: int) -> list[Done]:
    """One rank on each host, each with a run folder."""
    starts: list[Start] = []
    for number, (host, folder) in enumerate(zip(hosts, folders, strict=True)):
        command = [
            "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{hosts[0].address}:{port}", "--rdzv-id", f"{tmp_path.name}-{port}",
            "--rdzv-conf", f"is_host={1 - number}", "--local-addr", host.address, "-m", "shardwise",
        ]  # fmt: skip
        starts.append((host.command(sys.executable, *command, *train(text, folder)), {}))
    return run_all(tmp_path, starts)


@pytest.mark.slow
def test_torchrun_on_two_hosts(hosts: tuple[Host, Host], text: str, local: Curve, tmp_path: Path) -> None:
    done = torchrun(hosts, [tmp_path / "run"] * 2, text, tmp_path, PORT)
    done.sort(key=lambda one: '"loss_last"' not in one.output)  # torchrun may call either host the first
    check(done, tmp_path / "run", local, "DistributedCommunicator")
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step_00000004", "step_00000005"]


@pytest.mark.slow
def test_hosts_must_share_the_folder(hosts: tuple[Host, Host], text: str, tmp_path: Path) -> None:
    """No checkpoint could be completed: said before the first step, not after a week."""
    done = torchrun(hosts, [tmp_path / host.name / "run" for host in hosts], text, tmp_path, PORT + 1)
    assert [one.returncode for one in done] == [1, 1]
    assert any("rank 1 does not see what rank 0 writes there; legal: a folder" in one.output for one in done)
    assert not list(tmp_path.rglob("metrics.jsonl"))


FIND = """
import json, sys
from torch.distributed import FileStore
from shardwise.runtime.network import choose_interfaces, source_towards
from shardwise.runtime.rendezvous import Rendezvous
rank, store, peer, master = int(sys.argv[1]), *sys.argv[2:]
environment = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": master}
choose_interfaces(Rendezvous(FileStore(store, 2), rank, 2), environment)
found = [environment.get("GLOO_SOCKET_IFNAME"), environment.get("NCCL_SOCKET_IFNAME")]
print(json.dumps([source_towards(peer), source_towards(master), source_towards("198.51.100.1"), *found]))
"""


def test_interfaces_between_hosts(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    """Also where the first host knows its own name as the loopback."""
    a, b = hosts
    places = [(a, b.address, "127.0.0.1"), (b, a.address, a.address)]
    starts: list[Start] = [
        (host.command(sys.executable, "-c", FIND, str(rank), str(tmp_path / "store"), peer, master), {})
        for rank, (host, peer, master) in enumerate(places)
    ]
    done = run_all(tmp_path, starts)
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.output for one in done)
    found = [json.loads(one.output.splitlines()[-1]) for one in done]
    assert found == [
        [a.address, None, None, a.name, f"={a.name}"], [b.address, b.address, None, b.name, f"={b.name}"],
    ]  # fmt: skip


def test_the_loopback_is_no_way_to_others() -> None:
    assert source_towards("127.0.0.1") is source_towards("localhost") is source_towards("no-such-host.invalid") is None


STEP = {"SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "node07", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}


def slurm(command: Sequence[str], step: Mapping[str, str], tasks: Sequence[Mapping[str, str]]) -> list[Start]:
    """A command as the tasks of a step; the job is our own, so that its port is too."""
    common = {**step, "SLURM_JOB_ID": str(os.getpid()), "SLURM_NTASKS": str(len(tasks))}
    starts = [{**common, "SLURM_PROCID": str(number), **task} for number, task in enumerate(tasks)]
    return [([sys.executable, "-m", "shardwise", *command], variables) for variables in starts]


TWO_NODES = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node[01-02]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
NODES = [{"SLURM_NODEID": str(number), "SLURM_LOCALID": "0", "MASTER_ADDR": "127.0.0.1"} for number in range(2)]


@pytest.mark.slow
def test_slurm_tasks_on_two_nodes(text: str, local: Curve, tmp_path: Path) -> None:
    """Which share a file system."""
    done = run_all(tmp_path, slurm(train(text, tmp_path / "run"), TWO_NODES, NODES))
    check(done, tmp_path / "run", local, "DistributedCommunicator")


@pytest.mark.full  # half a minute, of runs like those above
def test_a_deterministic_run_on_two_nodes_repeats(text: str, tmp_path: Path) -> None:
    """Over gloo: losses, norms and weights, bit for bit."""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        done = run_all(tmp_path, slurm([*train(text, folder), "train.deterministic=true"], TWO_NODES, NODES))
        assert [one.returncode for one in done] == [0, 0], "\n".join(one.output for one in done)
        about = json.loads((folder / "about.json").read_text())
        assert (about["communicator"], about["deterministic"]) == ("DistributedCommunicator", {})
    assert len(curve(folders[0])) == STEPS and curve(folders[0]) == curve(folders[1])
    one, two = (load_file(folder / "weights.safetensors") for folder in folders)
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.slow
def test_slurm_tasks_on_one_node(text: str, local: Curve, tmp_path: Path) -> None:
    done = run_all(
        tmp_path, slurm(train(text, tmp_path / "run"), STEP, [{"SLURM_LOCALID": str(number)} for number in range(2)])
    )
    check(done, tmp_path / "run", local, "SharedMemoryCommunicator")
    assert curve(tmp_path / "run") == local


def test_slurm_tasks_run_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\nprint([os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')], sys.argv, sys.path[0])\n"
    )
    done = run_all(
        tmp_path, slurm(["launch", str(script), "--size", "3"], STEP, [{"SLURM_LOCALID": str(n)} for n in range(2)])
    )
    expected = [f"['{rank}', '2', '{rank}'] {[str(script), '--size', '3']} {tmp_path}\n" for rank in range(2)]
    assert [(one.returncode, one.output) for one in done] == [(0, text) for text in expected]
