"""MFU: FLOPs of models against closed forms by hand, and peaks by the names that CUDA gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.backend import Backend
from shardwise.core.devices import MODELS
from shardwise.core.errors import ConfigError
from shardwise.core.plan import CHOICES
from shardwise.launch.mfu import mfu, model_flops, named_peak, peak_flops
from shardwise.models import GPT, Llama
from shardwise.shard.assignment import TensorParallelSpec
from shardwise.units.tracing import trace

VOCABULARY, WIDTH, LAYERS, LENGTH = 61, 32, 3, 12
ROWS = 10


def text() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    return {n: torch.randint(0, VOCABULARY, (4, LENGTH), generator=g) for n in ("input_ids", "labels")}


def gpt(**sizes: float) -> GPT:
    return GPT(**{"vocabulary": VOCABULARY, "width": WIDTH, "layers": LAYERS, "heads": 4, "context": 16, **sizes})  # type: ignore[arg-type]


def palm(matmul_parameters: int, rows: int) -> int:
    """6 N T + 12 L H Q S T: appendix B, with N the parameters of products (the output's, not the embedding's)."""
    tokens = rows * LENGTH
    return 6 * matmul_parameters * tokens + 12 * LAYERS * WIDTH * LENGTH * tokens


GPT_N = LAYERS * 12 * WIDTH**2 + VOCABULARY * WIDTH


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "dropout", [0.0, 0.1]
)  # attention in one kernel, whose backward computes the scores again, and in several
def test_a_gpt_needs_what_palm_says(dropout: float, precision: str) -> None:
    found = trace(gpt(dropout=dropout), text(), precision=precision)
    assert model_flops(found, ROWS) == palm(GPT_N, ROWS)


@pytest.mark.slow
def test_grouped_heads_and_gated_mlps() -> None:
    """Keys and values have half the heads; the scores have as many as the queries."""
    module = Llama(vocabulary=VOCABULARY, width=WIDTH, layers=LAYERS, heads=4, kv_heads=2, context=16)
    products = sum(p.numel() for n, p in module.named_parameters() if p.dim() == 2)
    tied = module.lm_head.weight is module.get_parameter(
        next(n for n, p in module.named_parameters() if p.shape[0] == VOCABULARY)
    )
    assert model_flops(trace(module, text()), ROWS) == palm(products - (0 if tied else VOCABULARY * WIDTH), ROWS)


@pytest.mark.parametrize("microbatches", [2, 3, 7])
def test_microbatches_change_nothing(microbatches: int) -> None:
    assert model_flops(trace(gpt(), text()), ROWS, microbatches) == palm(GPT_N, ROWS)


class Perceptron(nn.Module):
    """Two linears: the first needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def test_the_gradient_of_data_is_not_needed() -> None:
    batch = {"x": torch.randn(4, 6), "y": torch.arange(4) % 3}
    assert model_flops(trace(Perceptron(), batch), 5) == 2 * 5 * (2 * 6 * 16 + 3 * 16 * 3)
    module = Perceptron()
    module.first.requires_grad_(False)
    assert model_flops(trace(module, batch), 5) == 2 * 5 * (6 * 16 + 2 * 16 * 3)


def test_rows_that_compare_with_each_other_count_by_the_microbatch() -> None:
    """Scores of every row with every other: four times as many in one microbatch of twice the rows."""

    class Contrastive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = nn.Linear(6, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            z = self.tower(x)
            return F.cross_entropy(z @ z.T, y)

    found = trace(Contrastive(), {"x": torch.randn(4, 6), "y": torch.arange(4)})
    tower = 2 * 2 * 8 * 6 * 8
    assert model_flops(found, 8) == tower + 3 * 2 * 8 * 8 * 8
    assert model_flops(found, 8, 2) == tower + 2 * 3 * 2 * 4 * 4 * 8


def test_a_model_that_was_not_captured_has_no_number() -> None:
    class Deciding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out = self.linear(x)
            return F.cross_entropy(out if float(x.sum()) > 0 and locals() else -out, y)

    found = trace(Deciding(), {"x": torch.ones(4, 6), "y": torch.arange(4) % 3})
    assert found.opaque is not None
    assert model_flops(found, 4) is None


def test_one_rank_s_trace_has_no_number_of_the_model_s() -> None:
    found = trace(gpt(), text(), tensor=TensorParallelSpec({"tp": 2}))
    with pytest.raises(ConfigError, match=r"of one rank of \{'tp': 2\}; legal: one of the whole model"):
        model_flops(found, ROWS)


def test_numbers_that_are_not_legal() -> None:
    found = trace(Perceptron(), {"x": torch.randn(4, 6), "y": torch.arange(4) % 3})
    for rows, microbatches in ((0, 1), (4, 0)):
        with pytest.raises(ConfigError, match=r"0 is not legal; legal: an integer of at least 1"):
            model_flops(found, rows, microbatches)
    for seconds, ranks, peak in ((0.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0)):
        with pytest.raises(ConfigError, match="legal: more than 0 of each"):
            mfu(1.0, seconds, ranks, peak)


def test_mfu_of_palm() -> None:
    """PaLM 540B (table 3, section 4): 238.3 K tokens/s on 6,144 TPU v4 chips of 275 TFLOP/s is an MFU of 46.2 %."""
    layers, heads, size, length, tokens = 118, 48, 256, 2048, 2048 * 2048
    flops = (6 * 540.35e9 + 12 * layers * heads * size * length) * tokens
    assert mfu(flops, tokens / 238.3e3, 6144, 275e12) == pytest.approx(0.462, abs=0.001)


# ---- peaks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fp64", "fp32", "tf32", "bf16", "fp16"),
    [
        ("NVIDIA A100-SXM4-80GB", 19.5, 19.5, 156.0, 312.0, 312.0),
        ("A100-PCIE-40GB", 19.5, 19.5, 156.0, 312.0, 312.0),
        ("NVIDIA A100 80GB PCIe", 19.5, 19.5, 156.0, 312.0, 312.0),
        ("NVIDIA H100 80GB HBM3", 67.0, 67.0, 494.5, 989.0, 989.0),
        ("NVIDIA H100 PCIe", 51.0, 51.0, 378.0, 756.0, 756.0),
        ("NVIDIA H100 NVL", 60.0, 60.0, 417.5, 835.5, 835.5),
        ("NVIDIA H200", 67.0, 67.0, 494.5, 989.0, 989.0),
        ("NVIDIA B200", 37.0, 75.0, 1125.0, 2250.0, 2250.0),
        ("NVIDIA L4", None, 30.3, 60.0, 121.0, 121.0),
        ("NVIDIA L40S", None, 91.6, 183.0, 362.0, 362.0),
        ("Tesla V100-SXM2-32GB", 7.8, 15.7, 15.7, None, 125.0),  # neither TF32 nor bf16 units
        ("Tesla T4", None, 8.1, 8.1, None, 65.0),
        ("NVIDIA GeForce RTX 3090", 0.556, 35.6, 35.6, 71.0, 71.0),
        ("NVIDIA GeForce RTX 4090", 1.29, 82.6, 82.6, 165.2, 165.2),
        ("NVIDIA GeForce RTX 5090", 1.64, 104.8, 104.8, 209.5, 209.5),
        ("AMD Instinct MI300X", 163.4, 163.4, 653.7, 1307.4, 1307.4),
        ("AMD Instinct MI250X", 47.9, 47.9, 47.9, 191.5, 191.5),  # of one die, which is what torch calls a device
    ],
)
def test_peaks_by_name(
    name: str, fp64: float | None, fp32: float, tf32: float, bf16: float | None, fp16: float
) -> None:
    found = [named_peak(name, p) for p in ("fp64", "fp32", "bf16", "fp16")] + [named_peak(name, "fp32", tf32=True)]
    assert found == [None if t is None else t * 1e12 for t in (fp64, fp32, bf16, fp16, tf32)]


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A100-SXM-64GB", "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
     "NVIDIA L400", "Quadro K620", "AMD Instinct MI300A", "AMD Instinct MI300X VF", ""],
)  # fmt: skip
def test_devices_that_only_resemble_a_known_one(name: str) -> None:
    assert all(named_peak(name, precision) is None for precision in CHOICES["precision"])


def test_no_peak_is_off_by_the_factor_of_sparsity() -> None:
    """Dense figures of one device: bf16 is twice TF32 (but for rounding), TF32 at least fp32."""
    for peak in (model.peak for model in MODELS):
        if peak.tf32 is not None:
            assert peak.bf16 is not None and peak.bf16 == pytest.approx(2 * peak.tf32, rel=0.02)
            assert peak.tf32 >= peak.fp32


@pytest.fixture
def matmul_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("matmul_precision")
def test_tf32_counts_where_it_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_name", lambda device: f"NVIDIA {'H200' if device.index == 1 else 'unknown'}"
    )
    device = torch.device("cuda", 1)
    torch.set_float32_matmul_precision("highest")
    assert peak_flops(device, "fp32") == 67e12
    with Backend.of(device).allow_tf32():
        assert peak_flops(device, "fp32") == 494.5e12
        assert peak_flops(device, "bf16") == 989e12
    assert peak_flops(device, "fp32") == 67e12
    assert peak_flops(torch.device("cuda", 0), "bf16") is None


def test_a_cpu_has_no_peak_and_a_precision_has_a_name() -> None:
    assert peak_flops(torch.device("cpu"), "fp32") is None
    with pytest.raises(ConfigError, match='precision: \'fp8\' is not legal; legal: "fp32", "fp64", "bf16", "fp16"'):
        peak_flops(torch.device("cpu"), "fp8")
