"""From a configuration to the model, the loss and the dataset; and what goes wrong in code of the user's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardwise.config import (
    Config,
    Hardware,
    build_data,
    build_loss_scale,
    build_model,
    build_optimizer,
    build_plan,
    load_config,
)
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.numeric_options import NumericOptions
from shardwise.core.plan import Plan
from shardwise.core.scale import ScaleChoice
from shardwise.data.loader import Loader
from shardwise.data.windows import PackedWindows
from shardwise.models import GPT, Llama
from shardwise.nn import MoE

torch.set_num_threads(1)

USER_CODE = """\
import torch
from torch import nn
from neighbour import WIDTH

def build(depth=1):
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])

class Net(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)

def loss(output, batch):
    return (output - batch["y"]).square().mean()

def none():
    pass

def fails():
    return {}["missing"]

def leaves():
    raise SystemExit(3)

def data(size=5):
    return [{"x": torch.full((3,), float(i)), "y": i} for i in range(size)]

def tuples():
    return [(1, 2)]

def stream():
    return iter([{"x": 1}])

def ragged():
    return [{"x": torch.zeros(3 + (i == 2))} for i in range(4)]

number = 3
"""

LLAMA_CODE = """
def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
"""


PIPE = ["train.devices=2", "parallel.pp=2", "parallel.microbatches=2", "parallel.schedule=auto"]
ORDER = 'parallel.timetable=["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"]'


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["parallel.pp=1"], 'parallel.schedule = "auto" .*: legal: another, or parallel.pp of at least 2'),
        (["parallel.microbatches=1"], 'parallel.microbatches = 1 .*: legal: at least 2. With schedule "auto"'),
        (["parallel.stages=[1, 2, 3]"], "parallel.stages = .*: legal: a multiple of 2 numbers"),
        (["parallel.stages=[3, 3]", "parallel.stages_per_rank=2"], "parallel.stages = .*: legal: 4 numbers"),
        ([ORDER, "parallel.stages=[1, 1, 2, 2]"], "parallel.stages = .*: legal: 2 numbers"),
        ([ORDER, "parallel.stages_per_rank=2"],
        r"parallel.timetable = .*: legal: 2 \(stages_per_rank\) on every rank. Rank 0: its stages are 0"),
        ([ORDER, "parallel.microbatches=4"],
        "parallel.timetable = .*: legal: at least microbatches = 4. It has 2 microbatches"),
        ([ORDER, "parallel.schedule=1f1b"], 'parallel.timetable = .*: legal: left out, for "1f1b" has its own'),
        (["parallel.timetable=F0.0"], "parallel.timetable = .*: legal: a list, each a text for each rank"),
    ],
)  # fmt: skip
def test_orders_that_cannot_be_are_refused(more: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, [*PIPE, *more], hardware=Hardware(cores=2))


def test_an_open_order_is_measured_with_a_named_schedule() -> None:
    open_ = load_config(None, PIPE, hardware=Hardware(cores=2))
    assert (build_plan(open_).pipeline.schedule, open_.parallel.stages_per_rank) == ("1f1b", None)
    several = load_config(None, [*PIPE, "parallel.stages=[1, 2, 2, 1]"], hardware=Hardware(cores=2))
    assert (build_plan(several).pipeline.schedule, several.parallel.stages_per_rank) == ("interleaved", 2)
    given = load_config(None, [*PIPE, ORDER], hardware=Hardware(cores=2))
    assert (build_plan(given).pipeline.schedule, given.parallel.stages_per_rank) == ("auto", 1)
    assert build_plan(given).pipeline.timetable == given.parallel.timetable


def test_the_ranks_of_a_layer_are_neighbours() -> None:
    keys = ["pp=2", "dp=4", "dp_replicate=2", "zero=1", "tp=3", "tensor=1d-sp"]
    plan = build_plan(load_config(None, [f"parallel.{key}" for key in keys], hardware=Hardware(cores=24)))
    assert plan.mesh == Mesh.of(pp=2, dp_replicate=2, dp=2, tp=3) and plan.tensor.recipe == "1d-sp"
    assert Plan.from_toml(plan.to_toml()) == plan
    one = build_plan(load_config(None, ["parallel.dp=2"], hardware=Hardware(cores=2)))
    assert one.mesh == Mesh.of(dp=2) and one.tensor.recipe == "1d"


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are kept in one folder for all tests here, not in the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 3\n")
    path = tmp_path / "user_code.py"
    path.write_text(USER_CODE)
    return path


def load(*overrides: str) -> Config:
    return load_config(None, overrides, hardware=Hardware(cores=1))


def refusal(build: Any, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        build(load(*overrides))
    return str(caught.value)


def make(config: Config) -> torch.nn.Module:
    return build_model(config)[0]()


# --- own models ---


def test_own_models_have_the_sizes_asked_for() -> None:
    sizes = ["model.vocabulary=300", "model.width=24", "model.layers=3", "model.heads=6", "model.hidden=40"]
    gpt = make(load(*sizes, "model.dropout=0.25", "data.sequence_length=12"))
    assert isinstance(gpt, GPT)
    assert gpt.wte.weight.shape == (300, 24)
    assert gpt.wpe.weight.shape == (12, 24)
    assert (len(gpt.blocks), gpt.blocks[0].attention.heads, gpt.drop.p) == (3, 6, 0.25)
    assert gpt.blocks[0].mlp.up.weight.shape == (40, 24)
    llama = make(load("model.name=llama", *sizes, "model.kv_heads=2", "model.tied=true", "model.context=200"))
    assert isinstance(llama, Llama)
    assert llama.blocks[2].attention.k_proj.weight.shape == (8, 24)
    assert llama.rotary.shape == (2, 200, 4)
    assert llama.lm_head.weight is llama.embedding.weight


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_own_models_have_the_experts_asked_for(name: str) -> None:
    words = ["model.width=24", "model.heads=6", "model.hidden=40", "model.layers=2", f"model.name={name}"]
    plain = make(load(*words, "model.experts=5")).blocks[1].mlp
    assert isinstance(plain, MoE) and plain.up.shape == (5, 40 * (2 if name == "llama" else 1), 24)
    assert (plain.top_k, plain.balance, plain.balance_weight, plain.capacity_factor) == (2, "switch", 0.01, None)
    more = make(
        load(
            *words, "model.experts=5", "model.experts_per_token=3", "model.shared_experts=2", "model.z_weight=0.1",
            "model.capacity_factor=1.25", "model.balance=none", "model.balance_weight=0.2", "model.bias_rate=0.001",
        )
    ).blocks[0].mlp  # fmt: skip
    assert (more.top_k, more.shared, more.balance, more.balance_weight) == (3, 2, None, 0.2)
    assert (more.capacity_factor, more.z_weight, more.bias_rate) == (1.25, 0.1, 0.001)
    assert make(load(*words, "model.experts=1")).blocks[0].mlp.top_k == 1


def test_default_sizes_are_those_of_the_models() -> None:
    ours, plain = (
        make(load("model.name=llama", "model.width=48", "model.heads=4")),
        Llama(width=48, heads=4, context=128),
    )
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}
    ours, plain = make(load("model.width=48", "model.heads=4")), GPT(width=48, heads=4, context=128)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in plain.named_parameters()}


def test_default_data_goes_through_the_default_model() -> None:
    config = load("model.width=32", "model.heads=4", "model.layers=1", "data.batch_size=2")
    torch.manual_seed(0)  # else the weights depend on the tests before
    data, model = build_data(config), make(config)
    dataset, decode = data.train, data.decode
    assert decode is not None
    assert decode(torch.tensor([104, 105])) == "hi"
    with Loader(dataset, Mesh.of(dp=1), 0, 2) as loader:
        loss = model(**next(loader).fields)
    assert loss.item() == pytest.approx(5.545, abs=0.15)


def test_loss_scale() -> None:
    assert build_loss_scale(load()) is None and build_loss_scale(load("parallel.precision=bf16")) is None
    assert build_loss_scale(load("parallel.precision=fp16")) == ScaleChoice()
    assert build_loss_scale(load("parallel.precision=fp16", "train.loss_scale=1024")) == ScaleChoice.fixed(1024.0)


def test_groups_with_options_of_their_own() -> None:
    """Also those that decide which state there is, and an optimizer of tables."""
    tables = (
        '{match = "*.bias", momentum = 0.0}', '{match = "head.*", nesterov = false, dampening = 0.1}',
        '{match = "wte.*", name = "sparse_adam", lr = 0.1}', '{match = "wpe.*", name = "adam", amsgrad = true}',
    )  # fmt: skip
    groups = f"optimizer.groups=[{', '.join(tables)}]"
    sgd = build_optimizer(load("optimizer.name=sgd", "optimizer.momentum=0.9", "optimizer.nesterov=true", groups))
    found = [(one.name, one.momentum, one.nesterov, one.dampening, one.amsgrad) for one in sgd.parts]
    assert found == [
        ("sgd", 0.9, True, 0.0, False), ("sgd", 0.0, False, 0.0, False), ("sgd", 0.9, False, 0.1, False),
        ("sparse_adam", None, None, 0.0, False), ("adam", None, None, 0.0, True),
    ]  # fmt: skip


def test_plan_and_optimizer() -> None:
    config = load(
        "parallel.dp=2", "parallel.microbatches=2", "parallel.recompute=full", "parallel.precision=bf16",
        "train.dropout=fast", "train.steps=50", "optimizer.schedule=wsd", "optimizer.warmup_steps=5",
        "optimizer.lr=0.5", "optimizer.betas=[0.8, 0.9]", "optimizer.weight_decay=0.3",
    )  # fmt: skip
    plan, optimizer = build_plan(config), build_optimizer(config)
    assert plan.mesh == Mesh.of(dp=2)
    assert (plan.microbatches, plan.memory.recompute, plan.numeric) == (2, "full", NumericOptions("bf16", "fast"))
    assert (optimizer.name, optimizer.lr, optimizer.betas, optimizer.weight_decay) == (
        "adamw",
        0.5,
        (0.8, 0.9),
        0.3,
    )
    assert (optimizer.schedule, optimizer.warmup_steps, optimizer.total_steps) == ("wsd", 5, 50)
    for name in ("adamw", "sgd", "adam", "adagrad", "rmsprop", "nadam", "radam"):
        assert build_optimizer(load(f"optimizer.name={name}")).name == name
    for steps in (1, 2, 9, 10, 11):
        assert build_optimizer(load(f"train.steps={steps}")).total_steps == steps


def test_zero_in_the_plan() -> None:
    config = load(
        "parallel.dp=4", "parallel.zero=3", "parallel.dp_replicate=2", "parallel.gathered=forward",
        "parallel.reduced=step",
        "parallel.prefetch=2", "parallel.reduce=bf16", "parallel.offload=optimizer", "data.batch_size=16",
    )  # fmt: skip
    plan = build_plan(config)
    assert plan.mesh == Mesh.of(dp_replicate=2, dp=2)
    assert (plan.data.rule("w").rest, plan.data.rule("w").grad, plan.data.rule("w").state) == ("S", "S", "S")
    assert (plan.data.gathered, plan.data.reduced, plan.data.prefetch, plan.data.reduce, plan.memory.offload) == (
        "forward",
        "step",
        2,
        "bf16",
        "optimizer",
    )


# --- functions of the user's ---


def test_factories(code: Path) -> None:
    config = load(
        f"model.factory={code}:build", "model.arguments.depth=2", f"model.loss={code}:loss",
        f"data.factory={code}:data", "data.arguments.size=7", "data.batch_size=4",
    )  # fmt: skip
    constructor, loss = build_model(config)
    model = constructor()
    assert [tuple(p.shape) for p in model.parameters()] == [(3, 3), (3,)] * 2
    assert constructor() is not model
    assert loss is not None
    assert loss(torch.full((2,), 5.0), {"y": torch.tensor([4.0, 3.0])}).item() == 2.5
    data = build_data(config)
    dataset, decode = data.train, data.decode
    assert len(dataset) == 7
    assert decode is None
    assert isinstance(make(load(f"model.factory={code}:Net")), torch.nn.Linear)


def test_factory_of_a_module_in_the_current_folder(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    (code.parent / "package_of_mine").mkdir()
    (code.parent / "package_of_mine" / "inner.py").write_text(USER_CODE)
    assert len(make(load("model.factory=package_of_mine.inner:build", "model.arguments={depth = 3}"))) == 3
    assert isinstance(make(load("model.factory=torch.nn:Identity")), torch.nn.Identity)


def test_a_file_is_imported_once(code: Path) -> None:
    code.write_text(USER_CODE + "\nprint('imported')\n")
    one = build_model(load(f"model.factory={code}:build", f"model.loss={code}:loss"))[1]
    two = build_model(load(f"model.factory={code}:Net", f"model.loss={code}:loss"))[1]
    assert one is two


def line_of(text: str, source: str = USER_CODE) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if text in line)


@pytest.mark.parametrize("key", ["model.factory", "data.factory"])
@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("biuld", ["has no biuld", "build, ", 'Did you mean "build"?']),
        ("number", ["number in ", "is of type int", "a function in"]),
        ("fails", ["KeyError: 'missing'", f"user_code.py:{line_of('missing')}, in fails"]),
        ("leaves", ["SystemExit: 3", f"user_code.py:{line_of('SystemExit')}, in leaves"]),
        ("none", ["returned None"]),
    ],
)
def test_functions_that_fail(code: Path, key: str, function: str, words: list[str]) -> None:
    build = make if key == "model.factory" else build_data
    message = refusal(build, f"{key}={code}:{function}")
    assert message.startswith(f'{key} = "{code}:{function}"')
    assert all(word in message for word in words), message


def test_functions_that_return_the_wrong_thing(code: Path) -> None:
    assert "returned an object of type list; legal: an nn.Module" in refusal(make, f"model.factory={code}:data")
    message = refusal(build_data, f"data.factory={code}:build")
    assert "sample 0 is a Linear; legal: a dict, a tuple or a dataclass with tensors" in message
    message = refusal(build_data, f"data.factory={code}:Net")
    assert "returned an object of type Net; legal: a map-style dataset" in message
    assert "list_iterator; legal: a map-style dataset" in refusal(build_data, f"data.factory={code}:stream")
    assert build_data(load(f"data.factory={code}:tuples")).digest
    assert "empty" in refusal(build_data, f"data.factory={code}:data", "data.arguments.size=0")


def test_ragged_samples_are_found_when_they_are_read(code: Path) -> None:
    dataset = build_data(load(f"data.factory={code}:ragged")).train
    with (
        Loader(dataset, Mesh.of(dp=1), 0, 4) as loader,
        pytest.raises(ConfigError, match=r"sample \d.*shape"),
    ):
        next(loader)


def test_wrong_arguments(code: Path) -> None:
    message = refusal(make, f"model.factory={code}:build", "model.arguments.depht=2")
    assert "build: got an unexpected keyword argument 'depht'; legal: model.arguments with depth" in message
    assert 'Did you mean "depth"?' in message and "factories.py" not in message
    message = refusal(make, f"model.factory={code}:Net", "model.arguments.depht=2")
    assert "legal: model.arguments with nothing" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "import torch\nimport no_such_module_at_all\n",
            ["ModuleNotFoundError", "no_such_module_at_all", "bad.py:2"],
        ),
        ("x = 1\n\ny = x / 0\n", ["ZeroDivisionError", "bad.py:3"]),
        ("def f(:\n    pass\n", ["SyntaxError", "bad.py:1"]),
        ("from torch import NoSuchThing\n", ["ImportError", "NoSuchThing", "bad.py:1"]),
        ("import sys\nsys.exit(1)\n", ["SystemExit", "bad.py:2"]),
    ],
)
def test_files_that_cannot_be_imported(tmp_path: Path, text: str, words: list[str]) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    for build, key in (
        (build_model, "model.factory"),
        (build_model, "model.loss"),
        (build_data, "data.factory"),
    ):
        message = refusal(build, f"{key}={path}:f")
        assert message.startswith(f'{key} = "{path}:f"')
        assert all(word in message for word in words), message
        assert "\n" not in message
    path.write_text("def f():\n    import torch\n    return torch.nn.ReLU()\n")
    assert isinstance(make(load(f"model.factory={path}:f")), torch.nn.ReLU)  # a failed import leaves nothing behind


def test_modules_that_are_not_there() -> None:
    message = refusal(build_model, "model.factory=no_such_package.module:f")
    assert "ModuleNotFoundError" in message
    assert "no_such_package" in message
    assert "has no f; legal" in refusal(build_model, "model.factory=string:f")


# --- transformers ---

TINY = [
    "model.transformers=LlamaForCausalLM", "model.config.hidden_size=32", "model.config.intermediate_size=48",
    "model.config.num_hidden_layers=1", "model.config.num_attention_heads=4",
    "model.config.num_key_value_heads=2",
]  # fmt: skip


def test_a_transformers_model_on_bytes() -> None:
    config = load(*TINY, "data.sequence_length=24", "data.batch_size=2")
    model, dataset = make(config), build_data(config).train
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.get_input_embeddings().weight.shape == (256, 32)
    assert model.config.use_cache is False
    batch = dataset[3]
    rows = {name: value.unsqueeze(0) for name, value in batch.items()}
    output = model(**rows)
    # Its loss must be that of the next token, once: the model shifts the labels, so the data must not.
    logits = output.logits[0]
    once = F.cross_entropy(logits[:-1], batch["input_ids"][1:])
    twice = F.cross_entropy(logits[:-2], batch["input_ids"][2:])
    assert abs(output.loss - once) < 1e-5
    assert abs(output.loss - twice) > 1e-4


def test_own_models_get_shifted_labels() -> None:
    sample = build_data(load()).train[3]
    assert torch.equal(sample["input_ids"][1:], sample["labels"][:-1])
    assert not torch.equal(sample["input_ids"], sample["labels"])


def test_context_and_vocabulary_fit_the_text() -> None:
    gpt2 = [
        "model.transformers=GPT2LMHeadModel", "model.config.n_embd=8", "model.config.n_layer=1",
        "model.config.n_head=2",
    ]  # fmt: skip
    config = make(load(*gpt2, "data.sequence_length=2000")).config
    assert (config.vocab_size, config.n_positions, config.eos_token_id) == (256, 2000, None)
    assert make(load(*gpt2, "model.config.max_position_embeddings=150")).config.n_positions == 150
    assert make(load(*gpt2, "model.config.vocab_size=400")).config.vocab_size == 400
    message = refusal(build_model, *gpt2, "model.config.vocab_size=255")
    assert "model.config.vocab_size = 255" in message
    assert "at least 256" in message
    for word in ("n_positions", "max_position_embeddings"):
        message = refusal(build_model, *gpt2, f"model.config.{word}=100")
        assert f"model.config.{word} = 100" in message
        assert "at least 128" in message


def test_other_data_leave_the_vocabulary_alone(code: Path) -> None:
    small = [*TINY, "model.config.vocab_size=99", f"data.factory={code}:data"]
    assert make(load(*small)).config.vocab_size == 99


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.transformers=LlamaForCausallM"], ['"LlamaForCausallM"', 'Did you mean "LlamaForCausalLM"?']),
        (["model.transformers=LlamaConfig"], ["not a model class", "LlamaForCausalLM"]),
        (["model.transformers=AutoModelForCausalLM"], ["not a model class"]),
        (
            [*TINY, "model.config.hiden_size=3"],
            ["model.config.hiden_size", "LlamaConfig", 'Did you mean "hidden_size"?'],
        ),
        ([*TINY, "model.config.hidden_size=big"], ["model.config", "hidden_size", "expected int"]),
        ([*TINY, "model.config.hidden_size=33"], ["model.config", "33", "attention heads"]),
    ],
)
def test_transformers_models_that_cannot_be(overrides: list[str], words: list[str]) -> None:
    message = refusal(build_model, *overrides)
    assert all(word in message for word in words), message


def test_several_unknown_keys_are_all_named() -> None:
    message = refusal(build_model, *TINY, "model.config.hiden_size=3", "model.config.layerz=3")
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "model.config.hiden_size",
        "model.config.layerz",
    ]


def test_a_constructor_that_fails() -> None:
    message = refusal(make, *TINY, "model.config.hidden_act=gellu")
    assert message.startswith('model.transformers = "LlamaForCausalLM": ')
    assert "gellu" in message
    assert ".py:" in message


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    message = refusal(build_model, *TINY)
    assert "transformers cannot be imported" in message
    assert "pip install transformers" in message


def test_a_factory_may_not_shift_labels_twice(code: Path) -> None:
    code.write_text(USER_CODE + LLAMA_CODE)
    message = refusal(make, f"model.factory={code}:llama")
    assert "shifts labels itself" in message
    assert "data.factory" in message
    for way_out in (f"data.factory={code}:data", f"model.loss={code}:loss"):
        assert type(make(load(f"model.factory={code}:llama", way_out))).__name__ == "LlamaForCausalLM"


def test_data_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 500)
    dataset = build_data(load(f"data.source={tmp_path}")).train
    assert isinstance(dataset, PackedWindows)
    assert len(dataset) == 500 // 128  # 500 bytes and the end of the document
    (tmp_path / "a.txt").write_text("a" * 50)
    assert f"{tmp_path} has 51 tokens" in refusal(build_data, f"data.source={tmp_path}")
