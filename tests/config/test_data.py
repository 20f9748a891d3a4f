"""From a configuration to its data: sides, mixtures, documents, and models that do not take them."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import Config, Data, Hardware, build_data, build_model, load_config
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.data.bpe import train_tokenizer
from shardwise.data.loader import Loader, one_pass
from shardwise.data.mixture import Joined, Mixture

ONE = Mesh.of(dp=1)
TINY = [
    "model.transformers=LlamaForCausalLM", "model.config.hidden_size=16", "model.config.intermediate_size=24",
    "model.config.num_hidden_layers=2", "model.config.num_attention_heads=2", "model.config.num_key_value_heads=2",
]  # fmt: skip
GPT2 = [
    "model.transformers=GPT2LMHeadModel", "model.config.n_embd=16", "model.config.n_layer=2", "model.config.n_head=2",
    "model.config.resid_pdrop=0", "model.config.embd_pdrop=0", "model.config.attn_pdrop=0",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Two hundred documents of 3 to 40 bytes."""
    folder = tmp_path / "words"
    folder.mkdir()
    for number in range(200):
        (folder / f"{number:03}.txt").write_text(("abcdefgh"[number % 8] + str(number)) * (1 + number % 10))
    return folder


def load(*overrides: str) -> Config:
    return load_config(None, overrides, hardware=Hardware(cores=1))


def data(*overrides: str) -> Data:
    return build_data(load(*overrides))


def test_the_two_sides(words: Path) -> None:
    found = data(f"data.source={words}", "validation.share=0.2", "data.sequence_length=16")
    assert found.decode is not None and found.encode is not None
    sides = [found.train, found.validation]
    texts = ["".join(found.decode(side[i]["input_ids"]) for i in range(len(side))) for side in sides]
    documents = [set(text.split("\0")[1:-1]) for text in texts]
    assert not documents[0] & documents[1]
    assert len(documents[0] | documents[1]) > 190
    assert found.encode("aß") == [97, 195, 159]
    assert found.notices == ()
    assert found.digest == data(f"data.source={words}", "validation.share=0.2", "data.sequence_length=16").digest
    assert found.digest != data(f"data.source={words}", "validation.share=0.2", "data.sequence_length=17").digest
    every = data(f"data.source={words}", "data.sequence_length=16")
    dataset, decode = every.train, every.decode
    assert decode is not None and len(dataset) > len(found.train)


def test_no_validation(words: Path) -> None:
    found = data(f"data.source={words}", "validation.share=0", "data.sequence_length=16")
    assert (found.validation, found.notices) == (None, ())
    found = data(f"data.source={words}", "validation.share=0.02", "data.sequence_length=256")
    assert found.validation is None
    assert len(found.notices) == 1
    assert str(words) in found.notices[0] and "of 200 documents apart" in found.notices[0]
    for wants in ('checkpoint.best="validation_loss"', "validation.patience=2", 'validation.metrics=["accuracy"]'):
        with pytest.raises(ConfigError, match=rf"{wants.split('=')[0]} = .*nothing to evaluate on.*share = 0.02"):
            data(f"data.source={words}", "validation.share=0.02", "data.sequence_length=256", wants)


def test_a_tokenizer_of_its_own(words: Path, tmp_path: Path) -> None:
    made = train_tokenizer([str(words)], tmp_path / "t.json", 280)
    config = load(
        f"data.source={words}", f"data.tokenizer={made.path}", "data.sequence_length=16", "validation.share=0"
    )
    found = build_data(config)
    assert found.decode is not None and found.encode is not None
    text = "".join(found.decode(found.train[i]["input_ids"]) for i in range(len(found.train)))
    first = (words / "000.txt").read_text() + "<|endoftext|>" + (words / "001.txt").read_text() + "<|endoftext|>"
    assert text.startswith(first)
    assert found.decode(found.encode("a0 b1\n")) == "a0 b1\n"
    assert build_model(config)[0]().get_parameter("wte.weight").shape[0] == 280
    transformer = build_model(load(*TINY, f"data.source={words}", f"data.tokenizer={made.path}"))[0]()
    assert transformer.get_input_embeddings().weight.shape[0] == 280  # type: ignore[operator,union-attr]
    with pytest.raises(ConfigError, match=r"vocab_size = 279: legal: at least 280"):
        build_model(load(*TINY, "model.config.vocab_size=279", f"data.source={words}", f"data.tokenizer={made.path}"))


def test_a_mixture(words: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"{n}" + "~" * 50, "n": n}) + "\n" for n in range(40))
    )
    mix = f'data.mix=[{{source = "{words}", weight = 1}}, {{source = "{tmp_path}/*.jsonl", weight = 3}}]'
    found = data(mix, "data.sequence_length=16", "validation.share=0")
    assert isinstance(found.train, Mixture)
    assert found.train.weights == (1.0, 3.0)
    with Loader(found.train, ONE, 0, 8) as loader:
        rows = torch.cat([batch.fields["input_ids"] for batch in islice(loader, 25)])
    share = (rows == ord("~")).any(1).double().mean().item()
    assert share == pytest.approx(0.75, abs=0.02)
    found = data(mix, "data.sequence_length=16", "validation.share=0.3")
    assert isinstance(found.validation, Joined)
    seen = torch.cat([batch.fields["input_ids"] for batch in one_pass(found.validation, ONE, 0, 4, batches=5)])
    assert 0 < (seen == ord("~")).any(1).sum() < len(seen)  # a few batches have something of every source


def test_validation_in_batches(words: Path) -> None:
    found = data(f"data.source={words}", "validation.share=0.3", "data.sequence_length=16")
    batches = list(one_pass(found.validation, ONE, 0, 5))
    assert sum(batch.rows for batch in batches) == len(found.validation)  # type: ignore[arg-type]
    assert torch.equal(batches[0].fields["input_ids"][3], found.validation[3]["input_ids"])  # type: ignore[index]


# --- documents ---


@pytest.mark.parametrize("model", [["model.name=gpt"], ["model.name=llama"], TINY, GPT2])
def test_documents_do_not_see_each_other(words: Path, model: list[str]) -> None:
    """Whatever stands in other documents of its window, a document's loss and gradients are those it has alone."""
    sizes = ["model.width=16", "model.layers=2", "model.heads=2"] if model[0].startswith("model.name") else []
    shared = [*model, *sizes, f"data.source={words}", "validation.share=0", "data.sequence_length=64"]
    config = load(*shared, "data.attention=document")
    dataset = build_data(config).train
    torch.manual_seed(0)
    module: Any = build_model(config)[0]().double()
    if "rotary" in dict(module.named_buffers()):
        module.rotary = module.rotary.double()
    row = {name: value.unsqueeze(0) for name, value in dataset[3].items()}
    loss = module(**row)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    ids = row["input_ids"][0]
    starts = [0, *(int(place) + 1 for place in (ids[:-1] == 0).nonzero().flatten()), 64]
    assert len(starts) > 3
    terms, count = [], 0
    for start, stop in zip(starts, starts[1:], strict=False):
        part = ids[start:stop].unsqueeze(0)
        output = module(input_ids=part)
        logits = (output if isinstance(output, torch.Tensor) else output.logits)[0]
        # The last document of the window goes on in the next one; for own models its last label is there.
        labels = ids[start + 1 : stop]
        if sizes and ids[stop - 1] != 0:
            labels = torch.cat((labels, row["labels"][0, -1:]))
        terms.append(torch.nn.functional.cross_entropy(logits[: len(labels)], labels, reduction="sum"))
        count += len(labels)
    alone = torch.stack(terms).sum() / count
    # Rotary tables, and the norms and losses of transformers, are in fp32.
    exact = 1e-10 if model == ["model.name=gpt"] else 1e-6
    assert abs(loss.item() - alone.item()) < exact
    expected = torch.autograd.grad(alone, list(module.parameters()), allow_unused=True)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - (0 if theirs is None else theirs)).abs().max() < exact
    plain = {name: value.unsqueeze(0) for name, value in build_data(load(*shared)).train[3].items()}
    full = module(**plain)
    assert abs((full if isinstance(full, torch.Tensor) else full.loss).item() - loss.item()) > 1e-4


MODELS = """
from torch import nn

class Plain(nn.Module):
    def forward(self, input_ids, labels=None):
        return input_ids

class Takes(nn.Module):
    def forward(self, input_ids, labels=None, documents=None):
        return documents
"""


def test_models_that_do_not_take_documents(words: Path, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    shared = [f"data.source={words}", "data.attention=document", "data.sequence_length=16"]

    def make(*overrides: str) -> torch.nn.Module:
        return build_model(load(*shared, *overrides))[0]()

    make(f"model.factory={tmp_path}/models.py:Takes")
    with pytest.raises(
        ConfigError, match=r'data.attention = "document": the forward of Plain.* has no parameter documents'
    ):
        make(f"model.factory={tmp_path}/models.py:Plain")
    with pytest.raises(
        ConfigError, match=r'data.attention = "document": not with LlamaForCausalLM, for its attention is "eager"'
    ):
        make(*TINY, "model.config.attn_implementation=eager")
    make(*TINY)
