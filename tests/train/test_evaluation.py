"""Trainer.evaluate and Trainer.predict against a plain loop on one device: each row counts once, under any plan."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.launch.evaluation import evaluated
from shardwise.lower.compiled import Compiled
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.runtime.communicator import Communicator
from shardwise.runtime.threads import run_ranks
from shardwise.train.metrics import ready
from shardwise.train.trainer import Trainer

SIZE, CLASSES, BATCH = 23, 4, 5  # batches of 5, 5, 5, 5 and 3 rows
P64 = Plan.of(precision="fp64")
PLANS = {
    "one": P64,
    "dp2": Plan.of(Mesh.of(dp=2), precision="fp64"),
    "dp3 x 2": Plan.of(Mesh.of(dp=3), microbatches=2, precision="fp64"),
    "dp4 x 4": Plan.of(Mesh.of(dp=4), microbatches=4, precision="fp64"),
    "zero3": data_parallel(Plan.of(precision="fp64", microbatches=2), 3, 3),
    "pp": pipeline(Plan.of(precision="fp64", microbatches=3), 2, "1f1b"),
    "tp": tensor_parallel(data_parallel(P64, 2), 2, "1d"),
    "tp x pp": pipeline(tensor_parallel(Plan.of(precision="fp64", microbatches=2), 2, "1d"), 2),
}


class Classifier(nn.Module):
    """Three classes of rows out of four features; it returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        features = x
        for layer in self.layers:
            features = self.drop(torch.tanh(layer(features)))
        logits = self.head(features)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "features": features}


class Rows:
    """Rows of the classifier; three of the labels are of no class."""

    def __init__(self, size: int = SIZE, labels: bool = True) -> None:
        made = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 6, generator=made, dtype=torch.float64)
        self.labels = torch.randint(0, CLASSES, (size,), generator=made)
        self.labels[[2, 11, 22][: max(0, size - 20)]] = -100
        self.with_labels = labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"x": self.x[index], "labels": self.labels[index]}
        return row if self.with_labels else {"x": self.x[index]}


def trained(plan: Plan, body: Callable[[Trainer], Any]) -> list[tuple[Any, dict[str, Tensor]]]:
    """What ``body`` makes of the trainer of each rank after a step, with the state."""
    torch.manual_seed(0)
    batch = {name: torch.stack([row[name] for row in map(Rows().__getitem__, range(BATCH))]) for name in Rows()[0]}
    compiled = Compiled(Classifier().double(), plan, batch)

    def rank(comm: Communicator) -> Any:
        trainer = Trainer(compiled, OptimizerChoice("adamw", lr=1e-2), plan, batch, comm=comm)
        with trainer.loader(Rows(), BATCH) as loader:
            trainer.step(next(loader))
        found = body(trainer)
        return found, trainer.state_dict()

    return run_ranks(plan.mesh, rank, timeout=100)


def plain(state: dict[str, Tensor]) -> dict[str, Any]:
    """The outputs of the whole dataset, and its loss, by the plain module."""
    module = Classifier().double().eval()
    module.load_state_dict(state)
    data = Rows()
    with torch.no_grad():
        found = module(data.x, data.labels)
    return {**found, "labels": data.labels}


def confident(outputs: Any, batch: Any) -> dict[str, tuple[Tensor, Any]]:
    """Two metrics of one function: the mean largest probability, and that of the first feature."""
    top = outputs.logits.softmax(-1).amax(-1)
    return {"confidence": (top.sum(), len(top)), "feature": (outputs["features"][:, 0].sum(), top.numel())}


def far(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    counts = batch["labels"] != -100
    return (outputs.logits.square().sum(-1) * counts).sum(), counts.sum()


METRICS = ["accuracy", "top-2", "perplexity", "f1", "f1-binary", confident, far]


def truth_of(found: dict[str, Any]) -> dict[str, float]:
    """The metrics by other arithmetic than theirs."""
    logits, labels, features = found["logits"], found["labels"].tolist(), found["features"]
    kept = [i for i, label in enumerate(labels) if label != -100]
    guesses = logits.argmax(-1).tolist()
    order = logits.argsort(-1, descending=True).tolist()
    scores = {}
    for one in range(CLASSES):
        hits = sum(guesses[i] == labels[i] == one for i in kept)
        wrong = sum((guesses[i] == one) != (labels[i] == one) for i in kept)
        if hits + wrong:
            scores[one] = hits / (hits + wrong / 2)
    return {
        "accuracy": sum(guesses[i] == labels[i] for i in kept) / len(kept),
        "top-2": sum(labels[i] in order[i][:2] for i in kept) / len(kept),
        "perplexity": math.exp(float(found["loss"])),
        "f1": sum(scores.values()) / len(scores),
        "f1-binary": scores.get(1, 0.0),
        "confidence": float(logits.softmax(-1).amax(-1).mean()),
        "feature": float(features[:, 0].mean()),
        "far": float(torch.stack([logits[i].square().sum() for i in kept]).mean()),
    }


@pytest.mark.parametrize("plan", ["one", "dp2", "pp"])
def test_a_batch_without_targets_has_no_part_in_an_evaluation(plan: str) -> None:
    """Its loss is a mean over nothing."""
    rows = Rows()
    rows.labels[BATCH : 2 * BATCH] = -100

    def body(trainer: Trainer) -> dict[str, Any]:
        return evaluated(trainer, trainer.one_pass(rows, BATCH), perplexity=True)

    results = trained(PLANS[plan], body)
    module = Classifier().double().eval()
    module.load_state_dict(results[0][1])
    with torch.no_grad():
        loss = float(module(rows.x, rows.labels)["loss"])
    for found, _ in results:
        assert found["rows"] == SIZE
        assert abs(found["validation_loss"] - loss) <= 1e-12
        assert abs(found["perplexity"] - math.exp(loss)) <= 1e-12


def test_one_batch_is_for_evaluate_batch() -> None:
    def body(trainer: Trainer) -> str:
        fields = dict(trainer.compiled.example)
        assert trainer.evaluate_batch(fields).loss.isfinite()
        with pytest.raises(ConfigError) as found:
            trainer.evaluate(fields)
        return str(found.value)

    ((message, _),) = trained(PLANS["one"], body)
    assert "Trainer.evaluate(...) of a dict" in message and "one: evaluate_batch" in message


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_are_those_of_one_device(plan: str) -> None:
    results = trained(PLANS[plan], lambda trainer: trainer.evaluate(Rows(), METRICS))
    expected = plain(results[0][1])
    truth = truth_of(expected)
    for found, _ in results:
        assert found.rows == SIZE
        assert abs(found.loss - float(expected["loss"])) <= 1e-12
        assert set(found.metrics) == set(truth)
        for name, value in truth.items():
            assert abs(found.metrics[name] - value) <= 1e-12, name
        assert found.metrics == results[0][0].metrics  # to the bit: ranks decide by them


@pytest.mark.few(4)
@pytest.mark.parametrize("plan", PLANS)
def test_predictions_are_in_order(plan: str) -> None:
    """Of a dataset without labels, whose last batch has fewer rows than there are ranks."""
    results = trained(PLANS[plan], lambda trainer: trainer.predict(Rows(labels=False), 11 if "dp" in plan else None))
    expected = plain(results[0][1])
    for found, _ in results:
        assert set(found) == {"logits", "features"}
        for name in found:
            assert found[name].shape == expected[name].shape
            assert float((found[name] - expected[name]).abs().max()) <= 1e-12


def test_predictions_of_one_rank() -> None:
    results = trained(PLANS["dp3 x 2"], lambda trainer: trainer.predict(Rows(), rank=1))
    assert [found is None for found, _ in results] == [True, False, True]
    expected = plain(results[0][1])["logits"]
    assert float((results[1][0].logits - expected).abs().max()) <= 1e-12


def test_a_loader_of_whole_batches() -> None:
    """Each rank takes its rows of a DataLoader's batches; some of its batches are cut off."""

    def body(trainer: Trainer) -> Any:
        loader = DataLoader(Rows(), batch_size=4)  # type: ignore[arg-type]
        whole = trainer.evaluate(loader, ["accuracy", confident])
        part = trainer.evaluate(loader, ["accuracy"], batches=2)
        own = trainer.evaluate(trainer.one_pass(Rows(), 4), ["accuracy", confident])
        return whole, part, own, trainer.evaluate(iter([]), ["accuracy"])

    results = trained(PLANS["dp3 x 2"], body)
    truth = truth_of(plain(results[0][1]))
    for (whole, part, own, nothing), _ in results:
        assert abs(whole.metrics["accuracy"] - truth["accuracy"]) <= 1e-12
        assert abs(whole.metrics["confidence"] - truth["confidence"]) <= 1e-12
        assert part.rows == 8
        assert own.metrics["accuracy"] == whole.metrics["accuracy"]
        assert abs(own.metrics["confidence"] - whole.metrics["confidence"]) <= 1e-12
        assert math.isnan(nothing.loss)
        assert math.isnan(nothing.metrics["accuracy"])


@pytest.mark.parametrize("plan", ["one", "dp3 x 2", "tp x pp"])
def test_torchmetrics(plan: str) -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    options = {"task": "multiclass", "num_classes": CLASSES, "ignore_index": -100}

    def objects() -> dict[str, Any]:
        return {
            "mean": torchmetrics.Accuracy(average="micro", **options),
            "each": torchmetrics.F1Score(average="none", **options),
            "area": torchmetrics.AUROC(**options),  # its state is a list of all rows
        }

    results = trained(PLANS[plan], lambda trainer: trainer.evaluate(Rows(), objects()))
    expected = plain(results[0][1])
    truth = {}
    for name, one in objects().items():
        one.update(expected["logits"], expected["labels"])
        value = one.compute()
        truth |= {f"{name}_{i}": float(v) for i, v in enumerate(value)} if value.dim() else {name: float(value)}
    for found, _ in results:
        assert set(found.metrics) == set(truth)
        for name, value in truth.items():
            assert abs(found.metrics[name] - value) <= 1e-6, name  # torchmetrics computes in fp32


def refused(metrics: Any, data: Any = None) -> str:
    with pytest.raises(ConfigError) as caught:
        trained(PLANS["one"], lambda trainer: trainer.evaluate(Rows() if data is None else data, metrics))
    return str(caught.value)


def test_wrong_metrics_are_refused() -> None:
    assert 'metric "precision": unknown; legal: accuracy, top-K' in refused(["precision"])
    assert "metrics: an object of type int; legal: accuracy" in refused([3])
    assert "accuracy is there twice" in refused(["accuracy", "accuracy"])
    assert "(sum, count)" in refused([lambda outputs, batch: outputs.logits.sum()])
    assert "with 'a': a tensor of shape (5, 4)" in refused([lambda outputs, batch: {"a": outputs.logits}])
    assert "Trainer.evaluate(...) of a int" in refused([], 3)
    torchmetrics = pytest.importorskip("torchmetrics")
    whole = torchmetrics.Accuracy(task="binary", dist_sync_on_step=True)
    assert "BinaryAccuracy has dist_sync_on_step, so states of several ranks cannot be merged" in refused([whole])
    both = torchmetrics.Accuracy(task="binary") + torchmetrics.F1Score(task="binary")
    assert "has full_state_update = None, so states of several ranks cannot be merged" in refused([both])


def test_names_that_an_evaluation_has_already_are_refused() -> None:
    assert "it returned 'rows', which each evaluation has; legal: other names than step" in refused(
        lambda outputs, batch: {"rows": (1, 1)}
    )
    twice = ["accuracy", lambda outputs, batch: {"accuracy": (1, 1)}]
    assert "metric <lambda>: it gives accuracy, as another one does; legal: other names" in refused(twice)


def test_wrong_batches_of_a_loader_are_refused() -> None:
    row = Rows()[0]
    assert "the loader gave (a tensor of shape (6,), a tensor of shape ())" in refused([], iter([(*row.values(),)]))
    assert 'field "labels" is a tensor of shape (); legal: a dict of tensors' in refused([], iter([row]))
    ragged = {"x": torch.zeros(3, 6), "labels": torch.zeros(2)}
    assert "these rows: x 3, labels 2; legal: a dict of tensors" in refused([], iter([ragged]))
    assert "these rows: x 0; legal" in refused([], iter([{"x": torch.zeros(0, 6)}]))
    with pytest.raises(ConfigError, match="batches: 0 is not legal; legal: an integer of at least 1"):
        trained(PLANS["one"], lambda trainer: trainer.evaluate(Rows(), batches=0))
    assert "metrics: None; legal: a list of metrics" in refused(None)


def by_class(outputs: Any, batch: Any) -> dict[str, Any]:
    """The recall of each class that a batch has, in numbers of numpy."""
    labels, found = batch.pop("labels"), {}  # the dict is the metric's own
    for one in labels.unique().tolist():
        own = labels == one
        hits = (outputs.logits.argmax(-1) == one) & own
        found[f"of {one}"] = hits.sum().numpy()[()], own.sum().numpy()[()]
    return found


@pytest.mark.parametrize("plan", ["one", "dp3 x 2"])
def test_a_metric_may_have_other_names_in_each_batch(plan: str) -> None:
    results = trained(PLANS[plan], lambda trainer: trainer.evaluate(Rows(), [by_class, "accuracy"]))
    expected = plain(results[0][1])
    guesses, labels = expected["logits"].argmax(-1), expected["labels"]
    truth = {f"of {one}": float((guesses[labels == one] == one).double().mean()) for one in labels.unique().tolist()}
    for found, _ in results:
        assert found.metrics == {**truth, "accuracy": truth_of(expected)["accuracy"]}


def test_one_metric_needs_no_list() -> None:
    def body(trainer: Trainer) -> Any:
        return [trainer.evaluate(Rows(), one).metrics for one in ("accuracy", far, ["accuracy", far])]

    ((name, function, both), _) = trained(PLANS["one"], body)[0]
    assert {**name, **function} == both


def test_which_labels_count() -> None:
    """Those that a loss with ``ignore_index=-1`` ignores do not; one logit with a dim of its own is for class 1."""
    batch = {"labels": torch.tensor([1, -1, 0, 1])}
    classes = torch.tensor([[0.0, 1], [1, 0], [1, 0], [1, 0]])
    for name, truth in (("accuracy", 2 / 3), ("f1", 2 / 3), ("f1-binary", 2 / 3)):
        one = ready(name)
        assert one.values([one.packed(one.add(one.begin(torch.device("cpu")), {"logits": classes}, batch))], 0.0) == {
            name: pytest.approx(truth, abs=1e-12)
        }
    batch = {"labels": torch.tensor([1, 0, 0, 1])}
    for name, truth in (("accuracy", 0.75), ("f1-binary", 0.8)):
        one = ready(name)
        logits = torch.tensor([[2.0], [-1], [3], [1]])
        assert one.values([one.packed(one.add(one.begin(torch.device("cpu")), logits, batch))], 0.0) == {
            name: pytest.approx(truth, abs=1e-12)
        }


def test_a_metric_that_does_not_fit_the_outputs() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 2)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.layer(x)
            return {"loss": y.square().mean(), "scores": y}

    batch = {"x": torch.randn(4, 6), "labels": torch.zeros(4, dtype=torch.long)}
    with Trainer(Plain(), OptimizerChoice("sgd"), Plan.of(), batch) as trainer:
        data = [{name: value[i] for name, value in batch.items()} for i in range(4)]
        with pytest.raises(ConfigError, match=r"metric accuracy: the model's outputs are scores; legal: .*\.logits"):
            trainer.evaluate(data, ["accuracy"])
        found = trainer.evaluate(data, {"mine": lambda outputs, batch: (outputs.scores.sum(), 4)})
        assert set(found.metrics) == {"mine"}
        with pytest.raises(ConfigError, match="metric writes: it writes in place to the outputs or the batch"):
            trainer.evaluate(data, {"writes": lambda outputs, batch: (outputs.scores.neg_().sum(), 4)})
