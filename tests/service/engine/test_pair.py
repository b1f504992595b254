"""A pair draws what stock Diffusers draws, whatever becomes of the follower: two engines, a real link, one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from diffusers import ControlNetModel

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.addons.controlnets.worker import RemoteControlNets
from bottega.engine.job import EngineOrder
from bottega.engine.parallel import pair
from bottega.engine.parallel.remote_rows import OffloadedRow, OffloadResult, OffloadTarget
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ModelMismatch
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.model.schedulers import SamplerKind
from bottega.transport import LinkCounters
from bottega.v1.generation_pb2 import PairUse
from bottega.worker.peer import Leader
from tests.fakes.scripted_latents import Cached, Hit, cached, entry
from tests.samples.controlnets import control_image, control_spec, controlled_latent, layout_of, save, shelf_of
from tests.samples.engine_loras import Components, LorasByHand, lora_spec, styled_latent, styled_stock
from tests.samples.small_model import SIZE, small_model
from tests.support.addon_messages import placed
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.linked_servers import Offers, linked_server
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.pair_follower import FollowerThread, led
from tests.support.stock import Stock, assert_close, load_stock
from tests.support.waiting import wait_until

PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background",
    num_inference_steps=6,
    guidance_scale=4.0,
    width=SIZE,
    height=SIZE,
    seed=1,
)
UNGUIDED = replace(PLAIN, prompt="a green circle", guidance_scale=1.0, seed=2)
NAMES = ("edges", "depth")
IMAGES = (control_image(1), control_image(2))
WAIT_S = 10.0
PATIENCE_S = 3.0
SLOW_S = 0.5


@pytest.fixture(scope="module")
def stock() -> Stock:
    return Stock(small_model())


@pytest.fixture
def follower(model: Model) -> Iterator[FollowerThread]:
    with FollowerThread(make_engine(model, TOGETHER)) as follower:
        yield follower


@pytest.fixture
def peer(follower: FollowerThread) -> Iterator[Leader]:
    peer = led(follower)
    yield peer
    peer.stop()


@pytest.fixture
def easel(model: Model, peer: Leader) -> ManualEngine:
    return leader(model, peer)


@pytest.fixture
def lends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row is lent whenever one may be: on a busy machine it may not pay, or an answer take longer than is usual."""
    monkeypatch.setattr(pair, "rows_to_offload", lambda _, able, **__: min(able, 1))
    monkeypatch.setattr(pair, "_LEAST_PATIENCE_S", PATIENCE_S)


def leader(model: Model, peer: Leader) -> ManualEngine:
    """An engine that has measured nothing, so that it lends whenever it may: the two share this process's cores."""
    return ManualEngine(make_engine(model, TOGETHER, peer=peer))


def pair_of(drawing: Drawing) -> PairUse:
    """What the follower did for it; it must have been lent something."""
    assert drawing.record.provenance.HasField("pair")
    return drawing.record.provenance.pair


@pytest.mark.usefixtures("lends")
def test_a_guided_request_ends_as_stock_does_with_half_of_its_rows_elsewhere(easel: ManualEngine, stock: Stock) -> None:
    spec = replace(PLAIN, sampler=SamplerKind.EULER_ANCESTRAL)
    drawing = easel.draw(EngineOrder(key="a", spec=spec))
    assert_close(drawing.latents[0], stock.reference(spec).latent)
    record = pair_of(drawing)
    assert record.worker == "follower"
    assert (record.steps, record.taken_back_steps) == (6, 0)


def test_a_mixed_group_ends_as_stock_does_and_only_rows_that_may_be_lent_are(
    easel: ManualEngine, stock: Stock, follower: FollowerThread
) -> None:
    orders = {
        "two": EngineOrder(key="two", spec=replace(PLAIN, num_images=2, num_inference_steps=8)),
        "plain": EngineOrder(key="plain", spec=UNGUIDED),
        "kept": EngineOrder(key="kept", spec=replace(PLAIN, seed=9), latent_parallelism=False),
    }
    drawings = easel.run({0: [orders["two"]], 1: [orders["plain"]], 2: [orders["kept"]]})
    for key, order in orders.items():
        for index in range(order.spec.num_images):
            assert_close(drawings[key].latents[index], stock.reference(order.spec, index=index).latent)
    assert pair_of(drawings["two"]).steps > 0
    assert not drawings["plain"].record.provenance.HasField("pair")
    assert not drawings["kept"].record.provenance.HasField("pair")


def test_nothing_is_lent_while_requests_queue(model: Model, easel: ManualEngine, peer: Leader) -> None:
    easel.engine.set_backlog(1)
    assert not easel.draw(EngineOrder(key="a", spec=PLAIN)).record.provenance.HasField("pair")
    easel = leader(model, peer)
    easel.engine.set_backlog(1)
    easel.engine.set_backlog(0)
    assert pair_of(easel.draw(EngineOrder(key="b", spec=PLAIN))).steps > 0


def test_a_follower_with_something_of_its_own_to_do_is_left_alone(
    model: Model, easel: ManualEngine, peer: Leader, follower: FollowerThread
) -> None:
    follower.busy = True
    wait_until(lambda: not peer.free, "the follower to say so")
    assert not easel.draw(EngineOrder(key="a", spec=PLAIN)).record.provenance.HasField("pair")
    follower.busy = False
    wait_until(lambda: peer.free, "the follower to say so")
    assert pair_of(leader(model, peer).draw(EngineOrder(key="b", spec=PLAIN))).steps > 0


@pytest.mark.usefixtures("lends")
def test_rows_whose_follower_dies_in_the_middle_of_a_step_are_computed_here_and_later_ones_there_again(
    model: Model, easel: ManualEngine, peer: Leader, follower: FollowerThread, stock: Stock
) -> None:
    steps = iter(range(100))

    def die_at_the_fourth() -> None:
        if next(steps) == 4:
            follower.go()

    follower.pause = die_at_the_fourth
    drawing = easel.draw(EngineOrder(key="a", spec=PLAIN))
    assert_close(drawing.latents[0], stock.reference(PLAIN).latent)
    assert pair_of(drawing).taken_back_steps == 1
    assert 1 <= pair_of(drawing).steps < 5
    follower.come()
    wait_until(lambda: peer.free, "the follower to be back")
    assert pair_of(leader(model, peer).draw(EngineOrder(key="b", spec=PLAIN))).steps > 0


@pytest.mark.usefixtures("lends")
def test_rows_of_a_follower_that_hangs_are_computed_here_and_its_late_answer_changes_nothing(
    easel: ManualEngine, peer: Leader, follower: FollowerThread, stock: Stock
) -> None:
    free, steps = threading.Event(), iter(range(100))

    def hang_at_the_third() -> None:
        if next(steps) == 3:
            free.wait(WAIT_S)

    follower.pause = hang_at_the_third
    began_s = time.monotonic()
    drawing = easel.draw(EngineOrder(key="a", spec=PLAIN))
    assert time.monotonic() - began_s < WAIT_S
    assert_close(drawing.latents[0], stock.reference(PLAIN).latent)
    assert pair_of(drawing).taken_back_steps == 1
    free.set()
    wait_until(lambda: peer.free, "the late answer")
    again = easel.draw(EngineOrder(key="b", spec=PLAIN))
    assert_close(again.latents[0], stock.reference(PLAIN).latent)


def test_a_refused_pair_is_told_once_and_tried_again(
    model: Model, follower: FollowerThread, caplog: pytest.LogCaptureFixture
) -> None:
    follower.refusal = ModelMismatch("workers a and b cannot be a pair")
    peer = Leader("follower:1", terms={}, offers=follower, counters=LinkCounters())
    peer.start()
    try:
        wait_until(lambda: "workers a and b" in str([vars(record) for record in caplog.records]), "a warning")
        time.sleep(1.2)
        told = [record for record in caplog.records if record.name.endswith("leader")]
        assert len(told) == 1
        assert not peer.free
        follower.refusal = None
        wait_until(lambda: peer.free, "the pair")
    finally:
        peer.stop()


@pytest.fixture(scope="module")
def shelf(
    model: Model, nets: Mapping[str, ControlNetModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlNetCache]:
    with shelf_of(model, save(nets, tmp_path_factory.mktemp("controlnets"))) as shelf:
        yield shelf


def controlled(**options: Any) -> EngineOrder:
    specs = tuple(
        control_spec(name, image, scale, **options)
        for name, image, scale in zip(NAMES, IMAGES, (0.8, 0.5), strict=True)
    )
    return EngineOrder(key="controlled", spec=replace(PLAIN, controlnets=specs), control_images=IMAGES)


@pytest.mark.parametrize("options", [{"control_guidance_start": 0.3}, {"guess_mode": True}], ids=str)
def test_rows_with_controlnets_are_lent_too_and_end_as_stock_does(
    model: Model, shelf: ControlNetCache, nets: Mapping[str, ControlNetModel], options: dict[str, Any]
) -> None:
    order = controlled(**options)
    with FollowerThread(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf))) as follower:
        peer = led(follower)
        easel = ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf), peer=peer))
        drawing = easel.draw(order)
        peer.stop()
    assert_close(drawing.latents[0], controlled_latent(load_stock(small_model()), nets, order.spec, IMAGES))
    assert pair_of(drawing).steps > 0


@pytest.mark.usefixtures("lends")
def test_a_follower_takes_residuals_of_its_rows_straight_from_the_server(
    model: Model, nets: Mapping[str, ControlNetModel], tmp_path: Path
) -> None:
    with linked_server("near", save(nets, tmp_path), tmp_path) as server:
        ours, theirs = (RemoteControlNets(base=layout_of(model), model=model, offers=Offers(server)) for _ in range(2))
        with FollowerThread(make_engine(model, TOGETHER, controlnets=theirs)) as follower:
            peer = led(follower)
            easel = ManualEngine(make_engine(model, TOGETHER, controlnets=ours, peer=peer))
            order = replace(controlled(), addons=placed(server.at(name) for name in NAMES))
            drawing = easel.draw(order)
            from_server = theirs.counters.snapshot().received.size_bytes
            peer.stop()
        ours.stop()
        theirs.stop()
    assert_close(drawing.latents[0], controlled_latent(load_stock(small_model()), nets, order.spec, IMAGES))
    assert pair_of(drawing).steps > 0
    assert from_server > 1 << 16


class LosableControlNets(LocalControlNets):
    """As on a server that can be lost. lost: whether it is."""

    lost = False

    def opened(self, handles: Sequence[Hashable]) -> bool:
        return not self.lost and super().opened(handles)

    def is_void(self, row: Row) -> bool:
        return self.lost


def test_a_job_whose_controlnets_the_follower_loses_goes_on_here_beside_rows_that_it_still_computes(
    model: Model, shelf: ControlNetCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever was measured.
    monkeypatch.setattr(pair, "rows_to_offload", lambda rows, able, **__: min(able, rows - 1, 3))
    order = controlled()
    order = replace(order, spec=replace(order.spec, num_inference_steps=16))
    theirs = LosableControlNets(shelf)
    with FollowerThread(make_engine(model, TOGETHER, controlnets=theirs)) as follower:
        peer = led(follower)
        easel = ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf), peer=peer))
        drawing = easel.submit(order)
        plain = easel.submit(EngineOrder(key="plain", spec=replace(PLAIN, num_inference_steps=30)))
        while plain.job is None or drawing.job is None or not drawing.job.provenance.HasField("pair"):
            easel.turn()
            assert not drawing.ended
        theirs.lost = True
        easel.turn()  # its last lent row is late
        shared, done = drawing.job.provenance.pair.steps, drawing.job.steps_done
        for _ in range(4):
            easel.turn()
        assert drawing.job.steps_done == done + 4
        assert drawing.job.provenance.pair.steps == shared
        assert follower.forwards > shared, "the other job's rows still go there"
        theirs.lost = False
        easel.run()
        peer.stop()
    alone = ManualEngine(make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf)))
    assert_close(drawing.latents[0], alone.draw(order).latents[0])
    assert pair_of(drawing).steps > shared, "it comes back"


class SlowControlNets(LocalControlNets):
    """As on a server that takes long."""

    def ask(self, rows: list[Row]) -> None:
        time.sleep(SLOW_S)
        super().ask(rows)


class TimedLeader:
    """A leader that notes how long an answer took here, and how long it counts. An OffloadTarget."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._offloaded_s = 0.0
        self.seconds: list[tuple[float, float]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._leader, name)

    def offload(self, rows: Sequence[OffloadedRow]) -> bool:
        self._offloaded_s = time.monotonic()
        return self._leader.offload(rows)

    def result(self, timeout_s: float) -> OffloadResult | None:
        result = self._leader.result(timeout_s)
        if result is not None:
            self.seconds.append((time.monotonic() - self._offloaded_s, result.seconds))
        return result


@pytest.mark.usefixtures("lends")
def test_waiting_for_residuals_does_not_make_a_follower_slow(model: Model, shelf: ControlNetCache) -> None:
    with FollowerThread(make_engine(model, TOGETHER, controlnets=SlowControlNets(shelf))) as follower:
        peer = led(follower)
        timed = TimedLeader(peer)
        easel = ManualEngine(
            make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf), peer=cast("OffloadTarget", timed))
        )
        order = controlled()
        drawing = easel.submit(replace(order, spec=replace(order.spec, num_inference_steps=500)))
        while not timed.seconds:
            assert not drawing.ended
            easel.turn()
            time.sleep(0.01)  # for the follower, which opens the ControlNets meanwhile
        easel.engine.cancel(order.key)
        peer.stop()
    assert all(counted_s <= took_s - SLOW_S for took_s, counted_s in timed.seconds)


@pytest.fixture(scope="module")
def styled() -> tuple[Any, dict[str, Components]]:
    return styled_stock(small_model())


@pytest.mark.usefixtures("lends")
def test_rows_with_loras_are_lent_too_once_they_are_there_and_go_in_at_the_leaders_step(
    model: Model, styled: tuple[Any, dict[str, Components]]
) -> None:
    pipeline, components = styled
    scales = {"pastel": 1.0, "outline": 0.8}
    ours, theirs = LorasByHand.of(components), LorasByHand.of(components)
    ours.here.clear()
    # It has weights of its own, as another process has.
    other = make_engine(load(small_model()), TOGETHER, loras=theirs)
    with FollowerThread(other) as follower:
        peer = led(follower)
        easel = ManualEngine(make_engine(model, TOGETHER, loras=ours, peer=peer))
        lora_weights(easel.engine).costs = FixedCosts(pays=True)
        loras = tuple(lora_spec(name, scale, bound=6) for name, scale in scales.items())
        drawing = easel.submit(EngineOrder(key="a", spec=replace(PLAIN, num_inference_steps=9, loras=loras)))
        while drawing.job is None or drawing.job.steps_done < 4:
            easel.turn()
        ours.come(*scales)
        easel.run()
        wait_until(lambda: not theirs.open, "the follower to let go of them")
        peer.stop()
    lora_weights(easel.engine).restore()
    assert [each.from_step for each in drawing.record.provenance.loras] == [4, 4]
    spec = replace(PLAIN, num_inference_steps=9)
    assert_close(drawing.latents[0], styled_latent(pipeline, spec, scales, 4))
    assert pair_of(drawing).steps > 5


def test_the_follower_forgets_jobs_that_have_ended(easel: ManualEngine, follower: FollowerThread) -> None:
    drawing = easel.draw(EngineOrder(key="a", spec=PLAIN))
    assert pair_of(drawing).steps > 0, "else it had nothing to forget"
    wait_until(lambda: follower.engine.remote_jobs.count == 0, "the job to be forgotten")


def test_in_half_precision_rows_at_the_follower_are_said_to_be_shared_and_some_are_never_lent() -> None:
    half = load(small_model(), dtype=torch.bfloat16)
    with FollowerThread(make_engine(half, TOGETHER)) as follower:
        peer = led(follower)
        easel = leader(half, peer)
        lent = easel.draw(EngineOrder(key="lent", spec=PLAIN))
        alone = easel.draw(EngineOrder(key="alone", spec=PLAIN, shared_turns=False))
        peer.stop()
    assert pair_of(lent).steps > 0
    assert lent.record.shared_in_half_precision
    assert not alone.record.provenance.HasField("pair")
    assert not alone.record.shared_in_half_precision
    assert torch.equal(alone.latents[0], Stock(small_model(), dtype=torch.bfloat16).reference(PLAIN).latent)


@pytest.mark.usefixtures("lends")
def test_a_pair_draws_the_same_picture_from_a_cached_latent(model: Model, peer: Leader) -> None:
    order = cached(EngineOrder(key=1, spec=replace(PLAIN, num_inference_steps=10, sampler=SamplerKind.EULER_ANCESTRAL)))
    hit: Hit = (entry(1), 5, 3 * torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(0)))
    alone = Cached(model, limits=TOGETHER).draw(order, hits=[hit])
    drawing = Cached(model, limits=TOGETHER, peer=peer).draw(order, at_turn=2, hits=[hit])
    assert_close(drawing.latents[0], alone.latents[0])
    assert [start.from_step for start in drawing.record.provenance.cached_starts] == [5]
    assert pair_of(drawing).steps >= 2
