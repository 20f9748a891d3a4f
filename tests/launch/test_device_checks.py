"""Devices that cannot be trained on are refused, or warned of, before anything starts.  Drivers are scripts on the
PATH, torch's facts are set.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from shardwise import drivers
from shardwise.backend import Backend
from shardwise.cli import train as train_command
from shardwise.cli.main import app
from shardwise.config import Hardware, load_config
from shardwise.core.devices import model_of, runs_on
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.estimate.devices import Device
from shardwise.launch import devices, training
from shardwise.launch.devices import (
    Card,
    cards_of,
    check_free,
    check_ranks,
    check_torch,
    explain_out_of_memory,
    mixed,
    occupied,
)
from shardwise.launch.ready import Surroundings
from shardwise.runtime import connect as connecting
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import connect
from shardwise.runtime.distributed import DistributedCommunicator
from shardwise.runtime.progress import Progress, record_path
from shardwise.runtime.threads import ThreadCommunicator, run_ranks

GIB = 1 << 30

INDEX = "--index-url https://download.pytorch.org/whl"
Smi = Callable[..., None]


def tool(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Puts on the PATH an nvidia-smi that knows these cards, a driver that runs this CUDA, and these processes."""

    def put(
        cards: str = "NVIDIA H200, 570.86.15, 9.0", runs: str = "12.8", processes: str = "", body: str | None = None
    ) -> None:
        answers = f"""case "$*" in
        *compute_cap*) printf '{cards}\\n' ;;
        *query-compute-apps*) printf '{processes}\\n' ;;
        "") echo '| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: {runs}  |' ;;
        *) exit 2 ;; esac"""
        tool(tmp_path / "bin", "nvidia-smi", answers if body is None else body)

    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return put


def torch_is(
    monkeypatch: pytest.MonkeyPatch, built: str, here: str = "cpu", toolkit: str | None = None, cards: int = 0
) -> None:
    """What torch is built for, and what it can use."""
    monkeypatch.setattr(Backend, "built", staticmethod(lambda: Backend(built)))
    monkeypatch.setattr(Backend, "here", staticmethod(lambda: Backend(here)))
    monkeypatch.setattr(Backend, "count", property(lambda self: cards if self.asynchronous else 1))
    monkeypatch.setattr(torch.version, "cuda", toolkit)
    monkeypatch.setattr(torch.version, "hip", None)


# ---- a torch for CPUs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "runs", "build"),
    [("NVIDIA H200, 570.86.15, 9.0", "12.8", "cu126"), ("NVIDIA B200, 580.65.06, 10.0", "13.0", "cu130"),
     ("Tesla V100, 580.65.06, 7.0", "13.0", "cu126"),
     ("Tesla V100, 470.57.02, 7.0", "11.4", None), ("NVIDIA A100, 535.54.03, 8.0", "12.2", "cu126")],
)  # fmt: skip
def test_a_torch_for_cpus_is_warned_of(
    card: str, runs: str, build: str | None, smi: Smi, monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(f"{card}\\n{card}", runs)
    torch_is(monkeypatch, "cpu")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    (warning,) = check_torch({})
    name = card.partition(",")[0]
    assert warning.startswith(
        f"this machine has 2 x {name}, but torch 2.13.0+cpu is a build for CPUs, so CPUs compute; "
    )
    if build is None:
        assert warning.endswith("update the driver (470.57.02), which is too old for it")
    else:
        assert f"`pip install torch==2.13.0+{build} {INDEX}/{build}`" in warning


def test_no_build_for_all_cards_is_not_the_driver_s_fault(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi("Tesla V100, 580.65.06, 7.0\\nNVIDIA B200, 580.65.06, 10.0", "13.0")
    torch_is(monkeypatch, "cpu")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    (warning,) = check_torch({})
    assert (
        "no build of torch 2.13.0+cpu has kernels for all of them; hide those of one kind with CUDA_VISIBLE_DEVICES"
        in warning
    )
    assert "driver" not in warning
    smi("Tesla K80, 470.57.02, 3.7", "12.0")
    assert "no build of torch" in check_torch({})[0]


def test_nobody_warns_where_cards_are_hidden_used_or_absent(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_is(monkeypatch, "cpu")
    smi(body="exit 9")
    assert check_torch({}) == [] or Path("/proc/driver/nvidia").exists()
    smi()
    assert check_torch({"CUDA_VISIBLE_DEVICES": ""}) == check_torch({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    assert check_torch({"CUDA_VISIBLE_DEVICES": "1,0"})
    monkeypatch.setattr(drivers, "found", lambda *_: pytest.fail("a tool is asked though torch has a device"))
    torch_is(monkeypatch, "cuda", "cuda", "12.8", cards=1)
    assert check_torch({}) == []


def test_a_run_says_it_once_and_goes_on(smi: Smi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[bool] = []
    smi()
    torch_is(monkeypatch, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def begin(*_: Any, **__: Any) -> None:
        started.append(True)
        raise ConfigError("enough")

    monkeypatch.setattr(train_command, "_train_local", begin)
    done = CliRunner().invoke(
        app, ["train", f"train.run_dir={tmp_path / 'run'}", "train.devices=1", "data.sequence_length=16"]
    )
    assert started == [True] and done.stdout.count("note: this machine has NVIDIA H200, but torch") == 1, done.output
    assert INDEX in done.stdout  # the command stands on one line


@pytest.mark.slow
def test_a_driver_that_hangs_says_nothing(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(body="sleep 20 & sleep 21")
    monkeypatch.setattr(drivers, "PATIENCE", 0.2)
    before = {one.pid for one in psutil.process_iter()}
    assert drivers.said("nvidia-smi") == "" == drivers.said("no-such-tool")
    started = [one for one in psutil.process_iter(["name"]) if one.pid not in before and one.info["name"] == "sleep"]
    assert psutil.wait_procs(started, timeout=5)[1] == []  # nor does what it has started stay


def test_cards_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's module; but a container sees that of its host, and has no card where it has no device files."""
    monkeypatch.setenv("PATH", str(tmp_path))
    card = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA L4\nIRQ:   100\n")
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu\n"
    )
    assert drivers.found({}, tmp_path) is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    found = drivers.found({}, tmp_path)
    assert found == drivers.Driver("NVIDIA", ("NVIDIA L4",), "550.54.14")
    assert found.build("2.13.0") == "cu130" and found.build("2.11.0") == "cu130"


def test_cards_of_amd_and_intel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}/bin")
    (tmp_path / "sys/class/drm/renderD128").mkdir(parents=True)
    card = tmp_path / "sys/pci/0000:03:00.0"
    card.mkdir(parents=True)
    (card / "vendor").write_text("0x8086\n")
    (tmp_path / "sys/class/drm/renderD128/device").symlink_to(card)
    assert drivers.intel(tmp_path) is None  # a container sees its host's /sys
    (tmp_path / "dev/dri/renderD128").mkdir(parents=True)
    intel = drivers.intel(tmp_path)
    assert intel is not None and intel.build("2.13.0") == "xpu" and intel.hidden == 'ONEAPI_DEVICE_SELECTOR="*:cpu"'
    assert drivers.hides("*:cpu") and not drivers.hides("level_zero:gpu") and not drivers.hides(None)
    tool(tmp_path / "bin", "rocm-smi", "echo 'GPU[0]\t\t: Card Series: \t\tAMD Instinct MI300X'")
    amd = drivers.found({"CUDA_VISIBLE_DEVICES": "0"}, tmp_path)
    assert amd is not None and (amd.maker, amd.cards, amd.build("2.13.0")) == (
        "AMD",
        ("AMD Instinct MI300X",),
        "rocm7.2",
    )
    assert drivers.parse_amd("        MARKET_NAME: AMD Instinct MI250X\n") == ("AMD Instinct MI250X",)


# ---- a torch for another CUDA ----------------------------------------------------------------------------------------


def test_a_driver_older_than_torch_s_cuda_is_refused(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(runs="12.4")
    torch_is(monkeypatch, "cuda", toolkit="13.0")
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    with pytest.raises(ConfigError) as caught:
        check_torch({})
    assert str(caught.value) == (
        "torch 2.11.0+cu130 needs CUDA 13.0, but the driver (570.86.15) of NVIDIA H200 supports up to CUDA 12.4; "
        "update the driver "
        f"(570.86.15) to one for CUDA 13.0, or run `pip install torch==2.11.0+cu126 {INDEX}/cu126`, or set "
        'CUDA_VISIBLE_DEVICES="" to '
        "train on CPUs"
    )
    assert check_torch({"CUDA_VISIBLE_DEVICES": ""}) == []  # the user says so


def test_any_other_reason_is_told_in_torch_s_words(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(runs="13.0")
    torch_is(monkeypatch, "cuda", toolkit="12.6")
    monkeypatch.setattr(Backend, "objection", lambda self: "CUDA unknown error")
    with pytest.raises(
        ConfigError, match=r"built for NVIDIA H200, but cannot use it: CUDA unknown error; mend the driver"
    ):
        check_torch({})


def test_nothing_is_made_before_it_is_refused(smi: Smi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi(runs="12.4")
    torch_is(monkeypatch, "cuda", toolkit="13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for command in (["train", f"train.run_dir={tmp_path / 'run'}"], ["verify", "--device", "cuda"]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and "needs CUDA 13.0" in done.stderr and not (tmp_path / "run").exists()


def test_verify_on_a_device_that_torch_is_not_built_for(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi()
    torch_is(monkeypatch, "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    done = CliRunner().invoke(app, ["verify", "--device", "cuda"])
    assert done.exit_code == 2 and "legal on this machine: cpu; this machine has NVIDIA H200, but torch" in done.stderr


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [((8, 6), "sm_80", True), ((9, 0), "sm_80", False), ((8, 0), "sm_86", False), ((12, 0), "sm_90 compute_90", True),
     ((10, 0), "sm_90a", False), ((9, 0), "sm_90a", True), ((10, 3), "sm_100f", True), ((7, 0), "sm_75 sm_80", False),
     ((9, 0), "gfx942", True), ((10, 3), "compute_100f", True), ((12, 0), "compute_100f", False),
     ((12, 0), "compute_100", True), ((10, 0), "compute_100a", True), ((10, 3), "compute_100a", False)],
)  # fmt: skip
def test_which_kernels_run_on_which_card(capability: tuple[int, int], kernels: str, runs: bool) -> None:
    assert runs_on(capability, kernels.split()) is runs


def test_a_card_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_is(monkeypatch, "cuda", "cuda", "13.0", cards=2)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 0)][index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla V100")
    check_ranks(1, 1)  # the first alone
    with pytest.raises(
        ConfigError,
        match=r"no kernels for Tesla V100, whose compute capability is 7.0: it has those of sm_75 sm_90; run `pip "
        r".*cu126`",
    ):
        check_ranks(2, 2)


# ---- ranks and cards -------------------------------------------------------------------------------------------------


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_is(monkeypatch, "cuda", "cuda", "12.8", cards=2)
    monkeypatch.setattr(torch.cuda, "get_arch_list", list)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))


@pytest.mark.usefixtures("two_cards")
def test_more_ranks_than_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    check_ranks(2, 2)
    check_ranks(16, 2)
    with pytest.raises(
        ConfigError, match=r"4 ranks on this host and 2 devices .* at most 2 here, and more on other hosts; .*gloo"
    ):
        check_ranks(4, 4)
    with pytest.raises(
        ConfigError, match=r"train.devices = 4 .*at most 2, the GPUs of this machine. More ranks take more hosts .*gloo"
    ):
        load_config(None, ["train.devices=4"], hardware=Hardware(cores=8, gpus=2))


@pytest.mark.parametrize(("uuids", "said"), [
    (("GPU-1", "GPU-2", "GPU-3"), None), (("", "", ""), None),  # nobody says which they are
    (("GPU-1", "GPU-1", "GPU-1"),
    "3 ranks have 1 cards, for ranks 0, 1, 2 have the same, GPU-1; legal: one rank a card"),
    (("GPU-1", "", "GPU-1"), "3 ranks have 2 cards, for ranks 0, 2 have the same, GPU-1; legal: one rank a card"),
])  # fmt: skip
def test_ranks_that_a_launcher_gave_one_card(
    monkeypatch: pytest.MonkeyPatch, uuids: tuple[str, ...], said: str | None
) -> None:
    """Any script's ranks are told so when they connect, all of them, and leave what they joined."""
    local, closed = threading.local(), list[int]()
    monkeypatch.setattr(Backend, "uuid", lambda self, device: uuids[local.rank])

    class Joined(SimpleNamespace):
        def close(self) -> None:
            closed.append(self.rank)

    def rank(comm: ThreadCommunicator) -> Any:
        local.rank, hosts[comm.rank] = comm.rank, comm
        return connect(comm.mesh, torch.device("cuda", 0))

    def join(mesh: Mesh, device: torch.device, *rest: Any) -> Joined:
        return Joined(mesh=mesh, rank=local.rank, device=device, host=hosts[local.rank])

    hosts: dict[int, ThreadCommunicator] = {}
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(connecting, "check_possible", lambda *rest: None)
    monkeypatch.setattr(DistributedCommunicator, "from_environment", join)

    def ranks() -> list[Any]:
        return run_ranks(Mesh.of(dp=3), rank, timeout=20)

    if said is None:
        assert [one.rank for one in ranks()] == [0, 1, 2] and not closed
        return
    with pytest.raises(ConfigError, match=said):
        ranks()
    assert 0 < len(closed) <= 3


@pytest.mark.usefixtures("two_cards")
def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name == "gloo")
    check_ranks(1, 1)
    with pytest.raises(
        ConfigError,
        match=r'built without "nccl", by which 2 ranks .*\(those for Linux have\), or use one rank; .*"gloo"',
    ):
        check_ranks(2, 2)
    done = CliRunner().invoke(app, ["train", "train.devices=2"])
    assert done.exit_code == 2 and "built without" in done.stderr
    torch_is(monkeypatch, "npu", "npu", cards=2)
    monkeypatch.setattr(Backend, "transport", None)
    with pytest.raises(ConfigError, match="nothing by which 2 ranks on devices of type npu communicate; legal: 1"):
        check_ranks(2, 2)


def test_mixed_cards_are_noted() -> None:
    small, large = Card("NVIDIA A100", 40 * GIB, 40 * GIB), Card("NVIDIA H100", 80 * GIB, 80 * GIB)
    assert mixed([]) is mixed([small, small]) is None
    assert mixed([small, large, large, small]) == (
        "devices: NVIDIA A100 (40.0 GiB) on ranks 0, 3, NVIDIA H100 (80.0 GiB) on ranks 1-2: the slowest sets the pace "
        "of every step, and the "
        "plan is made for the least memory, 40.0 GiB"
    )


def test_ranks_tell_each_other_of_their_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    frees = itertools.count()
    monkeypatch.setattr(devices, "Backend", SimpleNamespace(of=lambda device: SimpleNamespace(asynchronous=True)))
    monkeypatch.setattr(Card, "of", staticmethod(lambda device: Card("NVIDIA É" * 9, 80 * GIB, next(frees))))
    found = run_ranks(Mesh.of(dp=3), cards_of, timeout=20)
    assert found[0] == found[1] == found[2] and {one.free for one in found[0]} == {0, 1, 2}
    assert {(one.name, one.total) for one in found[0]} == {("NVIDIA É" * 9, 80 * GIB)}


def test_the_slowest_card_is_planned_for() -> None:
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "Unknown 1"]
    fast, slow, unknown = (Card(name, GIB, GIB) for name in names)
    assert (
        training._slowest([fast, slow, fast]) == model_of(names[1]) != training._slowest([fast]) == model_of(names[0])
    )
    assert training._slowest([fast, unknown]) is training._slowest([]) is None


def test_a_card_is_as_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "here", lambda device: Device("L4" * 99, "gpu", 100, 90))
    assert Card.of(torch.device("cpu")) == (card := Card("L4" * 40, 100, 90)) and card.shared
    assert not Card("L4", 100, 96).shared


# ---- a card that others fill -----------------------------------------------------------------------------------------

PROCESSES = (
    "4242, /usr/bin/python3, 70000, GPU-AB-1\\n17, own, 3000, GPU-AB-1\\n9, [Not Found], [N/A], GPU-AB-1\\n5, "
    "other, 9, GPU-AB-2"
)


@dataclass(frozen=True)
class Train:
    memory_gib: float | None = 70


@dataclass(frozen=True)
class Given:
    train: Train = Train()


@dataclass(frozen=True)
class Predicted:
    """Of a forecast what is asked of it."""

    worst: Any
    beside: Any
    config: Given = Given()

    def nearest(self) -> Any:
        return self.config.train.memory_gib

    def advice(self, fit: Any) -> str:
        return f"what fits, and memory_gib of {fit}"


def test_who_holds_a_card_is_named(smi: Smi) -> None:
    smi(processes=PROCESSES)
    assert occupied(3 * GIB, 80 * GIB, "NVIDIA H100", uuid="ab-1", own={17}) == (
        "3.0 GiB of the 80.0 GiB of NVIDIA H100 are free: process 4242 (python3) holds 68.4 GiB, process 9 ([Not "
        "Found]) holds some"
    )
    assert "the driver does not say who" in occupied(3 * GIB, 80 * GIB, "NVIDIA H100", uuid="cd")
    assert os.getpid() in devices.family()


def test_a_card_that_others_fill_is_refused_on_all_ranks(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(processes=PROCESSES)
    monkeypatch.setattr(Backend, "uuid", lambda self, device: "ab-1")
    full = [Card("NVIDIA H100", 80 * GIB, 80 * GIB), Card("NVIDIA H100", 80 * GIB, 10 * GIB)]

    def needs(gib: int, limit: float | None = None) -> Any:
        return Predicted(SimpleNamespace(peak_bytes=(gib - 1) * GIB), {"context": GIB}, Given(Train(limit)))

    def rank(comm: Communicator) -> str:
        check_free(comm, full, needs(9))  # it fits beside them
        check_free(comm, full[:1] * 2, needs(90))  # too much for any card: not for others to mend
        check_free(comm, full, needs(11, limit=10.0))  # who sets a limit for tensors knows what is beside them
        with pytest.raises(ConfigError) as caught:
            check_free(comm, full, needs(20))
        return str(caught.value)

    first, second = run_ranks(Mesh.of(dp=2), rank, timeout=20)
    assert first == second and first.startswith(
        "memory: rank 1 needs 20.0 GiB, 1.0 GiB of it beside tensors, but only 10.0 GiB of the 80.0 GiB of NVIDIA H100 "
        "are free: process 4242 (python3) holds 68.4 GiB, "
    )
    assert first.endswith("or change the plan: what fits, and memory_gib of None")


def test_a_card_so_full_that_nothing_starts_is_refused_by_name(
    smi: Smi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA's own words, as its first use of such a card raises them."""
    smi(processes=PROCESSES)
    torch_is(monkeypatch, "cuda", "cuda", "12.8", cards=1)
    monkeypatch.setattr(Backend, "uuid", lambda self, device: "ab-1")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA error: out of memory")

    monkeypatch.setattr(Backend, "select", full)
    config = load_config(None, [f"train.run_dir={tmp_path}", "train.devices=1"], hardware=Hardware(cores=1))
    with pytest.raises(ConfigError) as caught:
        training.train(config, Surroundings(Progress(record_path(tmp_path, 0))))
    assert str(caught.value) == (
        "memory: device cuda:0 has no room even to start: process 4242 (python3) holds 68.4 GiB, process 17 (own) "
        "holds 2.9 GiB, "
        "process 9 ([Not Found]) holds some; end what holds it, or let CUDA_VISIBLE_DEVICES choose other cards"
    )
    monkeypatch.setattr(Backend, "uuid", full)  # the driver may not answer for it either
    with (
        pytest.raises(ConfigError, match="the driver does not say who holds it"),
        explain_out_of_memory(torch.device("cuda", 0)),
    ):
        full()
    with pytest.raises(RuntimeError, match="anything else"), explain_out_of_memory(torch.device("cuda", 0)):
        raise RuntimeError("anything else")


@pytest.fixture
def precision() -> Iterator[None]:
    """Training sets that of the process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.slow
@pytest.mark.usefixtures("precision")
def test_a_run_asks_before_its_engine_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One rank of a CPU, which takes these for the cards of all."""
    (tmp_path / "text.txt").write_bytes(bytes(range(1, 256)) * 8)
    config = load_config(
        None,
        [f"train.run_dir={tmp_path}", "train.devices=1", "train.steps=1", "model.width=16", "model.layers=1",
        "model.heads=1",
               "data.sequence_length=16", "data.batch_size=2", f"data.source={tmp_path / 'text.txt'}"],
               hardware=Hardware(cores=1),
    )  # fmt: skip
    side = Surroundings(Progress(record_path(tmp_path, 0)))
    monkeypatch.setattr(training, "cards_of", lambda comm: [Card("NVIDIA L4", GIB, 1000)])
    with pytest.raises(
        ConfigError, match="memory: rank 0 needs .*, but only 1000 B of the 1.0 GiB of NVIDIA L4 are free: others hold"
    ):
        training.train(config, side)
    assert not (tmp_path / "plan.toml").exists()
    monkeypatch.setattr(
        training, "cards_of", lambda comm: [Card("NVIDIA L4", GIB, GIB), Card("NVIDIA H100", 2 * GIB, 2 * GIB)]
    )
    training.train(config, side)
    notes = json.loads((tmp_path / "about.json").read_text())["notes"]
    assert any(
        note.startswith("devices: NVIDIA L4 (1.0 GiB) on rank 0, NVIDIA H100 (2.0 GiB) on rank 1: ") for note in notes
    )


def test_what_torch_says_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Backend("cuda").objection() and not Backend("cpu").objection()
    given = SimpleNamespace(uuid="d1a2-00")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: given)
    monkeypatch.setattr(torch.version, "hip", None)
    assert Backend("cuda").uuid(torch.device("cuda:0")) == "d1a2-00"
    given.uuid = "0000-00"
    assert Backend("cuda").uuid(torch.device("cuda:0")) == Backend("xpu").uuid(torch.device("xpu:0")) == ""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert Backend("cuda").toolkit == (12, 8) and Backend("xpu").toolkit is None
