"""Triton's decorator with types: what a kernel is for who launches it, and for another kernel that calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import triton


class Kernel(Protocol):
    """Launched as `kernel[grid](arguments)`; called without a grid by another kernel alone."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...

    def __call__(self, *arguments: Any) -> Any: ...


def jit(function: Callable[..., Any]) -> Kernel:
    """Compiled at its first launch with arguments of these types; interpreted where TRITON_INTERPRET is set."""
    kernel: Kernel = triton.jit(function)
    return kernel


def ceil_div(length: int, part: int) -> int:
    """How many parts cover a length."""
    return -(-length // part)


def power_of_two(least: int) -> int:
    """The first one that is not below `least`: Triton's blocks have no other sizes."""
    return 1 << max(0, least - 1).bit_length()
