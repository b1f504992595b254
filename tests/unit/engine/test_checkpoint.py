"""A job that is cut anywhere and resumed in another engine gives the same image, also within a step of the caller."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bottega.engine import checkpoint
from bottega.engine.checkpoint import CheckpointMismatch, SavedJob, read_checkpoint, write_checkpoint
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import Sources, encode_image, encode_prompts
from bottega.engine.events import JobAdvanced, JobCheckpointed
from bottega.engine.forward import Network
from bottega.engine.job import EngineOrder
from bottega.engine.latent_step import RequestState
from bottega.engine.limits import EngineLimits
from bottega.engine.request import Request
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.model.model import Model
from bottega.model.samplers import Sampler
from bottega.model.schedulers import SamplerKind
from tests.samples.model_folders import with_scheduler
from tests.samples.small_model import SIZE
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.schedulers import SEVERAL, WITH_STATE
from tests.support.stock import Stock, assert_close

# A checkpoint is due every second step.
SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=11, width=SIZE, height=SIZE, seed=4
)
SHORT = replace(SPEC, num_inference_steps=4, sampler=SamplerKind.DPMPP_2M)
SAMPLERS = [kind for kind in WITH_STATE if kind not in SEVERAL]
# One request a turn, the first as long as it has steps.
ONE_BY_ONE = EngineLimits(max_rows=2, max_wait_turns=1000)


@pytest.fixture(scope="module")
def source() -> torch.Tensor:
    """A picture: uint8 [height, width, 3]."""
    ramp = torch.arange(0, 256, 256 // SIZE, dtype=torch.uint8).expand(SIZE, SIZE)
    return torch.stack([ramp, ramp.T, torch.full_like(ramp, 90)], dim=-1)


@pytest.fixture(scope="module")
def easel(model: Model) -> ManualEngine:
    """The engine that draws what another one began, idle between the tests."""
    return ManualEngine(make_engine(model, ONE_BY_ONE))


def cut(model: Model, order: EngineOrder, turns: int) -> JobCheckpointed:
    """What is left of a job whose engine is gone after so many turns."""
    easel = ManualEngine(make_engine(model, ONE_BY_ONE))
    drawing = easel.submit(order)
    for _ in range(turns):
        easel.turn()
    assert not drawing.ended
    return drawing.all(JobCheckpointed)[-1]


def assert_resumes(easel: ManualEngine, order: EngineOrder, left: JobCheckpointed) -> Drawing:
    """The job goes on from the checkpoint, in another engine, and its images are equal to an unbroken one's."""
    unbroken = easel.draw(order)
    resumed = easel.draw(replace(order, checkpoint=left.data))
    assert resumed.job is not None
    assert unbroken.job is not None
    assert resumed.job.steps_resumed == left.steps_done > 0
    assert resumed.job.steps_total == unbroken.job.steps_total
    for ours, theirs in zip(resumed.pixels, unbroken.pixels, strict=True):
        assert (ours == theirs).all()
    return resumed


@pytest.mark.parametrize("kind", SAMPLERS, ids=lambda kind: kind.name)
def test_a_job_cut_at_any_step_ends_as_an_unbroken_one(model: Model, easel: ManualEngine, kind: SamplerKind) -> None:
    turns = random.Random(kind.name).randint(2, 10)
    order = EngineOrder(key=1, spec=replace(SPEC, sampler=kind, use_karras_sigmas=kind is SamplerKind.DPMPP_2M))
    left = cut(model, order, turns)
    assert left.steps_done == turns // 2 * 2
    assert_resumes(easel, order, left)


def test_a_job_of_several_images_some_of_them_done_ends_as_an_unbroken_one(model: Model, easel: ManualEngine) -> None:
    several = replace(SPEC, num_images=3, prompts=(SPEC.prompt, SPEC.prompt, "a green circle"))
    order = EngineOrder(key=1, spec=replace(several, sampler=SamplerKind.DPMPP_2M, guidance_rescale=0.5))
    left = cut(model, order, 11 + 6)
    assert [state.evaluation for state in read_checkpoint(left.data, model, order.spec).images] == [11, 5, 0]
    resumed = assert_resumes(easel, order, left)
    assert len(resumed.pixels) == 3


def test_a_job_from_a_picture_ends_as_an_unbroken_one(model: Model, easel: ManualEngine, source: torch.Tensor) -> None:
    order = EngineOrder(key=1, spec=replace(SPEC, strength=0.7, sampler=SamplerKind.DPMPP_2M), image=source)
    left = cut(model, order, 4)
    assert left.steps_done == 4  # of seven: the first four of the schedule are skipped
    assert assert_resumes(easel, order, left).record.provenance.begin_step == 4


def checkpointed_steps(model: Model, order: EngineOrder, *, turn_s: float) -> list[int]:
    """At which steps, if every turn takes so long by the engine's clock."""
    now_s = itertools.count(start=0.0, step=turn_s)
    clock_s = 0.0
    engine = make_engine(model, EngineLimits(checkpoint_interval_s=2.0), clock=lambda: clock_s)
    easel = ManualEngine(engine)
    drawing = easel.submit(order)
    while engine.busy:
        clock_s = next(now_s)
        easel.turn()
    return [event.steps_done for event in drawing.all(JobCheckpointed)]


LONG = EngineOrder(key=1, spec=replace(SPEC, num_inference_steps=40, guidance_scale=1.0))


def test_checkpoints_come_with_every_tenth_of_the_steps_but_not_with_the_last(model: Model) -> None:
    assert checkpointed_steps(model, LONG, turn_s=0.0) == list(range(4, 40, 4))


def test_checkpoints_come_with_time_where_that_is_earlier(model: Model) -> None:
    assert checkpointed_steps(model, LONG, turn_s=1.0) == list(range(3, 40, 2))


def test_a_checkpoint_of_a_large_picture_is_under_a_mebibyte(model: Model) -> None:
    """1024x1024 in SDXL's latent space, float16, with the sampler that remembers most."""
    spec = replace(SPEC, sampler=SamplerKind.DPMPP_2M)
    sampler = Sampler(spec.sampler, model.scheduler_config, steps=spec.num_inference_steps)
    latent = torch.randn(1, 4, 128, 128, generator=torch.Generator().manual_seed(0)).half()
    for step in range(5):
        latent, _ = sampler.step(0.5 * latent, step, latent, None)
    state = RequestState(evaluation=5, latent=latent, generator=torch.Generator().get_state(), sampler=sampler.state())
    assert latent.dtype == torch.float16
    assert len(state.sampler.tensors) == 1
    assert 2 * latent.numel() * 2 < len(write_checkpoint(model, spec, SavedJob(images=[state]))) < 2**20


@pytest.fixture(scope="module")
def unbroken(easel: ManualEngine) -> Drawing:
    return easel.draw(EngineOrder(key=1, spec=SHORT))


@pytest.fixture(scope="module")
def kept(unbroken: Drawing) -> JobCheckpointed:
    """A good checkpoint of SHORT, after two of its steps."""
    return unbroken.all(JobCheckpointed)[1]


def with_state(**changes: Any) -> Callable[[Model, bytes], bytes]:
    """Writes a good checkpoint anew, its state changed."""
    return lambda model, data: write_checkpoint(
        model,
        SHORT,
        SavedJob(images=[replace(state, **changes) for state in read_checkpoint(data, model, SHORT).images]),
    )


def of_another(**changes: Any) -> Callable[[Model, bytes], bytes]:
    """Writes a good checkpoint's states for another model or spec."""

    def write(model: Model, data: bytes) -> bytes:
        its_model = replace(model, **{name: value for name, value in changes.items() if hasattr(model, name)})
        its_spec = replace(SHORT, **{name: value for name, value in changes.items() if hasattr(SHORT, name)})
        states = [read_checkpoint(data, model, SHORT).images[0] for _ in range(its_spec.num_images)]
        return write_checkpoint(its_model, its_spec, SavedJob(images=states))

    return write


def of_another_version(model: Model, data: bytes) -> bytes:
    states = read_checkpoint(data, model, SHORT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", checkpoint.VERSION + 1)
        return write_checkpoint(model, SHORT, states)


MISFITS: dict[str, Callable[[Model, bytes], bytes]] = {
    "another model": of_another(digest="0" * 64),
    "another element type": of_another(dtype=torch.bfloat16),
    "another seed": of_another(seed=5),
    "another prompt": of_another(prompt="a star"),
    "another sampler": of_another(sampler=SamplerKind.EULER),
    "more images": of_another(num_images=2),
    "another version": of_another_version,
    "a latent that is no number": with_state(latent=torch.full((1, 4, SIZE // 4, SIZE // 4), torch.nan)),
    "a latent of another size": with_state(latent=torch.zeros(1, 4, 8, 16)),
    "a step after the last": with_state(evaluation=5),
    "a step before the first": with_state(evaluation=-1),
    "a generator that is none": with_state(generator=torch.zeros(8, dtype=torch.uint8)),
    "one bit of the latent": lambda _, data: flipped(data, 8 * (len(data) - 100)),
    "one bit of the header": lambda _, data: flipped(data, 8 * 200),
    "cut in the header": lambda _, data: data[:100],
    "cut in the tensors": lambda _, data: data[:-100],
    "only a length": lambda _, data: data[:8],
    "something else": lambda _, __: b"not a checkpoint at all",
}


def flipped(data: bytes, bit: int) -> bytes:
    """One bit of it is the other way round."""
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << (bit % 8)
    return bytes(damaged)


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_not_read(model: Model, kept: JobCheckpointed, misfit: str) -> None:
    data = MISFITS[misfit](model, kept.data)
    with pytest.raises(CheckpointMismatch):
        read_checkpoint(data, model, SHORT)


def test_a_checkpoint_that_does_not_fit_is_logged_and_the_job_begins_again(
    model: Model, easel: ManualEngine, unbroken: Drawing, kept: JobCheckpointed, caplog: pytest.LogCaptureFixture
) -> None:
    data = MISFITS["one bit of the latent"](model, kept.data)
    again = easel.draw(EngineOrder(key=1, spec=SHORT, checkpoint=data))
    assert again.job is not None
    assert again.job.steps_resumed == 0
    assert [record.message for record in caplog.records] == [
        "a checkpoint does not fit; the job starts from the beginning"
    ]
    assert (again.pixels[0] == unbroken.pixels[0]).all()


def test_no_bit_of_a_checkpoint_can_change_unnoticed(model: Model, kept: JobCheckpointed) -> None:
    assert read_checkpoint(kept.data, model, SHORT).images[0].evaluation == 2
    for bit in random.Random(0).sample(range(8 * len(kept.data)), 400):
        with pytest.raises(CheckpointMismatch):
            read_checkpoint(flipped(kept.data, bit), model, SHORT)


def test_a_checkpoint_from_before_the_first_step_of_a_picture_does_not_fit(
    model: Model, easel: ManualEngine, source: torch.Tensor, kept: JobCheckpointed
) -> None:
    spec = replace(SHORT, strength=0.25)
    data = write_checkpoint(model, spec, read_checkpoint(kept.data, model, SHORT))
    order = EngineOrder(key=1, spec=spec, image=source)
    again = easel.draw(replace(order, checkpoint=data))
    assert again.job is not None
    assert again.job.steps_resumed == 0
    assert (again.pixels[0] == easel.draw(order).pixels[0]).all()


STEPS = 6
EVALUATED = ResolvedSpec(prompt="a big red star", num_inference_steps=STEPS, width=32, height=32, seed=4)
SKIPPING = {"skip_prk_steps": True}


@pytest.fixture(scope="module")
def skipping(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Stock]:
    """A model whose PNDM makes no steps with Runge-Kutta's method, as published models have it; and its pipelines."""
    folder = with_scheduler(tmp_path_factory.mktemp("model") / "plms", "PNDMScheduler", **SKIPPING)
    return load(folder), Stock(folder)


CONFIG = {"beta_schedule": "scaled_linear"}


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


@pytest.mark.parametrize(("kind", "strength"), [*((kind, None) for kind in SEVERAL), (SamplerKind.HEUN, 0.7)])
def test_a_job_cut_before_any_evaluation_ends_as_an_unbroken_one(
    model: Model, skipping: tuple[Model, Stock], kind: SamplerKind, strength: float | None
) -> None:
    assert_resumes_everywhere(model, replace(EVALUATED, sampler=kind, strength=strength))
    if kind is SamplerKind.PNDM:  # without Runge-Kutta's steps
        assert_resumes_everywhere(skipping[0], replace(EVALUATED, sampler=kind))


def test_noise_levels_stay_on_the_cpu_when_a_job_resumes_on_a_device(model: Model) -> None:
    spec = replace(EVALUATED, sampler=SamplerKind.HEUN)
    request = Request(model, spec, encode_prompts(model, spec), sources=Sources(image=None))
    evaluate(model, request)
    sampler = Sampler(SamplerKind.HEUN, CONFIG, steps=STEPS)
    sampler.restore(request.state().sampler, request.evaluation, torch.device("meta"))
    restored = sampler.state().tensors
    assert {name: tensor.device.type for name, tensor in restored.items()}["dt"] == "cpu"
    assert any(tensor.device.type == "meta" for tensor in restored.values())


def test_without_runge_kutta_steps_a_picture_in_a_batch_is_stocks(skipping: tuple[Model, Stock]) -> None:
    model, stock = skipping
    easel = ManualEngine(make_engine(model, TOGETHER))
    spec = replace(EVALUATED, sampler=SamplerKind.PNDM)
    others = [EngineOrder(key=kind, spec=replace(EVALUATED, sampler=kind, seed=7)) for kind in SEVERAL[1:]]
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
    drawing = easel.submit(EngineOrder(key=1, spec=replace(EVALUATED, sampler=kind, num_images=2)))
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
    spec = replace(EVALUATED, sampler=SamplerKind.HEUN)
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
