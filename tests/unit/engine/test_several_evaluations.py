"""Samplers that evaluate the network several times in a step: a caller's step stays one, and a job may be cut in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega.engine.checkpoint import SavedJob, read_checkpoint, write_checkpoint
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import Sources, encode_image, encode_prompts
from bottega.engine.events import JobAdvanced
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.model.model import Model
from bottega.model.samplers import Sampler
from bottega.model.schedulers import SamplerKind
from tests.samples.model_folders import with_scheduler
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.schedulers import SEVERAL
from tests.support.stock import Stock, assert_close

STEPS = 6
SPEC = ResolvedSpec(prompt="a big red star", num_inference_steps=STEPS, width=32, height=32, seed=4)
SKIPPING = {"skip_prk_steps": True}


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Stock]:
    """A model whose PNDM makes no steps with Runge-Kutta's method, as published models have it; and its pipelines."""
    folder = with_scheduler(tmp_path_factory.mktemp("model") / "plms", "PNDMScheduler", **SKIPPING)
    return load(folder), Stock(folder)


def firsts(sampler: Sampler) -> list[int]:
    """The first evaluation of each step that is made."""
    begin = sampler.step_of(sampler.first_evaluation)
    return [sampler.evaluation_of(step) for step in range(begin, sampler.steps)]


CONFIG = {"beta_schedule": "scaled_linear"}


@pytest.mark.parametrize(
    ("kind", "config", "begin", "expected", "evaluations"),
    [
        (SamplerKind.HEUN, CONFIG, 0, [0, 2, 4, 6, 8, 10], 11),
        (SamplerKind.KDPM2, CONFIG, 4, [8, 10], 11),
        (SamplerKind.PNDM, CONFIG | SKIPPING, 0, [0, 2, 3, 4, 5, 6], 7),
        (SamplerKind.PNDM, CONFIG | SKIPPING, 3, [3, 5, 6], 7),
        (SamplerKind.PNDM, CONFIG, 0, [0, 4, 8, 12, 13, 14], 15),
        (SamplerKind.PNDM, CONFIG, 2, [2, 6, 10, 14], 15),
        (SamplerKind.EULER, CONFIG, 2, [2, 3, 4, 5], 6),
    ],
)
def test_every_evaluation_belongs_to_a_step(
    kind: SamplerKind, config: dict[str, object], begin: int, expected: list[int], evaluations: int
) -> None:
    sampler = Sampler(kind, config, steps=STEPS, begin=begin)
    assert (firsts(sampler), sampler.evaluations, sampler.first_evaluation) == (expected, evaluations, expected[0])
    steps = [sampler.step_of(evaluation) for evaluation in range(evaluations + 1)]
    assert steps == sorted(steps)
    assert steps[-1] == sampler.steps
    assert sampler.evaluation_of(STEPS) == evaluations


@torch.inference_mode()
def evaluate(model: Model, request: Request) -> None:
    """Make the next evaluation of a request."""
    noise = Denoiser(Network(backbone=model.backbone, residuals=None)).predict(request.rows()).noise
    request.advance({row.half: predicted for row, predicted in noise.items()})


@torch.inference_mode()
def assert_resumes_everywhere(model: Model, spec: ResolvedSpec) -> None:
    """A request that is stored and read before each of its evaluations has the latent of one that is not."""
    conditions = encode_prompts(model, spec)
    ramp = torch.arange(0, 256, 8, dtype=torch.uint8).expand(32, 32)
    image = None if spec.strength is None else encode_image(model, torch.stack([ramp, ramp.T, ramp], dim=-1))
    whole, broken = (Request(model, spec, conditions, sources=Sources(image=image)) for _ in range(2))
    cut_in_a_step = False
    while not whole.done:
        evaluate(model, whole)
        evaluate(model, broken)
        cut_in_a_step |= not broken.between_steps
        data = write_checkpoint(model, spec, SavedJob(images=[broken.state()]))
        (state,) = read_checkpoint(data, model, spec).images
        broken = Request(model, spec, conditions, resume=state)
        assert (broken.step, broken.evaluation) == (whole.step, whole.evaluation)
    assert cut_in_a_step
    assert torch.equal(broken.latent, whole.latent)


@pytest.mark.parametrize("strength", [None, 0.7])
@pytest.mark.parametrize("kind", SEVERAL)
def test_a_job_cut_before_any_evaluation_ends_as_an_unbroken_one(
    model: Model, kind: SamplerKind, strength: float | None
) -> None:
    assert_resumes_everywhere(model, replace(SPEC, sampler=kind, strength=strength))


def test_noise_levels_stay_on_the_cpu_when_a_job_resumes_on_a_device(model: Model) -> None:
    spec = replace(SPEC, sampler=SamplerKind.HEUN)
    request = Request(model, spec, encode_prompts(model, spec), sources=Sources(image=None))
    evaluate(model, request)
    sampler = Sampler(SamplerKind.HEUN, CONFIG, steps=STEPS)
    sampler.restore(request.state().sampler, request.evaluation, torch.device("meta"))
    restored = sampler.state().tensors
    assert {name: tensor.device.type for name, tensor in restored.items()}["dt"] == "cpu"
    assert any(tensor.device.type == "meta" for tensor in restored.values())


def test_a_job_without_runge_kutta_steps_cut_anywhere_ends_as_an_unbroken_one(skipping: tuple[Model, Stock]) -> None:
    assert_resumes_everywhere(skipping[0], replace(SPEC, sampler=SamplerKind.PNDM))


def test_without_runge_kutta_steps_a_picture_in_a_batch_is_stocks(skipping: tuple[Model, Stock]) -> None:
    model, stock = skipping
    easel = ManualEngine(make_engine(model, TOGETHER))
    spec = replace(SPEC, sampler=SamplerKind.PNDM)
    others = [EngineOrder(key=kind, spec=replace(SPEC, sampler=kind, seed=7)) for kind in SEVERAL[1:]]
    drawings = easel.run({0: [EngineOrder(key="pndm", spec=spec)], 1: others})
    assert drawings["pndm"].record.provenance.mean_group_requests > 2
    for key in ("pndm", *SEVERAL[1:]):
        job = drawings[key].job
        assert job is not None
        assert_close(drawings[key].latents[0], stock.reference(job.order.spec).latent)


@pytest.mark.parametrize("kind", SEVERAL)
def test_progress_and_work_count_steps_and_evaluations(model: Model, kind: SamplerKind) -> None:
    limits = EngineLimits(max_rows=2, max_wait_turns=1000, progress_interval_s=0.0)
    easel = ManualEngine(make_engine(model, limits))
    drawing = easel.submit(EngineOrder(key=1, spec=replace(SPEC, sampler=kind, num_images=2)))
    made = STEPS + 9 if kind is SamplerKind.PNDM else 2 * STEPS - 1
    assert dict(easel.engine.evaluations_left()) == {1: 2 * made}
    easel.turn()
    assert dict(easel.engine.evaluations_left()) == {1: 2 * made - 1}
    easel.run()
    assert drawing.job is not None
    assert drawing.job.steps_total == 2 * STEPS
    told = [event.steps_done for event in drawing.all(JobAdvanced)]
    assert told == sorted(told)
    assert set(told) == set(range(2 * STEPS + 1))
    assert easel.engine.steps == 2 * STEPS
    assert easel.engine.turns == 2 * made


def test_adapters_count_whole_steps_and_controlnets_evaluations(model: Model) -> None:
    """As the API says of LoRAs, and as Diffusers' pipelines do with ControlNets."""
    spec = replace(SPEC, sampler=SamplerKind.HEUN)
    control = ControlSpec(name="edges", image_digest="", control_guidance_start=0.25, control_guidance_end=0.75)
    request = Request(model, spec, encode_prompts(model, spec))
    # Of 11 evaluations: those from 0.25 on, and up to 0.75.
    assert request.control_window(control) == (3, 8)
    assert request.control_steps(control) == (1, 4)
    steps = []
    while not request.done:
        steps.append((request.step, request.next_step, request.between_steps))
        evaluate(model, request)
    assert steps[:4] == [(0, 0, True), (0, 1, False), (1, 1, True), (1, 2, False)]
    assert (request.step, request.next_step, request.between_steps) == (STEPS, STEPS, True)
