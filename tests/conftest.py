"""Shared by all tests: one thread for each rank, no network, and no GPU but for the tests that are marked ``gpu``.

Those run by themselves, with ``pytest -m gpu tests/device`` (``make test-gpu``), in one process.  All others behave
everywhere as on a machine without a GPU: what hides it is in the environment, so that workers and processes that tests
start do not see it either.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / ".pytest_cache" / "xdg")  # tokens; not the user's
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("SHARDWISE_CAPTURES", "off")  # a test captures what it tests, not what an earlier run has left
# A rank of several threads, started by a test while other tests run, would spend most of its time spinning: each op
# waits for a thread that has no core.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parent))

import forked  # noqa: E402 - they lie beside this file
from covering import few  # noqa: E402

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ONEAPI_DEVICE_SELECTOR": "*:cpu"}
"""Hides the devices of CUDA, ROCm and XPU.  A Mac's cannot be hidden: tests are not run there."""
GPU_TESTS = Path(__file__).parent / "device"


def _on_gpu(config: pytest.Config) -> bool:
    """Whether the tests that need a GPU were asked for, and no others."""
    return config.option.markexpr.strip() == "gpu"


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported; torch looks at its devices when it is first asked for one."""
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    ):  # as shells let what they start in the background: not what is tested
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _on_gpu(config):
        os.environ.update(HIDDEN)
        forked.install(fork=not os.environ.get("SHARDWISE_FRESH"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    _mark_all_but_few(items)
    yield  # -m takes its choice
    _choose_by_gpu(config, items)


def _mark_all_but_few(items: list[pytest.Item]) -> None:
    """``few(n)``: of a test's cases those that are not chosen are ``full``; of those that are not,
    ``quick(n)`` makes all but n ``slow``."""
    for name, others in (("few", "full"), ("quick", "slow")):
        tests: dict[tuple[Path, str], list[pytest.Function]] = {}
        for item in items:
            marked = isinstance(item, pytest.Function) and item.get_closest_marker(name)
            if marked and not item.get_closest_marker("full"):
                tests.setdefault((item.path, item.originalname), []).append(item)
        for cases in tests.values():
            mark = cases[0].get_closest_marker(name)
            assert mark is not None
            chosen = few([case.callspec.params for case in cases], *mark.args)
            for i, case in enumerate(cases):
                if i not in chosen:
                    case.add_marker(others)


def _choose_by_gpu(config: pytest.Config, items: list[pytest.Item]) -> None:
    needing = [item for item in items if item.get_closest_marker("gpu")]
    for item in needing:
        if GPU_TESTS not in item.path.parents:
            raise pytest.UsageError(
                f"{item.nodeid}: a test that needs a GPU belongs into {GPU_TESTS}, which `make test-gpu` runs"
            )
    if not _on_gpu(config):
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
    elif not needing:
        return
    elif not _found():
        pytest.exit(f"no GPU here that torch can use: {len(needing)} tests not run", returncode=1)


def _found() -> bool:
    import torch

    return torch.accelerator.is_available()


@pytest.fixture(autouse=True, scope="session")
def _shared_captures() -> Iterator[None]:
    """A model is captured once in a process of tests (see :mod:`captures`)."""
    import captures

    with captures.shared():
        yield


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Begin with one thread and exact products, whatever a test before has left."""
    import torch

    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def _one_core() -> Iterator[None]:
    """Keep a test's own threads on one core, a core of its own for each worker; processes that it starts have them all.

    Ranks that are threads take turns in Python.  On several cores each op, which lets another thread in, costs them a
    switch: 4 times the CPU time for 8 ranks where nothing else runs.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw"))
    with forked.on_cores({forked.CORES[worker % len(forked.CORES)]} if forked.CORES else set()):
        yield


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> Iterator[None]:
    """What tests start is forked with everything imported (see :mod:`forked`), except where marked ``fresh``."""
    if request.node.get_closest_marker("fresh") is None:
        yield
    else:
        with forked.fresh():
            yield
