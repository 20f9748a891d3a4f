"""One rank of a run over gloo, as torchrun would start it: what it prints is compared by ``test_distributed.py``.

python distributed_runs.py steps        a step, an evaluation, the state of a tied GPT on three stages of two ranks each
python distributed_runs.py unprepared   what the use of a communicator says that was not prepared
python distributed_runs.py talk         what a rank gets of messages to all and to rank 0
python distributed_runs.py guest        the same steps, in a process group that is there already and stays
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.core.communicators import groups
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models import GPT
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.runtime.background import Background
from shardwise.runtime.call import CommunicationError
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.connect import connect
from shardwise.runtime.engine import Engine

ROWS = 4


def plan() -> Plan:
    return pipeline(data_parallel(Plan.of(microbatches=2, precision="fp64"), 2, 2), 3, "1f1b")


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (ROWS, 4), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def compiled(plan: Plan) -> Compiled:
    torch.manual_seed(0)
    return Compiled(GPT(vocabulary=32, width=16, layers=3, heads=2, context=4), plan, batch())


def results(comm: Communicator, one: Compiled) -> dict[str, float]:
    """Losses, and the sum of all parameters after a step."""
    engine = Engine(one, comm, OptimizerChoice("sgd", lr=0.1))
    index, parts, many = comm.mesh.index(comm.rank, "dp"), comm.mesh.axis_size("dp"), one.plan.microbatches
    size = ROWS // many
    rows = [m * size + r for m in range(many) for r in range(index * size // parts, (index + 1) * size // parts)]
    mine = {name: value[rows] for name, value in batch().items()}
    step, evaluated = float(engine.step(mine, ROWS).loss), float(engine.evaluate(mine, ROWS).loss)
    state = sum(float(value.double().abs().sum()) for value in engine.state_dict().values())
    comm.barrier()
    return {"step": step, "evaluated": evaluated, "state": state}


def unprepared() -> dict[str, str]:
    comm = connect(Mesh.of(dp=2), torch.device("cpu"), backend="gloo")
    found = {}
    try:
        comm.all_reduce(torch.zeros(1), "dp", lane="reduce", what="a sum")
    except CommunicationError as error:
        found["text"] = str(error)
    comm.prepare(groups(comm.mesh, "dp", "reduce"))
    x = torch.ones(1)
    comm.all_reduce(x, "dp", lane="reduce").wait()
    comm.close()
    return {**found, "sum": str(float(x))}


def talk() -> dict[str, list[str]]:
    comm = connect(Mesh.of(dp=3), torch.device("cpu"), backend="gloo", timeout=60)
    background = Background(comm)
    texts = ["", "b" * 70_000, "\0\xff!"]  # of different lengths, one without any
    found = {}
    for name, everywhere in (("all", True), ("first", False), ("again", True)):
        found[name] = [one.decode("latin1") for one in background.gather(texts[comm.rank].encode("latin1"), everywhere)]
    background.close()
    comm.close()
    return {name: [f"{len(one)} {one[:3]}" for one in each] for name, each in found.items()}


def guest() -> dict[str, object]:
    """Some ranks have made groups of their own before."""
    dist.init_process_group("gloo")
    own = [dist.new_group([0, 1]), dist.new_group([2, 4, 5])]
    comm = connect(plan().mesh, torch.device("cpu"))
    found = results(comm, compiled(plan()))
    comm.close()
    comm.close()
    x = torch.ones(1)
    dist.all_reduce(x)
    del own
    dist.destroy_process_group()
    return {**found, "kind": type(comm).__name__, "after": float(x)}


def steps() -> dict[str, float]:
    comm = connect(plan().mesh, torch.device("cpu"), backend="gloo", timeout=60)
    found = results(comm, compiled(plan()))
    comm.close()
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(
        json.dumps({"steps": steps, "unprepared": unprepared, "guest": guest, "talk": talk}[sys.argv[1]]()), flush=True
    )
