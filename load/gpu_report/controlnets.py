"""A step with none to several ControlNets: Diffusers, which runs them first, and a worker's own process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch

from bottega.addons.controlnets.config import ControlNetsConfig
from bottega.diffusion.engine.events import JobFinished
from bottega.diffusion.engine.job import EngineOrder
from bottega.diffusion.model.dtype import DTYPES
from bottega.diffusion.spec import ControlSpec
from bottega.worker.engine.runtime import Runtime
from load.gpu_report.figures import Figure
from load.gpu_report.rig import GUIDANCE_SCALE, PROMPT, Rig
from load.gpu_report.sides import finish_all, our_runtime, spec_of, stock_pipeline
from load.gpu_report.timing import give_back, timed

GROUP = "A step with ControlNets: milliseconds"


def measure(rig: Rig) -> Sequence[Figure]:
    """Ours with each number of them, then Diffusers."""
    counts = range(rig.size.controlnets + 1)
    folders = {_name(place): str(rig.controlnet) for place in counts[1:]}
    with our_runtime(rig, controlnets=ControlNetsConfig(folders=folders, budget_bytes=64 << 30)) as runtime:
        ours = {count: _our_step_s(rig, runtime, count) for count in counts}
    theirs = {count: _their_step_s(rig, count) for count in counts}
    figures = []
    for count in counts:
        for name, label, seconds in (("ours", "ours", ours[count]), ("eager", "Diffusers eager", theirs[count])):
            figures.append(
                Figure(
                    name=f"step_{count}_controlnets_{name}_ms",
                    label=f"{count} ControlNets, {label}",
                    value=seconds * 1e3,
                    unit="ms",
                    group=GROUP,
                )
            )
    return figures


def control_image(rig: Rig) -> PIL.Image.Image:
    """A gradient: what it shows is no matter."""
    return PIL.Image.linear_gradient("L").resize((rig.size.side, rig.size.side)).convert("RGB")


def _name(place: int) -> str:
    return f"net{place}"


def _our_step_s(rig: Rig, runtime: Runtime, count: int) -> float:
    """By the engine's own record, all that it does in a step."""
    pixels = torch.from_numpy(np.array(control_image(rig)))
    digest = hashlib.sha256(pixels.numpy().tobytes()).hexdigest()
    controls = tuple(ControlSpec(name=_name(place), image_digest=digest) for place in range(1, count + 1))
    taken: list[float] = []

    def draw(number: int) -> None:
        spec = spec_of(rig, seed=number, num_inference_steps=rig.size.edit_steps, controlnets=controls)
        runtime.engine.submit(EngineOrder(key=number, spec=spec, control_images=(pixels,) * count))
        (record,) = (event.record for event in finish_all(runtime.engine) if isinstance(event, JobFinished))
        spent = sum(record.seconds.get(stage, 0.0) for stage in ("denoise", "batch", "controlnets"))
        taken.append(spent / rig.size.edit_steps)

    timed(draw, rounds=rig.size.rounds, device=rig.device)
    return sorted(taken[1:])[len(taken[1:]) // 2]


def _their_step_s(rig: Rig, count: int) -> float:
    """Of a whole call without the VAE, a step: text is encoded within a step's time."""
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
            num_inference_steps=rig.size.edit_steps,
            guidance_scale=GUIDANCE_SCALE,
            width=rig.size.side,
            height=rig.size.side,
            generator=torch.Generator("cpu").manual_seed(number),
            output_type="latent",
            **options,
        )

    return timed(draw, rounds=rig.size.rounds, device=rig.device).seconds / rig.size.edit_steps
