"""A pair whose follower has a LoRA in its weights: it computes rows with another one, or none, as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bottega.engine.engine import Engine
from bottega.engine.job import EngineOrder
from bottega.engine.parallel import pair
from bottega.engine.spec import ResolvedSpec
from tests.samples.engine_loras import LorasByHand, lora_spec, styled_latent, styled_stock
from tests.samples.small_model import SIZE, small_model
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close, latent_of, load_stock

SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=6, width=SIZE, height=SIZE, seed=15
)
FROM_STEP = 3


@pytest.mark.parametrize("count", [1, 3], ids=["a row of the late one", "both of its rows and one without"])
def test_a_follower_with_another_lora_in_its_weights_computes_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **_: min(rows - 1, able, count))
    stock, components = styled_stock(small_model())
    late = EngineOrder(key="late", spec=replace(SPEC, loras=(lora_spec("pastel", from_step=FROM_STEP),)))
    plain = EngineOrder(key="plain", spec=replace(SPEC, seed=4))
    with FollowerThread(_patched_engine(LorasByHand.of(components))) as follower:
        peer = led(follower)
        easel = ManualEngine(make_engine(load(small_model()), TOGETHER, loras=LorasByHand.of(components), peer=peer))
        drawings = easel.run({0: [plain, late]})  # the last rows are lent first
        peer.stop()
    assert_close(drawings["late"].latents[0], styled_latent(stock, SPEC, {"pastel": 1.0}, FROM_STEP))
    assert_close(drawings["plain"].latents[0], latent_of(load_stock(small_model()), plain.spec))
    record = drawings["late"].record.provenance.pair
    assert record is not None
    assert record.steps > FROM_STEP, "rows of steps before and after it, or this says little"
    assert record.taken_back_steps == 0


def _patched_engine(loras: LorasByHand) -> Engine:
    """A worker's with a model of its own, as a job with a LoRA has left it."""
    engine = make_engine(load(small_model()), TOGETHER, loras=loras)
    lora_weights(engine).costs = FixedCosts(pays=True)
    ManualEngine(engine).draw(EngineOrder(key="own", spec=replace(SPEC, loras=(lora_spec("outline", 0.8),))))
    assert lora_weights(engine).patched is not None
    return engine
