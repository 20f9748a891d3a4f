"""transformers' ``Trainer``, whose steps, evaluations and checkpoints are shardwise's::

from shardwise.integrations.transformers import ShardwiseTrainer

trainer = ShardwiseTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer)
trainer.train()
"""

from .trainer import ShardwiseTrainer

__all__ = ["ShardwiseTrainer"]
