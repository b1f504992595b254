"""A job with ControlNets ends as stock Diffusers' pipelines do: alone, in company, in part of its steps, resumed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetImg2ImgPipeline
from torch import Tensor

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.device.memory_plan import MemoryPlan
from bottega.engine.checkpoint import CheckpointMismatch, SavedJob, read_checkpoint, write_checkpoint
from bottega.engine.encode import encode_prompts
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.request import Request
from bottega.errors import NotFinite
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import (
    control_image,
    control_spec,
    controlled_latent,
    random_controlnet,
    save,
    shelf_of,
    stock_options,
)
from tests.samples.small_model import SIZE, small_model
from tests.support.controlled_engine import IMAGES, NAMES, PLAIN, controlled
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import assert_close, latent_of, load_stock, variant


@pytest.fixture(scope="module")
def stock() -> Any:
    return load_stock(small_model())


@pytest.fixture(scope="module")
def nets(stock: Any) -> dict[str, ControlNetModel]:
    return {name: random_controlnet(stock.unet, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def folders(nets: dict[str, ControlNetModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save(nets, tmp_path_factory.mktemp("controlnets"))


Reference = Callable[[EngineOrder], Tensor]


@pytest.fixture(scope="module")
def reference(stock: Any, nets: Mapping[str, ControlNetModel]) -> Reference:
    """What stock makes of jobs with ControlNets."""
    return lambda order: controlled_latent(stock, nets, order.spec, order.control_images)


CASES = {
    "three": controlled((2, 0.5), (0, 0.8), (1, 1.3)),
    "one, unguided": controlled((2, 1.1), spec=replace(PLAIN, guidance_scale=1.0)),
    "in the middle": controlled((0, 1.0), control_guidance_start=0.2, control_guidance_end=0.8),
    "in the middle, two evaluations a step": controlled(
        (0, 1.0),
        control_guidance_start=0.2,
        control_guidance_end=0.8,
        spec=replace(PLAIN, sampler=SamplerKind.HEUN),
    ),
    "guess mode of two": controlled((0, 1.2), (2, 0.6), guess_mode=True),
    "guess mode, unguided": controlled((0, 1.2), guess_mode=True, spec=replace(PLAIN, guidance_scale=1.0)),
}


@pytest.mark.parametrize("case", CASES)
def test_alone_it_ends_to_the_last_bit_as_the_stock_pipeline_does(
    easel: ManualEngine, reference: Reference, case: str
) -> None:
    order = CASES[case]
    assert torch.equal(easel.draw(order).latents[0], reference(order))


def test_a_forward_that_finds_no_memory_behind_its_residuals_is_split_and_ends_the_same(
    model: Model, shelf: ControlNetCache, reference: Reference
) -> None:
    order = CASES["guess mode of two"]
    own = replace(model, memory=MemoryPlan())
    easel = ManualEngine(make_engine(own, TOGETHER, controlnets=LocalControlNets(shelf)))
    refused: list[int] = []

    def refuse_two(_: object, inputs: object, arguments: dict[str, Tensor]) -> None:
        rows = len(arguments["hidden_states"])
        if rows > 1:
            refused.append(rows)
            raise torch.OutOfMemoryError("none left")

    hook = model.backbone.network.up_blocks[1].register_forward_pre_hook(refuse_two, with_kwargs=True)
    try:
        latent = easel.draw(order).latents[0]
    finally:
        hook.remove()
    assert refused == [2]
    assert_close(latent, reference(order))


def test_one_controlnet_may_take_part_twice(easel: ManualEngine, reference: Reference) -> None:
    order = controlled((1, 0.4), (1, 0.9))  # both sessions share its forward: not to the last bit
    assert_close(easel.draw(order).latents[0], reference(order))


def test_a_controlnet_that_yields_nan_is_named_with_its_scale(easel: ManualEngine) -> None:
    drawing = easel.draw(controlled((0, 0.5), (1, 3e38)))
    assert isinstance(drawing.error, NotFinite)
    assert "its ControlNets (edges at scale 0.5, depth at scale 3e+38); try scales nearer to 0" in drawing.error.message
    assert drawing.error.metadata == {"controlnets": "edges,depth"}


def test_every_image_of_a_job_is_controlled(easel: ManualEngine, reference: Reference) -> None:
    order = controlled((0, 0.8), spec=replace(PLAIN, num_images=2))
    for index, latent in enumerate(easel.draw(order).latents):
        alone = replace(order, spec=replace(order.spec, seed=order.spec.seed + index))
        assert_close(latent, reference(alone))


SEVEN = replace(PLAIN, num_inference_steps=7)
COMPANY = {
    "plain": EngineOrder(key="plain", spec=replace(SEVEN, seed=11)),
    "unguided": EngineOrder(key="unguided", spec=replace(SEVEN, seed=12, guidance_scale=1.0)),
    "two": controlled((0, 0.8), (1, 1.3), spec=SEVEN),
    "late": controlled((0, 0.9), control_guidance_start=0.5, spec=replace(SEVEN, seed=14)),
    "guessing": controlled((0, 0.9), guess_mode=True, spec=replace(SEVEN, seed=15)),
    "another sampler": controlled(
        (2, 0.7), spec=replace(PLAIN, seed=16, sampler=SamplerKind.DPMPP_2M, num_inference_steps=5)
    ),
}


@pytest.fixture(scope="module")
def company(easel: ManualEngine) -> dict[str, Drawing]:
    """All of COMPANY, drawn together; three of them come two turns later."""
    orders = [replace(order, key=name) for name, order in COMPANY.items()]
    drawings = easel.run({0: orders[:3], 2: orders[3:]})
    return {name: drawings[name] for name in COMPANY}


@pytest.mark.parametrize("name", COMPANY)
def test_in_company_it_ends_as_the_stock_pipeline_does(
    company: dict[str, Drawing], reference: Reference, name: str
) -> None:
    assert company[name].record.provenance.mean_group_requests > 3
    assert_close(company[name].latents[0], reference(COMPANY[name]))


SIX = replace(PLAIN, num_inference_steps=6)
RESUMED = {
    "in the middle of the controlled steps": controlled((0, 1.0), (1, 0.7), spec=SIX),
    "before the first controlled step": controlled((0, 1.0), control_guidance_start=0.6, spec=SIX),
    "after the last controlled step": controlled((0, 1.0), control_guidance_end=0.26, spec=SIX),
}


def cut(model: Model, shelf: ControlNetCache, order: EngineOrder) -> JobCheckpointed:
    """What is left of a job whose engine is gone in the middle."""
    easel = ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf)))
    drawing = easel.submit(order)
    while not drawing.all(JobCheckpointed) or drawing.all(JobCheckpointed)[-1].steps_done < order.spec.steps // 2:
        easel.turn()
    easel.engine.cancel(order.key)
    return drawing.all(JobCheckpointed)[-1]


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_it_ends_as_an_unbroken_one(
    model: Model, shelf: ControlNetCache, easel: ManualEngine, case: str
) -> None:
    order = RESUMED[case]
    left = cut(model, shelf, order)
    resumed = easel.draw(replace(order, checkpoint=left.data))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == left.steps_done == order.spec.steps // 2
    assert torch.equal(resumed.latents[0], easel.draw(order).latents[0])


def test_a_checkpoint_fits_no_other_controls(model: Model) -> None:
    one = controlled((0, 1.0)).spec
    states = [Request(model, one, encode_prompts(model, one)).state()]
    data = write_checkpoint(model, one, SavedJob(images=states))
    assert read_checkpoint(data, model, one).images
    (net,) = one.controlnets
    others = [
        controlled((1, 1.0)).spec,
        controlled((0, 0.9)).spec,
        controlled((0, 1.0), (1, 1.0)).spec,
        controlled((0, 1.0), guess_mode=True).spec,
        controlled((0, 1.0), control_guidance_end=0.9).spec,
        replace(one, controlnets=(control_spec("edges", IMAGES[1]),)),
        replace(one, controlnets=(replace(net, digest="ab"),)),
    ]
    for other in others:
        with pytest.raises(CheckpointMismatch):
            read_checkpoint(data, model, other)


def test_the_record_says_what_took_part_and_what_was_waited_for(company: dict[str, Drawing]) -> None:
    record = company["late"].record
    (use,) = record.provenance.controlnets
    spec = COMPANY["late"].spec.controlnets[0]
    assert (use.name, use.image_digest) == ("edges", spec.image_digest)
    assert (use.begin_step, use.end_step, use.stale_steps) == (4, 7, 0)
    assert 0 < use.waited_s <= record.seconds["controlnets"]
    assert 0 < record.provenance.encoder_s < record.seconds["denoise"]
    plain = company["plain"].record
    assert not plain.provenance.controlnets
    assert "controlnets" not in plain.seconds
    assert [use.name for use in company["two"].record.provenance.controlnets] == ["edges", "depth"]


def test_a_controlnet_that_is_in_no_step_is_not_even_asked_for(easel: ManualEngine, shelf: ControlNetCache) -> None:
    before = shelf.counts
    order = controlled((0, 1.0), control_guidance_start=0.4, control_guidance_end=0.45)
    drawing = easel.draw(order)
    (use,) = drawing.record.provenance.controlnets
    assert use.begin_step == use.end_step
    assert shelf.counts == before
    assert torch.equal(drawing.latents[0], easel.draw(EngineOrder(key="plain", spec=PLAIN)).latents[0])


def test_from_a_picture_it_is_active_in_shares_of_the_steps_that_run(
    easel: ManualEngine, stock: Any, nets: Mapping[str, ControlNetModel]
) -> None:
    spec = replace(PLAIN, num_inference_steps=8, strength=0.5)
    picture = control_image(4, SIZE, SIZE)
    order = replace(controlled((0, 1.0), control_guidance_start=0.5, spec=spec), image=picture)
    drawing = easel.draw(order)
    (use,) = drawing.record.provenance.controlnets
    assert (use.begin_step, use.end_step) == (6, 8)
    pipeline = variant(stock, StableDiffusionXLControlNetImg2ImgPipeline, controlnet=nets["edges"])
    options = stock_options(order.spec.controlnets, order.control_images)
    options |= {"control_image": options["image"], "image": PIL.Image.fromarray(picture.numpy()), "strength": 0.5}
    assert_close(drawing.latents[0], latent_of(pipeline, order.spec, width=SIZE, height=SIZE, **options))


@pytest.fixture(scope="module")
def stock_half(folders: Mapping[str, Path]) -> Reference:
    """What stock makes of jobs in bfloat16, with the same ControlNets."""
    stock = load_stock(small_model(), torch.bfloat16)
    nets = {
        name: ControlNetModel.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True)
        for name, folder in folders.items()
    }
    return lambda order: controlled_latent(stock, nets, order.spec, order.control_images)


@pytest.fixture(scope="module")
def half(folders: Mapping[str, Path]) -> Iterator[ManualEngine]:
    """An engine in bfloat16."""
    model = load(small_model(), dtype=torch.bfloat16)
    with shelf_of(model, folders) as shelf:
        yield ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf)))


def test_in_bfloat16_it_ends_as_the_stock_pipeline_does(half: ManualEngine, stock_half: Reference) -> None:
    for order in (controlled((0, 0.8), (2, 1.1)), controlled((1, 1.2), guess_mode=True)):
        drawing = half.draw(order)
        assert not drawing.record.shared_in_half_precision
        assert torch.equal(drawing.latents[0], stock_half(order))


def test_in_half_precision_residuals_that_sessions_compute_together_are_said_to_be_shared(
    half: ManualEngine, stock_half: Reference
) -> None:
    twice = controlled((1, 0.4), (1, 0.9))
    assert half.draw(twice).record.shared_in_half_precision
    drawing = half.draw(replace(twice, shared_turns=False))
    assert not drawing.record.shared_in_half_precision
    assert torch.equal(drawing.latents[0], stock_half(twice))
