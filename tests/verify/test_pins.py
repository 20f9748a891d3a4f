"""Layouts from pins: what follows from them, that it equals one device, and what is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo
from communicating import communicated
from models import deep
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.optim import OptimizerChoice
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.models.gpt import GPT
from shardwise.models.llama import Llama
from shardwise.parallel.data import data_parallel
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.oracle import Oracle, OracleStep, plain_optimizer
from shardwise.verify.verify import OPTIMIZER, TOLERANCE, VerifiedStep, compare, run_steps, run_threads

PLAIN = OptimizerChoice("sgd", lr=0.1)
"""For models with parameters whose gradient is zero but for rounding, which Adam would make as large as any."""

MEGATRON = {"*.qkv.weight": "column", "*.up.weight": "column", "wte.weight": "row"}


def check(
    compiled: Compiled, batches: list[dict[str, Tensor]], truth: list[OracleStep], choice: OptimizerChoice = PLAIN
) -> None:
    ours: list[list[VerifiedStep]] = run_threads(
        compiled, lambda comm: run_steps(compiled, comm, batches, choice, 1.0, 0)
    )
    for rank in ours:
        found = compare(rank, truth)
        assert found.passes(TOLERANCE), (found.largest, found.worst(3))


def oracle(
    module: nn.Module, loss: Any, batches: list[dict[str, Tensor]], choice: OptimizerChoice, m: int
) -> list[OracleStep]:
    one = Oracle(module, loss, plain_optimizer(choice), microbatches=m, seed=0, clip_norm=1.0, group_of=choice.group_of)
    return [one.step(batch, choice.learning_rate(i)) for i, batch in enumerate(batches)]


def planned(
    pins: Mapping[str, str], tp: int = 2, how: Any = "propagate", kind: Any = "1d", plan: Plan | None = None
) -> Plan:
    return tensor_parallel(plan or Plan.of(precision="fp64", mesh=Mesh(())), tp, kind, how, pins)


@functools.cache
def subject(name: str) -> tuple[nn.Module, Any, list[dict[str, Tensor]], list[OracleStep]]:
    one = zoo.make(name)
    wide = {k: v.double() if v.is_floating_point() else v for k, v in one.batch.items()}
    batches = [wide, {k: v[:3] for k, v in wide.items()}]
    module = one.module.double().train()
    return module, one.loss, batches, oracle(module, one.loss, batches, PLAIN, 1)


def tiny(layers: int = 1, **sizes: int) -> tuple[GPT, list[dict[str, Tensor]]]:
    torch.manual_seed(4)
    sizes = {"vocabulary": 24, "width": 16, "heads": 4, "context": 6, **sizes}
    module = GPT(**sizes, layers=layers, dropout=0.1).double()  # type: ignore[arg-type]
    batches = [
        {name: torch.randint(0, sizes["vocabulary"], (rows, sizes["context"])) for name in ("input_ids", "labels")}
        for rows in (4, 3)
    ]
    return module, batches


def layouts(compiled: Compiled) -> dict[str, str]:
    """Of the parameters, without what is whole."""
    found = {p.name: p for bucket in compiled.general.buckets for p in bucket.parameters}
    return {name: str(p.placed) for name, p in found.items() if p.axes}


def compiled_for(
    pins: Mapping[str, str], tp: int = 2, how: Any = "propagate", kind: Any = "1d", **sizes: int
) -> Compiled:
    module, batches = tiny(**sizes)
    return Compiled(module, planned(pins, tp, how, kind), batches[0])


# ---- what follows ----------------------------------------------------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize("tp", [2, 3])
def test_megatrons_plan_follows_from_three_pins(tp: int) -> None:
    module, batches = tiny(2, vocabulary=41)
    recipe = Compiled(module, tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), tp, "1d"), batches[0])
    pinned = Compiled(module, planned(MEGATRON, tp), batches[0])
    assert layouts(pinned) == layouts(recipe) and len(layouts(pinned)) == 13
    assert communicated(pinned.general) == communicated(recipe.general)
    assert not any("pins" in note for note in pinned.general.notes)


def test_megatrons_plan_has_positions_by_rows_where_they_are_many() -> None:
    torch.manual_seed(0)
    module = GPT(vocabulary=41, width=8, layers=1, heads=2, context=32)
    batch = {name: torch.randint(0, 41, (4, 6)) for name in ("input_ids", "labels")}
    recipe = Compiled(module, tensor_parallel(Plan.of(mesh=Mesh(())), 2, "1d"), batch)
    pinned = Compiled(module, planned({**MEGATRON, "wpe.weight": "row"}, 2), batch)
    assert layouts(pinned) == layouts(recipe) and layouts(recipe)["wpe.weight"] == "[2:tp*16, 8]"


@pytest.mark.slow
def test_megatrons_plan_follows_for_llama_too() -> None:
    torch.manual_seed(0)
    module = Llama(vocabulary=32, width=16, layers=2, heads=4, kv_heads=2, context=8).double()
    batch = {name: torch.randint(0, 32, (4, 8)) for name in ("input_ids", "labels")}
    recipe = layouts(Compiled(module, tensor_parallel(Plan.of(precision="fp64", mesh=Mesh(())), 2, "1d"), batch))
    pins = {
        "*.o_proj.weight": "row",
        "*.down_proj.weight": "row",
        "embedding.weight": "row",
        "lm_head.weight": "column",
    }
    assert layouts(Compiled(module, planned(pins), batch)) == recipe and len(recipe) == 16


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        ({"*.up.weight": "column"},
        {"mlp.up.weight": "[2:tp*32, 16]", "mlp.up.bias": "[2:tp*32]", "mlp.proj.weight": "[16, 2:tp*32]"}),
        ({"*.mlp.proj.weight": "1"},
        {"mlp.up.weight": "[2:tp*32, 16]", "mlp.up.bias": "[2:tp*32]", "mlp.proj.weight": "[16, 2:tp*32]"}),
        ({"*.mlp.up": "-1"},
        {"mlp.up.weight": "[2:tp*32, 16]", "mlp.up.bias": "[2:tp*32]", "mlp.proj.weight": "[16, 2:tp*32]"}),
        (
            {"*.attention.proj.weight": "row"},
            {"attention.qkv.weight": "[3*2:tp*8, 16]", "attention.qkv.bias": "[3*2:tp*8]",
            "attention.proj.weight": "[16, 2:tp*8]"},
        ),
        ({"*.qkv.weight": "0/3", "*.attention.proj.weight": "whole", "*.qkv.bias": "whole"},
        {"attention.qkv.weight": "[3*2:tp*8, 16]"}),
    ],
)  # fmt: skip
def test_what_follows_from_a_pin(pins: dict[str, str], expected: dict[str, str]) -> None:
    found = compiled_for(pins)
    assert layouts(found) == {f"blocks.0.{name}": layout for name, layout in expected.items()}
    decided = found.general.decided
    (pattern, text), *_ = pins.items()
    for name in expected:
        assert decided[f"blocks.0.{name}"]["tp"].endswith(f'"{pattern}" = "{text}"')
    assert decided["norm.weight"] == {"tp": "whole, for nothing follows"}


@pytest.mark.slow
def test_rows_follow_the_heads_where_these_do_not_divide() -> None:
    found = layouts(compiled_for({"*.attention.proj.weight": "row", "*.qkv.weight": "column"}, width=21, heads=7))
    assert found["blocks.0.attention.proj.weight"] == "[21, 7:tp*3]"
    assert found["blocks.0.attention.qkv.weight"] == "[3*7:tp*3, 21]"


@pytest.mark.slow
def test_what_flows_between_blocks_is_sharded_along_the_sequence() -> None:
    found = compiled_for({**MEGATRON, "blocks.*.norm?": "1", "norm": "1", "lm_head": "2"}, layers=2)
    recipe = compiled_for(MEGATRON, layers=2)
    assert layouts(found) == layouts(recipe)
    kinds = {kind for kind, _, path in communicated(found.general) if path == "blocks.1.drop"}
    assert kinds == {"reduce_scatter"} and {
        k for k, _, path in communicated(recipe.general) if path == "blocks.1.drop"
    } == {"all_reduce"}


def test_a_whole_result_stops_what_follows() -> None:
    wide = layouts(compiled_for({"wpe.weight": "column"}))
    assert "blocks.0.norm1.weight" in wide and "wte.weight" in wide
    assert layouts(compiled_for({"wpe.weight": "column", "wpe": "whole"})) == {"wpe.weight": "[6, 2:tp*8]"}


@pytest.mark.slow
def test_conflicts_are_reported_by_name() -> None:
    found = compiled_for({"*.up.weight": "column", "*.mlp.proj.weight": "column"}, layers=2).general
    (note,) = [note for note in found.notes if "linear blocks.*.mlp.proj:" in note]
    assert note == (
        'pins: linear blocks.*.mlp.proj: "*.up.weight" = "column" wants blocks.*.mlp.proj.weight in pieces of dim 1, '
        "and "
        '"*.mlp.proj.weight" = "column" of dim 0, which stays'
    )


def test_evaluation_lies_as_training_does() -> None:
    found = compiled_for({"*.attention.proj.weight": "row", "blocks.*.norm1": "1", "*.drop": "1"})
    other = found.evaluation().general
    assert {p.name: p.placed for b in other.buckets for p in b.parameters} == {
        p.name: p.placed for b in found.buckets for p in b.parameters
    }
    assert any(kind == "slice" for kind, _, _ in communicated(other))


# ---- equal to one device ---------------------------------------------------------------------------------------------

CASES: list[tuple[str, int, str, dict[str, str]]] = [
    ("own gpt", 2, "1d", {"*.up.weight": "column"}),
    ("own gpt", 3, "1d", {"*.qkv.weight": "column", "wte.weight": "column"}),
    ("own llama", 2, "1d", {"*.weight": "whole", "blocks.?": "1"}),
    ("own convnet", 2, "1d", {"*0.weight": "column"}),
    ("own mlp", 4, "2d", {"*0.weight": "column@tp_i, 1@tp_j"}),
    ("llama", 2, "1d", {"*.o_proj.weight": "row", "*.mlp.down_proj.weight": "row", "lm_head.weight": "column"}),
    ("llama", 4, "1d", {"*.q_proj.weight": "column", "*.k_proj.weight": "0", "*layernorm": "1"}),
    ("gpt2", 2, "1d", {"*.c_attn.weight": "column", "*.mlp.c_fc.weight": "1", "lm_head.weight": "row"}),
    ("gpt2 padded", 4, "2d",
    {"*.c_attn.weight": "column@tp_j, 0@tp_i", "*.mlp.c_fc.weight": "column@tp_i", "*.ln_?": "0@tp_j"}),
    ("bert", 2, "1d", {"*.query.weight": "column", "*.intermediate.dense.weight": "column", "*.LayerNorm": "1"}),
    ("vit", 2, "1d", {"*.weight": "0"}),
    ("mixtral", 2, "1d", {"*.q_proj.weight": "column", "*embed_tokens.weight": "row"}),
    ("qwen3", 2, "1d", {"*.v_proj.weight": "column", "*.up_proj.weight": "column"}),
]  # fmt: skip


LARGE = ("gpt2 padded", "bert", "mixtral", "qwen3", "vit")
"""Those that take long to capture."""


@pytest.mark.quick(1)
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "tp", "kind", "pins"),
    [pytest.param(*case, marks=[pytest.mark.full] if case[0] in LARGE else []) for case in CASES],
)
def test_pins_equal_one_device(name: str, tp: int, kind: str, pins: dict[str, str]) -> None:
    module, loss, batches, truth = subject(name)
    compiled = Compiled(module, planned(pins, tp, kind=kind), batches[0], loss)
    assert layouts(compiled) or "*.weight" in pins
    check(compiled, batches, truth)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dp", "zero", "pp", "recompute", "pins"),
    [
        ("gpt", 2, 3, 1, "full", MEGATRON),
        ("gpt", 1, 0, 2, "none", {"*.up.weight": "column", "blocks.*.norm1": "1"}),
        ("gpt", 2, 1, 2, "selective", {"*.attention.proj.weight": "row"}),
    ],
)  # fmt: skip
def test_together(name: str, dp: int, zero: int, pp: int, recompute: Any, pins: dict[str, str]) -> None:
    torch.manual_seed(3)
    module, make = deep(name, 3)
    batches = [make(rows) for rows in (7, 5)]
    base = Plan.of(microbatches=2, recompute=recompute, precision="fp64")
    plan = planned(pins, plan=pipeline(data_parallel(base, dp, zero), pp, "1f1b"))
    compiled = Compiled(module.train(), plan, batches[0])
    assert layouts(compiled)
    check(compiled, batches, oracle(module, None, batches, OPTIMIZER, 2), OPTIMIZER)


ON: dict[str, tuple[int, dict[str, str]]] = {
    "1d-sp": (2, {**MEGATRON, "blocks.*.norm?": "1"}),
    "2d": (
        4,
        {
            "*.qkv.weight": "column@tp_j",
            "*.mlp.up.weight": "0@tp_i, 1@tp_j",
            "wte.weight": "row@tp_i",
            "blocks.*.norm2": "1@tp_i",
        },
    ),
    "2.5d": (
        8,
        {"*.qkv.weight": "column@tp_j", "*.mlp.up.weight": "0@tp_i", "blocks.?": "0@tp_d", "wpe.weight": "column@tp_i"},
    ),
}
"""Pins on the meshes of other recipes."""


@functools.cache
def on_one_device() -> tuple[nn.Module, list[dict[str, Tensor]], list[OracleStep]]:
    module, batches = tiny(2)
    return module, batches, oracle(module, None, batches, OPTIMIZER, 2)


def on_a_mesh(kind: str, pp: int, dp: int, zero: int, recompute: Any) -> None:
    (tp, pins), (module, batches, truth) = ON[kind], on_one_device()
    base = pipeline(data_parallel(Plan.of(microbatches=2, recompute=recompute, precision="fp64"), dp, zero), pp, "1f1b")
    compiled = Compiled(module, planned(pins, tp, kind=kind, plan=base), batches[0])
    assert layouts(compiled)
    check(compiled, batches, truth, OPTIMIZER)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ON)
def test_on_the_meshes_of_other_recipes(kind: str) -> None:
    on_a_mesh(kind, 1, 1, 0, "none")


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize(("pp", "dp", "zero"), [(1, 1, 0), (2, 1, 0), (1, 2, 3), (2, 2, 1)])
@pytest.mark.parametrize("kind", ON)
def test_everything_together(kind: str, pp: int, dp: int, zero: int, recompute: str) -> None:
    on_a_mesh(kind, pp, dp, zero, recompute)


# ---- tables ----------------------------------------------------------------------------------------------------------

TABLE = {
    "w?e.weight": "column", "*.qkv.weight": "column", "*.attention.proj.weight": "row", "*.up.weight": "column",
    "*.mlp.proj.weight": "0",
}  # fmt: skip


def test_a_table_says_it_all() -> None:
    module, batches = tiny()
    found = Compiled(module, planned(TABLE, how="table"), batches[0])
    expected = {
        "wte.weight": "[24, 2:tp*8]", "wpe.weight": "[6, 2:tp*8]", "blocks.0.attention.qkv.weight": "[3*2:tp*8, 16]",
        "blocks.0.attention.proj.weight": "[16, 2:tp*8]", "blocks.0.mlp.up.weight": "[2:tp*32, 16]",
        "blocks.0.mlp.proj.weight": "[2:tp*8, 64]",
    }  # fmt: skip
    own = layouts(found)
    assert {name: own[name] for name in expected} == expected
    assert own["blocks.0.attention.qkv.bias"] == "[3*2:tp*8]", "it follows its product"
    check(found, batches, oracle(module, None, batches, PLAIN, 1))
    pinned = layouts(compiled_for({**TABLE, "*.qkv.bias": "whole"}, how="table"))
    assert "blocks.0.attention.qkv.bias" not in pinned


def test_what_a_table_leaves_out_is_listed_with_what_is_legal() -> None:
    with pytest.raises(ConfigError) as error:
        compiled_for({"*.qkv.weight": "column", "w?e.weight": "row"}, how="table", layers=2)
    message = str(error.value)
    assert message.startswith('pins: under tensor_plan = "table" every parameter of several dims needs one')
    for name in ("blocks.*.attention.proj.weight", "blocks.*.mlp.up.weight", "blocks.*.mlp.proj.weight"):
        assert f'"{name}" = "column" or "row" or "0" or "1" or "whole"' in message
    assert "qkv" not in message and "norm" not in message


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"*.qvk.weight": "column"},
        'pins: "*.qvk.weight" matches no parameter that is read and no module with a result; '
        "legal: patterns of such names."),
        ({"*.upp.weight": "column"}, 'Did you mean "*.up.weight"?'),
        ({"*.mpl.up.weight": "column"}, 'Did you mean "*.mlp.up.weight"?'),
        ({"blocks.*.atention": "1"}, 'Did you mean "blocks.*.attention"?'),
        ({"blocks.0.atention": "1"}, 'Did you mean "blocks.0.attention"?'),
        (
            {"*.qkv.weight": "column", "blocks.0.attention.*": "whole"},
            'pins: "*.qkv.weight" = "column" and "blocks.0.attention.*" = "whole" disagree on '
            "blocks.0.attention.qkv.weight; legal: one of them.",
        ),
        ({"blocks.0.mlp": "1", "blocks.?.mlp": "0"},
        '"blocks.0.mlp" = "1" and "blocks.?.mlp" = "0" disagree on blocks.0.mlp'),
        ({"*.norm1.weight": "column"},
        'blocks.0.norm1.weight of [16] has no such pieces for 2 ranks; legal: "0", "whole".'),
        ({"*.qkv.bias": "row"},
        'blocks.0.attention.qkv.bias of [48] has no such pieces for 2 ranks; legal: "column", "0", "whole".'),
        ({"*.up.weight": "2"},
        'pins: "*.up.weight" = "2": blocks.0.mlp.up.weight of [64, 16] has no dim 2; legal: 0, 1 and "whole".'),
        ({"*.up.weight": "0/7"},
        "dim 0 of blocks.0.mlp.up.weight is 64, which has no 7 equal parts with a piece for each of 2 ranks"),
        ({"*.up.weight": "0/64"}, "which has no 64 equal parts with a piece for each of 2 ranks"),
        ({"blocks.*.mlp": "column"},
        'pins: "blocks.*.mlp" = "column" is of a parameter, and blocks.0.mlp is a module; legal: a dim of its result'),
        ({"blocks.*.mlp": "3"}, "blocks.0.mlp of [6, 6, 16] has no dim 3; legal: 0, 1, 2 and"),
    ],
)  # fmt: skip
def test_what_pins_cannot_do(pins: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compiled_for(pins)
    assert message in str(error.value)


def test_a_parameter_too_small_for_the_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"wpe.weight of \[6, 16\] has no such pieces for 8 ranks; legal: \"column\", \"1\", \"whole\"",
    ):
        compiled_for({"wpe.weight": "row"}, 8)
    with pytest.raises(
        ConfigError,
        match=r"dim 1 of what blocks.0.mlp returns, \[.*\], cannot be cut into pieces for 8 ranks over tp; legal: "
        r'"whole"',
    ):
        compiled_for({"blocks.0.mlp": "1"}, 8)


def test_two_axes_that_do_not_fit_together_are_refused() -> None:
    assert (
        layouts(compiled_for({"*.up.weight": "0@tp_i, 0@tp_j"}, 4, kind="2d"))["blocks.0.mlp.up.weight"]
        == "[2:tp_i*2:tp_j*16, 16]"
    )
    with pytest.raises(
        ConfigError,
        match="dim 0 of blocks.0.attention.qkv.weight is 48, which cannot be cut over tp_j within the pieces",
    ):
        compiled_for({"*.qkv.weight": "0@tp_i, 0@tp_j"}, 4, kind="2d")


# ---- any pins --------------------------------------------------------------------------------------------------------


@functools.cache
def fuzzed() -> tuple[nn.Module, list[dict[str, Tensor]], list[OracleStep], tuple[str, ...], tuple[str, ...]]:
    module, batches = tiny(vocabulary=23, width=15, heads=5)
    parameters = tuple(name for name, _ in module.named_parameters())
    return (
        module,
        batches,
        oracle(module, None, batches, PLAIN, 1),
        parameters,
        tuple(n for n, _ in module.named_modules() if n),
    )


@st.composite
def any_pins(draw: st.DrawFn) -> tuple[dict[str, str], int, str]:
    _, _, _, parameters, modules = fuzzed()
    kind, tp = draw(st.sampled_from([("1d", 2), ("1d", 3), ("2d", 4)]))
    axis = st.sampled_from(["@tp_i", "@tp_j"] if kind == "2d" else [""])
    of_parameters = st.dictionaries(
        st.sampled_from(parameters),
        st.sampled_from(["column", "row", "0", "1", "0/2", "0/3", "1/3", "1/5", "whole"]),
        max_size=3,
    )
    of_results = st.dictionaries(st.sampled_from(modules), st.sampled_from(["0", "1", "2", "whole"]), max_size=2)
    pins = {name: what + draw(axis) for name, what in {**draw(of_parameters), **draw(of_results)}.items()}
    return pins or {"wte.weight": "row" + draw(axis)}, tp, kind


def right_or_refused(case: tuple[dict[str, str], int, str]) -> None:
    pins, tp, kind = case
    module, batches, truth, _, _ = fuzzed()
    try:
        compiled = Compiled(module, planned(pins, tp, kind=kind), batches[0])
    except ConfigError as error:
        refused = str(error)
    else:
        check(compiled, batches, truth)
        return
    assert any(f'"{name}" = "{what}"' in refused or f'"{name}" matches' in refused for name, what in pins.items())


SLOW = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, **SLOW)  # type: ignore[arg-type]
@example(({"wpe.weight": "0/3"}, 2, "1d"))  # rows of a table that are not in one piece
@example(({"wpe.weight": "0/3@tp_j"}, 4, "2d"))
@example(({"blocks.0.attention.qkv": "1@tp_i", "wte": "1@tp_j"}, 4, "2d"))  # one dim in two ways
@given(any_pins())
def test_any_pins_are_right_or_refused_by_name(case: tuple[dict[str, str], int, str]) -> None:
    right_or_refused(case)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=200, **SLOW)  # type: ignore[arg-type]
@given(any_pins())
def test_many_pins_are_right_or_refused_by_name(case: tuple[dict[str, str], int, str]) -> None:
    right_or_refused(case)
