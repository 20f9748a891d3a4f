"""Ranks whose devices work behind their hosts: slow ones are let be, one that stands still is found.

The ranks are processes, and a device is what completes events in their order: each so long after the one before, some
never.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from test_watch import Start, look, start  # noqa: F401 - a fixture

from shardwise.backend import Backend
from shardwise.launch.local import RunFailed, launch_local, run_folder
from shardwise.runtime.progress import record_path

DEVICE = """
from shardwise.core.instruction import Buffer
from shardwise.runtime.marks import Marks
import math
class Device:
    def __init__(self, seconds, last=math.inf):
        self.seconds, self.last, self.number, self.free = seconds, last, 0, 0.0
    def event(self):
        return Event(self)
class Event:
    def __init__(self, device):
        self.device = device
        self.record()
    def record(self):
        device = self.device
        device.number += 1
        device.free = max(device.free, time.monotonic()) + device.seconds
        self.due = device.free if device.number <= device.last else math.inf
    def query(self):
        return time.monotonic() >= self.due
PROGRAM = [
    Instruction(Op.GATHER, bucket=3),
    *(Instruction(Op.FORWARD, unit=u, microbatch=0, waits=(0,) if u == 4 else ()) for u in range(8)),
]
def run(device, steps, ahead=2, stop=None, first=0):
    progress._marks = Marks(device.event, progress._passed, poll=0.02)
    ends = []
    for step in range(first, first + steps):
        progress.begin(step)
        if stop == step: sleep()
        progress.batch(4)
        for at, one in enumerate(PROGRAM):
            progress.instruction(at, one)
        ends.append(device.event())
        while len(ends) > ahead and not ends[-1 - ahead].query():
            time.sleep(0.01)
    while not ends[-1].query():
        time.sleep(0.01)
"""
PER_STEP = 11  # events of a step: its begin, nine instructions, and the host's own


@pytest.mark.slow
def test_a_slow_device_does_not_hang(start: Start) -> None:  # noqa: F811
    """A step takes the device more than three times what a rank may be silent, and the host waits for it."""
    ranks = [f"{DEVICE}\nrun(Device(0.15), 100)"] * 2
    watcher = start(*ranks, timeout=0.45, start_timeout=5.0, asynchronous=True)
    assert look(watcher, 6) is None
    seen = watcher.watched[0].record
    assert (
        seen is not None and seen.step >= 2 and seen.behind and not seen.patient
    )  # past the first step, and under way


def test_a_device_that_stands_still_hangs(start: Start) -> None:  # noqa: F811
    """Both hosts have gone ahead; one device waits for the other, which is two instructions behind."""
    ranks = [f"{DEVICE}\nrun(Device(0.005, {3 * PER_STEP + last}), 100)" for last in (8, 6)]
    watcher = start(*ranks, timeout=0.7, asynchronous=True)
    found = look(watcher, 15)
    assert found is not None and found.culprits == (1,)
    assert "rank 1 hangs: device at FORWARD u3 m0 of step 3, host at FORWARD u7 m0 of step 5" in found.message, (
        found.message
    )
    assert "rank 0 device at FORWARD u5 m0 of step 3, host at" in found.message
    assert any(line.startswith("rank 0: device at FORWARD u5 m0 of step 3, host at") for line in watcher.report())


def test_what_the_device_waits_for_is_told(start: Start) -> None:  # noqa: F811
    watcher = start(f"{DEVICE}\nrun(Device(0.005, {2 * PER_STEP + 7}), 100)", timeout=0.5, asynchronous=True)
    found = look(watcher, 10)
    assert (
        found is not None and "device at FORWARD u4 m0, which waits for GATHER b3, of step 2, host at" in found.message
    )


def test_a_host_that_stands_still_is_the_culprit_not_the_devices_that_wait_for_it(start: Start) -> None:  # noqa: F811
    """Rank 1 hangs as it reads its batch; the device of rank 0 waits in the step that rank 1 has not begun."""
    ranks = (f"{DEVICE}\nrun(Device(0.005, {4 * PER_STEP + 6}), 100)", f"{DEVICE}\nrun(Device(0.005), 100, stop=4)")
    found = look(start(*ranks, timeout=0.6, asynchronous=True), 15)
    assert found is not None and found.culprits == (1,)
    assert "rank 1 hangs at reading the batch of step 4" in found.message and "rank 0 device at" in found.message


@pytest.mark.slow
def test_the_first_step_on_the_device_may_take_longer(start: Start) -> None:  # noqa: F811
    ranks = [f"{DEVICE}\nrun(Device(0.005, 4), 100)"] * 2
    watcher = start(*ranks, timeout=0.3, start_timeout=3.0, asynchronous=True)
    assert look(watcher, 2.0) is None
    found = look(watcher, 10)
    assert found is not None and "device at FORWARD u1 m0 of step 0" in found.message


@pytest.mark.slow
def test_a_busy_host_that_has_no_device_to_wait_for_is_at_work(start: Start) -> None:  # noqa: F811
    """Saving weights, on a rank whose device has nothing to do; where it has, a busy host may be waiting for it."""
    saving = f"{DEVICE}\nrun(Device(0.001), 2)\nprogress.phase('saving the weights', patient=False)"
    assert look(start(f"{saving}\nspin()", timeout=0.4, asynchronous=True), 2.5) is None


def test_a_busy_host_whose_device_stands_still_hangs(start: Start, tmp_path: Path) -> None:  # noqa: F811
    stuck = f"{DEVICE}\nrun(Device(0.001, {3 * PER_STEP + 1}), 6)"
    spinning = stuck.replace("time.sleep(0.01)", "pass")
    found = look(start(spinning, timeout=0.5, asynchronous=True), 12)
    assert found is not None and found.culprits == (0,)
    assert record_path(tmp_path, 0).exists()


@pytest.mark.slow
def test_a_device_may_wait_long_for_a_rank_that_gets_on(start: Start) -> None:  # noqa: F811
    """Rank 0 waits in a barrier of hosts, the device of rank 1 for rank 2, which is slow."""
    barrier = (
        f"{DEVICE}\nrun(Device(0.001), 6)\nprogress.phase('saving', patient=False); progress.wait('barrier'); sleep()"
    )
    others = (f"{DEVICE}\nrun(Device(0.005, {3 * PER_STEP + 8}), 100)", f"{DEVICE}\nrun(Device(0.15), 100)")
    watcher = start(barrier, *others, timeout=0.6, start_timeout=5.0, asynchronous=True)
    assert look(watcher, 4) is None
    assert watcher.watched[1].quiet > 1.2 and watcher.watched[0].quiet > 1.2


def test_a_rank_that_waits_on_its_host_names_the_device_that_stands_still(start: Start) -> None:  # noqa: F811
    """Rank 0 waits in a barrier of hosts; of the two others one is behind on its device, and the other's device waits
    for it.
    """
    barrier = (
        f"{DEVICE}\nrun(Device(0.001), 6)\nprogress.phase('saving', patient=False); progress.wait('barrier'); sleep()"
    )
    others = [f"{DEVICE}\nrun(Device(0.005, {3 * PER_STEP + last}), 100)" for last in (8, 6)]
    found = look(start(barrier, *others, timeout=0.6, asynchronous=True), 15)
    assert found is not None and found.culprits == (2,)
    assert (
        "rank 2 hangs: device at" in found.message
        and "rank 0 waits" in found.message
        and "rank 1 device at" in found.message
    )


CARD = """
import pickle, threading, torch
from pathlib import Path
from shardwise.backend import Backend
from shardwise.runtime.progress import Progress
rank = int(os.environ["RANK"])
device = Device(0.002, 2 * 11 + 6 + 2 * rank)  # both stand still in step 2, rank 0 before rank 1
Backend.event = lambda self, at, timing=False: device.event()
progress = Progress.from_environment()
progress.follow(torch.device("cuda"))

def recorder():
    entry = dict(process_group=("5", ""), collective_seq_id=12, p2p_seq_id=0, profiling_name="nccl:all_reduce",
        state="started",
                 input_sizes=[[8]], is_p2p=False, time_created_ns=1)
    dump = dict(pg_config={"5": dict(ranks="[0, 1]")}, entries=[entry] if rank else [])
    stem = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"]
    os.mkfifo(f"{stem}{rank}.pipe")
    pipe = os.open(f"{stem}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)
    while not os.read(pipe, 128):
        time.sleep(0.1)
    Path(os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + str(rank)).write_bytes(pickle.dumps(dump))

threading.Thread(target=recorder, daemon=True).start()
run(device, 100)
"""


@pytest.mark.slow
def test_a_run_ends_with_what_devices_and_recorders_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backend, "here", lambda: Backend("cuda"))
    monkeypatch.setattr(Backend, "built", lambda: Backend("cuda"))
    monkeypatch.setattr(Backend, "numa_options", lambda *_: None)
    script = tmp_path / "script.py"
    imports = (
        "import os, time\nfrom shardwise.core.instruction import Instruction, Op\nsleep = lambda: time.sleep(60)\n"
    )
    followed = DEVICE.replace("    progress._marks = Marks(device.event, progress._passed, poll=0.02)\n", "")
    script.write_text(imports + followed + CARD)
    command = ["-m", "shardwise.launch.rank", str(tmp_path / "run"), str(script)]
    with run_folder(tmp_path / "run"), pytest.raises(RunFailed) as failed:
        launch_local(command, 2, tmp_path / "run", threads=1, hang_timeout=2.0)
    failure = failed.value
    assert failure.cause == "hang" and failure.rank == 0
    assert "rank 0 hangs: device at FORWARD u3 m0 of step 2, host at FORWARD u7 m0 of step 4" in str(failure)
    assert any(
        "all_reduce 12 of group 5" in line and "rank 0 has not posted it, rank 1 started" in line
        for line in failure.details
    )
    assert any("script.py" in line for line in failure.details)  # the stack of its host
