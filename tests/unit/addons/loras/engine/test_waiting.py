"""Jobs whose LoRAs are not there: who waits and how long, who does not, what each failure is, what is given back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from bottega.addons.loras.engine import LoraHandle
from bottega.addons.loras.wire.module_parts import TEXT_ENCODERS
from bottega.engine.events import ImageDrawn, JobAdvanced, JobDecided, JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest, LoraUnusable, NotFinite, Unavailable
from bottega.model.model import Model
from bottega.model.operations import Operations
from bottega.model_files.family_names import UNET
from tests.fakes.fake_time import FakeTime
from tests.samples.engine_loras import STORE_DOWN, Components, LorasByHand, lora_spec, random_layers
from tests.samples.small_model import SIZE
from tests.support.addon_messages import loras_at
from tests.support.engines import LORA_TIMEOUT_S, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import Drawing, ManualEngine

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=5, width=SIZE, height=SIZE, seed=1)
LONG = replace(SPEC, num_inference_steps=30)
EAGER = EngineLimits(max_rows=64, max_wait_turns=0, progress_interval_s=0.0)


@pytest.fixture(scope="module")
def components(model: Model) -> dict[str, Components]:
    unet, text = model.backbone.network, model.text_encoders[1]
    return {
        "outline": {UNET: random_layers(unet, 1)},
        "pastel": {UNET: random_layers(unet, 2), TEXT_ENCODERS[1]: random_layers(text, 3, targets=["q_proj", "fc1"])},
        "misfit": {UNET: random_layers(text, 4, targets=["q_proj"])},
    }


@pytest.fixture
def loras(components: dict[str, Components]) -> LorasByHand:
    return LorasByHand.of(components, here=False)


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
def easel(model: Model, loras: LorasByHand, clock: FakeTime) -> Iterator[ManualEngine]:
    engine = make_engine(model, EAGER, loras=loras, clock=clock.monotonic)
    yield ManualEngine(engine)
    lora_weights(engine).restore()  # the next test's engine has the same model


def styled(*names: str, spec: ResolvedSpec = SPEC, key: str = "styled", **options: Any) -> EngineOrder:
    return EngineOrder(key=key, spec=replace(spec, loras=tuple(lora_spec(name, **options) for name in names)))


def turn_until(easel: ManualEngine, happened: Callable[[], object]) -> None:
    for _ in range(300):
        if happened():
            return
        easel.turn()
    raise AssertionError("it does not happen")


def steps_done(drawing: Drawing) -> int:
    return drawing.job.steps_done if drawing.job is not None else 0


def test_an_exact_job_waits_before_its_first_step_and_nobody_else_does(
    easel: ManualEngine, loras: LorasByHand, clock: FakeTime
) -> None:
    loras.text.add("outline")
    waiting = easel.submit(styled("outline"))
    other = easel.submit(EngineOrder(key="plain", spec=SPEC))
    turn_until(easel, lambda: other.ended)
    assert not waiting.events
    clock.now += 2.5
    easel.turn()
    assert loras.settled  # it pauses instead of spinning
    loras.come("outline")
    easel.run()
    assert [type(event) for event in waiting.events[:3]] == [JobDecided, JobStarted, JobAdvanced]
    (record,) = waiting.record.provenance.loras
    assert (record.from_step, record.load_s, record.wait_s) == (0, 1.25, 2.5)
    assert waiting.record.seconds["loras"] == pytest.approx(2.5 + record.patch_s)
    assert not other.record.provenance.loras
    assert not loras.open


def test_a_bounded_job_starts_at_once_and_waits_at_its_bound_while_others_go_on(
    easel: ManualEngine, loras: LorasByHand, clock: FakeTime
) -> None:
    loras.text |= {"outline", "pastel"}
    bounded = easel.submit(replace_bounds(styled("outline", "pastel"), 4, 2))
    other = easel.submit(EngineOrder(key="plain", spec=LONG))
    turn_until(easel, lambda: other.ended)
    assert steps_done(bounded) == 2
    loras.come("outline")
    clock.now += 3.0
    easel.turn()
    assert steps_done(bounded) == 2  # all go in together
    loras.come("pastel")
    easel.run()
    assert [event.decisions for event in bounded.all(JobDecided)] == [loras_at(2)]
    assert [(each.name, each.from_step, each.wait_s) for each in bounded.record.provenance.loras] == [
        ("outline", 2, 3.0),
        ("pastel", 2, 3.0),
    ]


def replace_bounds(order: EngineOrder, *bounds: int) -> EngineOrder:
    loras = tuple(replace(lora, bound=bound) for lora, bound in zip(order.spec.loras, bounds, strict=True))
    return replace(order, spec=replace(order.spec, loras=loras))


def test_a_pinned_step_is_kept_whether_the_lora_is_early_or_late(easel: ManualEngine, loras: LorasByHand) -> None:
    loras.come("outline")
    early = easel.draw(styled("outline", key="early", from_step=3))
    assert [event.decisions for event in early.all(JobDecided)] == [loras_at(3)]
    loras.here.clear()
    late = easel.submit(styled("outline", key="late", from_step=3))
    for _ in range(20):
        easel.turn()
    assert steps_done(late) == 3
    loras.come("outline")
    easel.run()
    assert late.record.provenance.loras[0].from_step == 3
    assert torch.allclose(early.latents[0], late.latents[0], atol=1e-4)


def test_all_images_of_a_job_get_their_loras_at_one_step(model: Model, loras: LorasByHand) -> None:
    one_by_one = replace(EAGER, max_rows=2, max_wait_turns=1000)
    easel = ManualEngine(make_engine(model, one_by_one, loras=loras))
    loras.text.add("outline")
    drawing = easel.submit(styled("outline", spec=replace(SPEC, num_images=2), bound=4))
    turn_until(easel, lambda: steps_done(drawing) == 3)
    assert drawing.job is not None
    assert [request.step for request in drawing.job.requests] == [3, 0]
    loras.come("outline")
    easel.run()
    assert [event.decisions for event in drawing.all(JobDecided)] == [loras_at(3)]
    lora_weights(easel.engine).restore()
    again = ManualEngine(make_engine(model, one_by_one, loras=loras))
    pinned = again.draw(styled("outline", spec=replace(SPEC, num_images=2), from_step=3))
    lora_weights(again.engine).restore()
    for ours, theirs in zip(drawing.latents, pinned.latents, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("text_here", [False, True], ids=["its text never comes", "all but its text never comes"])
def test_a_lora_that_never_comes_fails_its_job_after_the_bound_on_waiting(
    model: Model, easel: ManualEngine, loras: LorasByHand, clock: FakeTime, text_here: bool
) -> None:
    before = {name: tensor.clone() for name, tensor in model.backbone.network.state_dict().items()}
    loras.text |= {"outline"} if text_here else set()
    drawing = easel.submit(styled("outline", bound=2))
    other = easel.submit(EngineOrder(key="plain", spec=LONG))
    turn_until(easel, lambda: steps_done(other) == 9)
    clock.now += LORA_TIMEOUT_S + 0.1
    easel.turn()
    assert isinstance(drawing.error, Unavailable)
    assert "LoRA outline did not arrive within 10 s" in drawing.error.message
    easel.run()
    assert len(other.pixels) == 1
    assert not loras.open
    for name, tensor in model.backbone.network.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_an_engine_that_only_waits_fails_the_job_soon_after_the_bound(
    easel: ManualEngine, loras: LorasByHand, clock: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settle(_self: LorasByHand, _handles: Sequence[LoraHandle], timeout_s: float) -> None:
        clock.now += timeout_s  # nothing comes

    monkeypatch.setattr(LorasByHand, "settle", settle)
    began_s = clock.now
    assert "did not arrive within 10 s" in str(easel.draw(styled("outline")).error)
    assert LORA_TIMEOUT_S < clock.now - began_s < LORA_TIMEOUT_S + 2.0
    assert not loras.open


@pytest.mark.parametrize("steps", [0, 2], ids=["before it is encoded", "in the middle"])
def test_what_the_source_says_fails_the_job_by_that_name_and_nobody_else(
    easel: ManualEngine, loras: LorasByHand, steps: int
) -> None:
    if steps:
        loras.text.add("outline")
    drawing = easel.submit(styled("outline", bound=4))
    other = easel.submit(EngineOrder(key="plain", spec=LONG))
    turn_until(easel, lambda: steps_done(other) == 3)
    loras.failed["outline"] = STORE_DOWN
    easel.run()
    assert drawing.error is STORE_DOWN
    assert len(other.pixels) == 1
    assert not loras.open


def test_a_lora_that_does_not_fit_the_model_fails_its_job_and_touches_no_weight(
    easel: ManualEngine, loras: LorasByHand
) -> None:
    loras.come("misfit")
    drawing = easel.draw(styled("misfit", bound=2))
    assert isinstance(drawing.error, LoraUnusable)
    assert lora_weights(easel.engine).pristine_bytes == 0
    assert not loras.open


@pytest.mark.parametrize("turns", [1, 4], ids=["while its text is fetched", "in the middle"])
def test_a_cancelled_job_lets_go_of_its_loras(easel: ManualEngine, loras: LorasByHand, turns: int) -> None:
    if turns > 1:
        loras.text.add("outline")
    easel.submit(styled("outline", bound=4))
    for _ in range(turns):
        easel.turn()
    assert loras.open
    easel.engine.cancel("styled")
    assert not easel.engine.busy
    assert not loras.open


def test_what_can_never_go_in_is_refused_at_once(model: Model, easel: ManualEngine) -> None:
    pins = (lora_spec("outline", from_step=1), lora_spec("pastel", from_step=2))
    with pytest.raises(InvalidRequest) as caught:
        easel.submit(EngineOrder(key=0, spec=replace(SPEC, loras=pins)))
    assert [each.field for each in caught.value.violations] == ["spec.loras[1].from_step"]
    with pytest.raises(InvalidRequest):
        easel.submit(styled("outline", from_step=SPEC.num_inference_steps))
    with pytest.raises(InvalidRequest, match="at most 0 where a LoRA is measured"):
        easel.submit(styled("outline", from_step=1, measured=True))
    easel.submit(styled("outline", key="at once", from_step=0, measured=True))
    with pytest.raises(Unavailable, match="has no LoRAs"):
        ManualEngine(make_engine(model, EAGER)).submit(styled("outline"))


@pytest.mark.parametrize("patches", [False, True], ids=["beside the weights", "inside them"])
def test_loras_that_are_too_strong_are_named_with_their_scales(
    easel: ManualEngine, loras: LorasByHand, patches: bool
) -> None:
    lora_weights(easel.engine).costs = FixedCosts(pays=patches)
    loras.come("outline", "pastel")
    strong = (lora_spec("pastel", scale=0.5), lora_spec("outline", scale=1e38))
    drawing = easel.draw(EngineOrder(key="strong", spec=replace(SPEC, loras=strong)))
    assert isinstance(drawing.error, NotFinite)
    assert "its LoRAs (pastel at scale 0.5, outline at scale 1e+38); try scales nearer to 0" in drawing.error.message
    assert drawing.error.metadata == {"loras": "pastel,outline"}
    assert easel.draw(EngineOrder(key="plain", spec=SPEC)).all(ImageDrawn), "nothing of it stays in the weights"


def test_warming_up_measures_both_ways_and_leaves_the_weights_as_they_were(model: Model, loras: LorasByHand) -> None:
    before = {name: tensor.clone() for name, tensor in model.backbone.network.state_dict().items()}
    engine = make_engine(model, replace(EAGER, max_rows=2), loras=loras)
    engine.warm_up()
    assert lora_weights(engine).swaps == 4
    assert lora_weights(engine).patched is None
    for name, tensor in model.backbone.network.state_dict().items():
        assert torch.equal(tensor, before[name])
    rounded = replace(model, operations=Operations(rounds_weights=True))
    engine = make_engine(rounded, replace(EAGER, max_rows=2), loras=loras)
    engine.warm_up()
    assert lora_weights(engine).swaps == 0, "rounded weights cannot be written"
