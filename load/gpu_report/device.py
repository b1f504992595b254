"""How fast the device copies and multiplies: what the other figures are to be read beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from torch import Tensor

from bottega.diffusion.model.dtype import DTYPES
from load.gpu_report.figures import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.timing import finish

_MIB = 1 << 20
_RUNS = 10


def measure(rig: Rig) -> Sequence[Figure]:
    """Copies of a large and pinned, a pageable, and a device's own buffer, and a square product."""
    size_bytes = (256 if rig.size.wanted else 4) * _MIB
    side = 8192 if rig.size.wanted else 256
    device = torch.empty(size_bytes, dtype=torch.uint8, device=rig.device)
    plain = torch.zeros(size_bytes, dtype=torch.uint8)
    pinned = plain.pin_memory() if rig.on_gpu else plain
    other = torch.empty_like(device)
    copies: dict[str, tuple[str, Callable[[], object], int]] = {
        "h2d_pinned_gb_per_s": ("host to device, pinned", lambda: device.copy_(pinned, non_blocking=True), 1),
        "h2d_pageable_gb_per_s": ("host to device, pageable", lambda: device.copy_(plain), 1),
        "d2h_pinned_gb_per_s": ("device to host, pinned", lambda: pinned.copy_(device, non_blocking=True), 1),
        "d2d_gb_per_s": ("device to itself, read and written", lambda: other.copy_(device), 2),
    }
    figures = [
        Figure(
            name=name,
            label=label,
            value=times * size_bytes / _seconds(rig, run) / 1e9,
            unit="GB/s",
            group="Copies, GB/s",
        )
        for name, (label, run, times) in copies.items()
    ]
    figures.append(
        Figure(
            name="matmul_tflops",
            label=f"a product of {side} x {side} in {rig.size.dtype}",
            value=product_flops(rig, side) / 1e12,
            unit="TFLOP/s",
        )
    )
    if rig.on_gpu:
        total = torch.cuda.get_device_properties(rig.device).total_memory
        figures.append(Figure(name="memory_gib", label="memory of the device", value=total / 2**30, unit="GiB"))
    return figures


def product_flops(rig: Rig, side: int) -> float:
    """FLOPs a second of a square product of random numbers: what utilisation is measured by."""
    left, right = (torch.randn(side, side, device=rig.device, dtype=DTYPES[rig.size.dtype]) for _ in range(2))
    made: Tensor = torch.empty_like(left)
    return 2 * side**3 / _seconds(rig, lambda: torch.mm(left, right, out=made))


def _seconds(rig: Rig, run: Callable[[], object]) -> float:
    """Of one run, in the mean: a device does one while the next is on its way."""
    for warm_up in (True, False):
        began_s = perf_counter()
        for _ in range(2 if warm_up else _RUNS):
            run()
        finish(rig.device)
    return (perf_counter() - began_s) / _RUNS
