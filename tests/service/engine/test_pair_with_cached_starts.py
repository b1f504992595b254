"""A picture that jumps to a cached latent while the other worker of a pair computes half of its rows."""

from __future__ import annotations

import torch

from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.fakes.scripted_latents import Cached, Hit, cached, entry
from tests.samples.small_model import SIZE
from tests.support.engines import TOGETHER, make_engine
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close
from tests.support.waiting import wait_until

SPEC = ResolvedSpec(
    prompt="a small green circle",
    num_inference_steps=10,
    width=SIZE,
    height=SIZE,
    seed=5,
    sampler=SamplerKind.EULER_ANCESTRAL,
)
HIT: Hit = (entry(1), 5, 3 * torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)))


def test_a_pair_draws_the_same_picture_from_a_latent(model: Model) -> None:
    order = cached(EngineOrder(key=1, spec=SPEC))
    alone = Cached(model, limits=TOGETHER).draw(order, hits=[HIT])
    with FollowerThread(make_engine(model, TOGETHER)) as follower:
        peer = led(follower)
        try:
            wait_until(lambda: peer.free, "the pair")
            drawing = Cached(model, limits=TOGETHER, peer=peer).draw(order, at_turn=2, hits=[HIT])
        finally:
            peer.stop()
    assert_close(drawing.latents[0], alone.latents[0])
    assert [start.from_step for start in drawing.record.provenance.cached_starts] == [5]
    assert drawing.record.provenance.HasField("pair")
    assert drawing.record.provenance.pair.steps >= 2
