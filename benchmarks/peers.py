"""The peers of shardwise's ZeRO, each used as it is meant to be: FSDP2, ZeroRedundancyOptimizer, DeepSpeed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed import init_process_group
from torch.distributed.device_mesh import DeviceMesh

from alternate import Step
from task import Task, fast_matmul, fused_adamw, loop

DEEPSPEED = "0.19.8"
CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"


def fsdp2(rank: int, ranks: int, *, task: Task, reshard: bool) -> Step:
    """Make a step with ``fully_shard`` on each block and the root; with ``reshard`` blocks are freed after forward and
    gathered again for backward.

    The root (embedding and head) stays gathered, as is torch's default.
    """
    from torch.distributed.device_mesh import init_device_mesh

    fast_matmul(task)
    if task.device == "cuda":
        init_process_group("nccl", device_id=task.place)
    else:
        init_process_group("gloo")
    model = task.model().to(task.place)
    shard_fully(model, init_device_mesh(task.device, (ranks,)), model.blocks, task, reshard=reshard)
    return loop(task, model, fused_adamw(model.parameters()), task.batch([rank]), autocast=False)


def shard_fully(model: nn.Module, mesh: DeviceMesh, blocks: Iterable[nn.Module], task: Task, *, reshard: bool) -> None:
    """Shard these blocks of a model, and then the rest of it, over ``mesh``.

    In bf16 gradients are reduced in fp32, as in shardwise."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = bf16 if task.precision == "bf16" else MixedPrecisionPolicy()
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=None if reshard else False)


def zero_redundancy(rank: int, ranks: int, *, task: Task) -> Step:
    """Make a step with DDP in which each rank's optimizer updates a share of the parameters and broadcasts it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    fast_matmul(task)
    init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return loop(task, model, optimizer, task.batch([rank]), autocast=task.precision == "bf16")


def deepspeed(rank: int, ranks: int, *, task: Task, stage: int) -> Step:
    """Make a step of DeepSpeed's engine with torch's fused AdamW, as fast as its own CPU Adam without a compiler."""
    import deepspeed as ds

    fast_matmul(task)
    ds.init_distributed("gloo", verbose=False)
    model = task.model()
    config = {
        "train_micro_batch_size_per_gpu": task.rows,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # the default is 1.0, and no other contender clips
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": task.precision == "bf16"},
    }
    engine, *_ = ds.initialize(model=model, optimizer=fused_adamw(model.parameters()), config=config)
    batch = task.batch([rank])

    def step() -> Tensor:
        loss: Tensor = engine(**batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


class NotInstalled(RuntimeError):
    """The error of a peer that cannot be installed here; its message is one line."""


def deepspeed_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for DeepSpeed's ranks, with the virtual environment in ``folder``."""
    import shardwise

    return {
        "DS_ACCELERATOR": "cpu",
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(shardwise.__file__).parents[1]),  # for the model, which is plain PyTorch
        "TORCH_EXTENSIONS_DIR": str(folder / "extensions"),
    }


def deepspeed_python(folder: Path) -> str:
    """Return the Python of a virtual environment in ``folder`` with DeepSpeed and this process's torch, and make it if
    it does not exist yet.

    Raises :class:`NotInstalled`.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    want = f"deepspeed {DEEPSPEED}, torch {torch.__version__}\n"
    if stamp.is_file() and stamp.read_text() == want:
        return str(python)
    print(f"installing DeepSpeed {DEEPSPEED} into {folder} (a minute or two)", file=sys.stderr)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(CONSTRAINTS)]
    torch_here = [f"torch=={torch.__version__}", "numpy", "setuptools"]
    index = f"https://download.pytorch.org/whl/{torch.__version__.partition('+')[2] or 'cpu'}"
    # DeepSpeed compiles this when it starts on a CPU; compiling it here shows a missing compiler early
    build = (
        "from deepspeed.accelerator import get_accelerator as a; a().create_op_builder('ShareMemCommBuilder').load()"
    )
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(folder)])
        try:
            _run([*pip, *torch_here])
        except NotInstalled:  # pip's own sources lack this build of torch
            _run([*pip, "--extra-index-url", index, *torch_here])
        _run([*pip, f"deepspeed=={DEEPSPEED}"])
        _run([str(python), "-c", build], deepspeed_environment(folder))
    except OSError as error:
        raise NotInstalled(str(error)) from error
    stamp.write_text(want)
    return str(python)


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env={**os.environ, **(environment or {})}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise NotInstalled(lines[-1] if lines else f"{command[0]}: exit code {done.returncode}")
