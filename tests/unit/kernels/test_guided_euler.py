"""Guidance and Euler's step by the kernel against the same in double precision, and against Diffusers' scheduler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bottega.kernels.guided_euler import guided_euler, reference
from tests.support.poisoned import Poisoned

SHAPES = [(1, 1, 1, 1), (1, 4, 5, 7), (1, 3, 16, 33)]


def tensors(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(shape))
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("velocity", [False, True])
@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_step_for_any_size_and_strides(shape: tuple[int, ...], guided: bool, velocity: bool) -> None:
    conditional, unconditional, latent = tensors(shape)
    # As a network that is channels-last predicts, and as a group's rows lie.
    conditional = conditional.contiguous(memory_format=torch.channels_last)
    unconditional = torch.cat([unconditional, unconditional], dim=1)[:, : shape[1]]
    latent = latent.transpose(2, 3).contiguous().transpose(2, 3)
    base = unconditional if guided else None
    outs = Poisoned(shape), Poisoned(shape)
    guided_euler(
        conditional,
        base,
        latent,
        velocity=velocity,
        out=(outs[0].tensor, outs[1].tensor),
        scale=7.5,
        sigma=3.2,
        next_sigma=2.1,
    )
    exact = reference(
        conditional.double(),
        base.double() if base is not None else None,
        latent.double(),
        velocity=velocity,
        scale=7.5,
        sigma=3.2,
        next_sigma=2.1,
    )
    for out, true in zip(outs, exact, strict=True):
        out.check()
        assert (out.tensor - true).abs().max() <= 1e-5 * true.abs().max().clamp(min=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_half_precision_it_is_closer_than_sums_in_it(dtype: torch.dtype) -> None:
    conditional, unconditional, latent = tensors(SHAPES[1], dtype)
    made, estimate = guided_euler(conditional, unconditional, latent, scale=7.5, sigma=3.2, next_sigma=2.1)
    plain, _ = reference(conditional, unconditional, latent, scale=7.5, sigma=3.2, next_sigma=2.1)
    exact, _ = reference(
        conditional.double(), unconditional.double(), latent.double(), scale=7.5, sigma=3.2, next_sigma=2.1
    )
    assert (made.dtype, estimate.dtype) == (dtype, torch.float32)
    assert (made.double() - exact).abs().max() <= torch.finfo(dtype).eps / 2 * exact.abs().max()
    assert (made.double() - exact).abs().max() <= (plain.double() - exact).abs().max()
