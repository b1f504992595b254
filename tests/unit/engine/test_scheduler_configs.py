"""Scheduler configurations of models and schedules of requests: drawn and resumed as stock does, in any batch."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import pytest
import torch

from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ConfigError, InvalidRequest
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from bottega.model_files.presets import PRESET_FILE
from bottega.schedules import Schedule
from tests.samples.edits import edit_order, ellipse_mask, template
from tests.samples.model_folders import with_scheduler
from tests.samples.small_model import SIZE
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.stock import Reference, Stock, assert_close, assert_same_image, latent_of, load_stock
from tests.support.torch_threads import torch_threads
from tests.unit.engine.test_checkpoint import assert_resumes, cut
from tests.unit.engine.test_exact import pixels_tensor

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background",
    num_inference_steps=6,
    width=32,
    height=32,
    seed=5,
    sampler=SamplerKind.DPMPP_2M,
)
ALONE = EngineLimits(max_rows=2, max_wait_turns=1000)
# By name, what a model's scheduler_config.json says of DPMSolverMultistepScheduler. Tests of the table of schedulers
# compare what each key does.
CONFIGS: dict[str, dict[str, Any]] = {
    "sde++ of third order": {"algorithm_type": "sde-dpmsolver++", "solver_order": 3, "use_karras_sigmas": True},
    "third order": {"solver_order": 3, "lower_order_final": False},
}


class Case(NamedTuple):
    """A model with a configuration, the stock pipelines of the same folder, and a spec that fits it."""

    model: Model
    stock: Stock
    spec: ResolvedSpec


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


pytestmark = pytest.mark.filterwarnings("ignore:.*algorithm_types .* is deprecated:FutureWarning")  # stock's own


def test_each_image_of_a_job_is_stocks_of_its_seed(case: Case) -> None:
    spec = replace(case.spec, num_images=2)
    drawing = ManualEngine(make_engine(case.model, EngineLimits())).draw(EngineOrder(key=1, spec=spec))
    for index, (latent, pixels) in enumerate(zip(drawing.latents, drawing.pixels, strict=True)):
        reference = case.stock.reference(spec, index=index)
        assert_close(latent, reference.latent)
        assert_same_image(pixels, reference.pixels)


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


def test_a_model_whose_own_sampler_cannot_draw_is_not_loaded(tmp_path: Path) -> None:
    folder = with_scheduler(
        tmp_path / "model", "DPMSolverMultistepScheduler", timestep_spacing="trailing", lambda_min_clipped=-2.0
    )
    with pytest.raises(ConfigError, match="the model's sampler, dpmpp_2m, cannot draw: the model's timestep spacing"):
        load(folder)


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


@pytest.mark.parametrize("name", ["sigmas", "that draw noise"])
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


@pytest.mark.parametrize("name", ["sigmas", "of two evaluations", "of several steps"])
def test_a_job_with_a_schedule_is_resumed_at_any_step(model: Model, easel: ManualEngine, name: str) -> None:
    order = EngineOrder(key=1, spec=SPECS[name])
    assert_resumes(easel, order, cut(model, order, random.Random(name).randint(2, 5)))


@pytest.mark.parametrize(
    ("spec", "field", "rule"),
    [
        (replace(PLAIN, sampler=SamplerKind.DDIM, schedule=LISTS), "timesteps", "DDIMScheduler takes none"),
        (replace(SPECS["of two evaluations"], strength=0.6), "timesteps", "must be empty with image: the sampler heun"),
    ],
)
def test_a_schedule_that_cannot_be_made_is_refused_by_its_field(
    easel: ManualEngine, spec: ResolvedSpec, field: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        easel.engine.submit(EngineOrder(key="refused", spec=spec))
    assert caught.value.violations[0].field == f"spec.{field}"
    assert rule in caught.value.violations[0].description
