"""``model.pretrained``: what is taken from a Hugging Face folder, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shardwise.checkpoint import weights
from shardwise.config import Config, Hardware, build_data, build_model, load_config, load_model_config
from shardwise.config.transformer import described
from shardwise.core.errors import ConfigError
from shardwise.data.bpe import train_tokenizer
from shardwise.initial.initial import record
from shardwise.launch.subject import compare_weights, start_values
from shardwise.models import Llama

SIZES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    made = tmp_path_factory.mktemp("folder") / "llama"
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(vocab_size=280, **SIZES)).to(torch.bfloat16).save_pretrained(made)
    train_tokenizer([str(text)], made / "tokenizer.json", 270)
    return made


def load(folder: Path, *overrides: str) -> Config:
    return load_config(None, [f"model.pretrained={folder}", *overrides], hardware=Hardware(cores=1))


def test_class_config_tokenizer_and_weights_are_those_of_the_folder(folder: Path, text: Path) -> None:
    config = load(folder, f"data.source={text}", "data.sequence_length=32", "validation.share=0")
    assert config.data.tokenizer == str(folder / "tokenizer.json") and config.data.end_token == "<|endoftext|>"
    assert load_config(None, [], hardware=Hardware(cores=1)).data.tokenizer == "bytes"
    constructor, loss = build_model(config)
    assert loss is None
    values = start_values(config, constructor)
    module = values.module
    assert isinstance(module, LlamaForCausalLM) and module.config.vocab_size == 280 and not module.config.use_cache
    theirs = LlamaForCausalLM.from_pretrained(folder)
    for name, value in theirs.state_dict().items():
        assert values[name].dtype == torch.float32 and torch.equal(values[name], value.float()), name
    labels = build_data(config).train[0]
    assert torch.equal(labels["input_ids"], labels["labels"]), "the model shifts them"


def test_its_config_goes_back_as_it_was(folder: Path, text: Path) -> None:
    config = load(folder, f"data.source={text}", "data.sequence_length=32", "model.config.attention_dropout=0.1")
    facts = described(config.model, record(build_model(config)[0]).module)
    before = json.loads((folder / "config.json").read_text())
    assert before["use_cache"] is True and before["dtype"] == "bfloat16"
    assert facts == {
        "class": "LlamaForCausalLM", "config": {**before, "attention_dropout": 0.1}, "dtype": "bfloat16"
    }  # fmt: skip
    plain = load_config(
        None, ["model.transformers=LlamaForCausalLM", "data.sequence_length=32",
               *(f"model.config.{k}={v}" for k, v in SIZES.items() if v)],
        hardware=Hardware(cores=1),
    )  # fmt: skip
    facts = described(plain.model, record(build_model(plain)[0]).module)
    assert facts is not None and facts["config"]["use_cache"] is True and facts["dtype"] is None


def test_the_run_keeps_what_it_needs(folder: Path, text: Path, tmp_path: Path) -> None:
    """A config of a run whose data and folder are gone."""
    config = load(folder, f"data.source={text}", "data.sequence_length=32", "train.devices=1")
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (kept / name).write_bytes((folder / name).read_bytes())
    resolved = config.resolved().replace(str(text), "/gone").replace(str(folder), "/gone/too")
    found = load_model_config(resolved, str(kept))
    assert found.data.tokenizer == str(kept / "tokenizer.json") and found.data.sequence_length == 32
    assert isinstance(record(build_model(found)[0]).module, LlamaForCausalLM)
    with pytest.raises(ConfigError, match=r"model\.pretrained = \"/gone/too\""):
        load_model_config(resolved)


def broken(folder: Path, to: Path, **values: Any) -> Path:
    to.mkdir()
    config = json.loads((folder / "config.json").read_text()) | values
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_folders_that_are_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    wrong = {
        tmp_path / "nowhere": "does not exist",
        tmp_path / "file": "is no folder",
        tmp_path / "empty": "config.json: does not exist",
        tmp_path / "adapter": "holds an adapter of peft, and no model",
        broken(folder, tmp_path / "no class", architectures=None): "does not name the class",
        broken(folder, tmp_path / "no type", model_type=None): "has no model_type",
    }
    for path, words in wrong.items():
        with pytest.raises(ConfigError) as found:
            load(path)
        assert "model.pretrained" in str(found.value) and words in str(found.value), path
        assert "legal: the path of a Hugging Face folder" in str(found.value)
        assert len(str(found.value).splitlines()) == 1, "nothing else is wrong"


def test_keys_that_do_not_go_with_it(folder: Path, tmp_path: Path) -> None:
    for override, words in (
        ("model.name=gpt", "model.name, model.factory, model.transformers, model.pretrained"),
        ("model.layers=2", "left out, for it belongs to"),
        (f"model.weights={folder}", "left out, for model.pretrained has the weights"),
        ("data.sft=x.jsonl data.source=stdlib", "not both"),
        ("data.text_field=body data.sft=x.jsonl", "data.text_field"),
        ("data.sft=/no/such.jsonl", "/no/such.jsonl does not exist"),
    ):
        with pytest.raises(ConfigError) as found:
            load(folder, *override.split())
        assert words in str(found.value), override
    bare = broken(folder, tmp_path / "bare")
    with pytest.raises(ConfigError, match=r"data\.tokenizer.*the folder of model\.pretrained has none"):
        load(bare)
    assert load(bare, "data.tokenizer=bytes").data.tokenizer == "bytes"
    with pytest.raises(ConfigError, match=r"model\.config\.hiden_size: unknown key .* Did you mean \"hidden_size\""):
        build_model(load(folder, "model.config.hiden_size=4"))
    strange = broken(folder, tmp_path / "strange", architectures=["LamaForCausalLM"])
    with pytest.raises(ConfigError, match=r'model\.pretrained = ".*strange": its class LamaForCausalLM is not a model'):
        build_model(load(strange, "data.tokenizer=bytes"))


def test_text_that_the_model_cannot_take(folder: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it knows 64 positions, and data.sequence_length is 128; legal: .*most 64"):
        build_model(load(folder, f"data.source={text}"))
    small = broken(folder, tmp_path / "small", vocab_size=100)
    with pytest.raises(ConfigError, match="its embedding has 100 tokens, and data.tokenizer 256"):
        build_model(load(small, "data.tokenizer=bytes", "data.sequence_length=16"))


def test_shapes_that_differ_are_named_before_weights_are_read(
    folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "opened", lambda path: pytest.fail(f"{path} is read"))
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("the model is built"))
    data = (f"data.source={text}", "data.sequence_length=32")
    compare_weights(load(folder, *data))
    compare_weights(load(folder, *data, "model.lora.rank=2"))
    with pytest.raises(ConfigError) as found:
        compare_weights(load(folder, *data, "model.config.intermediate_size=32"))
    message = str(found.value)
    assert message.startswith(f'model.pretrained = "{folder}": other shapes: ') and "missing" not in message
    assert "layers.0.mlp.gate_proj.weight is [24, 16] instead of [32, 16]" in message and "q_proj" not in message


def test_weights_for_another_size_build_nothing(folder: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class without a config is its default of 7B parameters, of which no tensor may be made."""
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("the model is built"))
    overrides = ["model.transformers=LlamaForCausalLM", f"model.weights={folder}", f"data.source={text}"]
    config = load_config(None, overrides, hardware=Hardware(cores=1))
    with pytest.raises(
        ConfigError, match=r"model\.weights = .*missing: model\.layers\.2\.self_attn.*other shapes"
    ) as e:
        compare_weights(config)
    assert "model.pretrained takes the sizes from its config.json" in str(e.value)
    with pytest.raises(ConfigError, match=r"model\.weights = .*missing"):
        start_values(config, build_model(config)[0])
    plain = load_config(
        None, ["model.name=llama", "model.width=36", f"model.weights={folder}"], hardware=Hardware(cores=1)
    )
    with pytest.raises(ConfigError, match=r"model\.weights = .*missing"):
        compare_weights(plain)


def test_a_model_of_our_own_starts_from_its_weights(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Llama(vocabulary=256, width=16, layers=1, heads=2, context=8)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    sizes = ["model.width=16", "model.layers=1", "model.heads=2", "data.sequence_length=8"]
    given = ["model.name=llama", *sizes, f"model.weights={tmp_path}/w.safetensors"]
    compare_weights(load_config(None, given, hardware=Hardware(cores=1)))


def test_a_folder_of_another_kind(tmp_path: Path, text: Path) -> None:
    """GPT-2 calls its sizes otherwise and ties its head."""
    torch.manual_seed(3)
    made = tmp_path / "gpt2"
    config = GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=32, eos_token_id=0, bos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(made)
    found = load(made, "data.tokenizer=bytes", f"data.source={text}", "data.sequence_length=16")
    compare_weights(found)
    values = start_values(found, build_model(found)[0])
    theirs = GPT2LMHeadModel.from_pretrained(made).state_dict()
    assert all(torch.equal(values[name], value) for name, value in theirs.items())
    with pytest.raises(ConfigError, match="it knows 32 positions, and data.sequence_length is 64"):
        build_model(load(made, "data.tokenizer=bytes", f"data.source={text}", "data.sequence_length=64"))
