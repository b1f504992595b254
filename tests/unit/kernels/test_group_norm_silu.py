"""GroupNorm and SiLU by the kernel against torch's in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bottega.kernels import group_norm_silu as module
from bottega.kernels.group_norm_silu import group_norm_silu, reference
from bottega.kernels.kernel import TOLERANCES
from tests.support.poisoned import Poisoned

# rows, channels, height, width, groups: channels of a group that are no power of two, groups that fill no block, maps
# of one element, and more places than fit into a tile.
SHAPES = [
    (1, 2, 1, 1, 1),
    (2, 6, 3, 5, 3),
    (1, 70, 4, 7, 7),
    (3, 30, 1, 9, 5),
    (1, 24, 13, 11, 8),
    (2, 80, 3, 5, 8),
    (1, 258, 3, 3, 2),
]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "contiguous": lambda x: x.contiguous(),
    "part of a larger map": lambda x: torch.nn.functional.pad(x, (1, 2, 3, 1))[:, :, 3:-1, 1:-2],
    "every second channel": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "turned": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
}


def inputs(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape[:4], generator=generator).to(dtype)
    weight, bias = (torch.randn(shape[1], generator=generator).to(dtype) for _ in range(2))
    return x, weight, bias


def distance(made: Tensor, exact: Tensor) -> float:
    return float((made.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [*((shape, "channels last") for shape in SHAPES), *((SHAPES[4], layout) for layout in LAYOUTS)],
    ids=str,
)
def test_it_is_torch_s_for_any_size_and_strides(shape: tuple[int, int, int, int, int], layout: str) -> None:
    x, weight, bias = inputs(shape, torch.float32)
    x = LAYOUTS[layout](x)
    exact = reference(x.double(), weight.double(), bias.double(), groups=shape[-1], eps=1e-5)
    out = Poisoned(shape[:4], channels_last=layout == "channels last")
    group_norm_silu(x, weight, bias, groups=shape[-1], eps=1e-5, out=out.tensor)
    out.check()
    assert distance(out.tensor, exact) < 1e-5


def test_without_silu_it_is_the_norm() -> None:
    x, weight, bias = inputs(SHAPES[2], torch.float32)
    exact = reference(x.double(), weight.double(), bias.double(), groups=7, eps=1e-5, activate=False)
    assert distance(group_norm_silu(x, weight, bias, groups=7, eps=1e-5, activate=False), exact) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_the_result_alone_is_rounded(dtype: torch.dtype) -> None:
    x, weight, bias = inputs(SHAPES[2], dtype)
    made = group_norm_silu(x, weight, bias, groups=7, eps=1e-5)
    exact = reference(x.double(), weight.double(), bias.double(), groups=7, eps=1e-5)
    assert made.dtype == dtype
    assert distance(made, exact) < torch.finfo(dtype).eps < TOLERANCES[dtype]


@pytest.mark.parametrize("channels_last", [True, False])
def test_parts_of_several_tiles_and_a_mean_that_is_large_cost_no_digits(
    monkeypatch: pytest.MonkeyPatch, channels_last: bool
) -> None:
    """A sum of squares would have lost all of them: a million to a variance of one."""
    monkeypatch.setattr(module, "_TILE", 256)
    monkeypatch.setattr(module, "_PROGRAMS", 6)
    x, weight, bias = inputs((1, 24, 9, 11, 3), torch.float32)
    x = x + 1000 * torch.arange(1, 25)[None, :, None, None].div(8, rounding_mode="floor")
    x = LAYOUTS["channels last" if channels_last else "contiguous"](x)
    exact = reference(x.double(), weight.double(), bias.double(), groups=3, eps=1e-5)
    assert distance(group_norm_silu(x, weight, bias, groups=3, eps=1e-5), exact) < 2e-4


def test_a_map_of_one_value_gives_its_bias() -> None:
    x, weight, bias = torch.full((1, 8, 4, 4), 3.0), torch.ones(8), torch.arange(8.0)
    made = group_norm_silu(x, weight, bias, groups=2, eps=1e-5, activate=False)
    assert torch.equal(made, bias[None, :, None, None].expand_as(made))


def test_the_layout_of_what_comes_out_is_that_of_what_goes_in() -> None:
    x, weight, bias = inputs((2, 12, 4, 6, 3), torch.float32)
    last = x.contiguous(memory_format=torch.channels_last)
    assert group_norm_silu(last, weight, bias, groups=3, eps=1e-5).stride() == last.stride()
    assert group_norm_silu(x, weight, bias, groups=3, eps=1e-5).stride() == x.stride()


def test_a_map_beyond_32_bits_of_offsets_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = inputs((1, 4, 3, 3, 2), torch.float32)
    monkeypatch.setattr(module, "_MOST_ELEMENTS", x.numel())
    monkeypatch.setattr(module, "_sum_parts", None)
    made = group_norm_silu(x, weight, bias, groups=2, eps=1e-5)
    assert torch.equal(made, reference(x, weight, bias, groups=2, eps=1e-5))
