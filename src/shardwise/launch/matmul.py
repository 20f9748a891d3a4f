"""Choose the float32 matrix multiplication of a CPU run: the fast kernel only where it is about as accurate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

FAST, SAFE = "medium", "highest"
SQUARE = (512, 512, 512)
FACTOR = 4.0  # the factor by which the fast kernel's error may be larger
LARGEST = 1024  # the most rows and columns that are tried

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class MatmulChoice:
    """This is the chosen ``torch.set_float32_matmul_precision`` with the errors that decided it.

    The errors are relative means, each the largest over all shapes.
    """

    precision: str
    fast_error: float
    safe_error: float

    def __str__(self) -> str:
        return (
            f'float32 matmul "{self.precision}": errors {self.fast_error:.1e} ("{FAST}") and {self.safe_error:.1e} '
            f'("{SAFE}")'
        )


def choose_matmul(shapes: Iterable[Shape]) -> MatmulChoice:
    """Compare the kernels with float64 for each shape (rows, inner, columns), as a product and as a linear layer.

    The setting of the process is restored.
    """
    before = torch.get_float32_matmul_precision()
    worst = {FAST: 0.0, SAFE: 0.0}
    accurate = True
    try:
        for shape in dict.fromkeys(tuple(min(size, LARGEST) for size in shape) for shape in shapes):
            errors = _errors(shape)  # type: ignore[arg-type]
            accurate = accurate and errors[FAST] <= FACTOR * errors[SAFE]
            worst = {name: max(worst[name], errors[name]) for name in worst}
    finally:
        torch.set_float32_matmul_precision(before)
    return MatmulChoice(FAST if accurate else SAFE, worst[FAST], worst[SAFE])


def typical_shapes(module: nn.Module, rows: int) -> list[Shape]:
    """Return a square shape, and that of the product of ``rows`` tokens with the module's largest matrix."""
    matrices = [p.shape for p in module.parameters() if p.dim() == 2]
    largest = max(matrices, key=lambda shape: shape.numel(), default=None)
    return [SQUARE] if largest is None else [SQUARE, (rows, largest[1], largest[0])]


def _errors(shape: Shape) -> dict[str, float]:
    """Return each kernel's mean error relative to the mean magnitude of the exact result."""
    rows, inner, columns = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, inner, generator=generator)
    weight = torch.randn(columns, inner, generator=generator)
    exact = x.double() @ weight.double().T
    found = {}
    for name in (FAST, SAFE):
        torch.set_float32_matmul_precision(name)
        results = (x @ weight.T, nn.functional.linear(x, weight))
        found[name] = max(_relative(result, exact) for result in results)
    return found


def _relative(found: Tensor, exact: Tensor) -> float:
    error = (found.double() - exact).abs().mean() / exact.abs().mean()
    return float(error) if bool(torch.isfinite(error)) else float("inf")
