"""Seconds and memory of work on the device."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A measurement of work."""

    seconds: float
    """The median."""
    peak_gib: float
    """The most memory of the device in use, weights included; 0 on a CPU."""


def timed(work: Callable[[int], object], *, rounds: int, device: str) -> Timed:
    """Time work that is called with the number of its round; round 0 pays for what is made once and does not count."""
    work(0)
    finish(device)
    on_gpu = device.startswith("cuda")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for number in range(1, rounds + 1):
        began_s = perf_counter()
        work(number)
        finish(device)
        seconds.append(perf_counter() - began_s)
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if on_gpu else 0.0
    return Timed(seconds=median(seconds), peak_gib=peak)


def finish(device: str) -> None:
    """Wait until the device has done all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def give_back(device: str) -> None:
    """Free memory of what was measured before, so that the next one's peak is its own."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
