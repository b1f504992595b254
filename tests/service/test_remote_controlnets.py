"""A worker's engine with ControlNets on servers in this process, at the ends of real links: latents, waits, losses."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from bottega.controlnet import hosts, links
from bottega.diffusion.control_messages import Kind, number_message
from bottega.diffusion.controlnets import LocalControlNets
from bottega.diffusion.controls import Control, ControlHosts, ControlServer
from bottega.diffusion.engine import Engine, EngineLimits
from bottega.diffusion.events import Checkpointed, Progress, Started
from bottega.diffusion.job import Order
from bottega.diffusion.model import Model
from bottega.diffusion.row import Row
from bottega.diffusion.spec import DrawingSpec
from bottega.errors import ControlNetUnusable, InternalError, NoControlNet, TooLarge, Unavailable
from bottega.transport import Limits, Offer
from bottega.v1.controlnet_pb2 import HOSTED_STATE_LOADING, HOSTED_STATE_ON_DISK
from bottega.worker.controlnets import LinkSettings, Offers, Pace, RemoteControlNets
from load.bench.throttle import Throttle
from tests.controlnets import Gate, control_image, control_spec, layout_of, random_controlnet, save, shelf_of
from tests.drawing import Drawing, Easel, load
from tests.service import linked_servers
from tests.service.linked_servers import LinkedServer, linked_server
from tests.service.scripted_controlnets import Script, ScriptedServer
from tests.stock import assert_close
from tests.threads import torch_threads

NAMES = ("edges", "depth", "layout")
IMAGES = (control_image(1), control_image(2), control_image(3, 80, 112))
PLAIN = DrawingSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=5, width=64, height=64, seed=1
)
ALONE = EngineLimits(max_rows=2)
# Of servers that shall not be given up, however busy the machine is; and where one is silent.
PATIENCE_S = 10.0
SILENCE_S = 0.6
STALL_S = 2.0
IMPATIENT = {"is silent": {"silence_s": SILENCE_S}, "computes nothing, and answers pings": {"stall_s": STALL_S}}


class AlwaysPipelined(Pace):
    """Lets everybody who may go on with old residuals do so at once."""

    def pipelined(self, control: Control, *, answer_s: float, transfer_s: float) -> bool:
        return control.may_be_stale


class Relayed(linked_servers.Offers):
    """Offers of a server that is reached through a relay."""

    def __init__(self, server: LinkedServer, throttle: Throttle) -> None:
        super().__init__(server)
        self._throttle = throttle

    def ask(self, address: str, link_id: str) -> Future[Offer]:
        offer = super().ask(address, link_id).result()
        assert offer.tcp is not None
        self._throttle.target = offer.tcp.port
        relayed = Future[Offer]()
        relayed.set_result(replace(offer, tcp=replace(offer.tcp, port=self._throttle.port)))
        return relayed


class StaleLocal(LocalControlNets):
    """Uses the residuals of the step before, after the first: what pipelined mode shall come to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before: dict[tuple[object, object], list[Tensor]] = {}
        self._now: dict[tuple[object, object], list[Tensor]] = {}

    def ask(self, rows: list[Row]) -> None:
        super().ask(rows)
        self._before, self._now = self._now, {}
        for row in rows:
            (handle,) = row.controls
            self._now[row.owner, row.half] = self._answers[row, handle]

    def take(self, row: Row, point: int) -> list[Tensor]:
        key = (row.owner, row.half)
        return [self._before.get(key, self._now[key])[point]]


@pytest.fixture(scope="module", autouse=True)
def _a_thread_each() -> Iterator[None]:
    """Engine and servers compute at the same time, in one process."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def folders(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    nets = {name: random_controlnet(model.backbone.unet, seed) for seed, name in enumerate(NAMES)}
    return save(nets, tmp_path_factory.mktemp("controlnets"))


@pytest.fixture(scope="module")
def near(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("near", folders, tmp_path_factory.mktemp("near")) as server:
        yield server


@pytest.fixture(scope="module")
def far(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[LinkedServer]:
    with linked_server("far", folders, tmp_path_factory.mktemp("far"), memfd=False) as server:
        yield server


@pytest.fixture(scope="module")
def local(model: Model, folders: Mapping[str, Path]) -> Iterator[LocalControlNets]:
    with shelf_of(model, folders) as shelf:
        yield LocalControlNets(shelf)


@pytest.fixture(autouse=True)
def _no_links_left() -> Iterator[None]:
    """Every test ends its links."""
    yield
    for desk in Desk.all:
        desk.controlnets.stop()
    Desk.all.clear()


class Desk:
    """An engine whose ControlNets are on servers. all: of this test."""

    all: ClassVar[list[Desk]] = []

    def __init__(self, model: Model, offers: Offers, limits: EngineLimits = ALONE, **options: Any) -> None:
        settings = LinkSettings(
            silence_s=options.pop("silence_s", PATIENCE_S),
            stall_s=options.pop("stall_s", PATIENCE_S),
            limits=Limits(slots=options.pop("slots", 8)),
        )
        self.controlnets = RemoteControlNets(
            base=options.pop("base", layout_of(model)),
            dtype=model.dtype,
            device=model.device,
            offers=offers,
            settings=settings,
            **options,
        )
        self.easel = Easel(Engine(model, limits, controlnets=self.controlnets))
        self.all.append(self)

    def draw(self, order: Order) -> Drawing:
        return self.easel.draw(order)


def controlled(*controls: tuple[int, float], spec: DrawingSpec = PLAIN, **options: Any) -> Order:
    """A job with these ControlNets, by place in NAMES and scale."""
    specs = tuple(control_spec(NAMES[place], IMAGES[place], scale, **options) for place, scale in controls)
    images = tuple(IMAGES[place] for place, _ in controls)
    return Order(key="controlled", spec=replace(spec, controlnets=specs), control_images=images)


def on(order: Order, *servers: LinkedServer | ScriptedServer, **options: Any) -> Order:
    """The order, with its ControlNets on these servers, the best first."""
    linked = next((server for server in servers if isinstance(server, LinkedServer)), None)
    there = tuple(server.server for server in servers)
    hosts = tuple(
        ControlHosts(digest=linked.digests[control.name] if linked else "", servers=there)
        for control in order.spec.controlnets
    )
    return replace(order, control_hosts=hosts, **options)


def alone(model: Model, local: LocalControlNets, order: Order) -> Tensor:
    """The latent where all ControlNets are in the engine's process, which is stock's to the last bit."""
    (latent,) = Easel(Engine(model, ALONE, controlnets=local)).draw(order).latents
    return latent


CASES = {
    "one": controlled((0, 0.8)),
    "two": controlled((0, 0.8), (1, 1.3)),
    "three": controlled((2, 0.5), (0, 0.8), (1, 1.3)),
    "unguided": controlled((2, 1.1), spec=replace(PLAIN, guidance_scale=1.0)),
    "in the middle": controlled((0, 1.0), control_guidance_start=0.2, control_guidance_end=0.8),
    "guess mode of two": controlled((0, 1.2), (2, 0.6), guess_mode=True),
}


@pytest.mark.parametrize("case", CASES)
def test_on_a_server_it_ends_to_the_last_bit_as_in_the_engines_own_process(
    model: Model, local: LocalControlNets, near: LinkedServer, far: LinkedServer, case: str
) -> None:
    order = CASES[case]
    expected = alone(model, local, order)
    for server in (near, far):
        drawing = Desk(model, linked_servers.Offers(server)).draw(on(order, server))
        assert torch.equal(drawing.latents[0], expected)
        assert {use.servers for use in drawing.record.controlnets} == {(server.server.name,)}
        assert all(use.stale_steps == 0 and not use.pipelined for use in drawing.record.controlnets)


def test_jobs_in_company_end_as_alone_and_give_everything_back(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    orders = [
        replace(
            on(controlled((seed % 3, 0.9), spec=replace(PLAIN, seed=seed, width=64 + 32 * (seed % 3))), near), key=seed
        )
        for seed in range(6)
    ]
    desk = Desk(model, linked_servers.Offers(near), EngineLimits(max_rows=8), slots=2)
    drawings = desk.easel.run({0: orders[:3], 2: orders[3:]})
    for order in orders:
        assert_close(drawings[order.key].latents[0], alone(model, local, order))
    until(lambda: not near.links.sessions)
    assert near.beats > near.forwards.turns  # from between the blocks of each
    assert near.hosts.shelf.used_bytes > 0  # they stay loaded
    assert desk.controlnets.servers == ["near"]


def test_the_next_step_is_computed_while_the_engine_tells_of_the_last_one(model: Model, near: LinkedServer) -> None:
    desk = Desk(model, linked_servers.Offers(near), EngineLimits(max_rows=2, progress_interval_s=1e-9))
    computed = near.forwards.turns
    drawing = desk.easel.submit(on(controlled((0, 0.8)), near))
    while not steps_done(drawing):
        for event in desk.easel.engine.turn():
            drawing.events.append(event)
            if isinstance(event, Progress):
                until(lambda: near.forwards.turns == computed + 2, 5.0)
    desk.easel.run()
    assert near.forwards.turns == computed + PLAIN.num_inference_steps, "no step is computed twice"


def test_a_job_whose_controlnets_nobody_has_fails_at_once(model: Model) -> None:
    drawing = Desk(model, linked_servers.Offers()).draw(controlled((0, 1.0)))
    assert isinstance(drawing.error, NoControlNet)
    assert drawing.error.metadata == {"controlnets": "edges", "servers": ""}


def test_a_server_that_cannot_be_reached_is_passed_over(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    offers = linked_servers.Offers(near)
    gone = ControlServer(name="gone", address="gone")
    order = on(controlled((0, 0.8)), near)
    hosts = (replace(order.control_hosts[0], servers=(gone, near.server)),)
    drawing = Desk(model, offers).draw(replace(order, control_hosts=hosts))
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert [address for address, _ in offers.asked] == ["gone", "near"]
    assert drawing.record.controlnets[0].servers == ("near",)


def test_what_does_not_fit_is_said_as_the_server_says_it(model: Model, near: LinkedServer) -> None:
    base = replace(layout_of(model), latent_channels=16)
    drawing = Desk(model, linked_servers.Offers(near), base=base).draw(on(controlled((0, 0.8)), near))
    assert isinstance(drawing.error, ControlNetUnusable)
    assert "its latent_channels is 4, the model's 16" in drawing.error.message


def test_what_the_link_has_no_room_for_is_refused_and_the_others_go_on(
    model: Model, local: LocalControlNets, folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_LIMITS", Limits(slots=8, slot_bytes=1 << 20))
    with linked_server("narrow", folders, tmp_path) as narrow:
        fits = on(controlled((0, 0.8)), narrow)
        image = control_image(1, 600, 600)
        spec = replace(PLAIN, controlnets=(control_spec("edges", image),))
        large = on(Order(key="large", spec=spec, control_images=(image,)), narrow)
        desk = Desk(model, linked_servers.Offers(narrow))
        drawings = desk.easel.run({0: [fits], 2: [large]})
    assert isinstance(drawings["large"].error, TooLarge)
    assert drawings[fits.key].record.controlnets[0].servers == ("narrow",)
    assert_close(drawings[fits.key].latents[0], alone(model, local, fits))


class Pair:
    """Offers of a server that follows a script, and of one that works."""

    def __init__(self, bad: ScriptedServer, good: LinkedServer | None) -> None:
        self._bad = bad
        self._good = linked_servers.Offers(*([good] if good else []))

    def ask(self, address: str, link_id: str) -> Any:
        chosen: Offers = self._bad if address == self._bad.server.address else self._good
        return chosen.ask(address, link_id)


SCRIPTS = {
    "dies in its first answer": Script(dies_at_step=1),
    "dies behind the deepest residuals": Script(dies_at_step=1, dies_after_points=1),
    # Long enough for the blocks to run that need no more than is here.
    "dies before the last residuals": Script(dies_at_step=1, dies_after_points=6, dies_after_s=0.2),
    "is silent": Script(silent_at_step=1),
    "computes nothing, and answers pings": Script(hangs_at_step=1),
    "refuses the sessions": Script(refuses_loans=Unavailable("not now")),
    "refuses a step": Script(refuses_steps=InternalError("a forward failed")),
    "answers what nobody asked": Script(lies=lambda number: number_message(Kind.RESIDUALS, number + 7)),
    "answers other residuals": Script(lies=lambda number: number_message(Kind.RESIDUALS, number)),
    "says what only workers say": Script(lies=lambda number: number_message(Kind.STEP, number)),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_whatever_a_server_does_wrong_another_one_finishes_the_same_latent(
    model: Model, local: LocalControlNets, near: LinkedServer, tmp_path: Path, what: str
) -> None:
    # The residuals of the server that goes wrong are 0: any that were used would be seen.
    order = controlled((0, 0.8), (1, 0.5), spec=replace(PLAIN, num_inference_steps=2))
    bad = ScriptedServer("bad", tmp_path, SCRIPTS[what], tuple(layout_of(model).shapes(16, 16)))
    began_s = time.monotonic()
    desk = Desk(model, Pair(bad, near), ALONE, **IMPATIENT.get(what, {}))
    drawing = desk.draw(on(order, bad, near))
    bad.close()
    assert drawing.record.controlnets[0].servers[-1] == "near"  # first: a job that failed has a latent as well
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert time.monotonic() - began_s < 10


def test_a_job_that_moves_to_a_server_that_still_loads_holds_up_nobody(
    model: Model,
    local: LocalControlNets,
    folders: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    monkeypatch.setattr(hosts, "load_controlnet", gate)
    order = controlled((0, 0.8), spec=replace(PLAIN, num_inference_steps=3))
    bad = ScriptedServer("bad", tmp_path, Script(dies_at_step=1), tuple(layout_of(model).shapes(16, 16)))
    with linked_server("slow", folders, tmp_path) as slow:
        desk = Desk(model, Pair(bad, slow))
        moving = desk.easel.submit(on(order, bad, slow))
        until(lambda: desk.easel.turn() is not None and bool(moving.all(Started)))
        other = desk.easel.submit(Order(key="other", spec=replace(PLAIN, width=96)))
        until(lambda: desk.easel.turn() is not None and other.ended)
        assert gate.waiting.is_set()
        assert not moving.ended
        states = {net.name: net.state for net in slow.hosts.report({})}
        assert states == dict.fromkeys(NAMES, HOSTED_STATE_ON_DISK) | {"edges": HOSTED_STATE_LOADING}
        gate.open()
        desk.easel.run()
    bad.close()
    assert torch.equal(moving.latents[0], alone(model, local, order))
    assert len(moving.all(Started)) == 1
    assert moving.record.controlnets[0].servers == ("bad", "slow")
    assert moving.record.seconds["controlnets"] > 0


def test_what_has_no_room_together_here_is_refused_at_once(
    model: Model, folders: Mapping[str, Path], near: LinkedServer
) -> None:
    one_bytes = near.hosts.report({})[0].size_bytes
    with shelf_of(model, folders, budget_bytes=one_bytes) as shelf:
        digests = dict.fromkeys(NAMES, "d")
        desk = Desk(model, linked_servers.Offers(), local=LocalControlNets(shelf), digests=digests)
        began_s = time.monotonic()
        drawing = desk.easel.submit(controlled((0, 0.8), (1, 0.5)))
        until(lambda: desk.easel.turn() is not None and drawing.ended)
        assert isinstance(drawing.error, TooLarge)
        assert time.monotonic() - began_s < 5
        assert desk.draw(replace(controlled((1, 0.5)), key="one")).record.controlnets[0].servers == ("",)


@pytest.mark.parametrize("what", ["dies in its first answer", "is silent", "refuses a step"])
def test_without_another_server_the_engine_finishes_it_or_says_that_nobody_can(
    model: Model, folders: Mapping[str, Path], local: LocalControlNets, tmp_path: Path, what: str
) -> None:
    order = controlled((0, 0.8), spec=replace(PLAIN, num_inference_steps=2))
    bad = ScriptedServer("bad", tmp_path, SCRIPTS[what], tuple(layout_of(model).shapes(16, 16)))
    with shelf_of(model, folders) as shelf:
        desk = Desk(model, Pair(bad, None), local=LocalControlNets(shelf), digests={"edges": "d"}, silence_s=SILENCE_S)
        drawing = desk.draw(on(order, bad))
        assert torch.equal(drawing.latents[0], alone(model, local, order))
        assert drawing.record.controlnets[0].servers == ("bad", "")
        other = on(order, bad)
        elsewhere = tuple(replace(each, digest="another version") for each in other.control_hosts)
        failed = desk.draw(replace(other, control_hosts=elsewhere))
    assert isinstance(failed.error, NoControlNet)
    failed = Desk(model, Pair(bad, None), silence_s=SILENCE_S).draw(on(order, bad))
    bad.close()
    assert isinstance(failed.error, NoControlNet)
    assert failed.error.metadata == {"controlnets": "edges", "servers": "bad"}


def test_pipelined_steps_use_the_residuals_of_the_step_before_and_the_first_one_waits(
    model: Model, folders: Mapping[str, Path], near: LinkedServer
) -> None:
    order = on(controlled((0, 0.8)), near, stale_residuals=True)
    drawing = Desk(model, linked_servers.Offers(near), pace=AlwaysPipelined()).draw(order)
    with shelf_of(model, folders) as shelf:
        expected = alone(model, StaleLocal(shelf), order)
    assert_close(drawing.latents[0], expected)
    (use,) = drawing.record.controlnets
    assert (use.pipelined, use.stale_steps) == (True, PLAIN.num_inference_steps - 1)


def similar(order: Order) -> Order:
    """Its ControlNets' profiles let it go on with old residuals, where the link makes that pay."""
    hosts = tuple(replace(each, similarity=0.999) for each in order.control_hosts)
    return replace(order, control_hosts=hosts, stale_residuals=True)


@pytest.mark.parametrize("link", ["near", "far"])
def test_a_server_that_computes_for_long_is_waited_for(model: Model, link: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(link)
    server.block_s = 0.02
    drawing = Desk(model, linked_servers.Offers(server)).draw(similar(on(controlled((0, 0.8)), server)))
    server.block_s = 0.0
    assert drawing.record.controlnets[0].waited_s > 0.3
    assert drawing.record.controlnets[0].stale_steps == 0


def test_a_slow_link_is_not(model: Model, far: LinkedServer) -> None:
    with Throttle(bytes_per_s=2e6) as throttle:
        drawing = Desk(model, Relayed(far, throttle)).draw(similar(on(controlled((0, 0.8)), far)))
    assert drawing.record.controlnets[0].stale_steps > 0


def test_a_job_that_ends_takes_no_answers_from_those_in_its_group(model: Model, near: LinkedServer) -> None:
    desk = Desk(
        model,
        linked_servers.Offers(near),
        EngineLimits(max_rows=8, max_wait_turns=0, progress_interval_s=1e-9),
        pace=AlwaysPipelined(),
    )
    order = on(controlled((0, 0.8)), near, stale_residuals=True)
    long = desk.easel.submit(replace(order, key="long", spec=replace(order.spec, seed=2, num_inference_steps=30)))
    until(lambda: desk.easel.turn() is not None and steps_done(long) > 0)
    short = desk.easel.submit(replace(order, key="short", spec=replace(order.spec, num_inference_steps=3)))
    until(lambda: desk.easel.turn() is not None and steps_done(short) == 1)
    time.sleep(0.1)  # what both have asked for their next steps is there
    until(lambda: not near.forwards.busy)
    near.computes.clear()
    time.sleep(0.1)  # what the server was about to do
    until(lambda: desk.easel.turn() is not None and short.ended)
    assert near.forwards.busy, "the answer of the last step, which both have asked for, is on its way"
    near.computes.set()
    until(lambda: desk.easel.turn() is not None and long.ended)
    assert long.record.mean_group_requests > 1
    assert long.record.controlnets[0].stale_steps == 30 - 1


def test_who_wants_exact_pictures_waits_for_every_step(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    order = on(controlled((0, 0.8)), near)
    drawing = Desk(model, linked_servers.Offers(near), pace=AlwaysPipelined()).draw(order)
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert drawing.record.controlnets[0].stale_steps == 0


def test_after_a_resume_the_first_pipelined_step_waits(model: Model, near: LinkedServer) -> None:
    order = on(controlled((0, 0.8)), near, stale_residuals=True)
    limits = EngineLimits(max_rows=2, checkpoint_interval_s=1e-9)
    first = Desk(model, linked_servers.Offers(near), limits, pace=AlwaysPipelined()).draw(order)
    checkpoint = first.all(Checkpointed)[1]
    assert checkpoint.steps_done == 2
    resumed = replace(order, checkpoint=checkpoint.data)
    drawing = Desk(model, linked_servers.Offers(near), pace=AlwaysPipelined()).draw(resumed)
    assert drawing.record.controlnets[0].stale_steps == PLAIN.num_inference_steps - 2 - 1


def test_a_pipelined_session_whose_server_dies_waits_for_the_first_step_elsewhere(
    model: Model, near: LinkedServer, tmp_path: Path
) -> None:
    script = Script(dies_at_step=2, dies_after_points=1)
    bad = ScriptedServer("bad", tmp_path, script, tuple(layout_of(model).shapes(16, 16)))
    order = on(controlled((0, 0.8)), bad, near, stale_residuals=True)
    drawing = Desk(model, Pair(bad, near), pace=AlwaysPipelined()).draw(order)
    bad.close()
    (use,) = drawing.record.controlnets
    assert use.servers == ("bad", "near")
    assert 0 < use.stale_steps < PLAIN.num_inference_steps - 1


def steps_done(drawing: Drawing) -> int:
    return max((progress.steps_done for progress in drawing.all(Progress)), default=0)


def until(condition: Any, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within time"
        time.sleep(0.01)
