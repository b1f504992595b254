"""GEGLU: the first half of a projection's channels times GELU of the second half, with the exact error function.

One launch reads both halves and writes their product once; torch writes GELU and reads it again.

Shapes: x [..., 2 * channels], whose last dimension may have any stride; the result is [..., channels], contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from bottega.kernels.kernel import Case, ceil_div, jit, power_of_two

_BLOCK = 1024


@jit
def _geglu(
    x: tl.tensor,
    out: tl.tensor,
    stride_item: tl.tensor,
    stride_channel: tl.tensor,
    out_item: tl.tensor,
    out_channel: tl.tensor,
    channels: tl.tensor,
    block: tl.constexpr,
) -> None:
    item = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * block + tl.arange(0, block)
    inside = channel < channels
    first = x + item * stride_item
    value = tl.load(first + channel * stride_channel, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(first + (channel + channels) * stride_channel, mask=inside, other=0.0).to(tl.float32)
    made = value * (0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)))
    tl.store(out + item * out_item + channel * out_channel, made, mask=inside)


def geglu(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute GEGLU of [..., 2 * channels], into `out` [..., channels] if given."""
    channels = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], channels) if out is None else out
    if out.numel() == 0:
        return out
    # A view if items have one stride, else a copy.
    items = x.reshape(-1, 2 * channels)
    made = out.view(-1, channels)
    block = min(_BLOCK, power_of_two(channels))
    _geglu[items.shape[0], ceil_div(channels, block)](
        items, made, *items.stride(), *made.stride(), channels, block=block
    )
    return out


def reference(x: Tensor) -> Tensor:
    """Compute GEGLU as Diffusers does."""
    value, gate = x.chunk(2, dim=-1)
    return value * functional.gelu(gate)


# SDXL's feed-forward layers at 1024 x 1024: tokens of both halves of guidance, and channels.
_SDXL = ((2 * 4096, 2560), (2 * 1024, 5120))


def cases(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Sequence[Case]:
    """Return the cases of the bench; small ones for an interpreter."""
    return [_case(device, dtype, 6 if small else items, channels) for items, channels in _SDXL]


def _case(device: torch.device, dtype: torch.dtype, items: int, channels: int) -> Case:
    x = torch.randn(items, 2 * channels, generator=torch.Generator("cpu").manual_seed(items)).to(device, dtype)
    return Case(
        name=f"geglu {items} x {channels}",
        kernel=lambda: [geglu(x)],
        reference=lambda: [reference(x)],
        exact=lambda: [reference(x.double())],
        moved_bytes=3 * x.nbytes // 2,
        flops=10 * x.numel(),
    )
