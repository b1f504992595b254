"""Triton's decorator with types, and the description of a kernel for its bench and its tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
from torch import Tensor


class Kernel(Protocol):
    """A kernel: host code launches it as `kernel[grid](arguments)`, and other kernels call it without a grid."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *arguments: Any) -> Any: ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Compile a function at its first launch with arguments of these types; interpret it with TRITON_INTERPRET set."""
    kernel: Kernel = triton.jit(function)
    return kernel


def ceil_div(length: int, part: int) -> int:
    """Return how many parts of this size are needed to cover a length."""
    return -(-length // part)


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`; Triton's blocks need such sizes."""
    return 1 << max(0, least - 1).bit_length()


# Tolerance of one value, as a share of the largest in the exact result: each result is rounded once, and a product's
# terms may be summed in another order. Eight times half the spacing of a dtype's numbers at 1.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3.2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A size at which a kernel is measured, with the kernel and its reference."""

    name: str
    kernel: Callable[[], Sequence[Tensor]]
    """Computes the same as `reference` from the same inputs, any number of times. Tensors written in place are returned
    as well.
    """
    reference: Callable[[], Sequence[Tensor]]
    exact: Callable[[], Sequence[Tensor]]
    """The reference in float64."""
    moved_bytes: int
    """Bytes that must be read and written at least once."""
    flops: int = 0
    """Floating-point operations; 0 if only bytes matter."""


def difference(made: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest |made - exact| relative to the largest |exact|, over all tensors; NaN if there is a NaN."""
    worst = 0.0
    for result, true in zip(made, exact, strict=True):
        apart = (result.double() - true.double()).abs().max().item()
        share = apart / max(true.double().abs().max().item(), 1e-30)
        if share != share:
            return share
        worst = max(worst, share)
    return worst
