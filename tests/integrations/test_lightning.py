"""``fit`` against Lightning's own Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from shardwise.core.errors import ConfigError
from shardwise.integrations.lightning import fit


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
        self.seen: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.training_step(batch, batch_idx)
        self.log("val_loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 2}}


class Loss(lightning.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    return kind().double()


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(24, size, generator=generator).double() for size in (5, 1))
    return (
        DataLoader(TensorDataset(x, y), batch_size=4),
        DataLoader(TensorDataset(x[:10], y[:10]), batch_size=4),
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize(("accumulated", "by"), [(1, None), (3, "norm"), (1, "value")])
def test_the_same_as_lightning(tmp_path: Path, accumulated: int, by: str | None) -> None:
    clips: dict[str, Any] = {"gradient_clip_val": 0.02 if by == "value" else 0.5, "gradient_clip_algorithm": by}
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    theirs, seen = net(), Loss()
    trainer = lightning.Trainer(
        max_epochs=3, accumulate_grad_batches=accumulated, precision="64-true", **clips,
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=[seen], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(theirs, *loaders())
    ours = net()
    found = fit(ours, *loaders(), max_epochs=3, accumulate_grad_batches=accumulated, precision="64-true", **clips)
    # Lightning's are those of each batch, divided by their number in a step
    sums = [sum(seen.losses[i : i + accumulated]) for i in range(0, len(seen.losses), accumulated)]
    assert found.losses == pytest.approx(sums, rel=1e-10)
    assert found.validation_losses[-1] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-10)
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-9, atol=1e-11)


def test_max_steps_end_in_an_epoch() -> None:
    assert len(fit(net(), loaders()[0], max_steps=8, precision="64-true").losses) == 8


def test_another_clipping_is_refused() -> None:
    with pytest.raises(ConfigError, match="gradient_clip_algorithm: 'length' is not legal"):
        fit(net(), loaders()[0], max_steps=1, gradient_clip_val=0.1, gradient_clip_algorithm="length")


def test_what_is_not_called_is_refused() -> None:
    class Hooked(Net):
        def on_train_epoch_end(self) -> None: ...

    class Indexed(Net):
        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (1 if batch_idx % 2 else 2)

    class Two(Net):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(self.net.parameters()), torch.optim.SGD(self.net.parameters())]

    class Silent(Net):
        def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None: ...

    cases = {
        Hooked: "Hooked.on_train_epoch_end: fit", Indexed: "training_step: it reads the index of the batch",
        Two: "configure_optimizers: it returned list", Silent: "validation_step: it returned NoneType",
    }  # fmt: skip
    for kind, words in cases.items():
        with pytest.raises(ConfigError, match=words):
            fit(net(kind), *loaders(), max_epochs=1, precision="64-true")
    with pytest.raises(ConfigError, match="precision: '16-true' is not legal"):
        fit(net(), loaders()[0], max_epochs=1, precision="16-true")
    with pytest.raises(ConfigError, match="neither max_epochs nor max_steps"):
        fit(net(), loaders()[0])
