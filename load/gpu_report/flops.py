"""What a picture computes, and which share of the device's speed that is."""

from __future__ import annotations

import json

import torch
from diffusers import UNet2DConditionModel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from load.gpu_report.device import product_flops
from load.gpu_report.environment import gpu_name
from load.gpu_report.rig import Rig

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
_PRODUCT_SIDE = 8192
_SMALL_PRODUCT_SIDE = 256


def picture_flops(rig: Rig) -> float:
    """Of the network in all steps of one guided picture; without text and VAE.

    Counted on the meta device, where nothing is computed, with attention as plain products.
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
    """FLOPs a second that the device could do, and by what that is known."""
    name = gpu_name() if rig.on_gpu else ""
    for known, flops in _PEAKS.items():
        if known in name:
            return flops, f"of the data sheet's {flops / 1e12:.0f} TFLOP/s"
    return product_flops(rig, _PRODUCT_SIDE if rig.size.wanted else _SMALL_PRODUCT_SIDE), "of a large product's rate"
