"""Models whose scheduler configuration makes their sampler another one: drawn, resumed and begun as stock does."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import pytest
import torch

from bottega.addons.cache.starts import format_start
from bottega.engine.encode import encode_prompts
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ConfigError, InvalidRequest
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.model_files.presets import PRESET_FILE
from tests.fakes.scripted_latents import Cached, cached, entry
from tests.samples.edits import edit_order, ellipse_mask, template
from tests.samples.model_folders import with_scheduler
from tests.support.engines import make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.stock import Stock, assert_close, assert_same_image, latent_of, load_stock

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background",
    num_inference_steps=6,
    width=32,
    height=32,
    seed=5,
    sampler=SamplerKind.DPMPP_2M,
)
ALONE = EngineLimits(max_rows=2, max_wait_turns=1000)
# By name, what a model's scheduler_config.json says of DPMSolverMultistepScheduler.
CONFIGS: dict[str, dict[str, Any]] = {
    "sde++": {"algorithm_type": "sde-dpmsolver++"},
    "sde++ of third order": {"algorithm_type": "sde-dpmsolver++", "solver_order": 3, "use_karras_sigmas": True},
    "sde": {"algorithm_type": "sde-dpmsolver", "final_sigmas_type": "sigma_min", "euler_at_final": True},
    "third order": {"solver_order": 3, "lower_order_final": False},
    "first order": {"solver_order": 1},
    "of noise": {"algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min", "solver_type": "heun"},
}
STOCHASTIC = ("sde++", "sde++ of third order", "sde")


class Case(NamedTuple):
    """A model with a configuration, the stock pipelines of the same folder, and a spec that fits it."""

    model: Model
    stock: Stock
    spec: ResolvedSpec


@pytest.fixture(scope="module")
def source() -> PIL.Image.Image:
    chance = random.Random(3)
    return PIL.Image.frombytes("RGB", (32, 32), chance.randbytes(32 * 32 * 3)).resize((8, 8)).resize((32, 32))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    cases = {}
    for name, config in CONFIGS.items():
        folder = with_scheduler(
            tmp_path_factory.mktemp("model") / name.replace(" ", "-"), "DPMSolverMultistepScheduler", **config
        )
        karras = bool(config.get("use_karras_sigmas"))
        cases[name] = Case(load(folder), Stock(folder), replace(SPEC, use_karras_sigmas=karras))
    return cases


@pytest.fixture(params=CONFIGS)
def case(request: pytest.FixtureRequest, models: dict[str, Case]) -> Case:
    return models[request.param]


def plain_spec(model: Model) -> ResolvedSpec:
    """What a request that names no sampler is drawn with."""
    defaults = model.defaults
    return replace(SPEC, sampler=defaults.sampler, use_karras_sigmas=defaults.use_karras_sigmas)


def pixels_tensor(image: PIL.Image.Image) -> torch.Tensor:
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, 3)


pytestmark = pytest.mark.filterwarnings("ignore:.*algorithm_types .* is deprecated:FutureWarning")  # stock's own


def test_each_image_of_a_job_is_stocks_of_its_seed(case: Case) -> None:
    spec = replace(case.spec, num_images=2)
    drawing = ManualEngine(make_engine(case.model, EngineLimits())).draw(EngineOrder(key=1, spec=spec))
    for index, (latent, pixels) in enumerate(zip(drawing.latents, drawing.pixels, strict=True)):
        reference = case.stock.reference(spec, index=index)
        assert_close(latent, reference.latent)
        assert_same_image(pixels, reference.pixels)


def test_image_to_image_is_stocks(case: Case, source: PIL.Image.Image) -> None:
    spec = replace(case.spec, strength=0.6)
    drawing = ManualEngine(make_engine(case.model, ALONE)).draw(
        EngineOrder(key=1, spec=spec, image=pixels_tensor(source))
    )
    assert_close(drawing.latents[0], case.stock.reference(spec, image=source).latent)


def test_an_edit_is_stocks(case: Case) -> None:
    spec, image, mask = replace(case.spec, width=64, height=64, strength=0.8), template(), ellipse_mask()
    drawing = ManualEngine(make_engine(case.model, ALONE)).draw(edit_order(spec, image, mask))
    assert_close(drawing.latents[0], case.stock.edit(spec, image, mask).latent)


def test_a_job_cut_in_the_middle_goes_on_as_if_it_had_not_been(case: Case) -> None:
    order = EngineOrder(key=1, spec=case.spec)
    unbroken = ManualEngine(make_engine(case.model, ALONE)).draw(order)
    first = ManualEngine(make_engine(case.model, ALONE))
    begun = first.submit(order)
    for _ in range(4):
        first.turn()
    left = begun.all(JobCheckpointed)[-1]
    assert left.steps_done > 0
    resumed = ManualEngine(make_engine(case.model, ALONE)).draw(replace(order, checkpoint=left.data))
    assert resumed.job is not None
    assert resumed.job.steps_resumed == left.steps_done
    assert torch.equal(resumed.latents[0], unbroken.latents[0])


def test_the_estimate_of_the_picture_is_near_the_finished_one(case: Case) -> None:
    """It is what previews show: not the noise that some algorithms keep."""
    spec = replace(case.spec, num_inference_steps=9)
    easel = ManualEngine(make_engine(case.model, ALONE))
    drawing = easel.submit(EngineOrder(key=1, spec=spec))
    for _ in range(spec.num_inference_steps - 1):
        easel.turn()
    assert drawing.job is not None
    (request,) = drawing.job.requests
    estimate, finished = request.estimate, case.stock.reference(spec).latent
    cosine = torch.nn.functional.cosine_similarity(estimate.flatten(), finished.flatten(), dim=0)
    assert cosine > 0.9


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_start_from_a_latent_draws_what_its_own_steps_would(models: dict[str, Case], name: str) -> None:
    """It makes no step again, and its generator is where its own first steps would have left it."""
    case = models[name]
    own, begun = (Request(case.model, case.spec, encode_prompts(case.model, case.spec)) for _ in range(2))
    easel = Cached(case.model, limits=ALONE)
    drawing = easel.draw(cached(EngineOrder(key=1, spec=case.spec)), hits=[(entry(1), 4, own.latent[0])])
    (start,) = drawing.record.provenance.cached_starts
    assert (start.entry, start.from_step) == (format_start(entry(1), 4), 4)
    shape = (1, 4, 8, 8)
    begun.start_from(own.latent[0], 4)
    generator = torch.Generator("cpu").manual_seed(case.spec.seed)
    torch.randn(shape, generator=generator)
    for _ in range(4):
        torch.randn(shape, generator=generator, dtype=torch.float32)
    assert torch.equal(begun.state().generator, generator.get_state())


@pytest.mark.parametrize("name", ["EulerDiscreteScheduler", "DPMSolverMultistepScheduler"])
def test_karras_sigmas_of_the_configuration_are_the_models_default(tmp_path: Path, name: str) -> None:
    folder = with_scheduler(tmp_path / "model", name, use_karras_sigmas=True)
    model, stock = load(folder), load_stock(folder)
    spec = plain_spec(model)
    drawing = ManualEngine(make_engine(model, ALONE)).draw(EngineOrder(key=1, spec=spec))
    assert_close(drawing.latents[0], latent_of(stock, spec, width=32, height=32))  # with the scheduler that it has


def test_a_presets_spacing_counts_where_the_configuration_has_none(tmp_path: Path) -> None:
    """Diffusers passes over what a configuration says was a default, and that was one."""
    folder = with_scheduler(tmp_path / "model", "EulerDiscreteScheduler")
    path = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(path.read_text())
    del config["timestep_spacing"]
    path.write_text(json.dumps(config))
    (folder / PRESET_FILE).write_text('{"timestep_spacing": "trailing"}')
    model, stock = load(folder), load_stock(folder)
    stock.scheduler = type(stock.scheduler).from_config(config, timestep_spacing="trailing")
    for kind in (SamplerKind.EULER, SamplerKind.DDIM):
        spec = replace(SPEC, sampler=kind)
        drawing = ManualEngine(make_engine(model, ALONE)).draw(EngineOrder(key=1, spec=spec))
        stock.scheduler = kind.scheduler_class.from_config(config, timestep_spacing="trailing")
        assert_close(drawing.latents[0], latent_of(stock, spec, width=32, height=32))


def test_a_sampler_that_the_configuration_rules_out_is_refused_with_the_reason(tmp_path: Path) -> None:
    """And an engine of such a model starts, though what it draws for itself must not be drawn with that sampler."""
    folder = with_scheduler(tmp_path / "model", "DPMSolverMultistepScheduler", interpolation_type="cubic")
    engine = make_engine(load(folder), ALONE)
    engine.warm_up()
    easel = ManualEngine(engine)
    with pytest.raises(InvalidRequest, match=r'spec.sampler: interpolation_type must be "linear" or "log_linear"'):
        easel.submit(EngineOrder(key=1, spec=replace(SPEC, sampler=SamplerKind.EULER)))
    assert easel.draw(EngineOrder(key=2, spec=SPEC)).record.exact


def test_a_number_of_steps_that_the_spacing_does_not_make_is_refused(tmp_path: Path) -> None:
    folder = with_scheduler(tmp_path / "model", "EulerDiscreteScheduler", timestep_spacing="trailing")
    easel = ManualEngine(make_engine(load(folder), ALONE))
    with pytest.raises(InvalidRequest, match=r"spec.num_inference_steps: the model's timestep spacing makes 62 steps"):
        easel.submit(EngineOrder(key=1, spec=replace(SPEC, sampler=SamplerKind.EULER, num_inference_steps=61)))


def test_a_model_whose_own_sampler_cannot_draw_is_not_loaded(tmp_path: Path) -> None:
    folder = with_scheduler(
        tmp_path / "model", "DPMSolverMultistepScheduler", timestep_spacing="trailing", lambda_min_clipped=-2.0
    )
    with pytest.raises(ConfigError, match="the model's sampler, dpmpp_2m, cannot draw: the model's timestep spacing"):
        load(folder)
