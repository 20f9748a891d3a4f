"""Train on the ranks of this host, then go on from a checkpoint of the middle; prints what was logged."""

import json
import sys
from pathlib import Path

from hf import GIVEN, Texts, arguments, bert, history, mean_logit, pad

from shardwise.core.plan import Plan
from shardwise.integrations.transformers import ShardwiseTrainer
from shardwise.parallel.data import data_parallel

folder = Path(sys.argv[1]) / "two"
data = {"train_dataset": Texts(22), "eval_dataset": Texts(9, seed=1), "data_collator": pad}


def trainer(**given: object) -> ShardwiseTrainer:
    args = arguments(folder, **GIVEN, per_device_train_batch_size=2)
    return ShardwiseTrainer(bert(), args, **data, compute_metrics=mean_logit, **given)


whole = trainer(plan=data_parallel(Plan.of(), 2, zero=3))
whole.train()
logged = history(whole)
whole.close()
resumed = trainer()
resumed.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
print(json.dumps({"whole": logged, "resumed": [one["loss"] for one in resumed.state.log_history if "loss" in one]}))
