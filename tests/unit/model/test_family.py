"""Families have the defaults of their pipelines in Diffusers, and draw with the scheduler that those make."""

from __future__ import annotations

import inspect
import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import (
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    LCMScheduler,
    StableDiffusionPipeline,
)
from torch import Tensor

from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.family import FAMILIES
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.model_files.family_names import FLUX, SD3, SDXL, Z_IMAGE
from bottega.schedules import Schedule
from bottega.v1.engine_pb2 import EngineStart
from bottega.v1.generation_pb2 import SAMPLER_LCM, GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest
from bottega.worker.engine.messages import ready_of
from bottega.worker.engine.orders import order_of
from tests.samples.edits import template
from tests.samples.family_models import SIZE, family_model
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import assert_close
from tests.unit.engine.test_exact import pixels_tensor

NAMES = ("guidance_scale", "num_inference_steps", "strength", "controlnet_conditioning_scale")
WITHOUT_FILTER: Mapping[str, Any] = {"safety_checker": None, "requires_safety_checker": False}
SPEC = ResolvedSpec(prompt="a big red star on the left", num_inference_steps=4, width=SIZE, height=SIZE, seed=3)

CONTROL = ControlSpec(name="edges", image_digest="")


def defaults_of(pipeline: str) -> Mapping[str, Any]:
    parameters = inspect.signature(getattr(diffusers, pipeline).__call__).parameters
    return {name: parameters[name].default for name in NAMES if name in parameters}


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_pipelines(name: str) -> None:
    starts = {SDXL: "StableDiffusionXL", SD3: "StableDiffusion3", FLUX: "Flux", Z_IMAGE: "ZImage"}
    family, start = FAMILIES[name], starts.get(name, "StableDiffusion")
    text = {"guidance_scale": family.guidance_scale, "num_inference_steps": family.num_inference_steps}
    assert defaults_of(f"{start}Pipeline") == text
    if name == SD3:  # Diffusers makes 28 steps of a text and 50 of a picture; here both have the steps of the text.
        text = {**text, "num_inference_steps": 50}
    if name == FLUX:  # Its image-to-image has the guidance of edits; here it has that of text-to-image.
        text = {**text, "guidance_scale": family.edit_guidance_scale}
    assert defaults_of(f"{start}Img2ImgPipeline") == {**text, "strength": family.strength}
    edit = {**text, "guidance_scale": family.edit_guidance_scale, "strength": family.edit_strength}
    assert defaults_of(f"{start}InpaintPipeline") == edit
    if name == SD3:
        return
    controlled = defaults_of(f"{start}ControlNetInpaintPipeline")
    assert controlled["controlnet_conditioning_scale"] == family.edit_controlnet_scale
    assert controlled.get("strength", family.edit_strength) == family.edit_strength  # That of Z-Image has none.


@pytest.mark.parametrize(
    "changes",
    [{"steps_offset": 0}, {"clip_sample": None}],
    ids=lambda changes: "-".join(map(str, next(iter(changes.items())))),
)
def test_old_schedules_are_corrected_as_the_pipeline_does(tmp_path: Path, changes: Mapping[str, object]) -> None:
    folder = _copied("SD 1 LCM", tmp_path, "scheduler/scheduler_config.json", changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The configuration file of", FutureWarning)
        stock = StableDiffusionPipeline.from_pretrained(folder, use_safetensors=True, **WITHOUT_FILTER)
    model = load(folder)
    spec = replace(SPEC, sampler=model.defaults.sampler, guidance_scale=model.defaults.guidance_scale)
    drawing = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key="it", spec=spec))
    assert_close(drawing.latents[0], _latent(stock, num_inference_steps=spec.num_inference_steps))


def test_a_folder_of_lcm_draws_as_its_own_pipeline_with_its_defaults(tmp_path: Path) -> None:
    folder = _copied("SD 1 LCM", tmp_path, "model_index.json", {"_class_name": "LatentConsistencyModelPipeline"})
    stock = LatentConsistencyModelPipeline.from_pretrained(folder, use_safetensors=True, **WITHOUT_FILTER)
    # This pipeline does not correct the schedule as the others do.
    stock.scheduler = LCMScheduler.from_config(stock.scheduler.config, clip_sample=True, clip_sample_range=0.5)
    stock.save_pretrained(folder, safe_serialization=True)
    model = load(folder)
    defaults = model.defaults
    theirs = defaults_of("LatentConsistencyModelPipeline")
    assert theirs == {"guidance_scale": defaults.guidance_scale, "num_inference_steps": defaults.num_inference_steps}
    assert defaults.sampler is SamplerKind.LCM
    spec = replace(
        SPEC,
        sampler=defaults.sampler,
        guidance_scale=defaults.guidance_scale,
        num_inference_steps=defaults.num_inference_steps,
    )
    drawing = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key="it", spec=spec))
    assert_close(drawing.latents[0], _latent(stock))
    _assert_lcm_starts_from_images_as_stock(model, stock, spec)


def _assert_lcm_starts_from_images_as_stock(model: Model, stock: Any, spec: ResolvedSpec) -> None:
    image = template(SIZE, SIZE)
    from_image = LatentConsistencyModelImg2ImgPipeline(**stock.components, requires_safety_checker=False)
    from_image.scheduler = stock.scheduler
    assert defaults_of("LatentConsistencyModelImg2ImgPipeline")["strength"] == model.defaults.strength
    drawing = ManualEngine(make_engine(model, EngineLimits()))

    def order(strength: float, schedule: Schedule, **changes: Any) -> EngineOrder:
        strong = replace(spec, strength=strength, schedule=schedule, **changes)
        return EngineOrder(key="picture", spec=strong, image=pixels_tensor(image))

    # At .1 Diffusers' other pipelines have no step left of four.
    for strength in (0.1, 0.7, 1.0):
        drawn = drawing.draw(order(strength, Schedule(strength=strength)))
        assert_close(drawn.latents[0], _latent(from_image, image=image, strength=strength))
        assert drawn.record.provenance.begin_step == 0
    sent = GenerationSpec(prompt=spec.prompt, sampler=SAMPLER_LCM, num_inference_steps=4, strength=0.1)
    received = order_of(EngineStart(request=RunAttemptRequest(spec=sent)), model).spec
    assert (received.schedule, received.steps) == (Schedule(strength=0.1), 4)
    assert ready_of(drawing.engine).ready.model.strength_keeps_steps
    listed = drawing.draw(order(0.6, Schedule(timesteps=(999, 759, 499, 259))))
    assert_close(listed.latents[0], _latent(from_image, image=image, strength=0.6, timesteps=[999, 759, 499, 259]))
    for changes, rule in (
        ({"sampler": SamplerKind.EULER}, "must be lcm: this model draws from an image with that sampler alone"),
        ({"controlnets": (CONTROL,)}, "must be empty with image: image-to-image of this model takes no ControlNets"),
        (
            {"num_inference_steps": 6},
            "6 steps are too many: LCM makes at most strength x original_inference_steps; raise strength or ask",
        ),
    ):
        with pytest.raises(InvalidRequest, match=rule):
            drawing.draw(order(0.1, Schedule(strength=0.1), **changes))


def _copied(family: str, folder: Path, file: str, changes: Mapping[str, object]) -> Path:
    """Copy the model of a family, with other values in one of its files; None takes a field away."""
    copy = shutil.copytree(family_model(family), folder / "model")
    values = {**json.loads((copy / file).read_text()), **changes}
    (copy / file).write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    return copy


def _latent(pipeline: Any, **options: Any) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(SPEC.seed)
    latent: Tensor = pipeline(SPEC.prompt, generator=generator, output_type="latent", **options).images
    return latent
