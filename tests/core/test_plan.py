from __future__ import annotations

import operator
import tomllib
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.core.data_options import DATA_PARALLEL_ROWS, ParameterRule
from shardwise.core.errors import ConfigError
from shardwise.core.local_options import ISLANDS
from shardwise.core.mesh import Axis, Mesh
from shardwise.core.pins import PLANS, PinnedCut, cuts
from shardwise.core.pipeline_options import PipelineOptions
from shardwise.core.plan import CHOICES, OPTIONS, UNGROUPED, Plan
from shardwise.core.schedules import traits
from shardwise.core.server_options import APART
from shardwise.core.tensor_options import BY_NUMBER, TensorOptions, parameter_axes
from shardwise.core.timetable import to_texts
from shardwise.parallel.schedule import timetable as timetable_of

names = st.sampled_from(["pp", ISLANDS, "dp_replicate", "dp", "cp", "tp", "ep", "tp_0"])
axes = st.builds(Axis, names, st.integers(1, 9))
rows = st.sampled_from([row for row in DATA_PARALLEL_ROWS if row[-1] != "O"])
rules = st.builds(lambda pattern, row: ParameterRule(pattern, *row), st.text(min_size=1), rows)


def served(draw: st.DrawFn, words: dict[str, str], found: list[Axis]) -> dict[str, Any]:
    """Return the rules and counts of servers as ``words`` ask for; what is not legal without them is left out."""
    if words["server"] not in APART:
        words["server_rate"], words["push"] = "fixed", "whole"
        if words["server"] == "none":
            return {}
        found[:] = [axis for axis in found if axis.name != "dp"] + [Axis("dp", 3)]
        servers = draw(st.integers(1, 3))
        return {"parameters": (ParameterRule("*", "R", "P", "O", servers),), "server_ranks": servers}
    found[:] = [*(Axis(axis.name, 1) for axis in found if axis.name != "dp"), Axis("dp", 1)]
    words["tensor_plan"] = "recipe"
    if words["precision"] == "fp16":
        words["precision"] = "bf16"
    counts = {name: draw(st.integers(1, 9)) for name in ("server_ranks", "workers", "pull_every")}
    if words["server"] == "stale":
        counts["staleness"] = draw(st.integers(0, 9))
    return {
        **counts, "parameters": (ParameterRule("*", "R", "P", "O"),),
        "push_share": draw(st.floats(0, 1, exclude_min=True)),
    }  # fmt: skip


def islands(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    """Return the options of islands, where the mesh has any."""
    if mesh.axis_size(ISLANDS) == 1:
        return {}
    steps = draw(st.integers(1, 9))
    share = st.floats(0, 1, exclude_min=True, exclude_max=True)
    return {
        "local_steps": steps, "local_fragments": draw(st.integers(1, steps)), "local_mix": draw(share),
        "outer_lr": draw(share), "outer_momentum": draw(share),
    }  # fmt: skip


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A legal plan with a value of its own in every field."""
    words = {field: draw(st.sampled_from(legal)) for field, legal in CHOICES.items()}
    if (words["precision"] == "fp64") != (words["reduce"] == "fp64"):
        words["reduce"] = "auto"
    found = draw(st.lists(axes, max_size=4, unique_by=lambda axis: axis.name))
    own = served(draw, words, found)
    parameters = own.pop("parameters", None) or draw(st.lists(rules, min_size=1, max_size=3))
    if any(rule.sharded for rule in parameters) and all(axis.name != "dp" for axis in found):
        found.append(Axis("dp", 3))
    mesh, timetable = Mesh(tuple(found)), ()
    own |= islands(draw, mesh)
    if own and traits(words["schedule"]).asynchronous:
        words["schedule"] = "1f1b"
    if traits(words["schedule"]).asynchronous or words["norm"] == "post-validate" or "local_steps" in own:
        words["sparse_gradients"] = "dense"
    if words["offload"] in ("optimizer", "all"):
        words["sparse_gradients"] = "dense"
    if "local_steps" in own:
        words["norm"] = "barrier"
        words["offload"] = "none"
    if words["norm"] == "post-validate" or words["server"] in APART:
        words["updates"] = "elements"
    counts = {**own, "microbatches": draw(st.integers(1, 10**6)), "prefetch": draw(st.integers(0, 9))}
    if words["schedule"] == "auto":
        counts["microbatches"] = draw(st.integers(1, 4))
        timetable = to_texts(timetable_of("1f1b", mesh.axis_size("pp"), counts["microbatches"]))
    if traits(words["schedule"]).asynchronous:
        parameters, counts["window"] = [ParameterRule("*")], draw(st.integers(1, 100))
        words["reduce"], words["norm"] = "auto", "barrier"
    pins = {}
    if words["tensor_plan"] in PLANS:
        if not parameter_axes(mesh):
            found = [axis for axis in found if axis.name != "tp"] + [Axis("tp", 2)]
            mesh = Mesh(tuple(found))
        over = [f"@{axis}" for axis in parameter_axes(mesh)]
        cut = st.builds(
            operator.add, st.sampled_from(["column", "row", "0", "-1", "2/3", "whole"]), st.sampled_from(over)
        )
        pins = draw(st.dictionaries(st.text(min_size=1), cut, min_size=1, max_size=3))
    if words["tensor_plan"] == "auto" and draw(st.booleans()):
        counts["tensor_bytes"] = draw(st.integers(1, 10**12))
    if words["tensor_plan"] != "recipe" or words["tensor"] not in BY_NUMBER:
        words["experts"] = "inside"
    sync = False
    if traits(words["schedule"]).stages_alone:
        counts["microbatches"], sync = 1, draw(st.booleans())
        words["precision"] = draw(st.sampled_from(("fp32", "fp64", "bf16")))
    return Plan.of(
        mesh=mesh, parameters=tuple(parameters), timetable=timetable, vertical_sync=sync, pins=pins, **counts, **words
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(plans())
def test_toml_round_trip(plan: Plan) -> None:
    assert Plan.from_toml(plan.to_toml()) == plan


def test_toml_holds_every_field() -> None:
    """A field that the writer forgets would come back as its default."""
    text = Plan.of().to_toml()
    assert sorted({*tomllib.loads(text)}) == sorted((*UNGROUPED, *OPTIONS))
    assert all(f"{field.name} = " in text for kind in (Axis, ParameterRule) for field in fields(kind))
    changed = Plan.of(
        Mesh((Axis("dp", 2),)), microbatches=3, recompute="full", precision="bf16", dropout="fast",
        parameters=(ParameterRule('a"\\\n\x7f*'),),
    )  # fmt: skip
    assert Plan.from_toml(changed.to_toml()) == changed
    assert changed != Plan.of()


def test_what_toml_leaves_out_has_its_default() -> None:
    assert Plan.from_toml("") == Plan.of()
    plan = Plan.from_toml('microbatches = 4\n[[mesh]]\nname = "dp"\nsize = 2\n[[parameters]]\npattern = "w*"\n')
    assert plan == Plan.of(Mesh.of(dp=2), microbatches=4, parameters=(ParameterRule("w*"),))


def test_the_default_is_one_device_with_plain_data_parallelism() -> None:
    plan = Plan.of()
    assert (plan.mesh.size, plan.microbatches, plan.memory.recompute, plan.numeric.precision) == (1, 1, "none", "fp32")
    rule = plan.data.rule("anything.weight")
    assert (rule.rest, rule.grad, rule.state) == ("R", "P", "R")


def test_the_first_rule_that_matches_counts() -> None:
    plan = Plan.of(parameters=(ParameterRule("*.bias"), ParameterRule("head.*")))
    assert plan.data.rule("head.bias").pattern == "*.bias"
    assert plan.data.rule("head.weight").pattern == "head.*"
    with pytest.raises(ConfigError, match='no rule matches "embed.weight"; .*"\\*.bias", "head.\\*"'):
        plan.data.rule("embed.weight")


def test_every_option_is_in_one_group_and_is_changed_there_by_its_flat_name() -> None:
    groups = [field.name for field in fields(Plan) if field.name not in UNGROUPED]
    assert len(OPTIONS) == sum(len(fields(getattr(Plan.of(), group))) for group in groups)
    assert set(CHOICES) < set(OPTIONS)
    plan = Plan.of(Mesh.of(pp=2, tp=2), schedule="gpipe", tensor="1d-sp", tensor_plan="auto", tensor_bytes=9)
    assert plan.pipeline == PipelineOptions("gpipe") and plan.tensor == TensorOptions("1d-sp", "auto", bytes=9)
    assert plan.replace(tensor_bytes=0, offload="all") == Plan.of(
        plan.mesh, schedule="gpipe", tensor="1d-sp", tensor_plan="auto", offload="all"
    )
    assert plan == Plan(plan.mesh, pipeline=plan.pipeline, tensor=plan.tensor)


def test_groups_refuse_what_they_alone_can_know() -> None:
    with pytest.raises(ConfigError, match='tensor_plan: \'solver\' is not legal; legal: "recipe", "auto"'):
        TensorOptions(plan="solver")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match='vertical_sync: true is not legal with schedule "1f1b"'):
        PipelineOptions(vertical_sync=True)
    with pytest.raises(ConfigError, match="stages: .3, 3. are 2 stages; legal: 3, for 3 ranks"):
        Plan(Mesh.of(pp=3), pipeline=PipelineOptions(stages=(3, 3)))
    with pytest.raises(ConfigError, match='plan: unknown key "data"'):
        Plan.of(data=3)


def test_replace_checks_anew() -> None:
    plan = Plan.of().replace(microbatches=2, precision="bf16")
    assert (plan.microbatches, plan.numeric.precision) == (2, "bf16")
    with pytest.raises(ConfigError, match="microbatches: 0"):
        plan.replace(microbatches=0)
    with pytest.raises(ConfigError, match='unknown key "microbatch"; .*Did you mean "microbatches"'):
        plan.replace(microbatch=2)
    with pytest.raises(FrozenInstanceError):
        plan.microbatches = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"microbatches": 0}, "microbatches: 0 is not legal; legal: an integer of at least 1"),
        ({"microbatches": 1.5}, "microbatches: 1.5"),
        ({"microbatches": True}, "microbatches: True"),
        (
            {"recompute": "ful"},
            'recompute: \'ful\' is not legal; legal: "none", "selective", "full". Did you mean "full"',
        ),
        ({"recompute": True}, "recompute: True"),
        (
            {"precision": "bf32"},
            'precision: \'bf32\' .*"fp32", "fp64", "bf16".*Did you mean "bf16"|Did you mean "fp32"',
        ),
        ({"schedule": "1F1B"}, 'schedule: \'1F1B\' is not legal; legal: "naive", "gpipe", "1f1b"'),
        ({"dropout": "exakt"}, "dropout: 'exakt' .*Did you mean \"exact\""),
        ({"offload": "cpu"}, "offload: 'cpu' is not legal; legal: \"none\""),
        ({"mesh": 2}, "mesh: 2 is not legal; legal: a Mesh"),
        ({"parameters": ()}, r"parameters: \(\) is not legal"),
        ({"parameters": ("*",)}, "parameters: .* is not legal; legal: one ParameterRule or more"),
        ({"parameters": None}, "parameters: None"),
    ],
)
def test_bad_plans_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.of(**change)  # type: ignore[arg-type]


PINNED = {"tensor_plan": "propagate", "mesh": Mesh.of(dp=2, tp=2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensor_plan": "propogate"}, "tensor_plan: 'propogate' .*Did you mean \"propagate\""),
        (
            {"pins": {"a": "0"}},
            'pins: "a" is not legal with tensor_plan = "recipe", which decides itself; legal: none, or',
        ),
        (
            {"tensor_bytes": 9},
            'tensor_bytes: 9 is not legal with tensor_plan = "recipe"; legal: 0, or tensor_plan = "auto"',
        ),
        ({"tensor_bytes": -1, "tensor_plan": "auto"}, "tensor_bytes: -1 is not legal"),
        ({"pins": {"a": "0"}, "tensor_plan": "auto"}, 'pins: "a" is not legal with tensor_plan = "auto"'),
        (
            {"pins": {"a": "0"}, "tensor_plan": "table"},
            'tensor_plan: "table" .* without ranks .*; legal: "recipe", or tp of 2',
        ),
        (
            {**PINNED, "pins": {}},
            'tensor_plan: "propagate" goes by pins, and there are none; legal: "recipe", "auto", or pins',
        ),
        ({**PINNED, "pins": "a"}, "pins: 'a' is not legal; legal: a mapping"),
        ({**PINNED, "pins": (("a", "0"), ("b", "0"), ("a", "1"))}, 'pins: "a" is there twice; legal: once'),
        ({**PINNED, "pins": {"": "0"}}, "pins: pattern: ''"),
        ({**PINNED, "pins": {"a": 0}}, 'pins: "a" = 0 is not legal; legal: "column"'),
        ({**PINNED, "pins": {"a": "0/0"}}, 'pins: "a" = "0/0" is not legal'),
        ({**PINNED, "pins": {"a": "cloumn"}}, 'Did you mean "column"?'),
        ({**PINNED, "pins": {"a": "0@dp"}}, 'there is no axis "dp" to shard over; legal: tp'),
        ({**PINNED, "pins": {"a": "0, 1"}}, "says two things of tp; legal: one"),
        (
            {**PINNED, "mesh": Mesh.of(tp_i=2, tp_j=2), "pins": {"a": "0"}},
            'does not say over which axis; legal: "0@tp_i" or "0@tp_j"',
        ),
    ],
)
def test_bad_pins_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.of(**change)  # type: ignore[arg-type]


def test_what_pins_say() -> None:
    assert cuts("a", "column", ["tp"]) == {"tp": PinnedCut("column")}
    assert cuts("a", "0/3@tp_j, -1@tp_i", ["tp_i", "tp_j"]) == {"tp_j": PinnedCut("", 0, 3), "tp_i": PinnedCut("", -1)}
    assert cuts("a", "whole", ["tp_i", "tp_j"]) == {"tp_i": PinnedCut("whole"), "tp_j": PinnedCut("whole")}
    assert cuts("a", "row@tp_j", ["tp_i", "tp_j"]) == {"tp_j": PinnedCut("row")}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (("S", "P", "R"), "is no row of the data-parallel table"),
        (("P", "P", "R"), 'parameters "w": rest: \'P\' is not legal; legal: "R", "S"'),
        (("R", "R", "R"), 'grad: \'R\' is not legal; legal: "P", "S"'),
        (("R", "P", 1), "state: 1 is not legal"),
    ],
)
def test_rows_that_are_not_in_the_table_are_refused_by_name(row: tuple[str, str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParameterRule("w", *row)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="parameters.pattern: ''"):
        ParameterRule("")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("microbatches = ", "plan: not TOML"),
        ("microbaches = 2", 'plan: unknown key "microbaches"; legal: mesh, .*Did you mean "microbatches"'),
        ("mesh = 2", r"mesh: 2 is not legal; legal: tables, each under \[\[mesh\]\]"),
        ("[mesh]\ndp = 2", "mesh: .* is not legal"),
        ('[[mesh]]\nname = "dp"', r'mesh\[0\]: "size" is missing; found: name'),
        ("[[mesh]]", r'mesh\[0\]: "name" is missing; found: nothing'),
        ('[[mesh]]\nname = "dp"\nsise = 2', r'mesh\[0\]: unknown key "sise"; .*Did you mean "size"'),
        ('[[mesh]]\nname = "dp"\nsize = "2"', "mesh.dp.size: '2'"),
        ('[[parameters]]\nrest = "R"', r'parameters\[0\]: "pattern" is missing; found: rest'),
        ('[[parameters]]\npattern = "*"\nstates = "R"', r'parameters\[0\]: unknown key "states".*"state"'),
        ('[[parameters]]\npattern = "*"\nrest = "S"', "legal: R, P, R .DDP., R, P, S .ZeRO-1."),
        ("parameters = []", "parameters: .* is not legal"),
    ],
)
def test_bad_toml_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.from_toml(text)


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r'parameters "w": S is a shard over the axis dp, which the mesh .* does not have'
    ):
        Plan.of(Mesh.of(tp=2), parameters=(ParameterRule("w", state="S"),))
    with pytest.raises(ConfigError, match='reduce: \'fp32\' is not legal; legal: "auto", "fp64"'):
        Plan.of(precision="fp64", reduce="fp32")
    with pytest.raises(ConfigError, match="prefetch: -1 is not legal; legal: an integer of at least 0"):
        Plan.of(prefetch=-1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"schedule": "pipedream", "microbatches": 3},
            'microbatches: 3 is not legal with schedule "pipedream".*legal: 1',
        ),
        ({"schedule": "pipedream", "precision": "fp16"}, 'precision: "fp16" is not legal.*"bf16"'),
        ({"schedule": "pipedream-2bw", "reduce": "bf16"}, 'reduce: "bf16" is not legal'),
        ({"schedule": "1f1b", "vertical_sync": True}, 'vertical_sync: true is not legal with schedule "1f1b"'),
        ({"schedule": "pipedream-2bw", "vertical_sync": True}, "vertical_sync"),
        ({"window": 0}, "window: 0"),
        ({"vertical_sync": 1}, "vertical_sync: 1 is not legal"),
        ({"schedule": "pipedream-2bw", "parameters": (ParameterRule("*", state="S"),)}, "zero: .*legal: 0"),
    ],
)
def test_what_asynchronous_schedules_cannot_do(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Plan.of(Mesh.of(pp=2, dp=2), **changes)
    if "window" not in changes and changes.get("vertical_sync") is not True and changes.get("vertical_sync") != 1:
        Plan.of(Mesh.of(pp=1, dp=2), **changes)  # nothing overlaps there
