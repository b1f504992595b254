"""Tenants share the seconds of a device: what jobs use is measured, and long turns make way for those of others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from diffusers.models.resnet import ResnetBlock2D
from torch import Tensor

from bottega.device import devices
from bottega.device.memory_plan import MemoryPlan
from bottega.engine.events import ImageDrawn, JobAdvanced, JobFinished, JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.engine.step import RequestCost, seconds_by_request
from bottega.fair_order import Share
from bottega.model import sampler_choices
from bottega.model.model import Model
from bottega.model.samplers import Sampler
from bottega.model.schedulers import SamplerKind
from bottega.schedules import Schedule
from tests.fakes.fake_time import FakeTime
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.stock import assert_same_image

SMALL = ResolvedSpec(prompt="a red star", width=SIZE, height=SIZE, num_inference_steps=4, seed=7)
LARGE = replace(SMALL, width=4 * SIZE, height=4 * SIZE)
# The light one is behind whatever its turns take on a busy machine.
HEAVY, LIGHT = Share(tenant="heavy"), Share(tenant="light", weight=100.0)


def test_a_job_says_what_it_has_used_of_the_device(model: Model) -> None:
    easel = ManualEngine(make_engine(model, EngineLimits(progress_interval_s=0.0)))
    drawing = easel.draw(EngineOrder(key=0, spec=SMALL))
    spans = [span for span in drawing.trace.spans if span.track in {"encode", "denoise", "decode"}]
    assert drawing.record.provenance.device_s == pytest.approx(sum(span.seconds for span in spans), rel=0.01)
    told = [event.device_s for event in drawing.all(JobAdvanced)]
    assert told == sorted(told)
    assert 0.0 < told[0] < told[-1] < drawing.record.provenance.device_s


def test_what_add_ons_add_to_shared_turns_is_told_apart_from_plain_steps() -> None:
    costs = [
        RequestCost(rows=2.0, waits=False, patched=False, alone_s=0.3),
        RequestCost(rows=2.0, waits=True, patched=False, alone_s=0.3),
        RequestCost(rows=4.0, waits=False, patched=True, alone_s=0.5),
    ]
    plain, controlled, styled = seconds_by_request(costs, turn_s=1.2, waited_s=0.2, patch_s=0.5, beside_s=0.2)
    assert (plain.controlnets_s, plain.loras_s) == (0.0, 0.0)
    assert (controlled.controlnets_s, controlled.loras_s) == pytest.approx((0.2, 0.0))
    assert (styled.controlnets_s, styled.loras_s) == pytest.approx((0.0, 0.7))
    assert [took.plain_s for took in (plain, controlled, styled)] == pytest.approx([0.3, 0.3, 0.5])
    assert [took.charged_s for took in (plain, controlled, styled)] == pytest.approx([0.25, 0.45, 1.0])
    (alone,) = seconds_by_request(costs[:1], turn_s=1.0, waited_s=0.2, patch_s=0.5)
    assert alone.charged_s == pytest.approx(0.8)


@pytest.mark.usefixtures("paced")
def test_a_long_turn_makes_way_for_another_tenant_after_its_first_row_and_draws_the_same(model: Model) -> None:
    alone = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key=0, spec=LARGE))
    easel = ManualEngine(make_engine(model, EngineLimits()))
    easel.engine.warm_up()
    easel.draw(EngineOrder(key="before", spec=SMALL, share=LIGHT))
    heavy = easel.submit(EngineOrder(key="heavy", spec=LARGE, share=HEAVY))
    before = easel.engine.turns
    easel.turn()
    assert (easel.engine.turns - before, heavy.latents != [], heavy.job and heavy.job.steps_done) == (1, True, 0)
    light = easel.submit(EngineOrder(key="light", spec=SMALL, share=LIGHT))
    while not light.ended:
        easel.turn()
    assert heavy.job is not None
    assert heavy.job.steps_done == 0, "its second row is predicted when the other tenant's picture is done"
    easel.run()
    assert_same_image(heavy.pixels[0], alone.pixels[0])
    assert easel.engine.steps == 4 + 4 + 4
    assert light.record.provenance.device_s < heavy.record.provenance.device_s


@dataclass
class Paced:
    """A device's clock, which only goes on while a network runs. layers: of the VAE, that ran."""

    time: FakeTime
    layers: int = 0

    def step(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        """Takes a millisecond for each element of each row."""
        rows, _, height, width = inputs[0].shape
        self.time.now += rows * height * width * 1e-3

    def layer(self, _: object, inputs: tuple[Tensor, ...]) -> None:
        """Takes as long for each element."""
        self.layers += 1
        self.time.now += inputs[0].shape[-1] * inputs[0].shape[-2] * 1e-3


@pytest.fixture
def paced(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paced]:
    """How long work takes depends on its size alone, not on the machine."""
    paced = Paced(FakeTime())
    monkeypatch.setattr(devices, "perf_counter", paced.time.monotonic)
    blocks = [module for module in model.vae.modules() if isinstance(module, ResnetBlock2D)]
    hooks = [block.register_forward_pre_hook(paced.layer) for block in blocks]
    hooks.append(model.backbone.network.conv_in.register_forward_pre_hook(paced.step))
    yield paced
    for hook in hooks:
        hook.remove()


def after_a_light_tenant(model: Model) -> ManualEngine:
    """An engine that expects a tenant of small pictures back."""
    easel = ManualEngine(make_engine(model, EngineLimits(max_pixels=1 << 20)))
    easel.engine.warm_up()
    easel.draw(EngineOrder(key="before", spec=SMALL, share=LIGHT))
    return easel


def begin_decoding(easel: ManualEngine) -> Drawing:
    """Draw a large picture until its latent is finished."""
    heavy = easel.submit(EngineOrder(key="heavy", spec=LARGE, share=HEAVY))
    while heavy.job is None or heavy.job.evaluations_left:
        easel.turn()
    assert not heavy.all(ImageDrawn)
    return heavy


def drawn_order(easel: ManualEngine) -> list[object]:
    """Turn until nothing is left to do; return the keys of the jobs in the order in which they finished."""
    finished: list[object] = []
    while easel.engine.busy:
        finished += [event.key for event in easel.turn() if isinstance(event, JobFinished)]
    return finished


def test_a_light_tenants_picture_is_drawn_between_the_layers_of_a_large_decoding(model: Model, paced: Paced) -> None:
    alone = ManualEngine(make_engine(model, EngineLimits())).draw(EngineOrder(key=0, spec=LARGE))
    easel = after_a_light_tenant(model)
    heavy = begin_decoding(easel)
    easel.turn()
    light = easel.submit(EngineOrder(key="light", spec=SMALL, share=LIGHT))
    came_s = paced.time.now
    assert drawn_order(easel) == ["light", "heavy"]
    assert_same_image(heavy.pixels[0], alone.pixels[0])
    spans = [span for span in heavy.trace.spans if span.track == "decode"]
    assert len(spans) > 2
    assert heavy.record.seconds["decode"] == pytest.approx(sum(span.seconds for span in spans))
    busy = {"encode", "denoise", "decode"}
    for drawing in (heavy, light):
        of_device_s = sum(span.seconds for span in drawing.trace.spans if span.track in busy)
        assert drawing.record.provenance.device_s == pytest.approx(of_device_s)
    assert light.record.provenance.device_s < paced.time.now - came_s


@pytest.fixture
def slow_trials(paced: Paced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each evaluation that is tried takes a second."""
    model_input = Sampler.model_input

    def slow(sampler: Sampler, latent: Tensor, evaluation: int) -> Tensor:
        if latent.shape == sampler_choices._TRIED_SHAPE:
            paced.time.now += 1.0
        return model_input(sampler, latent, evaluation)

    monkeypatch.setattr(Sampler, "model_input", slow)


@pytest.mark.usefixtures("slow_trials")
def test_a_light_tenants_picture_is_drawn_between_the_steps_of_anothers_trial(model: Model, paced: Paced) -> None:
    easel = after_a_light_tenant(model)
    easel.draw(EngineOrder(key="visit", spec=LARGE, share=HEAVY))
    listed = replace(
        SMALL,
        sampler=SamplerKind.DPMPP_2M,
        schedule=Schedule(timesteps=tuple(range(900, 880, -1))),
        num_inference_steps=20,
    )
    began_s = paced.time.now
    heavy = easel.submit(EngineOrder(key="heavy", spec=listed, share=HEAVY))
    assert paced.time.now == began_s, "a command tries nothing"
    easel.turn()
    assert paced.time.now - began_s == pytest.approx(1.0)
    light = easel.submit(EngineOrder(key="light", spec=SMALL, share=LIGHT))
    while not light.ended:
        easel.turn()
    assert not heavy.all(JobStarted)
    easel.run()
    assert heavy.all(ImageDrawn)
    tried_s = paced.time.now
    easel.turn()
    easel.draw(EngineOrder(key="again", spec=listed, share=HEAVY))
    assert paced.time.now - tried_s < 20.0, "its result is known"


def test_a_job_that_is_cancelled_between_the_layers_of_its_decoding_runs_no_more_of_them(
    model: Model, paced: Paced
) -> None:
    easel = after_a_light_tenant(model)
    job = begin_decoding(easel).job
    assert job is not None
    latent = weakref.ref(job.requests[0].latent)
    easel.turn()
    layers = paced.layers
    easel.engine.cancel("heavy")
    assert not easel.engine.busy
    easel.turn()
    assert paced.layers == layers
    del easel.drawings["heavy"], job
    gc.collect()
    assert latent() is None


@pytest.mark.usefixtures("paced")
def test_a_job_that_is_cancelled_in_the_middle_of_a_step_leaves_nothing(model: Model) -> None:
    easel = after_a_light_tenant(model)
    easel.submit(EngineOrder(key="heavy", spec=LARGE, share=HEAVY))
    easel.turn()
    assert easel.engine._stepper._halves
    easel.engine.cancel("heavy")
    assert not easel.engine._stepper._halves
    assert not easel.engine.busy


@pytest.mark.parametrize(("available_gib", "order"), [(16.5, ["heavy", "light"]), (18, ["light", "heavy"])])
def test_a_picture_is_decoded_beside_a_paused_one_only_if_there_is_memory_for_both(
    model: Model, paced: Paced, available_gib: float, order: list[str]
) -> None:
    plan = MemoryPlan(available=lambda: round(available_gib * (1 << 30)))
    easel = after_a_light_tenant(replace(model, memory=plan))
    plan.observe_decoding(64, 1 << 30)  # So a large picture takes 16 GiB.
    begin_decoding(easel)
    easel.submit(EngineOrder(key="light", spec=SMALL, share=LIGHT))
    assert drawn_order(easel) == order
    assert not any(drawing.record.provenance.vae_tiled for drawing in easel.drawings.values())
