"""A loop that is written for Accelerate; run as ranks, it prints what the ranks got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, rows: int = 20) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(rows, 5, generator=generator).double()
        self.y = torch.randn(rows, 1, generator=generator).double()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.second(self.first(x).tanh()) - y).square().mean()}


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def prepared(accelerator: Any, accumulated: int) -> tuple[Any, ...]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(Rows(), batch_size=4 if accumulated == 1 else 5, shuffle=True)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def loop(
    accelerator: Any, accumulated: int = 1, save: Path | None = None, load: Path | None = None, epochs: int = 2
) -> dict[str, Any]:  # fmt: skip
    """Train for two epochs; with ``save`` the state is saved after three steps, and with ``load`` begins there."""
    if accelerator.__module__.startswith("shardwise") and "fp64" not in accelerator.plan.numeric.precision:
        accelerator.plan = accelerator.plan.replace(precision="fp64")
    model, optimizer, loader, scheduler = prepared(accelerator, accumulated)
    found: dict[str, Any] = {"losses": [], "rates": [], "evaluations": []}
    steps = 0
    if load is not None:
        accelerator.load_state(load)
    for epoch in range(epochs):
        model.train()
        torch.manual_seed(epoch)
        due = []
        for batch in loader:
            if load is not None and steps < 3:
                steps += 1
                continue
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            due.append(loss)
            if accelerator.sync_gradients:
                found["losses"].append(sum(one.item() for one in due) / len(due))
                found["rates"].append(scheduler.get_last_lr()[0])
                due = []
                steps += 1
                if save is not None and steps == 3:
                    accelerator.save_state(save)
        model.eval()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(**one)["loss"]).mean() for one in loader]
        found["evaluations"].append(float(torch.stack(losses).mean()))
    found["state"] = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return found


def criterion_loop(accelerator: Any, rows: int, clip: str = "all") -> dict[str, Any]:
    """A loop whose model knows no loss: it is combined of a criterion and a penalty, after several outputs."""
    if accelerator.__module__.startswith("shardwise"):
        accelerator.plan = accelerator.plan.replace(precision="fp64")
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    model = accelerator.prepare(module)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    loader = accelerator.prepare(DataLoader(Rows(), batch_size=rows))
    criterion = nn.MSELoss()
    found: dict[str, Any] = {"losses": [], "errors": [], "norms": []}
    for _ in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                output = model(batch["x"])
                loss = criterion(output, batch["y"]) + 0.1 * output.square().mean()
                accelerator.backward(loss)
                norm = clipped(accelerator, model, clip)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                found["losses"].append(loss.item())
                found["errors"].append((output - batch["y"]).abs().max().item())
                found["norms"] += [] if norm is None else [float(norm)]
    model.eval()
    with torch.no_grad():
        x = Rows().x
        found["outputs"] = accelerator.gather_for_metrics(model(x)).flatten().tolist()
    found["state"] = {name: value.tolist() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return found


def clipped(accelerator: Any, model: Any, clip: str) -> Any:
    if not accelerator.sync_gradients or clip == "none":
        return None
    if clip == "value":
        return accelerator.clip_grad_value_(model.parameters(), 0.02)
    if clip == "part":
        return accelerator.clip_grad_norm_(list(model.parameters())[:2], 0.1)
    if clip == "largest":
        return accelerator.clip_grad_norm_(model.parameters(), 0.1, norm_type=float("inf"))
    return accelerator.clip_grad_norm_(model.parameters(), 0.1)


def plain_loop(rows: int) -> list[float]:
    """The losses of plain PyTorch with batches of ``rows``, and a schedule that goes two steps on each time."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    losses = []
    for epoch in range(2):
        torch.manual_seed(epoch)
        for batch in DataLoader(Rows(), batch_size=rows, shuffle=True):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + 2 * len(losses))
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        torch.manual_seed(0)
    return losses


if __name__ == "__main__":
    from shardwise.integrations.accelerate import Accelerator

    if sys.argv[1] == "criterion":
        print(json.dumps(criterion_loop(Accelerator(gradient_accumulation_steps=3), rows=2, clip=sys.argv[2])))
        sys.exit()
    folder = Path(sys.argv[1]) / "state"
    first = Accelerator()
    first.wait_for_everyone()
    whole = loop(first, save=folder)
    resumed = loop(Accelerator(), load=folder)
    print(json.dumps({"losses": whole["losses"], "resumed": resumed["losses"], "main": first.is_main_process}))
