"""What a measured LoRA changes from step to step, against pictures drawn apart; and that measuring disturbs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bottega.addons.loras.wire.module_parts import TEXT_ENCODERS
from bottega.engine.events import ImageDrawn, JobCheckpointed, JobDecided, JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.model_files.family_names import UNET
from tests.samples.engine_loras import Components, LorasByHand, lora_spec, random_layers
from tests.samples.small_model import SIZE
from tests.support.addon_messages import loras_at
from tests.support.engines import lora_weights, make_engine
from tests.support.manual_engine import Drawing, ManualEngine

SPEC = ResolvedSpec(prompt="a small green circle", num_inference_steps=5, width=SIZE, height=SIZE, seed=1, num_images=2)
EAGER = EngineLimits(max_rows=64, max_wait_turns=0, progress_interval_s=0.0)


@pytest.fixture(scope="module")
def components(model: Model) -> dict[str, Components]:
    unet, text = model.backbone.network, model.text_encoders[1]
    words = {TEXT_ENCODERS[1]: random_layers(text, 3, targets=["q_proj", "fc1"])}
    return {"style": {UNET: random_layers(unet, 1), **words}, "words": words}


@pytest.fixture
def loras(components: dict[str, Components]) -> LorasByHand:
    return LorasByHand.of(components)


@pytest.fixture
def easel(model: Model, loras: LorasByHand) -> Iterator[ManualEngine]:
    engine = make_engine(model, EAGER, loras=loras)
    yield ManualEngine(engine)
    lora_weights(engine).restore()


def _order(name: str = "style", *, key: str = "measured", spec: ResolvedSpec = SPEC, **options: Any) -> EngineOrder:
    return EngineOrder(key=key, spec=replace(spec, loras=(lora_spec(name, **{"measured": True, **options}),)))


def _latents(easel: ManualEngine, order: EngineOrder) -> list[list[Tensor]]:
    """After each step, of each image, drawn alone."""
    drawing = easel.submit(order)
    found: dict[int, list[Tensor]] = {}
    while not drawing.ended:
        easel.turn()
        if drawing.job is not None:
            found.setdefault(drawing.job.requests[0].step, [latent.clone() for latent in drawing.latents])
    return [found[step] for step in range(1, order.spec.num_inference_steps + 1)]


def _measured(drawing: Drawing) -> tuple[float, ...]:
    (record,) = drawing.record.provenance.loras
    return tuple(record.similarities)


def test_it_is_the_cosine_with_what_the_same_prompt_gives_without_the_unets_part(easel: ManualEngine) -> None:
    last = SPEC.num_inference_steps - 1
    whole = _latents(easel, _order(key="with", measured=False))
    without = _latents(easel, _order(key="without", measured=False, from_step=last))
    expected = [
        min(
            float(cosine_similarity(one.flatten().double(), other.flatten().double(), dim=0))
            for one, other in zip(*pair, strict=True)
        )
        for pair in zip(whole, without, strict=True)
    ]
    drawing = easel.draw(_order())
    assert list(_measured(drawing))[:last] == pytest.approx(expected[:last], abs=1e-5)
    assert len(_measured(drawing)) == SPEC.num_inference_steps
    assert _measured(drawing)[0] > _measured(drawing)[last - 1]
    for one, other in zip(drawing.latents, whole[-1], strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert len(drawing.all(ImageDrawn)) == 2
    assert not easel.engine.busy


def test_what_the_text_encoders_read_is_no_part_of_it(easel: ManualEngine) -> None:
    assert _measured(easel.draw(_order("words"))) == pytest.approx([1.0] * SPEC.num_inference_steps, abs=1e-6)


def test_nothing_is_drawn_before_the_loras_are_there_whatever_their_bound(
    easel: ManualEngine, loras: LorasByHand
) -> None:
    loras.here.clear()
    drawing = easel.submit(_order(bound=3))
    for _ in range(20):
        easel.turn()
    assert not drawing.events
    loras.come("style")
    easel.run()
    assert [event.decisions for event in drawing.all(JobDecided)] == [loras_at(0)]
    assert len(_measured(drawing)) == SPEC.num_inference_steps


def test_a_later_attempt_measures_from_the_beginning(model: Model, components: dict[str, Components]) -> None:
    often = ManualEngine(
        make_engine(model, replace(EAGER, checkpoint_interval_s=0.0), loras=LorasByHand.of(components))
    )
    first = often.draw(_order())
    checkpoint = first.all(JobCheckpointed)[-1].data
    again = often.draw(replace(_order(key="again"), checkpoint=checkpoint, decisions=loras_at(0)))
    assert again.all(JobStarted)[0].steps_resumed == 0
    assert _measured(again) == pytest.approx(_measured(first), abs=1e-5)
    lora_weights(often.engine).restore()


def test_beside_controlnets_it_is_refused(easel: ManualEngine) -> None:
    net = ControlSpec(name="edges", image_digest="0" * 64)
    with pytest.raises(InvalidRequest, match="measured"):
        easel.submit(_order(spec=replace(SPEC, controlnets=(net,))))
