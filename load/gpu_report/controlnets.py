"""A step with none to several ControlNets: Diffusers, which runs them first, and a worker's own process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import PIL.Image
import torch

from bottega.addons.controlnets.config import ControlNetsConfig
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ControlSpec
from bottega.model.weights import DTYPES
from bottega.worker.engine.runtime import Runtime
from load.bench.framework import GUIDANCE_SCALE, PROMPT
from load.gpu_report.report import Figure
from load.gpu_report.rig import Rig
from load.gpu_report.sides import draw_one, our_runtime, spec_of, stock_pipeline
from load.gpu_report.timing import give_back, timed

GROUP = "A step with ControlNets: milliseconds"


def measure(rig: Rig) -> Sequence[Figure]:
    """Time steps of ours with each number of ControlNets, then of Diffusers."""
    counts = range(rig.size.controlnets + 1)
    folders = {_name(place): str(rig.controlnet) for place in counts[1:]}
    with our_runtime(rig, controlnets=ControlNetsConfig(folders=folders, budget_bytes=64 << 30)) as runtime:
        ours = {count: _our_step_s(rig, runtime, count) for count in counts}
    theirs = {count: _their_step_s(rig, count) for count in counts}
    return [
        Figure(f"step_{count}_controlnets_{name}_ms", f"{count} ControlNets, {label}", seconds * 1e3, "ms", GROUP)
        for count in counts
        for name, label, seconds in (("ours", "ours", ours[count]), ("eager", "Diffusers eager", theirs[count]))
    ]


def control_image(rig: Rig) -> PIL.Image.Image:
    """Return a gradient."""
    return PIL.Image.linear_gradient("L").resize((rig.size.side, rig.size.side)).convert("RGB")


def _name(place: int) -> str:
    return f"net{place}"


def _our_step_s(rig: Rig, runtime: Runtime, count: int) -> float:
    """Return the seconds of all that the engine does in a step, by its own record."""
    pixels = torch.from_numpy(np.array(control_image(rig)))
    digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
    controls = tuple(ControlSpec(name=_name(place), image_digest=digest) for place in range(1, count + 1))
    taken: list[float] = []
    for number in range(rig.size.rounds + 1):
        spec = spec_of(rig, seed=number, num_inference_steps=rig.size.edit_steps, controlnets=controls)
        record = draw_one(runtime.engine, EngineOrder(key=number, spec=spec, control_images=(pixels,) * count))
        spent = sum(record.seconds.get(stage, 0.0) for stage in ("denoise", "batch", "controlnets"))
        taken.append(spent / rig.size.edit_steps)
    return median(taken[1:])


def _their_step_s(rig: Rig, count: int) -> float:
    """Return the seconds of a call without the VAE over its steps: text is encoded within a step's time."""
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    give_back(rig.device)
    options: dict[str, Any] = {}
    if count:
        dtype = DTYPES[rig.size.dtype]
        net = ControlNetModel.from_pretrained(rig.controlnet, use_safetensors=True, torch_dtype=dtype)
        pipeline = stock_pipeline(rig, StableDiffusionXLControlNetPipeline, controlnet=[net] * count)
        options = {"image": [control_image(rig)] * count, "controlnet_conditioning_scale": [1.0] * count}
    else:
        pipeline = stock_pipeline(rig)

    def draw(number: int) -> None:
        pipeline(
            PROMPT,
            **{**rig.picture, "num_inference_steps": rig.size.edit_steps},
            guidance_scale=GUIDANCE_SCALE,
            generator=torch.Generator("cpu").manual_seed(number),
            output_type="latent",
            **options,
        )

    return timed(draw, rounds=rig.size.rounds, device=rig.device).seconds / rig.size.edit_steps
