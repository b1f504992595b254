"""A pair, a ControlNet server and a mixed batch at once: every picture ends as stock draws it, whoever dies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from diffusers import ControlNetModel

from bottega.addons.controlnets.worker import RemoteControlNets
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import control_image, control_spec, controlled_latent, layout_of, save
from tests.samples.small_model import SIZE, small_model
from tests.support.addon_messages import placed
from tests.support.engines import TOGETHER, make_engine
from tests.support.linked_servers import LinkedServer, Offers, linked_server
from tests.support.manual_engine import MOST_TURNS, ManualEngine
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import assert_close, load_stock
from tests.support.torch_threads import torch_threads
from tests.support.waiting import wait_until

PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background",
    num_inference_steps=10,
    guidance_scale=4.0,
    width=SIZE,
    height=SIZE,
    seed=1,
)
IMAGES = {"edges": control_image(1), "depth": control_image(2)}
# In which lent turn the follower dies: the earlier ones were shared.
FATAL = 4


@pytest.fixture(scope="module", autouse=True)
def _a_thread_each() -> Iterator[None]:
    """Engines and server compute at the same time, in one process."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def server(nets: Mapping[str, ControlNetModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    folders = save(nets, tmp_path_factory.mktemp("controlnets"))
    with linked_server("near", folders, tmp_path_factory.mktemp("near")) as server:
        yield server


def remote(model: Model, server: LinkedServer) -> RemoteControlNets:
    return RemoteControlNets(base=layout_of(model), model=model, offers=Offers(server))


def controlled(
    key: str, server: LinkedServer, scales: Mapping[str, float], spec: ResolvedSpec, **options: object
) -> EngineOrder:
    specs = tuple(control_spec(name, IMAGES[name], scale, **options) for name, scale in scales.items())
    return EngineOrder(
        key=key,
        spec=replace(spec, controlnets=specs),
        control_images=tuple(IMAGES[name] for name in scales),
        addons=placed(server.at(name) for name in scales),
    )


def mixed(server: LinkedServer) -> dict[int, list[EngineOrder]]:
    """Jobs by the turn before which they come: with both ControlNets, one, one without guidance, and none."""
    both = controlled("both", server, {"edges": 0.8, "depth": 0.5}, PLAIN)
    guess = controlled("guess", server, {"depth": 1.1}, replace(PLAIN, seed=5, guidance_scale=6.0), guess_mode=True)
    middle = controlled("middle", server, {"edges": 0.9}, replace(PLAIN, seed=7), control_guidance_start=0.3)
    lone = controlled("lone", server, {"edges": 1.0}, replace(PLAIN, seed=9, guidance_scale=1.0, num_inference_steps=6))
    plain = replace(PLAIN, seed=3, num_images=2, num_inference_steps=7, sampler=SamplerKind.DPMPP_2M)
    return {0: [both], 1: [EngineOrder(key="plain", spec=plain), guess], 3: [lone, middle]}


@pytest.mark.slow
@pytest.mark.alone  # a peer is used only where the cores are free for both
def test_a_mixed_batch_with_controlnets_ends_as_stock_does_with_a_peer_that_dies_and_comes_back(
    model: Model, server: LinkedServer, nets: Mapping[str, ControlNetModel]
) -> None:
    ours, theirs = remote(model, server), remote(model, server)
    arrivals = mixed(server)
    orders = [order for several in arrivals.values() for order in several]
    with FollowerThread(make_engine(model, TOGETHER, controlnets=theirs)) as follower:
        mortal = led(follower, lambda turn: follower.go() if turn == FATAL else None)
        easel = ManualEngine(make_engine(model, TOGETHER, controlnets=ours, peer=mortal))
        for turn in range(MOST_TURNS):
            for order in arrivals.pop(turn, ()):
                easel.submit(order)
            if not arrivals and not easel.engine.busy:
                break
            easel.turn()
            if mortal.turns == FATAL and not mortal.free:
                follower.come()
                wait_until(lambda: mortal.free, "the peer to be back")
        from_server = theirs.counters.snapshot().received.size_bytes
        mortal.stop()
        ours.stop()
        theirs.stop()
    stock = load_stock(small_model())
    for order in orders:
        for index, latent in enumerate(easel.drawings[order.key].latents):
            single = replace(order.spec, seed=order.spec.seed + index)
            assert_close(latent, controlled_latent(stock, nets, single, order.control_images))
    records = {key: drawing.record.provenance for key, drawing in easel.drawings.items()}
    assert not records["lone"].HasField("pair"), "without guidance there is nothing to halve"
    assert all(records[key].HasField("pair") for key in ("both", "plain"))
    assert sum(record.pair.taken_back_steps for record in records.values()) >= 1
    assert mortal.turns > FATAL, "it is used again"
    assert from_server > 1 << 20, "residuals of its rows went straight to it"
