"""A process that tries models: each line that it reads is a model with its plans, each that it writes an outcome, after
one that says that it is ready."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "src")]


def main() -> None:
    """Serve until there is no more to read; a line without a plan says that a model is done."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no outcome
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    import torch

    from sweeping.trial import trial
    from sweeping.zoo import find

    torch.set_num_threads(1)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        for outcome in trial(find(asked["model"]), lambda plan, asked=asked: plan in asked["plans"]):
            print(json.dumps(asdict(outcome)), file=out, flush=True)
        print(json.dumps({"model": asked["model"], "plan": None}), file=out, flush=True)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
