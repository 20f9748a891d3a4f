"""Experts equal one device: those of models that are unchanged, over ranks with parts of the tokens, of the experts and
of what is inside them, whatever tokens choose.
"""

from __future__ import annotations

import copy
import functools
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_tensor import ALONE, CLIP, PLAIN, check, oracle
from torch import Tensor, nn

import zoo
from communicating import communicated
from covering import covering
from processes import run_processes
from shardwise.core.errors import ConfigError
from shardwise.core.mesh import Mesh
from shardwise.core.plan import Plan
from shardwise.lower.compiled import Compiled
from shardwise.ops import collectives
from shardwise.ops.experts import placed
from shardwise.parallel.context import context_parallel
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.parallel.overlap import overlapped
from shardwise.parallel.pipeline import pipeline
from shardwise.parallel.tensor import tensor_parallel
from shardwise.verify.verify import verify

SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 12, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral balanced": ("Mixtral", {"num_local_experts": 4, "output_router_logits": True}),
    "qwen3": ("Qwen3Moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 3}),
    "deepseek": ("DeepseekV3", {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 8}),
    "granite": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
BIASES = ("experts.down_proj_bias",)


@functools.cache
def model(name: str) -> tuple[Compiled, list[dict[str, Tensor]], nn.Module]:
    """A model on one device, whose capture serves all plans."""
    import transformers as t

    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = getattr(t, f"{kind}Config")(**{**SIZES, **changes})
    module = getattr(t, f"{kind}ForCausalLM")(config).double().train()
    batch = zoo.padded(zoo.tokens(words=24))
    batches = [batch, {k: v[:3] for k, v in batch.items()}]
    return Compiled(module, ALONE, batches[0], None), batches, module


@functools.cache
def truth(name: str, microbatches: int) -> Any:
    _, batches, module = model(name)
    return oracle(module, None, batches, PLAIN, microbatches)


def composed(
    ep: int, cp: tuple[int, Any], tensor: tuple[Any, ...], data: tuple[int, int], pp: tuple[int, str], recompute: Any,
    microbatches: int,
) -> Plan:  # fmt: skip
    plan = ALONE.replace(microbatches=microbatches, recompute=recompute)
    kind, size, *experts = tensor
    plan = context_parallel(tensor_parallel(plan, size, kind, experts=(experts or ["inside"])[0]), *cp)
    return pipeline(data_parallel(expert_parallel(plan, ep), *data), *pp)  # type: ignore[arg-type]


BY_NUMBER = tuple((kind, size, "by-number") for kind, size in (("1d", 2), ("1d", 3), ("1d", 4), ("1d-sp", 2)))

CASES = list(
    itertools.product(
        ("mixtral", "qwen3", "olmoe", "deepseek", "gpt-oss", "granite"),
        (1, 2, 3, 4),
        ((1, "gathered"), (2, "gathered"), (2, "ring"), (2, "heads")),
        (("1d", 1), ("1d", 2), ("1d", 3), ("1d-sp", 2), ("2d", 4), ("3d", 8), *BY_NUMBER),
        ((1, 0), (2, 0), (3, 1), (2, 2), (2, 3)),
        ((1, "1f1b"), (2, "1f1b"), (2, "zb-h1"), (2, "zbv")),
        ("none", "full", "selective"),
        (1, 2),
    )
)


def fits(case: tuple[Any, ...]) -> bool:
    _, ep, cp, tensor, data, pp, _, microbatches = case
    fitting = ep * cp[0] * tensor[1] * data[0] * pp[0] <= 24 and (pp[1] != "zbv" or microbatches == 2)
    return bool(fitting and enough(ep, tensor))


def enough(ep: int, tensor: tuple[Any, ...]) -> bool:
    """Whether each rank has an expert: all models have four or more."""
    return tensor not in BY_NUMBER or ep * tensor[1] <= 4


@pytest.mark.slow
@pytest.mark.few(40)
@pytest.mark.parametrize("case", list(covering([case for case in CASES if fits(case)])), ids=str)
def test_together(case: tuple[Any, ...]) -> None:
    """Every pair of settings of each two axes."""
    name, *options, microbatches = case
    one, batches, _ = model(name)
    check(one.under(composed(*options, microbatches)), batches, truth(name, microbatches), PLAIN)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", ["dp", "ep", "tp", "tp by number", "cp"])
def test_nothing_is_computed_twice(name: str, plan: str) -> None:
    """No op is whole on every rank, and no weight of experts where ranks share them."""
    one, batches, _ = model(name)
    size = 2
    made = {
        "dp": lambda: data_parallel(ALONE, size), "ep": lambda: expert_parallel(ALONE, size),
        "tp": lambda: tensor_parallel(ALONE, size),
        "tp by number": lambda: tensor_parallel(ALONE, size, experts="by-number"),
        "cp": lambda: context_parallel(ALONE, size),
    }[plan]()  # fmt: skip
    compiled = one.under(made)
    check(compiled, batches, truth(name, 1), PLAIN)
    if name != "mixtral balanced":  # its balance is one of the whole batch
        assert not compiled.general.replicated
    if plan in ("ep", "tp", "tp by number"):
        of_experts = [p for p in compiled.general.parameters if ".experts." in p.name]
        whole = [p.name for p in of_experts if not p.axes and not (plan == "tp" and p.name.endswith(BIASES))]
        assert of_experts
        assert not whole
    if plan == "dp" and name != "mixtral balanced":
        assert {kind for kind, *_ in communicated(compiled.general)} <= {"slice"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "mixtral balanced"])
def test_loops_over_experts(name: str) -> None:
    """They are trained as grouped products are, whatever divides them; the user's model keeps its loops."""
    _, batches, module = model(name)
    looping: Any = copy.deepcopy(module)
    looping.set_experts_implementation("eager")
    expected = oracle(looping, None, batches, PLAIN, 1)
    one = Compiled(looping, ALONE, batches[0], None)
    assert any("loops over experts" in note for note in one.general.notes)
    assert looping.config._experts_implementation == "eager"
    by_number = tensor_parallel(ALONE, 2, experts="by-number")
    for plan in (data_parallel(ALONE, 2), expert_parallel(ALONE, 2), tensor_parallel(ALONE, 2), by_number):
        compiled = one.under(plan)
        check(compiled, batches, expected, PLAIN)
        of_experts = [p for p in compiled.general.parameters if ".experts." in p.name and not p.name.endswith(BIASES)]
        assert all(bool(p.axes) == ("dp" not in plan.mesh.names) for p in of_experts)


# ---- what tokens choose ----------------------------------------------------------------------------------------------


class Forced(nn.Module):
    """Its batch says which experts each token chooses."""

    def __init__(self, experts: int, normed: bool = False) -> None:
        super().__init__()
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        torch.manual_seed(1)
        config: Any = SimpleNamespace(
            num_local_experts=experts, hidden_size=8, intermediate_size=12, hidden_act="silu",
            _experts_implementation="grouped_mm",
        )  # fmt: skip
        self.table, self.gate, self.experts = nn.Embedding(16, 8), nn.Linear(8, experts), MixtralExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.3)
        if normed:
            self.experts.has_post_expert_norm, self.experts.post_expert_norm = True, nn.RMSNorm(8)

    def forward(self, x: Tensor, ids: Tensor, y: Tensor) -> Tensor:
        hidden = self.table(x).flatten(0, 1)
        chosen = ids.flatten(0, 1)
        scores = self.gate(hidden).softmax(-1).gather(1, chosen.clamp(max=self.experts.num_experts - 1))
        out = hidden + self.experts(hidden, chosen, scores)
        return (out.unflatten(0, x.shape) - y).square().mean()


def chosen(how: str, experts: int, rows: int, length: int, slots: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    number = rows * length
    if how == "all to one":
        found = torch.full((number, slots), experts - 1)
    elif how == "none to the first":
        found = torch.randint(1, experts, (number, slots), generator=generator)
    elif how == "as many to each":
        found = torch.arange(number * slots).remainder(experts).view(number, slots)
    else:
        found = torch.randint(0, experts + (how == "some to none"), (number, slots), generator=generator)
    return found.view(rows, length, slots)


ROUTES = ("all to one", "none to the first", "as many to each", "some to none", "random")


@functools.cache
def forced(how: str, experts: int, slots: int, normed: bool = False) -> tuple[Compiled, list[dict[str, Tensor]], Any]:
    def batch(rows: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rows)
        return {
            "x": torch.randint(0, 16, (rows, 6), generator=generator), "ids": chosen(how, experts, rows, 6, slots),
            "y": torch.randn(rows, 6, 8, generator=generator).double(),
        }  # fmt: skip

    module, batches = Forced(experts, normed).double().train(), [batch(8), batch(3)]
    return Compiled(module, ALONE, batches[0], None), batches, oracle(module, None, batches, PLAIN, 1)


SHARED = [(2, 1, 1), (4, 1, 1), (3, 1, 1), (2, 2, 1), (2, 1, 2), (1, 3, 1)]
BY_NUMBER_SHARED = [(1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2), (1, 2, 2)]


@pytest.mark.quick(2)
@pytest.mark.parametrize("how", ROUTES)
@pytest.mark.parametrize(("experts", "slots"), [(4, 1), (6, 2), (5, 3)])
@pytest.mark.parametrize(
    ("ep", "dp", "tp", "tensor"),
    [*((*one, "inside") for one in SHARED), *((*one, "by-number") for one in BY_NUMBER_SHARED)],
)
def test_what_tokens_choose(how: str, experts: int, slots: int, ep: int, dp: int, tp: int, tensor: Any) -> None:
    """The last batch has fewer rows than some plans have ranks."""
    one, batches, expected = forced(how, experts, slots)
    plan = data_parallel(expert_parallel(tensor_parallel(ALONE, tp, experts=tensor), ep), dp)
    check(one.under(plan), batches, expected, PLAIN)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("ep", "dp", "tp", "tensor"),
    [*((*one, "inside") for one in (*SHARED, (1, 1, 2))), *((*one, "by-number") for one in BY_NUMBER_SHARED)],
)
@pytest.mark.parametrize("experts", [4, 8])
def test_a_weight_that_all_experts_share(experts: int, ep: int, dp: int, tp: int, tensor: Any) -> None:
    """A norm behind the last product, of width 8, which may be the number of experts."""
    one, batches, expected = forced("random", experts, 2, normed=True)
    compiled = one.under(data_parallel(expert_parallel(tensor_parallel(ALONE, tp, experts=tensor), ep), dp))
    check(compiled, batches, expected, PLAIN)
    (norm,) = (p for p in compiled.general.parameters if p.name.endswith("norm.weight"))
    assert not norm.axes


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 56])
@pytest.mark.parametrize(("kind", "tp", "ep"), [("1d", 2, 1), ("1d", 3, 2), ("1d-sp", 6, 1), ("2d", 4, 1)])
def test_parts_that_no_kernel_takes_as_they_are(width: int, kind: Any, tp: int, ep: int) -> None:
    """In bf16 kernels take experts of widths that divide by 8: the model's does, and a rank's part of it does not."""
    plan = expert_parallel(tensor_parallel(Plan.of(precision="bf16", mesh=Mesh(())), tp, kind), ep)
    one, batches = narrow(width)
    report = verify(one.module, batches, plan, captured=one)
    assert report.passed, (report.worst[:3], report.low_precision)
    units = one.under(plan).general.units
    ops = [node.target for unit in units if unit.graph is not None for node in unit.graph.nodes]
    assert torch.ops.shardwise.grouped_mm.default in ops


@functools.cache
def narrow(width: int) -> tuple[Compiled, list[dict[str, Tensor]]]:
    import transformers as t

    torch.manual_seed(0)
    module = t.MixtralForCausalLM(t.MixtralConfig(**{**SIZES, "intermediate_size": width, "num_local_experts": 4}))
    return Compiled(module.train(), ALONE, zoo.tokens(words=24), None), [zoo.tokens(words=24)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ep"), [("1d", 1), ("1d-sp", 1), ("1d", 2)])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", ["mixtral", "deepseek"])
def test_microbatches_in_pairs(name: str, kind: Any, ep: int, recompute: Any) -> None:
    one, batches, _ = model(name)
    plan = tensor_parallel(ALONE.replace(microbatches=2, recompute=recompute), 2, kind, experts="by-number")
    check(one.under(overlapped(expert_parallel(plan, ep), "pairs")), batches, truth(name, 2), PLAIN)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (3, 1), (2, 2)])
def test_a_pin_gives_experts_by_number(tp: int, ep: int) -> None:
    """One weight is pinned along its experts, and the other follows."""
    one, batches, _ = model("mixtral")
    pins = {"*.experts.gate_up_proj": "0"}
    compiled = one.under(expert_parallel(tensor_parallel(ALONE, tp, "1d", "propagate", pins), ep))
    check(compiled, batches, truth("mixtral", 1), PLAIN)
    of_experts = [p for p in compiled.general.parameters if ".experts." in p.name]
    assert all(p.layout is not None and p.layout.dims[0][0].axes[-1] == "tp" for p in of_experts)


@pytest.mark.slow
def test_the_solver_may_take_experts_by_number() -> None:
    import transformers as t

    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "num_local_experts": 8, "num_hidden_layers": 1}
    ids = torch.randint(0, 24, (2, 512))
    module = t.MixtralForCausalLM(t.MixtralConfig(**sizes)).train()
    plan = tensor_parallel(Plan.of(mesh=Mesh(()), precision="bf16"), 2, tensor_plan="auto")
    found = Compiled(module, plan, {"input_ids": ids, "labels": ids}, None).general.parameters
    assert all(p.layout is not None and p.layout.dims[0][0].axes for p in found if ".experts." in p.name)


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["mixtral", "deepseek", "granite"])
@pytest.mark.parametrize("experts", ["inside", "by-number"])
def test_results_are_summed_once_a_token(name: str, experts: Any) -> None:
    """Not once for each expert that a token chooses, and together with those of experts that all tokens have."""
    general = model(name)[0].under(tensor_parallel(ALONE, 2, experts=experts)).general
    behind = [
        node
        for unit in general.units
        for node in (() if unit.graph is None else unit.graph.nodes)
        if node.target is placed
        for node in followed(node)
    ]
    assert len(behind) == (1 if name == "deepseek" else 2) * 2
    assert not any(node.target is collectives.all_reduce for node in behind)


def followed(node: Any) -> list[Any]:
    """What views and sums make of a value, one after the other: two of them."""
    found = []
    for _ in range(2):
        (node,) = node.users
        found.append(node)
    return found


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_more_ranks_than_experts() -> None:
    one, *_ = model("mixtral")
    with pytest.raises(ConfigError, match="ep: 5 is not legal for 4 experts; legal: 1 to 4"):
        one.under(expert_parallel(ALONE, 5))


@pytest.mark.parametrize(
    ("tp", "ep", "wrong"),
    [
        (5, 1, "for 4 experts; legal: 1 to 4, or experts = .inside"),
        (3, 2, "for 4 experts over ep = 2; legal: 1 to 2, or experts = .inside"),
    ],
)
def test_more_ranks_of_tp_than_experts(tp: int, ep: int, wrong: str) -> None:
    one, *_ = model("mixtral")
    with pytest.raises(ConfigError, match=f'tp: {tp} is not legal with experts = "by-number" {wrong}'):
        one.under(expert_parallel(tensor_parallel(ALONE, tp, experts="by-number"), ep))


@pytest.mark.slow
def test_a_model_without_experts() -> None:
    own = zoo.make("own gpt", 16)
    wrong = "no layer of experts was found in the model; legal:"
    with pytest.raises(ConfigError, match=f"ep: 2 is not legal: {wrong} 1"):
        Compiled(own.module.double(), expert_parallel(ALONE, 2), own.batch, own.loss)
    with pytest.raises(ConfigError, match=f'experts: "by-number" is not legal: {wrong} "inside"'):
        Compiled(own.module.double(), tensor_parallel(ALONE, 2, experts="by-number"), own.batch, own.loss)


@pytest.mark.parametrize("options", [{"tensor": "2d"}, {"tensor_plan": "auto"}])
def test_who_else_decides(options: dict[str, str]) -> None:
    name, word = next(iter(options.items()))
    with pytest.raises(ConfigError, match=f'experts: "by-number" is not legal with {name} = "{word}"; legal: "inside"'):
        Plan.of(experts="by-number", **options)


# ---- processes -------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
import torch, transformers as t
from shardwise import Plan, Trainer
from shardwise.core.optim import OptimizerChoice
from shardwise.parallel.data import data_parallel
from shardwise.parallel.experts import expert_parallel
from shardwise.runtime.connect import connect

backend, ep, dp, zero = sys.argv[1], *map(int, sys.argv[2:5])
torch.set_num_threads(1)
torch.manual_seed(0)
module = t.MixtralForCausalLM(t.MixtralConfig(**json.loads(sys.argv[5]))).double().train()
plan = data_parallel(expert_parallel(Plan.of(precision="fp64"), ep), dp, zero)
comm = connect(plan.mesh, backend=backend)
ids = [torch.randint(0, 24, (6, 9), generator=torch.Generator().manual_seed(step)) for step in range(3)]
own, rows = comm.mesh.index(comm.rank, ("dp",)), 6 // dp
mine = [one[own * rows : (own + 1) * rows] for one in ids]
batches = [{"input_ids": one, "labels": one} for one in mine]
trainer = Trainer(module, OptimizerChoice("sgd", lr=0.1), plan, batches[0], comm=comm, clip_norm=float(sys.argv[6]))
losses = [float(trainer.step(batch).loss) for batch in batches]
state = trainer.state_dict()
print(json.dumps([losses, {name: value.norm().item() for name, value in state.items()}]), flush=True)
comm.close()
"""


@pytest.mark.parametrize(
    ("backend", "ep", "dp", "zero"),
    [
        pytest.param("gloo", 2, 1, 0, marks=pytest.mark.slow),
        pytest.param("shared", 2, 1, 0, marks=pytest.mark.slow),
        pytest.param("gloo", 2, 2, 3, marks=pytest.mark.slow),
        pytest.param("shared", 3, 1, 0, marks=pytest.mark.full),
    ],
)
def test_processes(tmp_path: Path, backend: str, ep: int, dp: int, zero: int) -> None:
    """Three steps of Mixtral, with clipped gradients, beside one device."""
    import transformers as t

    script = tmp_path / "loop.py"
    script.write_text(SCRIPT)
    sizes = {**SIZES, "num_local_experts": 4}
    torch.manual_seed(0)
    module = t.MixtralForCausalLM(t.MixtralConfig(**sizes)).double().train()
    ids = [torch.randint(0, 24, (6, 9), generator=torch.Generator().manual_seed(step)) for step in range(3)]
    expected = oracle(module, None, [{"input_ids": one, "labels": one} for one in ids], PLAIN, 1)
    words = [str(script), backend, *map(str, (ep, dp, zero)), json.dumps(sizes), str(CLIP)]
    for output in run_processes(ep * dp, words, 120):
        losses, norms = json.loads(output.splitlines()[-1])
        assert losses == pytest.approx([one.loss for one in expected], rel=1e-10, abs=0)
        for name, value in expected[-1].parameters.items():
            assert norms[name] == pytest.approx(value.norm().item(), rel=1e-10, abs=0)


class TorchsGroups(nn.Module):
    """A layer of experts that calls torch's own grouped product, for which torch has no kernel of doubles."""

    def __init__(self, captured: bool, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.captured, self.named = captured, named
        self.gate, self.experts = nn.Linear(8, 3), nn.Parameter(torch.randn(3, 8, 16))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        best, chosen = chances.max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.arange(3).ge(chosen[:, None]).sum(0).to(torch.int32)
        product = torch.nn.functional.grouped_mm if self.named else torch._grouped_mm
        found = product(x[order], self.experts, offs=ends).square().mean(-1) * best[order]
        if not self.captured and float(found.detach().sum()) > 1e9:  # a float: this runs as it is written
            raise ValueError("too large")
        return found.mean()


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("named", [True, False])
def test_torchs_own_grouped_products_in_doubles(captured: bool, named: bool) -> None:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    plan = data_parallel(Plan.of(microbatches=2), 2)
    report = verify(TorchsGroups(captured, named), [{"x": x}] * 2, plan)
    assert report.passed and report.compared, report.worst[:3]
    assert captured != any("runs as it is written" in note for note in report.notes)
