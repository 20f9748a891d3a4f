"""A user's own loop: `shardwise launch examples/train_script.py`, or plain `python` for one rank."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from shardwise import Mesh, OptimizerChoice, Plan, Trainer
from shardwise.models.gpt import GPT


class Words(torch.utils.data.Dataset):
    """Windows of this file's own bytes."""

    def __init__(self, length: int = 64) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.length = length

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[index : index + self.length + 1]
        return {"input_ids": window[:-1], "labels": window[1:]}


def main() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=256, width=64, layers=2, heads=4, context=64)
    dataset = Words()
    example = {name: value[None] for name, value in dataset[0].items()}
    plan = Plan(mesh=Mesh.of(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    with Trainer(model, OptimizerChoice("adamw", lr=3e-3), plan, example, clip_norm=1.0) as trainer:
        loader = trainer.loader(dataset, batch_size=16)
        for step in range(50):
            result = trainer.step(next(loader))
            if trainer.comm.rank == 0 and step % 10 == 9:
                print(f"step {step + 1}: loss {result.loss.item():.3f}")


if __name__ == "__main__":
    main()
