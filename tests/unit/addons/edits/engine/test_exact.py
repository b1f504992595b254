"""Edits end as Diffusers' inpainting pipelines do: alone and in company, with LoRAs and ControlNets, and resumed."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace

import PIL.Image
import pytest
import torch
from diffusers import StableDiffusionXLInpaintPipeline
from torch import Tensor

from bottega.engine.checkpoint import CheckpointMismatch, read_checkpoint
from bottega.engine.encode import encode_all_prompts
from bottega.engine.events import JobAdvanced, JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.engine.waiting import new_requests
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.edits import box_mask, edit_order, ellipse_mask, template
from tests.samples.engine_loras import LorasByHand, lora_spec, styled_latent, styled_stock
from tests.samples.small_model import small_model
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.stock import Stock, assert_close, assert_same_image, edit_options, variant

SPEC = ResolvedSpec(
    prompt="a small green circle on a white background",
    num_inference_steps=6,
    width=64,
    height=64,
    seed=5,
    strength=0.9999,
)
IMAGE = template()
BOX, ELLIPSE = box_mask(), ellipse_mask()
EDITS: dict[str, tuple[ResolvedSpec, PIL.Image.Image]] = {
    "euler, karras, all of it": (replace(SPEC, use_karras_sigmas=True, strength=1.0, seed=6), ELLIPSE),
    "ancestral": (replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL, seed=7, num_images=2), ELLIPSE),
    "ddim, half of it": (replace(SPEC, sampler=SamplerKind.DDIM, strength=0.5, seed=8), BOX),
    "dpm++": (replace(SPEC, sampler=SamplerKind.DPMPP_2M, seed=9), ELLIPSE),
    "pndm": (replace(SPEC, sampler=SamplerKind.PNDM, strength=0.6, seed=14), BOX),
    "heun": (replace(SPEC, sampler=SamplerKind.HEUN, seed=15), ELLIPSE),
    "unguided": (replace(SPEC, guidance_scale=1.0, strength=1.0, seed=11), BOX),
    "rescaled": (replace(SPEC, guidance_rescale=0.7, negative_prompt="a star", seed=12), ELLIPSE),
}


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock(small_model())


@pytest.fixture(scope="module")
def busy(model: Model) -> dict[Hashable, Drawing]:
    """All edits beside each other and beside plain pictures, some coming later, some with previews."""
    orders = [edit_order(spec, IMAGE, mask, key=name, preview=name == "dpm++") for name, (spec, mask) in EDITS.items()]
    plain = [
        EngineOrder(key="plain", spec=replace(SPEC, strength=None, num_inference_steps=9)),
        EngineOrder(key="from a picture", spec=replace(SPEC, strength=0.7), image=orders[0].image),
    ]
    return ManualEngine(make_engine(model, TOGETHER)).run({0: [plain[0], *orders[:4]], 2: [*orders[4:], plain[1]]})


@pytest.mark.parametrize("name", EDITS)
def test_in_a_busy_batch_an_edit_ends_as_the_stock_pipeline_does(
    busy: Mapping[Hashable, Drawing], stock: Stock, name: str
) -> None:
    spec, mask = EDITS[name]
    drawing = busy[name]
    assert drawing.record.provenance.mean_group_requests > 2
    assert len(drawing.latents) == spec.num_images
    for index, (latent, pixels) in enumerate(zip(drawing.latents, drawing.pixels, strict=True)):
        theirs = stock.edit(spec, IMAGE, mask, index=index)
        assert_close(latent, theirs.latent)
        assert_same_image(pixels, theirs.pixels)


def test_alone_an_edit_ends_as_the_stock_pipeline_does(model: Model, stock: Stock) -> None:
    spec, mask = EDITS["ancestral"]
    spec = replace(spec, num_images=1, width=96)
    image, mask = IMAGE.resize((96, 64)), mask.resize((96, 64))
    drawing = ManualEngine(make_engine(model, TOGETHER)).draw(edit_order(spec, image, mask))
    assert drawing.record.provenance.mean_group_requests == 1
    assert_close(drawing.latents[0], stock.edit(spec, image, mask).latent)


def test_pictures_beside_edits_are_what_they_are_alone(
    model: Model, busy: Mapping[Hashable, Drawing], stock: Stock
) -> None:
    assert_close(busy["plain"].latents[0], stock.reference(replace(SPEC, strength=None, num_inference_steps=9)).latent)
    theirs = stock.reference(replace(SPEC, strength=0.7), image=IMAGE)
    assert_close(busy["from a picture"].latents[0], theirs.latent)


def test_a_preview_shows_the_image_itself_outside_the_mask(model: Model, busy: Mapping[Hashable, Drawing]) -> None:
    previews = [event.preview for event in busy["dpm++"].all(JobAdvanced) if event.preview is not None]
    outside = latents_of_mask(ELLIPSE) == 0
    assert len(previews) > 1
    for preview in previews[:-1]:
        assert torch.equal(preview[outside], previews[-1][outside])
        assert not torch.equal(preview[~outside], previews[-1][~outside])


def latents_of_mask(mask: PIL.Image.Image) -> Tensor:
    """Where latents of the small model are redrawn: [height, width], 1 or 0."""
    small = torch.frombuffer(bytearray(mask.tobytes()), dtype=torch.uint8).reshape(64, 64)[::4, ::4]
    return (small >= 128).to(torch.uint8)


def test_an_edit_with_loras_in_the_weights_ends_as_the_stock_pipeline_does(model: Model) -> None:
    scales = {"outline": 0.8, "pastel": 1.1}
    stock, components = styled_stock(small_model())
    pipeline = variant(stock, StableDiffusionXLInpaintPipeline)
    engine = make_engine(model, TOGETHER, loras=LorasByHand.of(components))
    lora_weights(engine).costs = FixedCosts(pays=True)
    spec = replace(SPEC, loras=tuple(lora_spec(*each) for each in scales.items()))
    try:
        drawing = ManualEngine(engine).draw(edit_order(spec, IMAGE, BOX))
        assert lora_weights(engine).patched is not None
    finally:
        lora_weights(engine).restore()
    assert_close(drawing.latents[0], styled_latent(pipeline, SPEC, scales, **edit_options(SPEC, IMAGE, BOX)))


# Resumed.

EVERY_STEP = EngineLimits(checkpoint_interval_s=1e-9)


def test_an_edit_that_another_engine_goes_on_with_is_the_same_picture(model: Model) -> None:
    spec, mask = EDITS["ancestral"]
    order = edit_order(spec, IMAGE, mask)
    unbroken = ManualEngine(make_engine(model, EVERY_STEP)).draw(order)
    left = unbroken.all(JobCheckpointed)[3]
    resumed = ManualEngine(make_engine(model, EVERY_STEP)).draw(replace(order, checkpoint=left.data))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == left.steps_done == 4
    for ours, theirs in zip(resumed.pixels, unbroken.pixels, strict=True):
        assert (ours == theirs).all()


def test_a_checkpoint_of_an_edit_fits_no_other_mask_and_no_plain_picture(model: Model) -> None:
    order = edit_order(SPEC, IMAGE, BOX)
    left = ManualEngine(make_engine(model, EVERY_STEP)).draw(order).all(JobCheckpointed)[0]
    assert read_checkpoint(left.data, model, order.spec).images[0].noise is not None
    edit = order.spec.edit
    assert edit is not None
    others = [None, replace(edit, mask_digest="0"), replace(edit, image_digest="0"), replace(edit, padding_mask_crop=3)]
    for other in others:
        with pytest.raises(CheckpointMismatch):
            read_checkpoint(left.data, model, replace(order.spec, edit=other))


def test_a_trajectory_is_put_back_in_place_of_noise(model: Model) -> None:
    order = edit_order(replace(SPEC, strength=0.5), IMAGE, BOX)
    (request,) = new_requests(model, order, encode_all_prompts(model, SPEC))
    assert request.edit is not None
    steps = range(request.begin, request.end)
    trajectory = {step: torch.full_like(request.latent, 1.0 + step) for step in steps}
    request.use_edit(replace(request.edit, trajectory=trajectory))
    outside = latents_of_mask(BOX) == 0
    for step in steps:
        assert (request.latent[0, :, outside] == 1.0 + step).all()
        assert not (request.latent[0, :, ~outside] == 1.0 + step).any()
        request.advance({row.half: torch.zeros_like(row.sample) for row in request.rows()})
    assert torch.equal(request.latent[0, :, outside], request.edit.image_latent[0, :, outside])
