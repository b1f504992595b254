"""GEGLU by the kernel against torch's in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bottega.kernels.geglu import geglu, reference
from tests.support.poisoned import Poisoned

# A share of the value, with what float32 has lost before: the interpreter cuts bfloat16 off, where a device rounds it.
ROUNDING = {torch.float16: 1.01 * 2**-11, torch.bfloat16: 1.01 * 2**-7}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "every second channel": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "part of more channels": lambda x: torch.nn.functional.pad(x, (3, 2))[..., 3:-2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 2), (3, 14), (2, 3, 10), (5, 2 * 1030)], ids=str)
def test_it_is_torch_s_for_any_size_and_strides(shape: tuple[int, ...], layout: str) -> None:
    x = LAYOUTS[layout](4 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))))
    exact = reference(x.double())
    out = Poisoned(exact.shape)
    geglu(x, out=out.tensor)
    out.check()
    assert (out.tensor - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_the_result_alone_is_rounded(dtype: torch.dtype) -> None:
    x = torch.randn(7, 66, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = reference(x.double())
    apart = (geglu(x).double() - exact).abs()
    assert (apart <= ROUNDING[dtype] * exact.abs() + torch.finfo(dtype).tiny).all()


def test_the_error_function_is_exact_where_its_usual_approximation_is_not() -> None:
    """tanh's is off by up to 5e-4."""
    gates = torch.linspace(-30, 30, 241)
    made = geglu(torch.stack([torch.ones_like(gates), gates], dim=-1))[:, 0]
    exact = torch.nn.functional.gelu(gates.double())
    assert (made - exact).abs().max() < 2e-6
    approximate = torch.nn.functional.gelu(gates.double(), approximate="tanh")
    assert (approximate - exact).abs().max() > 1e-4


def test_no_items_are_no_items() -> None:
    assert geglu(torch.empty(0, 8)).shape == (0, 4)
