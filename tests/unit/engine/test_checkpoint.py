"""A job that is cut anywhere and resumed in another engine gives the same image; what does not fit begins again."""

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
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.request import RequestState
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.samplers import Sampler
from bottega.model.schedulers import KARRAS, SamplerKind
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.schedulers import BASIC, SEVERAL, WITH_STATE
from tests.support.stock import assert_close

# A checkpoint is due every second step.
SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=11, width=SIZE, height=SIZE, seed=4
)
SHORT = replace(SPEC, num_inference_steps=4, sampler=SamplerKind.DPMPP_2M)
SAMPLERS = [
    *((kind, False) for kind in WITH_STATE if kind not in SEVERAL),
    *((kind, True) for kind in BASIC if kind in KARRAS),
]
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


@pytest.mark.parametrize(("kind", "karras"), SAMPLERS, ids=[f"{kind.name}-{karras}" for kind, karras in SAMPLERS])
def test_a_job_cut_at_any_step_ends_as_an_unbroken_one(
    model: Model, easel: ManualEngine, kind: SamplerKind, karras: bool
) -> None:
    turns = random.Random(f"{kind.name}{karras}").randint(2, 10)
    order = EngineOrder(key=1, spec=replace(SPEC, sampler=kind, use_karras_sigmas=karras))
    left = cut(model, order, turns)
    assert left.steps_done == turns // 2 * 2
    assert_resumes(easel, order, left)


def test_a_job_of_several_images_some_of_them_done_ends_as_an_unbroken_one(model: Model, easel: ManualEngine) -> None:
    order = EngineOrder(key=1, spec=replace(SPEC, num_images=3, sampler=SamplerKind.DPMPP_2M, guidance_rescale=0.5))
    left = cut(model, order, 11 + 6)
    assert [state.evaluation for state in read_checkpoint(left.data, model, order.spec).images] == [11, 5, 0]
    resumed = assert_resumes(easel, order, left)
    assert len(resumed.pixels) == 3


def test_a_job_of_several_prompts_ends_as_an_unbroken_one(model: Model, easel: ManualEngine) -> None:
    order = EngineOrder(key=1, spec=replace(SPEC, prompts=(SPEC.prompt, "a green circle"), num_images=2))
    resumed = assert_resumes(easel, order, cut(model, order, 11))
    assert (resumed.pixels[0] != resumed.pixels[1]).any()


@pytest.mark.parametrize("kind", [SamplerKind.EULER_ANCESTRAL, SamplerKind.DPMPP_2M], ids=["EULER_ANCESTRAL", "DPMPP"])
def test_a_job_from_a_picture_ends_as_an_unbroken_one(
    model: Model, easel: ManualEngine, source: torch.Tensor, kind: SamplerKind
) -> None:
    order = EngineOrder(key=1, spec=replace(SPEC, strength=0.7, sampler=kind), image=source)
    left = cut(model, order, 4)
    assert left.steps_done == 4  # of seven: the first four of the schedule are skipped
    assert assert_resumes(easel, order, left).record.provenance.begin_step == 4


def test_a_resumed_job_can_be_cut_again(model: Model, easel: ManualEngine) -> None:
    order = EngineOrder(key=1, spec=replace(SPEC, sampler=SamplerKind.EULER_ANCESTRAL))
    first = cut(model, order, 4)
    second = cut(model, replace(order, checkpoint=first.data), 5)
    assert (first.steps_done, second.steps_done) == (4, 8)
    assert_resumes(easel, order, second)


def test_beside_others_a_resumed_job_ends_as_an_unbroken_one(model: Model, easel: ManualEngine) -> None:
    order = EngineOrder(key="resumed", spec=replace(SPEC, sampler=SamplerKind.DPMPP_2M))
    left = cut(model, order, 5)
    others = [EngineOrder(key=seed, spec=replace(SPEC, seed=seed)) for seed in (5, 6)]
    together = ManualEngine(make_engine(model, EngineLimits(max_wait_turns=0)))
    drawings = together.run({0: [*others, replace(order, checkpoint=left.data)]})
    assert drawings["resumed"].record.provenance.mean_group_requests > 1
    assert_close(drawings["resumed"].latents[0], easel.draw(order).latents[0])


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


def test_a_resumed_job_waits_as_long_for_its_next_checkpoint(model: Model) -> None:
    left = cut(model, LONG, 21)
    assert left.steps_done == 20
    assert checkpointed_steps(model, replace(LONG, checkpoint=left.data), turn_s=0.0) == [24, 28, 32, 36]


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
def test_a_checkpoint_that_does_not_fit_is_logged_and_the_job_begins_again(
    model: Model,
    easel: ManualEngine,
    unbroken: Drawing,
    kept: JobCheckpointed,
    caplog: pytest.LogCaptureFixture,
    misfit: str,
) -> None:
    data = MISFITS[misfit](model, kept.data)
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
