"""Configurations: what is accepted and completed, what is refused and how, and the way back to TOML."""

import random
import string
import sys
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.backend import Backend
from shardwise.config import Config, Hardware, load_config
from shardwise.config.build import build_plan
from shardwise.config.defaults import EXPERTS
from shardwise.config.sections import SECTIONS, rules
from shardwise.config.toml import dumps, inline, parse, shown
from shardwise.core.averaging import Averaging
from shardwise.core.errors import ConfigError
from shardwise.core.learning_rates import OPTIONS
from shardwise.core.tensor_options import TensorOptions

CPU = Hardware(cores=2)


def load(*overrides: str, toml: str | None = None, folder: Path | None = None, hardware: Hardware = CPU) -> Config:
    path = None
    if toml is not None:
        assert folder is not None
        path = folder / "config.toml"
        path.write_text(toml, encoding="utf-8")
    return load_config(path, overrides, hardware=hardware)


def problems(*overrides: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **options)
    return str(caught.value).splitlines()


# --- what is accepted ---


def test_defaults_train_a_small_gpt_on_the_standard_library() -> None:
    config = load()
    assert (config.model.name, config.model.vocabulary, config.data.source) == ("gpt", 256, "stdlib")
    assert config.model.context == config.data.sequence_length
    assert (config.parallel.dp, config.train.devices, config.train.threads) == (2, 2, 1)
    assert config.notices == ()


def test_a_file_and_overrides(tmp_path: Path) -> None:
    text = '[optimizer]\nname = "sgd"\nlr = 1\n[train]\nsteps = 7\n[data]\nbatch_size = 4\n'
    text += "[parallel]\nmicrobatches = 2"
    config = load("train.steps=9", "train.run_dir=runs/x y", "train.steps = 11 ", toml=text, folder=tmp_path)
    assert (config.optimizer.name, config.optimizer.lr, config.train.steps) == ("sgd", 1.0, 11)
    assert isinstance(config.optimizer.lr, float)
    assert config.train.run_dir == "runs/x y"
    assert config.optimizer.betas is None
    assert config.optimizer.weight_decay == 0.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("[0.9, 0.95]", [0.9, 0.95]),
        ("{a = 1}", {"a": 1}),
        ('"quoted"', "quoted"),
        ("runs/first", "runs/first"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
        ("[" * 5000, "[" * 5000),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_values_of_overrides(text: str, value: object) -> None:
    assert parse(text) == value


def test_tables_of_overrides(tmp_path: Path) -> None:
    text = '[model]\ntransformers = "LlamaForCausalLM"\n'
    text += "[model.config]\nhidden_size = 64\nrope = {a = 1, b = {c = 2}}"
    config = load("model.config.layers=2", "model.config.rope.b.d=3", toml=text, folder=tmp_path)
    assert config.model.config == {"hidden_size": 64, "layers": 2, "rope": {"a": 1, "b": {"c": 2, "d": 3}}}
    config = load("model.config={x = 1}", "model.config.y=2", toml=text, folder=tmp_path)
    assert config.model.config == {"x": 1, "y": 2}
    assert config.model.width is None


def test_a_later_value_makes_good_an_earlier_one(tmp_path: Path) -> None:
    assert load("train.steps=5", toml='[train]\nsteps = "many"', folder=tmp_path).train.steps == 5
    assert len(problems("train.steps=few", toml='[train]\nsteps = "many"', folder=tmp_path)) == 1


def test_paths_are_relative_to_where_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for folder in (here, tmp_path):
        (folder / "text.txt").write_text("text")
        (folder / "code.py").write_text("")
    text = '[data]\nsource = "text.txt"\n[model]\nfactory = "code.py:f"\nloss = "package.module:g"'
    config = load(toml=text, folder=tmp_path)
    assert config.data.source == str(tmp_path / "text.txt")
    assert config.model.factory == f"{tmp_path / 'code.py'}:f"
    assert config.model.loss == "package.module:g"
    config = load("data.source=./text.txt", "model.factory=../code.py:h", toml=text, folder=tmp_path)
    assert config.data.source == str(here / "text.txt")
    assert config.model.factory == f"{tmp_path / 'code.py'}:h"


def test_a_way_to_share_layers_among_no_ranks_is_noted() -> None:
    given, one = ["parallel.tensor=2d", "parallel.tensor_plan=auto"], Hardware(cores=1)
    alone = load(*given, hardware=one).notices
    assert [notice.split(" changes nothing")[0] for notice in alone] == [
        'parallel.tensor = "2d"',
        'parallel.tensor_plan = "auto"',
    ]
    assert load("parallel.tensor=1d", hardware=one).notices == ()
    (notice,) = load("parallel.experts=by-number", hardware=one).notices
    assert notice.startswith('parallel.experts = "by-number" changes nothing')
    assert load(*given, "parallel.tp=4", "parallel.dp=1", hardware=Hardware(cores=4)).notices == ()


@pytest.mark.parametrize("cores", range(1, 70))
def test_the_defaults_suit_any_number_of_cores(cores: int) -> None:
    config = load(hardware=Hardware(cores))
    assert config.data.batch_size % config.parallel.dp == 0
    assert config.parallel.dp <= cores
    assert (config.parallel.dp < cores) == bool(config.notices)
    assert config.train.threads == cores // config.parallel.dp


def test_devices() -> None:
    four = Hardware(cores=4)
    assert load("parallel.dp=2", hardware=four).train.devices == 2
    assert load("train.devices=2", hardware=four).parallel.dp == 2
    assert load("data.batch_size=6", "parallel.microbatches=2", hardware=four).parallel.dp == 3
    notice = load("train.devices=8", "data.batch_size=16", hardware=four).notices
    assert len(notice) == 1
    assert "8 ranks share 4 cores" in notice[0]
    assert load("train.devices=4", hardware=four).notices == ()
    assert load("data.batch_size=16", hardware=Hardware(cores=16, gpus=4)).parallel.dp == 4
    assert load("parallel.dp=4", hardware=Hardware(cores=1, gpus=4)).notices == ()
    assert load(hardware=Hardware(cores=1, world=4)).parallel.dp == 4
    assert load("train.devices=4", hardware=Hardware(cores=1, gpus=1, world=4)).parallel.dp == 4


def test_ranks_that_share_a_layer_count() -> None:
    four = Hardware(cores=4)
    assert (load(hardware=four).parallel.tp, load(hardware=four).parallel.tensor) == (1, "1d")
    for overrides, dp, devices in (
        (["parallel.tp=2"], 2, 4),
        (["parallel.tp=4"], 1, 4),
        (["parallel.tp=2", "parallel.pp=2"], 1, 4),
        (["parallel.tp=2", "parallel.dp=1"], 1, 2),
        (["parallel.tp=3", "parallel.pp=2", "parallel.dp=2"], 2, 12),
        (["parallel.tp=3", "train.devices=6"], 2, 6),
        (["parallel.tp=8"], 1, 8),
    ):
        config = load(*overrides, hardware=four)
        assert (config.parallel.dp, config.train.devices) == (dp, devices), overrides
        assert config.notices == () if devices <= 4 else "ranks share 4 cores" in config.notices[0], overrides
    assert load("parallel.tp=2", hardware=Hardware(cores=1, world=8)).parallel.dp == 4
    assert load("data.batch_size=6", "parallel.tp=2", hardware=Hardware(cores=16)).parallel.dp == 6


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "3")
    here = Hardware.here()
    assert here.cores >= 1
    assert here.gpus == (Backend.here().count if Backend.here().asynchronous else 0)
    assert here.world is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert Hardware.here().world == 3
    monkeypatch.setattr(Backend, "here", lambda: Backend("cuda"))
    monkeypatch.setattr(Backend, "count", 5)
    assert Hardware.here().gpus == 5


# --- what is refused ---

REFUSED = [
    # typos
    ("optimiser.lr=1", ["optimiser", "unknown section", "model, data", 'Did you mean "optimizer"?']),
    ("optimizer.learning=1", ["optimizer.learning", "unknown key", "lr, betas"]),
    ("train.step=1", ["train.step", "unknown key", 'Did you mean "steps"?']),
    ("optimizer.name=adamv", ["optimizer.name", '"adamv"', '"sgd"', 'Did you mean "adam']),
    ("model.name=lama", ["model.name", '"lama"', '"gpt", "llama"', 'Did you mean "llama"?']),
    ("train.steps", ['"train.steps"', "section.key=value"]),
    ("steps=3", ['"steps=3"', "section.key=value"]),
    ("train.=3", ["section.key=value"]),
    # wrong types
    ("train.steps=many", ["train.steps", '"many"', "an integer of at least 1"]),
    ("train.steps=1.0", ["train.steps", "1.0", "an integer"]),
    ("train.steps=true", ["train.steps", "true", "an integer"]),
    ("train.steps.x=1", ["train.steps", "{x = 1}", "an integer"]),
    ("optimizer.lr=[1]", ["optimizer.lr", "[1]", "a number of at least 0"]),
    ("optimizer.lr=false", ["optimizer.lr", "a number"]),
    ("optimizer.betas=0.9", ["optimizer.betas", "a list of two"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas", "a list of two"]),
    ("optimizer.betas=[0.9, 0.9, 0.9]", ["optimizer.betas", "a list of two"]),
    ('optimizer.betas=["a", 1]', ["optimizer.betas", "each a number"]),
    ("train.run_dir=3", ["train.run_dir", "3", "the path of a folder"]),
    ("train.run_dir=", ["train.run_dir", "the path of a folder"]),
    ("data.source=1979-05-27", ["data.source", "1979-05-27", "stdlib"]),
    ("model.config=3", ["model.config", "a table"]),
    ("model.config.when=1979-05-27", ["model.config", "It holds", "1979"]),
    ("model.config.x=nan", ["model.config", "It holds nan"]),
    # impossible values
    ("train.steps=0", ["train.steps", "0", "at least 1"]),
    ("train.steps=-3", ["train.steps", "-3", "at least 1"]),
    ("train.steps=3000000000", ["train.steps", "At most 2147483647"]),
    ("train.seed=-1", ["train.seed", "at least 0"]),
    ("train.seed=9223372036854775808", ["train.seed", "At most 9223372036854775807"]),
    ("train.devices=0", ["train.devices", "at least 1"]),
    ("train.threads=0", ["train.threads", "at least 1"]),
    ("train.clip_norm=-1", ["train.clip_norm", "at least 0"]),
    ("train.dropout=0.1", ["train.dropout", '"exact", "fast"']),
    ("data.batch_size=0", ["data.batch_size", "at least 1"]),
    ("data.sequence_length=-8", ["data.sequence_length", "-8", "at least 1"]),
    ("model.layers=-1", ["model.layers", "-1", "at least 1"]),
    ("model.width=0", ["model.width", "at least 1"]),
    ("model.dropout=1.5", ["model.dropout", "1.5", "below 1"]),
    ("model.heads=7", ["model.heads", "7", "a divisor of model.width = "]),
    ("model.vocabulary=255", ["model.vocabulary", "255", "at least 256"]),
    ("model.context=8", ["model.context", "8", "at least data.sequence_length = 256"]),
    ("optimizer.lr=nan", ["optimizer.lr", "nan", "a number"]),
    ("optimizer.lr=inf", ["optimizer.lr", "inf", "a number"]),
    ("optimizer.lr=-1e-3", ["optimizer.lr", "-0.001", "at least 0"]),
    ("optimizer.betas=[0.9, 1]", ["optimizer.betas", "below 1"]),
    ("optimizer.weight_decay=-1", ["optimizer.weight_decay", "at least 0"]),
    ("optimizer.schedule=lineal", ["optimizer.schedule", '"constant", "linear", "cosine"', 'Did you mean "linear"']),
    ("optimizer.milestones=[0]", ["optimizer.milestones", "integer of at least 1"]),
    ("parallel.recompute=some", ["parallel.recompute", '"none", "selective", "full"']),
    ("parallel.zero=4", ["parallel.zero", "4", "At most 3"]),
    ("parallel.reduce=fp64", ["parallel.reduce", '"fp64"', '"fp32", "bf16" or "fp16"']),
    ("parallel.dp_replicate=2", ["parallel.dp_replicate", "parallel.zero or parallel.local_steps of at least 1"]),
    ("parallel.local_steps=4", ["parallel.local_steps", "4", "parallel.dp_replicate of at least 2", "one group"]),
    ("parallel.server_ranks=2", ["parallel.server_ranks", "2", 'parallel.server = "sync"', "no server"]),
    ("parallel.server=asynchronous", ["parallel.server", '"none", "sync", "async", "stale"']),
    ("parallel.local_fragments=2", ["parallel.local_fragments", "2", "1 to parallel.local_steps = 0"]),
    ("parallel.outer_lr=0.5", ["parallel.outer_lr", "0.5", "parallel.local_steps of at least 1"]),
    ("parallel.push_every=2", ["parallel.push_every", "2", 'parallel.server = "async" or "stale"']),
    ("parallel.push_share=0.5", ["parallel.push_share", "0.5", 'parallel.push = "top-k"']),
    ("parallel.local_mix=1.5", ["parallel.local_mix", "1.5", "at most 1"]),
    ("parallel.outer_momentum=1", ["parallel.outer_momentum", "below 1"]),
    ("parallel.dp_replicate=3", ["parallel.dp_replicate", "a divisor of parallel.dp = 2: 1, 2"]),
    ("parallel.precision=fp8", ["parallel.precision", '"fp8"', '"fp32", "fp64", "bf16", "fp16"']),
    ("train.loss_scale=dynamic", ["train.loss_scale", '"dynamic"', "left out", 'parallel.precision = "fp16"']),
    ("train.loss_scale=dynamics",
    ["train.loss_scale", '"dynamics"', '"dynamic" or a number above 0', 'Did you mean "dynamic"']),
    ("train.loss_scale=0", ["train.loss_scale", "0", '"dynamic" or a number above 0 and below 1.7']),
    ("parallel.dp=3", ["data.batch_size", "3 x 1", "6 or 9"]),
    ("parallel.pp=0", ["parallel.pp", "0", "an integer of at least 1"]),
    ("parallel.tp=0", ["parallel.tp", "0", "an integer of at least 1"]),
    ("parallel.tp=1.5", ["parallel.tp", "1.5", "an integer of at least 1"]),
    ("parallel.tensor=4d", ["parallel.tensor", '"4d"', '"1d", "1d-sp", "2d", "2.5d", "3d"']),
    ("parallel.tensor_plan=auto_",
    ["parallel.tensor_plan", '"recipe", "auto", "propagate", "table"', 'Did you mean "auto"?']),
    ("parallel.pins=3", ["parallel.pins", 'a table of patterns, such as "*.q_proj.weight" = "column"']),
    ("parallel.pins={}", ["parallel.pins", "a table of patterns"]),
    ('parallel.pins={"*.weight" = 1}', ["parallel.pins", "It holds '*.weight' = 1"]),
    ("parallel.experts=outside", ["parallel.experts", '"outside"', '"inside", "by-number"']),
    ("parallel.tensor=1dsp", ["parallel.tensor", '"1dsp"', 'Did you mean "1d-sp"?']),
    ("parallel.microbatches=3", ["data.batch_size", "2 x 3", "6 or 12"]),
    ("parallel.microbatches=16", ["data.batch_size", "2 x 16", "such as 32"]),
    # what does not go together, or is not there
    ("model.kv_heads=2", ["model.kv_heads", "left out", 'model.name = "llama"']),
    ("model.experts=0", ["model.experts", "legal: an integer"]),
    ("model.z_weight=0.1", ["model.z_weight", "left out, or model.experts beside it"]),
    ("model.config={a = 1}", ["model.config", "left out", "model.transformers"]),
    ("model.arguments={a = 1}", ["model.arguments", "left out", "model.factory"]),
    ("data.arguments={a = 1}", ["data.arguments", "left out", "data.factory"]),
    ("data.pad={a = 1}", ["data.pad", "left out", "data.factory"]),
    ('data.varies={"a.1" = 9}', ["data.varies", "left out", "data.factory"]),
    ('data.varies={"a.1" = 0}', ["data.varies", "a table of the largest size of each FIELD.DIM"]),
    ("data.pad={}", ["data.pad", "a table of a number for each field"]),
    ("data.pad_to_multiple_of=8", ["data.pad_to_multiple_of", "left out", "data.factory"]),
    ("data.source=/no/such/text", ["data.source", "/no/such/text does not exist"]),
    ("model.factory=/no/such/file.py:f", ["model.factory", "There is no /no/such/file.py"]),
    ("model.loss=/no/such/file.py:f", ["model.loss", "There is no /no/such/file.py"]),
    ("data.factory=/no/such/file.py:f", ["data.factory", "There is no /no/such/file.py"]),
    ("model.factory=function", ["model.factory", "path/to/file.py:function"]),
    ("model.factory=file.py:", ["model.factory", "path/to/file.py:function"]),
    ("model.transformers=not a name", ["model.transformers", "LlamaForCausalLM"]),
    ("train.run_dir=" + sys.executable, ["train.run_dir", "It is a file"]),
    # data
    ("data.source=[]", ["data.source", "a list of these", "The list is empty"]),
    ('data.source=["stdlib", 3]', ["data.source", '"stdlib"', "a list of these"]),
    ('data.source=["stdlib", "/no/such"]', ["data.source", "/no/such does not exist"]),
    ("data.source=/no/such/*.txt", ["data.source", "/no/such/*.txt does not exist"]),
    ("data.mix=stdlib", ["data.mix", "a list of tables"]),
    ("data.mix=[]", ["data.mix", "a list of tables"]),
    ("data.mix=[3]", ["data.mix", "Part 1 is no table"]),
    ('data.mix=[{source = "stdlib"}]', ["data.mix", "Part 1 has no weight"]),
    ('data.mix=[{source = "stdlib", weight = 0}]', ["data.mix", "Part 1 has a wrong weight", "a number above 0"]),
    ('data.mix=[{source = "stdlib", wieght = 1}]', ["data.mix", "Part 1", "wieght", 'Did you mean "weight"?']),
    ('data.mix=[{source = "stdlib", weight = 1}, {source = "/no/such", weight = 1}]',
    ["data.mix", "/no/such does not exist"]),
    ("data.tokeniser=bytes", ["data.tokeniser", "unknown key", 'Did you mean "tokenizer"?']),
    ("data.tokenizer=/no/such.json", ["data.tokenizer", "cannot read /no/such.json", "shardwise tokenizer train"]),
    ("data.tokenizer=/", ["data.tokenizer", "cannot read /"]),
    ("data.tokenizer=" + __file__, ["data.tokenizer", "is no tokenizer"]),
    ("data.end_token=</s>", ["data.end_token", "left out", "byte 0"]),
    ("validation.share=1", ["validation.share", "at least 0 and below 1"]),
    ("data.validation=-0.1", ["validation.share", "at least 0 and below 1"]),
    ("data.attention=documents", ["data.attention", '"full", "document"', 'Did you mean "document"?']),
    ("data.text_field=", ["data.text_field", "the name of the column"]),
    ("data.cache_dir=3", ["data.cache_dir", "the path of a folder"]),
    ("model.weights=/no/such.safetensors", ["model.weights", "/no/such.safetensors does not exist"]),
    # what a run does beside training
    ("train.eval_every=-1", ["validation.every", "at least 0"]),
    ("validation.patience=0", ["validation.patience", "at least 1"]),
    ("validation.metrics=accuracy", ["validation.metrics", "a list"]),
    ('validation.metrics=["precision"]', ["validation.metrics", "top-K"]),
    ('validation.metrics=["accuracy", "accuracy"]', ["validation.metrics", "accuracy is there twice"]),
    ("validation.goal=most", ["validation.goal", '"max", "min"']),
    ("validation.source=3", ["validation.source", "stdlib"]),
    ("validation.factory=f", ["validation.factory", "function"]),
    ("validation.watch=3", ["validation.watch", "the name of a metric"]),
    ("checkpoint.best=3", ["checkpoint.best", "the name of a metric"]),
    ("checkpoint.goal=best", ["checkpoint.goal", '"max", "min"']),
    ("validation.arguments=3", ["validation.arguments", "a table"]),
    ("validation.batches=0", ["validation.batches", "at least 1"]),
    ("train.sample_every=x", ["train.sample_every", "an integer"]),
    ("train.max_restarts=-1", ["train.max_restarts", "at least 0"]),
    ("train.tensorboard=true", ["train.tensorboard", 'train.loggers = ["tensorboard"]']),
    ("train.loggers=wandb", ["train.loggers", '"tensorboard", "wandb", "mlflow"', "It is no list"]),
    ("train.loggers=['wandbb']", ["train.loggers", 'Did you mean "wandb"?']),
    ("train.loggers=['mlflow', 'mlflow']", ["train.loggers", "mlflow is there twice"]),
    ("train.callbacks=['/no/such.py:f']", ["train.callbacks", "There is no /no/such.py"]),
    ("train.callbacks=['f']", ["train.callbacks", "path/to/file.py:function"]),
    ("train.epochs=0", ["train.epochs", "above 0"]),
    ("train.epochs=many", ["train.epochs", "a number above 0"]),
    ("train.sample_prompt=", ["train.sample_prompt", "a text that is not empty"]),
    ("train.tf32=1", ["train.tf32", "true or false"]),
    ("train.trace_steps=3", ["train.trace_steps", "a list of steps", "[] for none"]),
    ("train.trace_steps=[3, 0]", ["train.trace_steps", "a list of steps", "[] for none"]),
    ("train.resume=yes", ["train.resume", '"auto", "never"']),
    ("checkpoint.every=-1", ["checkpoint.every", "at least 0"]),
    ("checkpoint.keep_last=0", ["checkpoint.keep_last", "at least 1"]),
    ("checkpoint.keep_every=0", ["checkpoint.keep_every", "at least 1"]),
    ("checkpoint.staging_mib=0", ["checkpoint.staging_mib", "at least 1"]),
    ("checkpoint.evry=3", ["checkpoint.evry", 'Did you mean "every"?']),
]  # fmt: skip


BASE = ("data.batch_size=8", "data.sequence_length=256")  # figures of the messages


@pytest.mark.parametrize(("override", "words"), REFUSED, ids=[override for override, _ in REFUSED])
def test_refused(override: str, words: list[str]) -> None:
    found = problems(*BASE, override)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found
    assert "(command line)" in found[0]


TOGETHER = [
    (["model.name=gpt", "model.transformers=A"], ["model.transformers", "model.name is there as well"]),
    (["model.factory=a:b", "model.transformers=A"], ["model.transformers", "model.factory is there as well"]),
    (["model.transformers=A", "model.width=8"], ["model.width", "left out", "[model.config]"]),
    (["model.factory=a:b", "model.heads=8"], ["model.heads", "left out"]),
    (["model.name=llama", "model.dropout=0.1"], ["model.dropout", "left out", 'model.name = "gpt"']),
    (["model.experts=4", "model.experts_per_token=5"], ["model.experts_per_token", "1 to model.experts = 4"]),
    (["model.experts=4", "model.capacity_factor=0"], ["model.capacity_factor", "above 0"]),
    (["model.experts=4", "model.balance=bias"], ["model.balance", '"switch", "gshard", "none"']),
    (["model.transformers=MixtralForCausalLM", "model.experts=4"],
     ["model.experts", "left out, for it belongs to"]),
    (["model.name=llama", "model.heads=8", "model.width=256", "model.kv_heads=3"],
     ["model.kv_heads", "a divisor of model.heads = 8"]),
    (["model.name=llama", "model.width=24", "model.heads=8"], ["model.heads", "even size", "is 3"]),
    (["data.source=stdlib", "data.factory=a:b"], ["data.factory", "not both"]),
    (["data.source=stdlib", 'data.mix=[{source = "stdlib", weight = 1}]'], ["data.mix", "not both"]),
    (["data.factory=a:b", 'data.mix=[{source = "stdlib", weight = 1}]'], ["data.factory", "not both"]),
    (["data.factory=a:b", "data.tokenizer=bytes"], ["data.tokenizer", "left out", "data.source"]),
    (["data.factory=a:b", "data.attention=full"], ["data.attention", "left out"]),
    (["data.factory=a:b", "validation.every=5"], ["validation.every", "validation.share = 0", "no validation.source"]),
    (["data.validation=0", "train.eval_every=5"], ["validation.every", "validation.share = 0"]),
    (["validation.source=stdlib", "validation.factory=a:b"], ["validation.factory", "not both"]),
    (["validation.source=stdlib", "validation.share=0.1"], ["validation.share", "0 or left out", "validation.source"]),
    (["validation.source=nowhere.txt"], ["validation.source", "nowhere.txt does not exist"]),
    (["data.factory=a:b", "validation.source=stdlib"], ["validation.source", "left out", "validation.factory"]),
    (["validation.arguments={a = 1}"], ["validation.arguments", "belongs to validation.factory"]),
    (["validation.factory=nowhere.py:f"], ["validation.factory", "a Python file that exists"]),
    (['validation.metrics=["accuracy", "accuracy"]'], ["validation.metrics", "accuracy is there twice"]),
    (['validation.metrics=["nowhere.py:f"]'], ["validation.metrics", "a Python file that exists"]),
    (['validation.metrics=["m:rows"]'], ["validation.metrics", "rows is one of these"]),
    (['validation.metrics=["accuracy"]', "validation.every=0"], ["validation.metrics", "no evaluations"]),
    (["checkpoint.best=accuracy"], ["checkpoint.best", "one of validation_loss, perplexity", "validation.metrics"]),
    (["data.factory=a:b", "validation.share=0.5", "checkpoint.best=perplexity"],
     ["checkpoint.best", "validation_loss"]),
    (["checkpoint.best=perplexity", "validation.every=0"], ["checkpoint.best", "no evaluations"]),
    (["checkpoint.goal=max"], ["checkpoint.goal", "belongs to checkpoint.best"]),
    (["validation.goal=max"], ["validation.goal", "belongs to validation.watch"]),
    (["validation.watch=perplexity"], ["validation.watch", "belongs to validation.patience"]),
    (["validation.patience=2", "validation.watch=accuracy"], ["validation.watch", "one of validation_loss"]),
    (["validation.patience=2", "validation.every=0"], ["validation.patience", "no evaluations"]),
    (["optimizer.name=sgd", "optimizer.betas=[0.9, 0.9]"], ["optimizer.betas", '"sgd" has none', "adamw"]),
    (["train.steps=10", "optimizer.warmup_steps=10"], ["optimizer.warmup_steps", "at most 9"]),
    (["train.steps=10", "optimizer.warmup_steps=11", "optimizer.schedule=constant"], ["at most 10"]),
    (["train.steps=10", "optimizer.warmup_steps=9", "optimizer.schedule=wsd"], ["optimizer.warmup_steps", "at most 8"]),
    (["train.steps=10", "optimizer.warmup_steps=7", "optimizer.schedule=wsd", "optimizer.decay_fraction=0.4"],
     ["optimizer.warmup_steps", "at most 6"]),
    (["optimizer.schedule=multistep", "optimizer.milestones=[5, 5]"], ["optimizer.milestones", "rising integers"]),
    (["optimizer.ema_start=5"], ["optimizer.ema_start", "optimizer.ema as well"]),
    (["validation.ema=true"], ["validation.ema", "there is no optimizer.ema"]),
    (["optimizer.ema=0.9", "parallel.server=async", "train.devices=3"], ["optimizer.ema", '"sync"']),
    (["optimizer.ema=0.9", "train.devices=2", "parallel.dp_replicate=2", "parallel.local_steps=2"],
     ["optimizer.ema", "local_steps = 0"]),
    (["train.clip_value=0.1", "train.clip_norm=2"], ["train.clip_value", "train.clip_norm = 0", "which comes first"]),
    (["train.clip_value=0.1", "parallel.server=async", "train.devices=3"], ["train.clip_value", '"sync"']),
    (["optimizer.gamma=0.5"], ["optimizer.gamma", 'schedule = "step", "multistep"', "cosine"]),
    (["optimizer.schedule=step"], ["optimizer.step_size", "the number of steps after which", "needs it"]),
    (["optimizer.schedule=one_cycle", "optimizer.warmup_steps=5"], ["optimizer.warmup_steps", "legal: 0"]),
    (["optimizer.schedule=one_cycle", "optimizer.name=sgd"], ["optimizer.cycle_momentum", "legal: false", "momentum"]),
    (["parallel.dp=1", "parallel.zero=3"], ["parallel.zero", "0, or parallel.dp of at least 2"]),
    (["parallel.zero=3", "parallel.dp_replicate=2"], ["parallel.zero", "parallel.dp of at least 4"]),
    (["train.devices=4", "parallel.dp=2"], ["parallel.dp", "train.devices = 4"]),
    (["train.devices=4", "parallel.tp=3"], ["parallel.tp", "a divisor of train.devices = 4: 1, 2, 4"]),
    (["train.devices=12", "parallel.pp=2", "parallel.tp=4"],
    ["parallel.tp", "train.devices = 12 over parallel.pp = 2: 1, 2, 3, 6"]),
    (["train.devices=12", "parallel.pp=5", "parallel.tp=4"],
    ["parallel.pp", "a divisor of train.devices = 12: 1, 2, 3, 4, 6, 12"]),
    (["train.devices=8", "parallel.dp=4", "parallel.tp=4"],
    ["parallel.dp", "2, train.devices = 8 over parallel.tp = 4"]),
    (["train.devices=8", "parallel.dp=4", "parallel.pp=2", "parallel.tp=2"],
     ["parallel.dp", "2, train.devices = 8 over parallel.pp x parallel.tp = 2 x 2"]),
    (["parallel.tp=4", "parallel.tensor=2d", "parallel.experts=by-number"],
    ["parallel.experts", 'tensor = "2d"', '"inside", or tensor = "1d" or "1d-sp"']),
    (["parallel.tensor_plan=propagate", 'parallel.pins={a = "0"}'],
    ["parallel.tensor_plan", '"recipe", or tp of 2 or more']),
    (["parallel.tp=2", "parallel.tensor_plan=table"],
    ['parallel.tensor_plan = "table"', '"recipe", "auto", or pins', "there are none"]),
    (["parallel.tp=2", 'parallel.pins={a = "0"}'],
    ["parallel.pins", 'none, or tensor_plan = "propagate", "table"', '"a" is not legal']),
    (["parallel.tp=2", "parallel.tensor_plan=auto", 'parallel.pins={a = "0"}'],
    ["parallel.pins", "which decides itself"]),
    (["parallel.tp=2", "parallel.tensor_plan=table", 'parallel.pins={a = "colum"}'],
    ["parallel.pins", '"row"', '"a" = "colum" is not legal. Did you mean "column"?']),
    (["parallel.tp=4", "parallel.tensor=2d", "parallel.tensor_plan=table", 'parallel.pins={a = "row"}'],
     ["parallel.pins", '"row@tp_i" or "row@tp_j"', "does not say over which axis"]),
    (["parallel.tp=6", "parallel.tensor=2d"],
     ['parallel.tp = 6 (command line): legal: a square, such as 4 or 9. With parallel.tensor = "2d"']),
    (["parallel.tp=6", "parallel.tensor=2.5d"],
    ["parallel.tp = 6 (command line): legal: d·q² with d and q of 2 or more, such as 8 or 18. With"]),
    (["parallel.tp=9", "parallel.tensor=3d"], ["parallel.tp = 9 (command line): legal: a cube, such as 8 or 27. With"]),
    (["parallel.tp=2", "parallel.tensor=3d", "train.devices=4"], ["parallel.tp = 2", "a cube"]),
    (["train.devices=4", "parallel.tp=4", "parallel.zero=1"], ["parallel.zero", "0, or parallel.dp of at least 2"]),
    (["data.batch_size=10", "parallel.dp=2", "parallel.microbatches=3"], ["data.batch_size", "6 or 12"]),
    (["data.factory=nonsense", "model.context=64"], ["data.factory = "]),
    (["train.devices=1", "parallel.stages=[1, 2]"], ["parallel.stages", "legal: 1 number, one for each stage"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words"), TOGETHER, ids=[" ".join(each) for each, _ in TOGETHER])
def test_refused_together(overrides: list[str], words: list[str]) -> None:
    found = problems(*overrides)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    ("override", "hardware", "words"),
    [
        ("train.devices=3", Hardware(cores=8, gpus=2), ["train.devices = 3", "at most 2, the GPUs"]),
        ("parallel.dp=4", Hardware(cores=8, gpus=2), ["parallel.dp = 4", "at most 2, the GPUs"]),
        ("train.devices=2", Hardware(cores=8, world=4), ["train.devices = 2", "4, the number of ranks"]),
        ("data.batch_size=6", Hardware(cores=8, world=4), ["data.batch_size = 6", "4 x 1", "4 or 8"]),
        ("parallel.tp=4", Hardware(cores=8, gpus=2), ["parallel.tp = 4", "at most 2, the GPUs of this machine"]),
        (
            "parallel.dp=2 parallel.tp=2",
            Hardware(cores=8, gpus=2),
            ["parallel.dp = 2", "at most 1, the GPUs", "over parallel.tp = 2"],
        ),
        (
            "parallel.pp=2 parallel.tp=2",
            Hardware(cores=8, gpus=2),
            ["parallel.tp = 2", "at most 1, the GPUs", "over parallel.pp = 2"],
        ),
        ("parallel.dp=1 parallel.tp=8", Hardware(cores=8, gpus=4), ["parallel.tp = 8", "at most 4, the GPUs"]),
        ("parallel.tp=3", Hardware(cores=8, world=4), ["parallel.tp = 3", "a divisor of train.devices = 4: 1, 2, 4"]),
        (
            "parallel.dp=1 parallel.tp=3",
            Hardware(cores=8, world=4),
            ["parallel.tp = 3", "a divisor of 4, the number of ranks already"],
        ),
        (
            "parallel.dp=1 parallel.tp=2",
            Hardware(cores=8, world=4),
            ["parallel.dp = 1", "2, the number of ranks", "parallel.tp = 2"],
        ),
        ("train.devices=2 parallel.tp=2", Hardware(cores=8, world=4), ["train.devices = 2", "4, the number of ranks"]),
    ],
)
def test_more_devices_than_there_are(override: str, hardware: Hardware, words: list[str]) -> None:
    found = problems(*override.split(), hardware=hardware)
    assert len(found) == 1
    assert all(word in found[0] for word in words), found


def test_a_mesh_that_is_none_is_refused_with_all_else() -> None:
    found = problems("parallel.tp=6", "parallel.tensor=2d", "train.steps=0", "parallel.zero=9")
    assert len(found) == 3 and any("parallel.tp = 6 (command line): legal: a square" in one for one in found), found
    for kind, sizes in (
        ("1d", (1, 5, 6)),
        ("1d-sp", (1, 3)),
        ("2d", (1, 4, 9)),
        ("2.5d", (1, 8, 12 * 6, 18)),
        ("3d", (1, 8, 27)),
    ):
        for size in sizes:
            assert load(f"parallel.tensor={kind}", f"parallel.tp={size}", "parallel.dp=1").parallel.tp == size


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = '[optimizer]\nlr = "fast"\nnam = "sgd"\n[trian]\nsteps = 1\n[model]\nheads = 5\n[parallel]\ndp = 0'
    found = problems("data.batch_size=-1", "nonsense", toml=text, folder=tmp_path)
    assert len(found) == 7
    for key, origin in (
        ("optimizer.lr", "config.toml"),
        ("optimizer.nam ", "config.toml"),
        ("trian ", "config.toml"),
        ("model.heads", "config.toml"),
        ("parallel.dp", "config.toml"),
        ("data.batch_size", "command line"),
        ('"nonsense"', "command line"),
    ):
        assert [origin in line for line in found if line.startswith(key)] == [True], (key, found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[train]\nsteps = = 3", ["not TOML", "line 2"]),
        ("[train]\nsteps = 3\nsteps = 4", ["not TOML"]),
        ("train = 3", ["train = 3", "a section, [train]"]),
        ("[[train]]\nsteps = 3", ["train", "a section, [train]"]),
        ("steps = 3", ["steps", "unknown section"]),
        ('["a\\nb"]\nc = 1', ['"a\\nb"', "unknown section"]),
        ("[train]\n" + '"a\\nb" = 1', ['train."a\\nb"', "unknown key"]),
        ("[train]\nsteps = " + "[" * 3000, ["not TOML"]),
    ],
)
def test_files_that_are_no_config(text: str, words: list[str], tmp_path: Path) -> None:
    found = problems(toml=text, folder=tmp_path)
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'[train]\nrun_dir = "\xe4"')
    for name, words in (("missing.toml", "No such file"), ("", "directory"), ("latin.toml", "utf-8")):
        with pytest.raises(ConfigError, match=words) as caught:
            load_config(tmp_path / name, hardware=CPU)
        assert str(tmp_path / name) in str(caught.value)


def test_arguments_that_are_no_text() -> None:
    found = problems("train.run_dir=\udcff", "train.run_dir\udcff=x", "data.source=a\0b")
    assert len(found) == 3
    "\n".join(found).encode()


def test_values_in_messages_are_short_and_on_one_line() -> None:
    found = problems("train.steps=" + "x\n" * 10_000)
    assert len(found) == 1
    assert len(found[0]) < 300
    assert shown("\udcff") == '"\\udcff"'


def test_every_key_of_the_issue_is_there() -> None:
    expected = {
        "model": "name factory transformers loss loss_weight vocabulary width layers heads kv_heads hidden context "
        "dropout tied config arguments weights pretrained lora experts experts_per_token shared_experts "
        "capacity_factor balance balance_weight z_weight bias_rate",
        "data": "source mix sft text_field tokenizer end_token attention cache_dir factory arguments batch_size "
        "sequence_length pad pad_mask pad_to_multiple_of varies",
        "optimizer": "name lr betas weight_decay schedule warmup_steps eps momentum dampening nesterov amsgrad "
        "groups layer_decay ema ema_start ema_every ema_warmup min_lr_ratio decay_fraction power cycle_steps "
        "cycle_mult step_size milestones gamma timescale step_size_up step_size_down mode pct_start anneal_strategy "
        "div_factor final_div_factor "
        "three_phase cycle_momentum base_momentum max_momentum adjust_lr_fn beside",
        "parallel": "pp schedule stages_per_rank stages timetable norm window vertical_sync tp tensor tensor_plan "
        "experts pins ep cp context overlap links dp dp_replicate local_steps local_fragments local_mix outer_lr "
        "outer_momentum server server_ranks server_host staleness pull_every push_every server_rate push push_share "
        "zero gathered prefetch reduced reduce sparse_gradients offload microbatches rows recompute precision",
        "train": "steps seed devices threads clip_norm clip_value run_dir dropout hang_timeout loss_scale "
        "sample_every expert_load_every "
        "max_restarts trace_steps epochs sample_prompt loggers callbacks tf32 deterministic resume memory_gib",
        "checkpoint": "every keep_last keep_every best goal staging_mib",
        "validation": "share source factory arguments every batches ema metrics patience watch goal",
    }
    assert {section: set(rules(section)) for section in SECTIONS} == {
        section: set(keys.split()) for section, keys in expected.items()
    }


def test_tf32_belongs_to_float32() -> None:
    assert load("train.tf32=true").train.tf32 and not load().train.tf32
    for precision in ("bf16", "fp16", "fp64"):
        with pytest.raises(ConfigError, match='train.tf32.*parallel.precision = "fp32"'):
            load("train.tf32=true", f"parallel.precision={precision}")
        assert not load(f"parallel.precision={precision}").train.tf32


def test_gradients_are_clipped_to_a_norm_of_1_but_by_value() -> None:
    assert load().train.clip_norm == 1.0
    auto = load("train.devices=2", "parallel.pp=2", "parallel.schedule=auto", "parallel.microbatches=4")
    assert auto.train.clip_norm == 1.0  # as with the other schedules
    assert load("train.clip_value=0.1").train.clip_norm == 0.0
    assert load("train.clip_value=0.1", "train.clip_norm=0").train.clip_value == 0.1
    assert load("train.devices=2", "parallel.pp=2", "parallel.schedule=pipedream").train.clip_norm == 0.0


def test_epochs_stand_for_steps() -> None:
    """The last step of an epoch, with the rows that are left, counts; what follows from steps follows from them."""
    config = load("train.epochs=2", "data.batch_size=4", "data.factory=a:b", "optimizer.warmup_steps=700")
    assert config.train.epochs == 2  # the data is not known yet, and neither are the steps
    with pytest.raises(ConfigError, match="optimizer.warmup_steps.*at most 5, with train.steps = 6"):
        config.for_samples(9)
    islands = ["train.devices=2", "parallel.dp_replicate=2", "parallel.local_steps=2"]
    pushes = ["parallel.server=async", "parallel.push_every=3"]  # 25 rows are two pushes of 12, and one of the last
    config = load("train.epochs=2", "data.batch_size=4", "data.factory=a:b", *pushes).for_samples(25)
    assert config.train.steps == 6 and config.rows_of_step == config.rows_together == 12
    config = load("train.epochs=3", "data.batch_size=16", "data.factory=a:b", *islands).for_samples(17)
    assert config.train.steps == 3  # a row that is left is not one for each island
    config = load("train.epochs=2", "data.batch_size=4", "data.factory=a:b").for_samples(9)
    assert (config.train.epochs, config.train.steps, config.checkpoint.every) == (None, 6, 1)
    assert any(
        one == "train.epochs = 2: 6 steps, 3 an epoch, the last of an epoch with 1 rows" for one in config.notices
    )
    assert config.for_samples(1000) is config and "train.epochs" not in config.origins
    assert "epochs" not in config.resolved()
    for epochs, samples, steps in ((0.5, 9, 2), (0.1, 9, 1), (1.5, 8, 3), (3, 2, 3), (0.7, 40, 7)):
        found = load(f"train.epochs={epochs}", "data.batch_size=4", "data.factory=a:b").for_samples(samples)
        assert found.train.steps == steps, (epochs, samples)
    with pytest.raises(ConfigError, match="train.epochs = 2 .*left out, or train.steps left out"):
        load("train.epochs=2", "train.steps=6")


def test_a_sample_prompt_belongs_to_models_that_write() -> None:
    assert load('train.sample_prompt="class "').train.sample_prompt == "class "
    for other in ("data.factory=a:b", "model.factory=a:b"):
        assert load(other).train.sample_prompt is None
        with pytest.raises(ConfigError, match="train.sample_prompt.*left out, for only the models of model.name"):
            load(other, "train.sample_prompt=x")


def test_a_config_cannot_be_changed() -> None:
    config = load()
    with pytest.raises(AttributeError):
        config.train.steps = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        config.train = replace(config.train, steps=3)  # type: ignore[misc]


# --- text ---


def test_defaults_of_evaluation_and_checkpoints() -> None:
    config = load("train.steps=600")
    assert (config.validation.share, config.validation.every, config.checkpoint.every) == (0.01, 60, 120)
    assert (config.checkpoint.keep_last, config.checkpoint.keep_every, config.checkpoint.staging_mib) == (2, None, None)
    assert (config.validation.batches, config.train.sample_every, config.train.max_restarts) == (20, 0, 3)
    assert (config.train.loggers, config.train.callbacks, config.train.resume) == ((), (), "auto")
    assert (config.train.trace_steps, config.train.sample_prompt) == ((3,), "\ndef ")
    assert (
        load("train.trace_steps=[9, 2, 9]").train.trace_steps == (2, 9)
        and load("train.trace_steps=[]").train.trace_steps == ()
    )
    config = load("train.steps=3")
    assert (config.validation.every, config.checkpoint.every) == (1, 1)
    assert load("data.validation=0").validation.every == 0
    config = load("data.factory=a:b")
    assert (config.validation.share, config.validation.every, config.data.tokenizer, config.data.cache_dir) == (
        0,
        0,
        None,
        None,
    )
    assert load("checkpoint.every=0", "train.eval_every=0").checkpoint.every == 0
    config = load("validation.patience=3", "checkpoint.best=perplexity")
    assert (config.validation.watch, config.validation.goal, config.checkpoint.goal) == ("perplexity", None, None)
    assert load("validation.patience=3").validation.watch == "validation_loss"
    assert load("validation.source=stdlib").validation.share == 0 and load("validation.source=stdlib").validation.every


def test_keys_that_have_moved_are_read_at_their_old_place(tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text("[data]\nvalidation = 0.2\n[train]\neval_every = 7\neval_batches = 3\n")
    old = load_config(tmp_path / "old.toml", hardware=CPU)
    assert (old.validation.share, old.validation.every, old.validation.batches) == (0.2, 7, 3)
    assert old == load("validation.share=0.2", "validation.every=7", "validation.batches=3")
    assert "eval_every" not in old.resolved()


def test_where_tokens_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load().data.cache_dir == str(tmp_path / "shardwise" / "tokens")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load().data.cache_dir == str(Path.home() / ".cache" / "shardwise" / "tokens")
    assert not list(tmp_path.iterdir())  # made when it is needed


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from shardwise.data.bpe import train_tokenizer

    train_tokenizer([__file__], tmp_path / "t.json", 300)
    return tmp_path / "t.json"


def test_the_vocabulary_follows_the_tokenizer(tokenizer: Path) -> None:
    config = load(f"data.tokenizer={tokenizer}")
    assert (config.model.vocabulary, config.data.end_token) == (300, "<|endoftext|>")
    assert load(f"data.tokenizer={tokenizer}", "model.vocabulary=304").model.vocabulary == 304
    found = problems(f"data.tokenizer={tokenizer}", "model.vocabulary=299")
    assert len(found) == 1
    assert "model.vocabulary = 299" in found[0] and "at least 300, the tokens of data.tokenizer" in found[0]
    found = problems(f"data.tokenizer={tokenizer}", "data.end_token=<|endoftxt|>")
    assert len(found) == 1
    assert 'data.end_token = "<|endoftxt|>" (command line)' in found[0] and 'Did you mean "<|endoftext|>"?' in found[0]
    (found,) = problems(
        f"data.tokenizer={tokenizer}", "data.end_token=a"
    )  # an ordinary token: any text would end documents
    assert 'data.end_token = "a" (command line)' in found


def test_pins_come_back(tmp_path: Path) -> None:
    pins = {"*.q_proj.weight": "column", "wte.weight": "row", "blocks.*": "whole"}
    text = "[parallel]\ntp = 2\ntensor_plan = 'propagate'\n[parallel.pins]\n" + "".join(
        f"'{k}' = '{v}'\n" for k, v in pins.items()
    )
    config = load(toml=text, folder=tmp_path)
    assert list((config.parallel.pins or {}).items()) == list(pins.items())
    assert load(toml=config.resolved(), folder=tmp_path) == config
    assert build_plan(config).tensor == TensorOptions(plan="propagate", pins=tuple(pins.items()))
    given = load(
        "parallel.tp=2", "parallel.tensor_plan=table", 'parallel.pins={"*.q_proj.weight" = "0@tp"}'
    ).parallel.pins
    assert given == {"*.q_proj.weight": "0@tp"}


def test_text_and_its_paths_come_back(tokenizer: Path, tmp_path: Path) -> None:
    for name in ("one.txt", "two.md", "w.safetensors"):
        (tmp_path / name).write_text("x")
    text = """
        [model]
        weights = "w.safetensors"
        [data]
        mix = [{source = ["one.txt", "*.md"], weight = 3}, {source = "stdlib", weight = 0.5}]
        tokenizer = "t.json"
        cache_dir = "tokens"
        attention = "document"
        text_field = "content"
        [checkpoint]
        keep_every = 7
        staging_mib = 64
    """
    config = load(toml=text, folder=tmp_path)
    assert config.data.source is None
    assert config.data.mix == (
        {"source": (str(tmp_path / "one.txt"), str(tmp_path / "*.md")), "weight": 3.0},
        {"source": "stdlib", "weight": 0.5},
    )
    assert (config.data.tokenizer, config.data.cache_dir) == (str(tokenizer), str(tmp_path / "tokens"))
    assert config.model.weights == str(tmp_path / "w.safetensors")
    away = tmp_path / "run"
    away.mkdir()
    assert load(toml=config.resolved(), folder=away) == config
    listed = load(toml="[data]\nsource = ['one.txt', 'stdlib', '**/*.md']", folder=tmp_path)
    assert listed.data.source == (str(tmp_path / "one.txt"), "stdlib", str(tmp_path / "**/*.md"))
    assert load(toml=listed.resolved(), folder=away) == listed


# --- and back to TOML ---

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12)
PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
TABLES = st.dictionaries(TEXT, PLAIN, max_size=4)
MODELS = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("gpt")}, optional={"dropout": st.floats(0, 0.99), "layers": st.integers(1, 99)}
    ),
    st.fixed_dictionaries(
        {"name": st.just("llama"), "heads": st.just(6), "kv_heads": st.sampled_from([1, 2, 3, 6])},
        optional={"tied": st.booleans()},
    ),
    st.fixed_dictionaries({"transformers": st.just("LlamaForCausalLM"), "config": TABLES}),
    st.fixed_dictionaries(
        {"factory": st.just("a.b:c"), "arguments": TABLES}, optional={"loss": st.just("d:e")}
    ),
)  # fmt: skip
TRAIN = st.fixed_dictionaries({}, optional={
    "steps": st.integers(1, 2**31 - 1),
    "seed": st.integers(0, 2**63 - 1),
    "run_dir": TEXT,
    "clip_norm": st.floats(0, 1e300),
    "devices": st.sampled_from([1, 2, 4]),
    "dropout": st.sampled_from(["exact", "fast"]),
})  # fmt: skip
OPTIMIZER = st.fixed_dictionaries({}, optional={
    "lr": st.floats(0, 1e6) | st.integers(0, 5),
    "name": st.sampled_from(["adamw", "sgd", "rmsprop", "nadam"]),
    "weight_decay": st.floats(0, 1),
    "schedule": st.sampled_from(["constant", "cosine", "wsd"]),
    "warmup_steps": st.just(0),
})  # fmt: skip


@pytest.mark.slow
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=MODELS, train=TRAIN, optimizer=OPTIMIZER, factory=st.booleans())
def test_resolved_loads_back(
    tmp_path: Path, model: dict[str, Any], train: dict[str, Any], optimizer: dict[str, Any], factory: bool
) -> None:
    data = {"factory": "x.y:z"} if factory else {"source": "stdlib"}
    tables = {"model": model, "train": train, "optimizer": optimizer, "data": data}
    config = load(toml=dumps(tables), folder=tmp_path)
    for section, keys in tables.items():
        for name, value in keys.items():
            assert getattr(getattr(config, section), name) == value
    away = tmp_path / "run"
    away.mkdir(exist_ok=True)
    text = config.resolved()
    assert load(toml=text, folder=away) == config
    assert load(toml=text, folder=away).resolved() == text
    # Nothing is left to defaults: another machine loads the same.
    assert load(toml=text, folder=away, hardware=Hardware(cores=7)) == config


def test_resolved_names_every_key_that_applies() -> None:
    tables = tomllib.loads(load().resolved())
    left_out = {
        f"{section}.{f.name}"
        for section in SECTIONS
        for f in fields(SECTIONS[section])
        if f.name not in tables[section]
    }
    assert left_out == {
        "model.factory",
        "model.transformers",
        "model.loss_weight",
        "model.loss",
        "model.kv_heads",
        "model.tied",
        "model.config",
        "model.arguments",
        "model.weights",
        "model.pretrained",
        "model.lora",
        *(f"model.{key}" for key in EXPERTS),
        *(
            f"optimizer.{key}"
            for key in (
                "eps",
                "momentum",
                "dampening",
                "nesterov",
                "amsgrad",
                "groups",
                "layer_decay",
                "adjust_lr_fn",
                "beside",
                *OPTIONS,
            )
        ),
        *(f"optimizer.{one.name}" for one in fields(Averaging)),
        "validation.ema",
        "data.mix",
        "data.sft",
        "data.end_token",
        "data.factory",
        *(f"data.{key}" for key in ("arguments", "pad", "pad_mask", "pad_to_multiple_of", "varies")),
        "train.epochs",
        "train.clip_value",
        "parallel.links",
        "parallel.gathered",
        "parallel.prefetch",
        "parallel.stages",
        "parallel.timetable",
        "parallel.reduced",
        "parallel.pins",
        "train.memory_gib",
        "train.loss_scale",
        "checkpoint.keep_every",
        "checkpoint.best",
        "checkpoint.goal",
        "checkpoint.staging_mib",
        *(f"validation.{key}" for key in ("source", "factory", "arguments", "metrics", "patience", "watch", "goal")),
    }


@settings(deadline=None)
@given(TABLES)
def test_toml_is_written_without_loss(table: dict[str, Any]) -> None:
    assert tomllib.loads(dumps({"section": {"key": table}}))["section"]["key"] == table
    assert parse(inline(table)) == table


# --- mutations ---

VALUES = [
    "0", "1", "2", "3", "-1", "256", "1e-3", "nan", "inf", "-inf", "true", "false", '""', '"x"',
    '"gpt"', '"llama"', '"sgd"',
    "[]", "[0.9, 0.9]", "[[]]", "{}", "{a = 1}", "1979-05-27", "07:32:00", "9" * 30, "1e400", '"\\u0000"',
    "'a:b'", "stdlib", '"/"', '"cosine"', '"full"', '"bf16"', '"fast"',
    '"document"', '"bytes"', '"stdlib"', '["stdlib"]', '["stdlib", "/"]', '[{source = "stdlib", weight = 1}]',
    "[{weight = 1}]",
    '[{source = ["stdlib", "stdlib"], weight = 0.5}, {source = "/", weight = 1}]', '"**"', '"["', '"/dev/null"',
    '"~nobody/x"',
    '"/etc/hostname/x"', f'"{"x" * 5000}"', '"\\ud800"', '"never"',
]  # fmt: skip


SECTION_HEADERS = [f"[{section}]" for section in SECTIONS]


def mutate(text: str, dice: random.Random) -> str:
    """One small damage: of a line, a key, a value, or a few characters."""
    lines = text.splitlines()
    place = dice.randrange(len(lines))
    line = lines[place]
    kind = dice.randrange(8)
    if kind == 0:
        lines.pop(place)
    elif kind == 1:
        lines.insert(dice.randrange(len(lines)), line)
    elif kind == 2 and "=" in line:
        lines[place] = f"{line.split('=')[0]}= {dice.choice(VALUES)}"
    elif kind == 3:
        header = dice.choice([at for at, line in enumerate(lines) if line in SECTION_HEADERS] or [0])
        name = dice.choice(list(rules(lines[header].strip("[]") if lines[header] in SECTION_HEADERS else "train")))
        lines.insert(header + 1, f"{name} = {dice.choice(VALUES)}")
    elif kind == 4 and line:
        at = dice.randrange(len(line))
        lines[place] = line[:at] + dice.choice(string.printable + "äß東\u0085") + line[at + dice.randrange(2) :]
    elif kind == 5:
        at = dice.randrange(len(line) + 1)
        lines[place] = line[:at] + line[at + 1 :]
    elif kind == 6 and "=" in line:
        lines[place] = f"{line.split('=')[0]}= {dice.choice(['1', '2', '4', '6', '192', '0.1', '0'])}"
    else:
        other = dice.randrange(len(lines))
        lines[place], lines[other] = lines[other], line
    return "\n".join(lines)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", [20, 21])
def test_500_damaged_configs(tmp_path: Path, tokenizer: Path, seed: int) -> None:
    dice = random.Random(seed)
    whole = [
        load("model.name=gpt").resolved(),
        load("model.name=llama", "parallel.microbatches=2", "optimizer.schedule=wsd").resolved(),
        load("model.transformers=LlamaForCausalLM", "model.config.hidden_size=64").resolved(),
        load("model.factory=a:b", "data.factory=c:d", "model.arguments.x=[1, {y = 2}]",
        "optimizer.name=sgd").resolved(),
        load(f"data.tokenizer={tokenizer}", "data.attention=document", 'data.source=["stdlib", "/etc"]').resolved(),
        load(
            'data.mix=[{source = "stdlib", weight = 1}, {source = "/etc/host*", weight = 2}]',
            "checkpoint.keep_every=5",
            f"model.weights={tokenizer}", "checkpoint.staging_mib=10",
        ).resolved(),
    ]  # fmt: skip
    refused, valid, unclear = 0, 0, []
    for number in range(500):
        text = dice.choice(whole)
        for _ in range(dice.choice([1, 1, 1, 2, 4])):
            text = mutate(text, dice)
        overrides = [mutate("train.seed=3", dice)] if number % 5 == 0 else []
        try:
            config = load(*overrides, toml=text, folder=tmp_path)
        except ConfigError as error:
            refused += 1
            unclear += [line for line in str(error).splitlines() if "legal:" not in line and "not TOML" not in line]
        else:
            valid += 1
            assert load(toml=config.resolved(), folder=tmp_path) == config
    assert not unclear
    assert refused + valid == 500
    assert min(refused, valid) >= 50
