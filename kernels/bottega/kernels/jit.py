"""Triton's decorator with types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import triton


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
