"""How fast the device copies and multiplies, and what a picture computes: what the other figures are read beside."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from time import perf_counter

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bottega.model.weights import DTYPES
from load.gpu_report.environment import gpu_name
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.timing import finish

# Dense products in half precision with sums in float32, FLOPs a second. Source: NVIDIA's data sheets; the first name
# that the device's has in it counts.
_PEAKS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}
_MIB = 1 << 20
_RUNS = 10


def measure(rig: Rig) -> Sequence[Figure]:
    """Time copies of a large pinned, a pageable and the device's own buffer, and a square product."""
    size_bytes = (256 if rig.size.wanted else 4) * _MIB
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
        Figure(name, label, times * size_bytes / _seconds(rig, run) / 1e9, "GB/s", "Copies, GB/s")
        for name, (label, run, times) in copies.items()
    ]
    side, per_s = _product_flops(rig)
    label = f"a product of {side} x {side} in {rig.size.dtype}"
    figures.append(Figure("matmul_tflops", label, per_s / 1e12, "TFLOP/s"))
    if rig.on_gpu:
        total = torch.cuda.get_device_properties(rig.device).total_memory
        figures.append(Figure("memory_gib", "memory of the device", total / 2**30, "GiB"))
    return figures


def picture_flops(rig: Rig) -> float:
    """Return the FLOPs of the network in all steps of one guided picture, without text and VAE.

    They are counted on the meta device, where nothing is computed, with attention as plain products.
    """
    config = json.loads((rig.model / "unet" / "config.json").read_text(encoding="utf-8"))
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
        side, rows = unet.config.sample_size, 2
        pooled = unet.config.projection_class_embeddings_input_dim - 6 * unet.config.addition_time_embed_dim
        sample = torch.empty(rows, unet.config.in_channels, side, side)
        prompt = torch.empty(rows, rig.size.topology.prompt_tokens, unet.config.cross_attention_dim)
        added = {"text_embeds": torch.empty(rows, pooled), "time_ids": torch.empty(rows, 6)}
        timestep = torch.empty(())
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        unet(sample, timestep, encoder_hidden_states=prompt, added_cond_kwargs=added)
    return float(counter.get_total_flops() * rig.size.steps)


def peak_flops(rig: Rig) -> tuple[float, str]:
    """Return the FLOPs a second that the device could do, and the source of the number."""
    name = gpu_name() if rig.on_gpu else ""
    for known, flops in _PEAKS.items():
        if known in name:
            return flops, f"of the data sheet's {flops / 1e12:.0f} TFLOP/s"
    return _product_flops(rig)[1], "of a large product's rate"


def _product_flops(rig: Rig) -> tuple[int, float]:
    """Return the side of a square product of random numbers, and its FLOPs a second."""
    side = 8192 if rig.size.wanted else 256
    left, right = (torch.randn(side, side, device=rig.device, dtype=DTYPES[rig.size.dtype]) for _ in range(2))
    made: Tensor = torch.empty_like(left)
    return side, 2 * side**3 / _seconds(rig, lambda: torch.mm(left, right, out=made))


def _seconds(rig: Rig, run: Callable[[], object]) -> float:
    """Return the mean seconds of a run: a device does one while the next is on its way."""
    for warm_up in (True, False):
        began_s = perf_counter()
        for _ in range(2 if warm_up else _RUNS):
            run()
        finish(rig.device)
    return (perf_counter() - began_s) / _RUNS
