"""Adapters of low rank in a checkpoint: merged into the weights, as peft does it."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from saving_of_checkpoints import flat_pieces, save
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from shardwise.checkpoint.export import export
from shardwise.checkpoint.reader import Checkpoint
from shardwise.config.lora import adapters_of, with_adapters
from shardwise.config.sections import ModelConfig
from shardwise.core.errors import ConfigError


def gpt2() -> nn.Module:
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32))


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_a_transposed_layer_is_merged_as_peft_does(tmp_path: Path) -> None:
    """GPT-2's weights are (in, out), and attn.c_proj is square: its shape does not tell."""
    lora = {"rank": 2, "alpha": 6.0, "dropout": 0.0, "targets": "all-linear"}
    model = ModelConfig(transformers="GPT2LMHeadModel", lora=lora)
    module = with_adapters(model, gpt2)()
    with torch.no_grad():
        for name, one in module.named_parameters():
            if ".lora_" in name:
                one.copy_(torch.sin(torch.arange(one.numel(), dtype=torch.float32).view(one.shape)))
    adapters = adapters_of(model, module)
    assert adapters is not None and adapters.transposed and adapters.scale == 3.0
    config = json.loads(json.dumps(module.config.to_dict()))  # type: ignore[union-attr]
    facts = {
        "transformers": {"class": "GPT2LMHeadModel", "config": config},
        "lora": adapters.to_meta(),
        "aliases": {"lm_head.weight": "transformer.wte.weight"},
    }
    tensors = {f"model.{n}": v.detach() for n, v in module.state_dict().items() if n != "lm_head.weight"}
    (end,) = save(tmp_path / "run", 1, [flat_pieces(tensors, 0, 1)], {"model": facts})
    assert end.path is not None
    export(Checkpoint.open(end.path), tmp_path / "out", shard_bytes=4000)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    layers = [one for one in module.modules() if isinstance(one, peft.tuners.lora.LoraLayer)]
    assert len(layers) == 8
    for one in layers:
        one.merge()  # type: ignore[operator]
    for name, value in module.state_dict().items():
        if ".lora_" not in name:
            assert torch.allclose(found[name.replace(".base_layer.", ".")], value, atol=1e-5), name
            assert torch.equal(value, before[name]) != name.endswith(".base_layer.weight")


def test_a_checkpoint_without_adapters_has_none_to_export(tmp_path: Path) -> None:
    (end,) = save(tmp_path / "run", 1, [flat_pieces({"model.w": torch.ones(3)}, 0, 1)], {"model": {"aliases": {}}})
    assert end.path is not None
    with pytest.raises(ConfigError, match=r"has no adapter, for the run has trained without model\.lora"):
        export(Checkpoint.open(end.path), tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
