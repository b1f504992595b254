"""Guidance and the Euler sampler's step in one launch: the next latent, and the estimate of the finished one.

torch takes about ten launches over latents so small that overhead dominates.

Shapes: conditional, unconditional and latent [1, channels, height, width] of any strides, in float32, float16 or
bfloat16. The next latent has the latent's dtype, the estimate is float32, and both are contiguous. Everything is
computed in float32 and rounded once, while Diffusers rounds the terms of guidance to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
import triton.language as tl
from torch import Tensor

from bottega.kernels.kernel import Case, ceil_div, jit

_BLOCK = 1024


@jit
def _step(
    conditional: tl.tensor,
    unconditional: tl.tensor,
    latent: tl.tensor,
    following: tl.tensor,
    estimate: tl.tensor,
    conditional_c: tl.tensor,
    conditional_h: tl.tensor,
    conditional_w: tl.tensor,
    unconditional_c: tl.tensor,
    unconditional_h: tl.tensor,
    unconditional_w: tl.tensor,
    latent_c: tl.tensor,
    latent_h: tl.tensor,
    latent_w: tl.tensor,
    height: tl.tensor,
    width: tl.tensor,
    count: tl.tensor,
    scale: tl.tensor,
    sigma: tl.tensor,
    next_sigma: tl.tensor,
    guided: tl.constexpr,
    velocity: tl.constexpr,
    block: tl.constexpr,
) -> None:
    place = tl.program_id(0) * block + tl.arange(0, block)
    inside = place < count
    x = place % width
    y = (place // width) % height
    channel = place // (width * height)
    predicted = tl.load(
        conditional + channel * conditional_c + y * conditional_h + x * conditional_w, mask=inside, other=0.0
    ).to(tl.float32)
    if guided:
        base = tl.load(
            unconditional + channel * unconditional_c + y * unconditional_h + x * unconditional_w,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        predicted = base + scale * (predicted - base)
    now = tl.load(latent + channel * latent_c + y * latent_h + x * latent_w, mask=inside, other=0.0).to(tl.float32)
    if velocity:
        level = sigma * sigma + 1.0
        finished = predicted * (-sigma / tl.sqrt(level)) + now / level
    else:
        finished = now - sigma * predicted
    derivative = (now - finished) / sigma
    tl.store(estimate + place, finished, mask=inside)
    tl.store(following + place, now + derivative * (next_sigma - sigma), mask=inside)


def guided_euler(
    conditional: Tensor,
    unconditional: Tensor | None,
    latent: Tensor,
    *,
    scale: float,
    sigma: float,
    next_sigma: float,
    velocity: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply guidance and one Euler step.

    Args:
        conditional: The model's output for the prompt.
        unconditional: The model's output for the negative prompt; None without guidance.
        latent: The latent before the step.
        scale: Guidance scale.
        sigma: Noise level before the step, above 0.
        next_sigma: Noise level after the step.
        velocity: Whether the model predicts velocity instead of noise.
        out: Tensors that receive the two results; None allocates them.

    Returns:
        The latent after the step, and the estimate of the finished latent.
    """
    _, channels, height, width = latent.shape
    following, estimate = out or (
        torch.empty(latent.shape, device=latent.device, dtype=latent.dtype),
        torch.empty(latent.shape, device=latent.device, dtype=torch.float32),
    )
    base = conditional if unconditional is None else unconditional
    count = channels * height * width
    _step[ceil_div(count, _BLOCK),](
        *(conditional, base, latent, following, estimate),
        *(*conditional.stride()[1:], *base.stride()[1:], *latent.stride()[1:], height, width, count),
        *(scale, sigma, next_sigma),
        guided=unconditional is not None,
        velocity=velocity,
        block=_BLOCK,
    )
    return following, estimate


def reference(
    conditional: Tensor,
    unconditional: Tensor | None,
    latent: Tensor,
    *,
    scale: float,
    sigma: float,
    next_sigma: float,
    velocity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Compute the same as Diffusers does, but sum in the tensors' own dtypes."""
    predicted = conditional if unconditional is None else unconditional + scale * (conditional - unconditional)
    now = latent.to(torch.promote_types(latent.dtype, torch.float32))
    if velocity:
        finished = predicted * (-sigma / (sigma**2 + 1) ** 0.5) + now / (sigma**2 + 1)
    else:
        finished = now - sigma * predicted
    following = now + (now - finished) / sigma * (next_sigma - sigma)
    return following.to(latent.dtype), finished


class _Numbers(TypedDict):
    scale: float
    sigma: float
    next_sigma: float


# Side of SDXL's latent at 1024 x 1024.
_SIDE = 128


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; a small one for an interpreter."""
    side = 16 if small else _SIDE
    generator = torch.Generator("cpu").manual_seed(side)
    conditional, unconditional, latent = (
        torch.randn(1, 4, side, side, generator=generator).to(device, dtype) for _ in range(3)
    )
    numbers = _Numbers(scale=5.0, sigma=2.0, next_sigma=1.75)
    return [
        Case(
            name=f"guided_euler 4 x {side} x {side}",
            kernel=lambda: guided_euler(conditional, unconditional, latent, **numbers),
            reference=lambda: reference(conditional, unconditional, latent, **numbers),
            exact=lambda: reference(conditional.double(), unconditional.double(), latent.double(), **numbers),
            moved_bytes=4 * latent.nbytes + 4 * latent.numel(),
            flops=9 * latent.numel(),
        )
    ]
