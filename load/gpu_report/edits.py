"""Edits of one picture by the size of their mask: the steps, against Diffusers' inpainting.

What the network put out for the picture lies in the host's memory and is copied to the device while blocks compute.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from bottega.addons.edits.config import EditsConfig
from bottega.engine.events import EngineRecord
from bottega.engine.job import EngineOrder
from bottega.engine.spec import EditSpec
from bottega.worker.engine.runtime import Runtime
from load.bench.framework import GUIDANCE_SCALE, PROMPT
from load.bench.stock import STRENGTH
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.sides import draw_one, our_runtime, spec_of, stock_pipeline
from load.gpu_report.timing import finish, give_back

# Of SDXL's transformers and convolutions, 20 steps and both halves take 17 GB.
_ACTIVATIONS_MIB = 40 << 10
_SMALL_ACTIVATIONS_MIB = 64
# A token of the finest attention level, in latent elements a side; computed around a mask, in tokens.
_TOKEN, _MARGIN = 2, 1
WANTED_SHARE, WANTED = 0.19, 2.2


def measure(rig: Rig) -> Sequence[Figure]:
    """Time ours for every share, after the picture has been recorded; then Diffusers, for which the mask is all one."""
    mib = _ACTIVATIONS_MIB if rig.size.wanted else _SMALL_ACTIVATIONS_MIB
    with our_runtime(rig, edits=EditsConfig(activations_mib=mib)) as runtime:
        ours = {share: _ours(rig, runtime, share) for share in sorted(rig.size.mask_shares)}
    their_s = _their_steps_s(rig)
    figures = [Figure("inpaint_s", "Diffusers' inpainting, steps", their_s, "s")]
    group = "Edits, times as fast as Diffusers' inpainting"
    for share, (seconds, record) in ours.items():
        name, label = f"edit_{share * 100:02.0f}", f"steps of an edit, mask of {share:g}"
        edit = record.provenance
        reused = edit.blocks_reused / edit.blocks_total if edit.blocks_total else 0.0
        at_least = WANTED if share == WANTED_SHARE else None
        figures += [
            rig.wanted(Figure(name, label, their_s / seconds, "x", group, at_least=at_least)),
            Figure(f"{name}_reused", "  of its transformer blocks, computed in part", reused),
            Figure(f"{name}_computed", "  of its tokens, computed", edit.mask.computed_share or 1.0),
        ]
    return figures


def square_mask(side: int, token: int, share: float) -> npt.NDArray[np.uint8]:
    """Return [side, side], 1 in a square in the middle that has this share of the tokens with its margin.

    Args:
        side: Of the picture, in pixels.
        token: Side of a token, in pixels.
        share: In 0 to 1.
    """
    tokens = side // token
    across = max(round(tokens * math.sqrt(share)), 2 * _MARGIN + 1)
    first = (tokens - across) // 4 * 2
    inside = slice((first + _MARGIN) * token, (first + across - _MARGIN) * token)
    mask = np.zeros((side, side), np.uint8)
    mask[inside, inside] = 1
    return mask


def template(side: int) -> PIL.Image.Image:
    """Return the picture that is edited: noise."""
    return PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def _ours(rig: Rig, runtime: Runtime, share: float) -> tuple[float, EngineRecord]:
    """Return the seconds of the steps and the last record; the first edits record, and complete that for a share."""
    model, side = runtime.engine.model, rig.size.side
    pixels = torch.from_numpy(np.array(template(side)))
    mask = torch.from_numpy(square_mask(side, _TOKEN * model.latent_scale, share))
    edit = EditSpec(
        mask_digest=str(share),
        image_digest=hashlib.sha256(pixels.numpy().tobytes()).hexdigest(),
        masked_blocks=True,
        any_prompt=True,
    )
    taken = []
    for number in range(rig.size.rounds + 2):
        spec = spec_of(rig, seed=number, num_inference_steps=rig.size.edit_steps, strength=STRENGTH, edit=edit)
        record = draw_one(runtime.engine, EngineOrder(key=number, spec=spec, image=pixels, mask=mask))
        taken.append(record.seconds["denoise"] + record.seconds["batch"])
    return median(taken[2:]), record


def _their_steps_s(rig: Rig) -> float:
    from diffusers import StableDiffusionXLInpaintPipeline

    give_back(rig.device)
    pipeline = stock_pipeline(rig, StableDiffusionXLInpaintPipeline)
    begun: list[float] = []

    def begin(*_: Any) -> None:
        """Note the network's first call, where the steps begin: before it, prompt and picture are encoded."""
        if not begun:
            finish(rig.device)
            begun.append(perf_counter())

    pipeline.unet.register_forward_pre_hook(begin)
    side = rig.size.side
    mask = PIL.Image.fromarray(255 * square_mask(side, _TOKEN * pipeline.vae_scale_factor, WANTED_SHARE))
    taken = []
    for number in range(rig.size.rounds + 1):
        begun.clear()
        pipeline(
            PROMPT,
            image=template(side),
            mask_image=mask,
            strength=STRENGTH,
            guidance_scale=GUIDANCE_SCALE,
            **{**rig.picture, "num_inference_steps": rig.size.edit_steps},
            generator=torch.Generator().manual_seed(number),
            output_type="latent",
        )
        finish(rig.device)
        taken.append(perf_counter() - begun[0])
    return median(taken[1:])
