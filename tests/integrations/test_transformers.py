"""ShardwiseTrainer against transformers' own Trainer: the same losses, norms, rates, callbacks and weights."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hf import GIVEN, TIMES, Texts, Tokens, arguments, bert, history, llama, mean_logit, pad
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import (
    BertForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from processes import run_processes
from shardwise.core.errors import ConfigError
from shardwise.core.plan import Plan
from shardwise.integrations.transformers import ShardwiseTrainer
from shardwise.integrations.transformers.arguments import AS_THERE, NOTED, REFUSED, check_arguments
from shardwise.verify.promote import Promote64


class Theirs(Trainer):
    """transformers' Trainer, which notes each loss as a double: its log adds them up in fp32."""

    def training_step(self, *given: Any, **named: Any) -> Tensor:
        loss = super().training_step(*given, **named)
        self.losses = [*getattr(self, "losses", []), (self.state.global_step, float(loss))]
        return loss

    def of_steps(self) -> list[float]:
        last = self.losses[-1][0]
        return [sum(loss for at, loss in self.losses if at == step) for step in range(last + 1)]


class Ours(ShardwiseTrainer):
    def of_steps(self) -> list[float]:
        logged = [one["loss"] for one in self.state.log_history if "loss" in one]
        return logged


def same(ours: Any, theirs: Any, padded: bool = False) -> None:
    assert ours.of_steps() == pytest.approx(theirs.of_steps(), rel=1e-10)
    assert len(history(ours)) == len(history(theirs))
    for one, other in zip(history(ours), history(theirs), strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if key == "total_flos" and padded:  # ours pad to the longest of all batches
                assert value >= other[key]
                continue
            rough = key in ("loss", "train_loss")  # sums of theirs in fp32
            assert value == pytest.approx(other[key], rel=1e-6 if rough else 1e-10, abs=1e-12), (key, one)
    state = theirs.model.state_dict()
    for name, value in ours.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-11)


def both(model: Any, folder: Path, given: dict[str, Any], **more: Any) -> tuple[Any, Any]:
    theirs = Theirs(model=model(), args=arguments(folder / "theirs", **given), **more)
    with Promote64():  # their losses and norms cast to fp32
        theirs.train()
    ours = Ours(model=model(), args=arguments(folder / "ours", **given), **more)
    ours.train()
    return ours, theirs


@pytest.mark.slow
def test_a_llama(tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 2, "weight_decay": 0.1, "max_grad_norm": 0.5, "warmup_steps": 2,
             "lr_scheduler_type": "cosine", "eval_strategy": "epoch"}  # fmt: skip
    ours, theirs = both(llama, tmp_path, given, train_dataset=Tokens(22), eval_dataset=Tokens(10, seed=1))
    same(ours, theirs)


@pytest.mark.slow
def test_a_classifier_of_texts_of_many_lengths(tmp_path: Path) -> None:
    given = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 8, "weight_decay": 0.01, "optim": "sgd",
             "learning_rate": 0.5}  # fmt: skip

    def accuracy(found: Any) -> dict[str, float]:
        return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    data = {"train_dataset": Texts(22), "eval_dataset": Texts(9, seed=1), "data_collator": pad}
    ours, theirs = both(bert, tmp_path, given, **data, compute_metrics=accuracy)
    assert "eval_accuracy" in history(ours)[3]
    same(ours, theirs, padded=True)
    with Promote64():
        expected = theirs.predict(Texts(7, seed=2))
    found = ours.predict(Texts(7, seed=2))
    assert found.predictions == pytest.approx(expected.predictions, rel=1e-9, abs=1e-11)
    assert (found.label_ids == expected.label_ids).all()
    assert found.metrics["test_accuracy"] == expected.metrics["test_accuracy"]
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-10)


class Record(TrainerCallback):
    """What a trainer calls, and when; it stops the second epoch early and asks for things in between."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def call(args: Any, state: Any, control: Any, **more: Any) -> None:
            metrics = sorted(k for k in more.get("logs") or more.get("metrics") or {} if not k.endswith(TIMES))
            self.calls.append((name, state.global_step, state.epoch, metrics))
            if name == "on_step_end" and state.global_step == 2:
                control.should_evaluate = True
            if name == "on_step_end" and state.global_step == 5:
                control.should_epoch_stop = True
            if name == "on_substep_end" and state.global_step == 7:
                control.should_training_stop = True

        return call


@pytest.mark.slow
def test_callbacks_are_called_as_there(tmp_path: Path) -> None:
    given = {"gradient_accumulation_steps": 2, "num_train_epochs": 4, "eval_strategy": "epoch",
             "per_device_train_batch_size": 3, "logging_steps": 2, "logging_first_step": True, "save_strategy": "steps",
             "save_steps": 4, "load_best_model_at_end": False, "eval_on_start": True}  # fmt: skip
    calls = [Record(), Record()]
    for kind, one, name in zip((Theirs, Ours), calls, ("theirs", "ours"), strict=True):
        trainer = kind(llama(), arguments(tmp_path / name, **given), train_dataset=Tokens(19), callbacks=[one],
                       eval_dataset=Tokens(4))  # fmt: skip
        trainer.train()
    assert calls[1].calls == calls[0].calls
    assert calls[0].calls[-1][1] == 7


@pytest.mark.slow
def test_the_best_model_is_kept_and_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    given = {"max_steps": 9, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3,
             "weight_decay": 0.1, "learning_rate": 0.3, "adam_epsilon": 1e-2}  # fmt: skip
    data = {"train_dataset": Tokens(22), "eval_dataset": Tokens(10, seed=1)}
    ours, theirs = both(llama, tmp_path, given | {"load_best_model_at_end": True, "save_total_limit": 2}, **data)
    assert ours.state.best_global_step == theirs.state.best_global_step != 9
    same(ours, theirs)
    kept = {path.name for path in (tmp_path / "ours").iterdir()}
    assert kept == {path.name for path in (tmp_path / "theirs").iterdir()} and len(kept) == 2
    best = LlamaForCausalLM.from_pretrained(ours.state.best_model_checkpoint, dtype=torch.float64)
    for name, value in best.state_dict().items():
        torch.testing.assert_close(value, ours.model.state_dict()[name], rtol=0, atol=0)
    whole = Ours(llama(), arguments(tmp_path / "whole", **given), **data)
    whole.train()
    again = Ours(llama(), arguments(tmp_path / "whole", **given), **data)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert again.of_steps() == whole.of_steps()
    for name, value in again.model.state_dict().items():
        torch.testing.assert_close(value, whole.model.state_dict()[name], rtol=0, atol=0)


@pytest.mark.full
def test_losses_of_ones_own(tmp_path: Path) -> None:
    def doubled(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        return 2 * nn.functional.cross_entropy(outputs.logits, labels)

    class Tripled(Ours):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**inputs)
            loss = 3 * nn.functional.cross_entropy(outputs.logits, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    class Changed(Ours):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return model(**inputs | {"input_ids": inputs["input_ids"] + 1}).loss

    data = {"train_dataset": Texts(22), "data_collator": pad}
    for given, more in (({}, {"compute_loss_func": doubled}), ({"label_smoothing_factor": 0.1}, {})):
        ours, theirs = both(bert, tmp_path, {"max_steps": 3} | given, **data, **more)
        same(ours, theirs, padded=True)
    plain, tripled = (
        kind(bert(), arguments(tmp_path, max_steps=1, max_grad_norm=0.0), **data) for kind in (Ours, Tripled)
    )
    plain.train(), tripled.train()
    assert tripled.of_steps()[0] == pytest.approx(3 * plain.of_steps()[0], rel=1e-12)
    with pytest.raises(ConfigError, match="compute_loss: it calls the model with input_ids other than in the batch"):
        Changed(bert(), arguments(tmp_path, max_steps=1), **data).train()


@pytest.mark.slow
def test_a_stream_of_samples(tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            return iter([Tokens(10)[index] for index in range(10)])

    ours, theirs = both(llama, tmp_path, {"max_steps": 5}, train_dataset=Stream())
    same(ours, theirs)


def test_every_argument_is_answered(tmp_path: Path) -> None:
    tables = [AS_THERE, NOTED.keys(), REFUSED.keys()]
    names = {field.name for field in fields(TrainingArguments)}
    assert not names - set().union(*tables)
    assert not any(tables[i] & tables[j] for i, j in ((0, 1), (0, 2), (1, 2)))
    assert check_arguments(arguments(tmp_path)) == []
    notes = check_arguments(arguments(tmp_path, ddp_bucket_cap_mb=20, eval_accumulation_steps=2))
    assert [note.split(" =")[0] for note in notes] == [
        "TrainingArguments.eval_accumulation_steps", "TrainingArguments.ddp_bucket_cap_mb",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size: True is not supported; legal: False"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha: 5.0 is not supported"),
        ({"torch_compile": True}, "torch_compile: True is not supported; legal: False"),
        ({"train_sampling_strategy": "group_by_length"}, "group_by_length"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config"),
        (
            {"average_tokens_across_devices": False},
            "across_devices: False is not supported; legal: True",
        ),
        ({"gradient_accumulation_steps": 3}, "3, but the plan has 2 microbatches; legal: 1, or 2"),
    ],
)
def test_what_is_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    plan = Plan.of(microbatches=2)
    with pytest.raises(ConfigError, match=re.escape(words)):
        ShardwiseTrainer(llama(), arguments(tmp_path, **given), train_dataset=Tokens(8), plan=plan).train()


@pytest.mark.slow
def test_two_ranks_are_as_one(tmp_path: Path) -> None:
    outputs = run_processes(2, [str(Path(__file__).parent / "two_ranks.py"), str(tmp_path)], 240)
    plain = Ours(bert(), arguments(tmp_path / "one", **GIVEN, per_device_train_batch_size=4), train_dataset=Texts(22),
                 eval_dataset=Texts(9, seed=1), data_collator=pad, compute_metrics=mean_logit)  # fmt: skip
    plain.train()
    expected = json.loads(json.dumps(history(plain)))
    for output in outputs:
        found = json.loads(output.splitlines()[-1])
        for one, other in zip(found["whole"], expected, strict=True):
            assert one == pytest.approx(other, rel=1e-10, abs=1e-12)
        assert found["resumed"] == pytest.approx([one["loss"] for one in expected if "loss" in one], rel=1e-10)
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "two" / "checkpoint-8", dtype=torch.float64)
    for name, value in saved.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=1e-9, atol=1e-11)
