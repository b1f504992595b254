"""The VAE as a worker runs it: how long a decode takes, in how much memory, and how close it is to float32."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from bottega.model.decode import decode_image
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.sides import our_runtime
from load.gpu_report.timing import timed

WANTED_DB = 40.0
# Of equal pixels, which have no error.
_EQUAL_DB = 99.0
_GROUP = "Decoding a picture: milliseconds"


def measure(rig: Rig) -> Sequence[Figure]:
    """Decode random latents of about unit variance, as the network leaves them."""
    with our_runtime(rig) as runtime, torch.inference_mode():
        model = runtime.engine.model
        side = rig.size.side // model.latent_scale
        generator = torch.Generator("cpu").manual_seed(0)
        latent = torch.randn(1, model.latent_channels, side, side, generator=generator).to(model.device, model.dtype)
        ours = timed(lambda _: decode_image(model, latent).pixels, rounds=rig.size.rounds, device=rig.device)
        pixels = decode_image(model, latent).pixels
        whole = AutoencoderKL.from_pretrained(rig.model / "vae", use_safetensors=True, torch_dtype=torch.float32)
        decoder = replace(model.decoder, vae=whole.to(model.device).eval(), dtype=torch.float32)
        exact = replace(model, decoder=decoder)
        theirs = timed(lambda _: decode_image(exact, latent).pixels, rounds=rig.size.rounds, device=rig.device)
        off_db = psnr(pixels, decode_image(exact, latent).pixels)
    figures = [
        Figure("decode_ms", f"ours, in {model.decoder.dtype}".replace("torch.", ""), ours.seconds * 1e3, "ms", _GROUP),
        Figure("decode_float32_ms", "in float32", theirs.seconds * 1e3, "ms", _GROUP),
        rig.wanted(Figure("decode_psnr_db", "ours against float32", off_db, "dB", at_least=WANTED_DB)),
    ]
    if rig.on_gpu:
        figures += [
            Figure("decode_gib", "memory at the most, ours", ours.peak_gib, "GiB"),
            Figure("decode_float32_gib", "memory at the most, float32", theirs.peak_gib, "GiB"),
        ]
    return figures


def psnr(ours: Tensor, theirs: Tensor) -> float:
    """Return the dB of two pictures of uint8."""
    error = float((ours.cpu().float() - theirs.cpu().float()).square().mean())
    return 10 * math.log10(255**2 / error) if error else _EQUAL_DB
