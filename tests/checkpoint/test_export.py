"""Weights in and out: Hugging Face folders, plain safetensors, other people's files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from saving_of_checkpoints import flat_pieces, same, save
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from loading import load_weights
from shardwise.checkpoint.export import export
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.weights import read_weights
from shardwise.core.errors import ConfigError


def llama(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32, **options))


def gpt2(kind: Any = GPT2LMHeadModel) -> nn.Module:
    torch.manual_seed(2)
    return kind(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32))


class Tied(nn.Module):
    """Not of transformers: an embedding and a head that are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


def saved(module: nn.Module, folder: Path, transformers: bool = True) -> Checkpoint:
    """A checkpoint of two ranks of a module, as a run saves it: a tied tensor under the first of its names."""
    first: dict[int, str] = {}
    aliases, tensors = {}, {"optimizer.step": torch.tensor(3.0)}
    for name, value in module.state_dict(keep_vars=True).items():
        kept = first.setdefault(id(value), name)
        if kept != name:
            aliases[name] = kept
        else:
            tensors[f"model.{name}"] = value.detach()
    model: dict[str, Any] = {"aliases": aliases}
    if transformers:
        config = json.loads(json.dumps(module.config.to_dict()))  # type: ignore[union-attr]
        model["transformers"] = {"class": type(module).__name__, "config": config}
    ends = save(folder, 1, [flat_pieces(tensors, rank, 2) for rank in range(2)], {"model": model})
    assert ends[0].error is None and ends[0].path is not None
    return Checkpoint.open(ends[0].path)


def equal(module: nn.Module, other: nn.Module) -> bool:
    first, second = module.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(same(first[name], second[name]) for name in first)


@pytest.mark.parametrize("make", [llama, lambda: llama(tie_word_embeddings=True), gpt2])
@pytest.mark.parametrize("shard_bytes", [5 * 2**30, 9000])
def test_from_pretrained_reads_what_export_writes(tmp_path: Path, make: Any, shard_bytes: int) -> None:
    model = make()
    files = export(saved(model, tmp_path / "run"), tmp_path / "out", shard_bytes=shard_bytes)
    assert sorted(files) == sorted((tmp_path / "out").iterdir())
    found, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(found) is type(model) and equal(found, model)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    names = [name for file in files if file.suffix == ".safetensors" for name in load_file(file)]
    assert len(names) == len(set(names)) == len({id(one) for one in model.state_dict(keep_vars=True).values()}), (
        "tied ones once"
    )
    if shard_bytes == 9000:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 2
        assert index["metadata"]["total_size"] == sum(
            one.nbytes for file in files[:-2] for one in load_file(file).values()
        )
    # and such a folder is where a run can start, as are the checkpoint itself and transformers' own folder
    model.save_pretrained(tmp_path / "theirs")
    for source in (tmp_path / "out", tmp_path / "run" / "step_00000001", tmp_path / "theirs"):
        blank = make()
        with torch.no_grad():
            for value in blank.parameters():
                value.zero_()
        load_weights(source, blank)
        assert equal(blank, model), source


def test_another_dtype(tmp_path: Path) -> None:
    model = llama()
    export(saved(model, tmp_path / "run"), tmp_path / "out", dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert equal(found, model.bfloat16())
    half = llama()
    load_weights(tmp_path / "out", half)
    assert all(one.dtype == torch.float32 for one in half.parameters()) and equal(half, model.float())


def test_a_plain_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    model.norm(torch.randn(8, 4))
    (file,) = export(saved(model, tmp_path / "run", transformers=False), tmp_path / "deep" / "out")
    assert file == tmp_path / "deep" / "out" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        assert "head.weight" not in opened.keys()  # noqa: SIM118
    for read in (
        lambda one: load_model(one, file),
        lambda one: load_weights(file, one),
        lambda one: load_weights(file.parent, one),
    ):
        found = Tied()
        read(found)
        assert equal(found, model)
    weights = read_weights(file)
    assert torch.equal(weights.read("head.weight"), model.head.weight)
    with pytest.raises(ConfigError, match='Did you mean "norm.bias"'):
        weights.read("norm.bais")


def test_where_export_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = saved(Tied(), tmp_path / "run", transformers=False)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("x")
    with pytest.raises(ConfigError, match="out: exists and is not empty"):
        export(checkpoint, out)
    (out / "mine").unlink()
    assert export(checkpoint, out), "an empty folder is fine"
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for path in (Path("."), here, Path("../here")):
        with pytest.raises(ConfigError, match="is the current folder; legal: a new folder, or another empty one"):
            export(checkpoint, path)
    monkeypatch.undo()
    here.rmdir()
    path = tmp_path / "run" / "step_00000001" / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"rank_00001\.safetensors: damaged"):
        export(checkpoint, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"rank_00001\.safetensors: damaged"):
        load_weights(checkpoint.path, Tied())
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out", "run"]


def test_prefixes_of_hugging_face(tmp_path: Path) -> None:
    """The base model's names in the model with a head, and back; a file whose names all share one that is not ours."""
    head = gpt2()
    head.transformer.save_pretrained(tmp_path / "base")
    other = gpt2()
    with torch.no_grad():
        for value in other.parameters():
            value.zero_()
    load_weights(tmp_path / "base", other)
    assert equal(other, head)
    base = gpt2(GPT2Model)
    head.save_pretrained(tmp_path / "head")
    load_weights(tmp_path / "head", base)
    assert equal(base, head.transformer)
    tied = Tied()
    save_file(
        {f"module.{name}": value.clone() for name, value in tied.state_dict().items()}, tmp_path / "ddp.safetensors"
    )
    found = Tied()
    load_weights(tmp_path / "ddp.safetensors", found)
    assert equal(found, tied)
    # buffers that older versions saved, of which the model says that it has no use for them
    state: dict[str, Tensor] = {
        name: value.clone() for name, value in head.state_dict().items() if name != "lm_head.weight"
    }
    save_file({**state, "transformer.h.0.attn.masked_bias": torch.ones(1)}, tmp_path / "old.safetensors")
    if any("masked_bias" in str(one) for one in getattr(head, "_keys_to_ignore_on_load_unexpected", None) or ()):
        load_weights(tmp_path / "old.safetensors", gpt2())


def test_weights_that_do_not_fit_are_told_all_at_once(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    right = {name: value.clone() for name, value in Tied().state_dict().items() if name != "head.weight"}
    wrong = {**right, "norm.weight": torch.ones(5), "extra": torch.ones(1)}
    wrong["norm.num_batches_tracked"] = torch.tensor(1.5)
    del wrong["norm.bias"]
    save_file(wrong, path)
    module = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ConfigError) as caught:
        load_weights(path, module)
    assert str(caught.value) == (
        f'model.weights = "{path}": missing: norm.bias; unexpected: extra; other shapes: norm.weight is [5] instead of '
        "[4]; "
        "other dtypes: norm.num_batches_tracked is torch.float32 instead of torch.int64"
    )
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items()), "nothing was copied"
    save_file({**right, "head.weight": torch.zeros(9, 4)}, path)
    with pytest.raises(
        ConfigError, match="tied in the model, but different in the file: embedding.weight and head.weight"
    ):
        load_weights(path, module)
    save_file({**right, "head.weight": right["embedding.weight"].clone()}, path)
    load_weights(path, module)
    save_file({"x": torch.ones(1), "module.x": torch.ones(1)}, path)
    only = nn.Module()
    only.register_buffer("x", torch.zeros(1))
    with pytest.raises(ConfigError, match=r"unexpected: module\.x"):
        load_weights(path, only)


@pytest.mark.parametrize("kind", ["mixtral", "vit"])
def test_models_whose_files_have_other_names_than_their_memory(tmp_path: Path, kind: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

    def make() -> nn.Module:
        if kind == "vit":
            return ViTForImageClassification(ViTConfig(**sizes, image_size=32))
        return MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=2, num_local_experts=4))

    model, found = make(), make()
    model.save_pretrained(tmp_path / "theirs")
    assert not set(load_file(tmp_path / "theirs" / "model.safetensors")) <= set(model.state_dict())
    load_weights(tmp_path / "theirs", found)
    assert equal(found, model)
    export(saved(model, tmp_path / "run"), tmp_path / "out")
    assert equal(type(model).from_pretrained(tmp_path / "out"), model)  # type: ignore[attr-defined]
    # what its own loader would fill with random numbers is refused
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    del tensors[min(name for name in tensors if "norm" in name)]
    save_file(tensors, tmp_path / "theirs" / "model.safetensors", metadata={"format": "pt"})
    before = {name: value.clone() for name, value in found.state_dict().items()}
    with pytest.raises(ConfigError, match="missing: .*norm"):
        load_weights(tmp_path / "theirs", found)
    assert all(torch.equal(before[name], value) for name, value in found.state_dict().items())


class Bomb:
    """Unpickling this would leave a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.safetensors", "model.safetensors.index.json", "manifest.json"]
)
def test_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    folder, mark = tmp_path / "weights", tmp_path / "mark"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    for path in (folder, folder / name):
        with pytest.raises(ConfigError) as caught:
            load_weights(path, Tied())
        assert str(caught.value).startswith(f'model.weights = "{path}": {folder}')
    assert not mark.exists()
    if name.endswith(".bin"):
        assert "is a pickle" in str(caught.value) and "save_pretrained" in str(caught.value)


def test_other_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: does not exist"):
        read_weights(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="has neither model.safetensors nor"):
        read_weights(tmp_path)
    checkpoint = saved(Tied(), tmp_path / "checkpoints", transformers=False)
    with pytest.raises(
        ConfigError, match=f"the folder of a run; legal: one of its checkpoints, such as {checkpoint.path}"
    ):
        read_weights(tmp_path)
    folder = tmp_path / "hf"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    save_file({"a": torch.ones(1)}, folder / "one.safetensors")
    for where, words in [
        ({"a": "../one.safetensors"}, "legal: the name of a .safetensors file beside the index"),
        ({"a": 1}, "legal: the name of"),
        ({"b": "one.safetensors"}, r"one\.safetensors: holds no tensor 'b'"),
        ({"a": "two.safetensors"}, r"two\.safetensors: does not exist"),
        ([], "weight_map is a list instead of an object"),
    ]:
        index.write_text(json.dumps({"weight_map": where}))
        with pytest.raises(ConfigError, match=words) as caught:
            read_weights(folder)
        assert str(caught.value).startswith(str(folder))


def test_an_alias_of_a_tensor_that_the_index_leaves_out(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1), "x": torch.ones(1)}, tmp_path / "model-1.safetensors", metadata={"y": "x"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ConfigError, match="missing: y$"):
        load_weights(tmp_path, nn.ParameterDict({"a": torch.zeros(1), "y": torch.zeros(1)}))
