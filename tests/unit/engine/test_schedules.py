"""Requests with a schedule of their own: drawn as stock's pipelines draw them, in any batch, cut and resumed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace

import PIL.Image
import pytest

from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.schedules import Schedule
from tests.samples.small_model import SIZE
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.stock import Reference, Stock, assert_close, assert_same_image
from tests.support.torch_threads import torch_threads
from tests.unit.engine.test_checkpoint import assert_resumes, cut
from tests.unit.engine.test_exact import pixels_tensor

TIMESTEPS = (999, 870, 610, 459, 239, 12)
LISTS = Schedule(timesteps=TIMESTEPS)
PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=6, width=SIZE, height=SIZE, seed=5
)
SPECS: Mapping[str, ResolvedSpec] = {
    "beta": replace(PLAIN, schedule=Schedule(use_beta_sigmas=True)),
    "spaced": replace(PLAIN, sampler=SamplerKind.UNIPC, schedule=Schedule(timestep_spacing="linspace")),
    "sigma_min": replace(PLAIN, sampler=SamplerKind.DPMPP_2M, schedule=Schedule(final_sigmas_type="sigma_min")),
    "sigmas": replace(PLAIN, schedule=Schedule(sigmas=(14.0, 6.5, 3.0, 1.5, 0.6, 0.2, 0.0))),
    "timesteps": replace(PLAIN, schedule=LISTS),
    "of two evaluations": replace(PLAIN, sampler=SamplerKind.HEUN, schedule=LISTS),
    "of several steps": replace(PLAIN, sampler=SamplerKind.DPMPP_2M, schedule=LISTS),
    "that draw noise": replace(PLAIN, sampler=SamplerKind.LCM, schedule=LISTS, guidance_scale=1.0),
}


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.fixture(scope="module")
def easel(model: Model) -> ManualEngine:
    return ManualEngine(make_engine(model, EngineLimits(max_rows=2, max_wait_turns=1000)))


@pytest.fixture(scope="module")
def batch(model: Model) -> dict[str, Drawing]:
    """All of them in one batch, each of which comes a turn after the other, beside one without a schedule."""
    engine = ManualEngine(make_engine(model, TOGETHER))
    specs = {**SPECS, "plain": PLAIN}
    orders = {turn: [EngineOrder(key=name, spec=specs[name])] for turn, name in enumerate(specs)}
    return {str(key): drawing for key, drawing in engine.run(orders).items()}


def assert_drawn(drawing: Drawing, theirs: Reference) -> None:
    assert_close(drawing.latents[0], theirs.latent)
    assert_same_image(drawing.pixels[0], theirs.pixels)


@pytest.mark.parametrize("name", [*SPECS, "plain"])
def test_a_schedule_in_a_batch_of_others_is_stocks(batch: dict[str, Drawing], stock: Stock, name: str) -> None:
    assert batch[name].record.provenance.mean_group_requests > 2
    assert_drawn(batch[name], stock.reference({**SPECS, "plain": PLAIN}[name]))


@pytest.mark.parametrize("name", ["timesteps", "sigmas", "of several steps", "that draw noise"])
def test_image_to_image_makes_the_last_steps_of_a_list_as_stock_does(
    easel: ManualEngine, stock: Stock, name: str
) -> None:
    spec = replace(SPECS[name], strength=0.6)
    source = PIL.Image.linear_gradient("L").resize((SIZE, SIZE)).convert("RGB")
    drawing = easel.draw(EngineOrder(key=name, spec=spec, image=pixels_tensor(source)))
    assert drawing.record.provenance.begin_step == 3
    assert drawing.job is not None
    assert drawing.job.steps_total == 3
    assert_drawn(drawing, stock.reference(spec, image=source))


@pytest.mark.parametrize("name", SPECS)
def test_a_job_with_a_schedule_is_resumed_at_any_step(model: Model, easel: ManualEngine, name: str) -> None:
    order = EngineOrder(key=1, spec=SPECS[name])
    assert_resumes(easel, order, cut(model, order, random.Random(name).randint(2, 5)))


def test_a_checkpoint_of_another_schedule_begins_again(model: Model, easel: ManualEngine) -> None:
    left = cut(model, EngineOrder(key=1, spec=SPECS["timesteps"]), 4)
    other = replace(SPECS["timesteps"], schedule=Schedule(timesteps=(*TIMESTEPS[:-1], 11)))
    drawing = easel.draw(EngineOrder(key=2, spec=other, checkpoint=left.data))
    assert drawing.job is not None
    assert drawing.job.steps_resumed == 0


@pytest.mark.parametrize(
    ("spec", "field", "rule"),
    [
        (replace(PLAIN, sampler=SamplerKind.DDIM, schedule=LISTS), "timesteps", "DDIMScheduler takes none"),
        (replace(PLAIN, num_inference_steps=5, schedule=LISTS), "num_inference_steps", "must be 6, the steps of its"),
        (replace(SPECS["of two evaluations"], strength=0.6), "timesteps", "must be empty with image: the sampler heun"),
        (replace(PLAIN, use_karras_sigmas=True, schedule=LISTS), "timesteps", "where use_karras_sigmas is true"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused_by_its_field(
    easel: ManualEngine, spec: ResolvedSpec, field: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        easel.engine.submit(EngineOrder(key="refused", spec=spec))
    assert caught.value.violations[0].field == f"spec.{field}"
    assert rule in caught.value.violations[0].description
