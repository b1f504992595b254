"""ControlNet servers and workers as real processes: the pictures of stock Diffusers, whoever dies or floods."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from PIL import Image

from bottega.addons.controlnets.engine import provider
from bottega.addons.controlnets.engine.provider import ControlHosts
from bottega.client.suite.plan import free_ports
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import ControlNetUnusable, LinksFull
from bottega.model.schedulers import SamplerKind
from bottega.rpc.status import from_rpc_error
from bottega.transport import Deadline, ServiceOffer, connect, offer_from_wire
from bottega.v1 import generation_pb2, hosted_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from load.bench.throttle import Throttle
from tests.samples.controlnets import control_image, control_spec, random_controlnet, save
from tests.samples.family_models import SIZE, FamilyStock, control_networks, family_model
from tests.support.addon_messages import placed
from tests.support.controlled_engine import Desk
from tests.support.deployed_metrics import assert_shows_what_is_named, scrape
from tests.support.manual_engine import load
from tests.support.offers import OffersAtOnce
from tests.support.running_controlnets import ControlNetServer, House, Worker, controlled, hosts
from tests.support.services import Services
from tests.support.stock import Pixels, assert_close, assert_same_image, load_stock, pixels_of, variant
from tests.support.waiting import wait_until

IMAGES = {"edges": control_image(1), "depth": control_image(2), "layout": control_image(3, 80, 112)}
# Long enough for a kill to land inside of it.
LONG = controlled(("edges", IMAGES["edges"], 0.8), num_inference_steps=24)
KILL_AT = 5
SHORT = controlled(("edges", IMAGES["edges"], 0.8), num_inference_steps=4)
FLOOD_PER_S, FLOOD = 60, 300
# A host's offers fill all room of one within two thirds of it; those that nobody takes up are given up.
GIVEN_UP = FLOOD // 2
# On which residuals take several times as long as a step.
SLOW_BYTES_PER_S = 4e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """near: linked by shared memory. far: by TCP through `throttle`, with room for two of the three ControlNets.

    bare: a worker without ControlNets of its own.
    """

    near: ControlNetServer
    far: ControlNetServer
    throttle: Throttle
    bare: Worker


@pytest.fixture(scope="module")
def stock() -> Any:
    return load_stock()


@pytest.fixture(scope="module")
def nets(stock: Any) -> dict[str, ControlNetModel]:
    return {name: random_controlnet(stock.unet, seed) for seed, name in enumerate(IMAGES)}


@pytest.fixture(scope="module")
def folders(nets: Mapping[str, ControlNetModel], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save(nets, tmp_path_factory.mktemp("controlnets"))


@pytest.fixture(scope="module")
def cast(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cast]:
    folder = tmp_path_factory.mktemp("house")
    one_bytes = sum(path.stat().st_size for path in folders["edges"].glob("*.safetensors"))
    with Services(folder) as services, Throttle() as throttle, ThreadPoolExecutor(3) as pool:
        house = House(services, folder, folders)
        near = pool.submit(house.server, "near")
        throttle.target = free_ports(1)[0]
        links = {
            "listen": f"127.0.0.1:{throttle.target}",
            "advertised": f"127.0.0.1:{throttle.port}",
            "socket": None,
        }
        engine = {"links": links, "budget_bytes": int(2.5 * one_bytes)}
        far = pool.submit(house.server, "far", engine=engine, root=str(folders["edges"].parent))
        bare = pool.submit(house.worker, "bare")
        yield Cast(near=near.result(), far=far.result(), throttle=throttle, bare=bare.result())


@pytest.fixture(scope="module")
def calm(cast: Cast) -> Pixels:
    return cast.bare.draw(LONG, hosts(LONG, cast.near)).picture


def reference(stock: Any, nets: Mapping[str, ControlNetModel], spec: GenerationSpec) -> Pixels:
    used = [nets[net.name] for net in spec.controlnets]
    images = [Image.fromarray(IMAGES[net.name].numpy()) for net in spec.controlnets]
    scales = [net.controlnet_conditioning_scale for net in spec.controlnets]
    starts = [net.control_guidance_start for net in spec.controlnets]
    ends = [net.control_guidance_end if net.HasField("control_guidance_end") else 1.0 for net in spec.controlnets]
    one = len(used) == 1
    pipeline = variant(stock, StableDiffusionXLControlNetPipeline, controlnet=used[0] if one else used)
    drawn = pipeline(
        spec.prompt,
        image=images[0] if one else images,
        controlnet_conditioning_scale=scales[0] if one else scales,
        control_guidance_start=starts[0] if one else starts,
        control_guidance_end=ends[0] if one else ends,
        guess_mode=any(net.guess_mode for net in spec.controlnets),
        num_inference_steps=spec.num_inference_steps,
        guidance_scale=spec.guidance_scale,
        width=spec.width,
        height=spec.height,
        generator=torch.Generator("cpu").manual_seed(spec.seed),
    )
    return pixels_of(drawn.images[0])


def test_one_request_may_use_two_servers(cast: Cast, stock: Any, nets: Mapping[str, ControlNetModel]) -> None:
    spec = controlled(("depth", IMAGES["depth"], 0.7), ("edges", IMAGES["edges"], 1.1))
    placed = [hosts(spec, cast.far)[0], hosts(spec, cast.near)[1]]
    drawn = cast.bare.draw(spec, placed)
    assert_same_image(drawn.picture, reference(stock, nets, spec))
    assert (drawn.servers(0), drawn.servers(1)) == (["far"], ["near"])
    assert all(use.waited_s > 0 and not use.stale_steps for use in drawn.provenance.controlnets)
    assert drawn.provenance.exact
    assert drawn.provenance.encoder_s > 0
    linked = [event for event in cast.bare.service.events() if event["event"] == "linked to a ControlNet server"]
    assert {event["service"]: event["backend"] for event in linked} == {"near": "memfd", "far": "tcp"}


@pytest.mark.parametrize("number", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_server_that_freezes_or_dies_in_a_session_is_replaced_by_the_next(
    cast: Cast, calm: Pixels, number: signal.Signals
) -> None:
    act = once(lambda: cast.near.signal_engine(number))
    drawn = cast.bare.draw(LONG, hosts(LONG, cast.near, cast.far), on_step=act)
    with contextlib.suppress(ProcessLookupError):
        cast.near.signal_engine(signal.SIGCONT)
    assert_same_image(drawn.picture, calm)
    assert drawn.servers() == ["near", "far"]
    assert drawn.provenance.exact
    wait_until(lambda: "layout" in cast.near.hosted(), "the next engine to host what later tests use", within_s=90)


def test_a_server_reports_what_forward_passes_and_loads_take(cast: Cast) -> None:
    assert cast.bare.draw(SHORT, hosts(SHORT, cast.near)).picture.size
    wait_until(lambda: bool(cast.near.hosted()["edges"].forward_times), "a report", within_s=5)
    edges = cast.near.hosted()["edges"]
    guided = next(measured for measured in edges.forward_times if measured.rows == 2)
    assert guided.latent_height == guided.latent_width > 0
    assert guided.seconds > 0.0
    assert edges.load_s > 0.0


def test_a_pinned_controlnet_stays_when_it_is_not_needed_any_more(cast: Cast) -> None:
    def loaded() -> set[str]:
        return {name for name, net in cast.near.hosted().items() if net.state == hosted_pb2.HOSTED_STATE_LOADED}

    assert cast.near.pin("depth").pinned
    wait_until(lambda: "depth" in loaded(), "the pinned one to be loaded", within_s=20)
    assert cast.near.hosted()["depth"].pinned
    cast.near.prefetch("edges")
    wait_until(lambda: {"edges", "depth"} <= loaded(), "both to be loaded", within_s=20)
    cast.near.evict("edges", "depth")
    wait_until(lambda: "edges" not in loaded(), "the other one to be evicted", within_s=20)
    assert "depth" in loaded()
    assert not cast.near.pin("depth", pinned=False).pinned
    cast.near.evict("depth")
    wait_until(lambda: "depth" not in loaded(), "it to be evicted", within_s=20)


def test_a_scrape_has_what_dashboard_and_alerts_name(cast: Cast) -> None:
    assert_shows_what_is_named("controlnet", scrape(cast.near.service.metrics))


def test_another_controlnet_can_be_added_where_there_is_one_below_the_root(cast: Cast) -> None:
    hosted = cast.far.add("mine/edges", "edges")
    assert hosted.digest == cast.far.hosted()["edges"].digest
    spec = controlled(("mine/edges", IMAGES["edges"], 0.8), num_inference_steps=SHORT.num_inference_steps)
    drawn = cast.bare.draw(spec, hosts(spec, cast.far)).picture
    assert_same_image(drawn, cast.bare.draw(SHORT, hosts(SHORT, cast.far)).picture)
    with pytest.raises(grpc.RpcError) as refusal:
        cast.far.add("mine/x", ".")
    assert isinstance(from_rpc_error(refusal.value), ControlNetUnusable)
    assert "mine/x" not in cast.far.hosted()


class _FarOffers(OffersAtOnce):
    """Offers of links to a server's process, for an engine in this one."""

    def __init__(self, server: ControlNetServer) -> None:
        super().__init__()
        self._server = server

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        return ServiceOffer(offer=offer_from_wire(self._server.open_link("tester", link_id).offer), service=address)


def test_one_for_stable_diffusion_3_is_added_and_draws_as_stock(cast: Cast, folders: Mapping[str, Path]) -> None:
    network, image = control_networks("SD 3")[0], control_image(4, SIZE, SIZE)
    save({"sd3": network}, folders["edges"].parent)
    hosted = cast.far.add("mine/sd3", "sd3")
    far = ControlHosts(digest=hosted.digest, servers=(provider.ControlServer(name="far", address="far"),))
    spec = ResolvedSpec(
        prompt="a big red star",
        num_inference_steps=4,
        width=SIZE,
        height=SIZE,
        sampler=SamplerKind.FLOW_MATCH_EULER,
        controlnets=(control_spec("mine/sd3", image, 0.8),),
    )
    order = EngineOrder(key="it", spec=spec, control_images=(image,), addons=placed([far]))
    with Desk.closing():
        drawing = Desk(load(family_model("SD 3")), _FarOffers(cast.far)).draw(order)
    theirs = FamilyStock("SD 3").latent(spec, networks=[network], control_images=[image])
    assert_close(drawing.latents[0], theirs)
    assert drawing.record.provenance.controlnets[0].servers == ["far"]


def test_a_full_server_says_when_to_ask_again_and_a_workers_job_waits_for_it(cast: Cast) -> None:
    """After the server's death: the worker needs a new link."""
    wait_until(lambda: bool(cast.near.hosted()), "another engine to serve")
    with ThreadPoolExecutor(9) as pool:
        crowd: list[Future[str]] = [pool.submit(answer_of, cast.near) for _ in range(600)]
        refused = lambda: any(each.done() and each.result() == "UNAVAILABLE" for each in crowd)  # noqa: E731
        wait_until(refused, "a refusal")
        drawn = pool.submit(cast.bare.draw, SHORT, hosts(SHORT, cast.near))
        assert {each.result(60) for each in crowd} == {"OK", "UNAVAILABLE"}
        assert drawn.result(60).servers() == ["near"]


def test_workers_link_and_draw_while_a_stranger_asks_for_links_that_it_does_not_take_up(cast: Cast) -> None:
    wait_until(lambda: answer_of(cast.near) == "OK", "room for offers after the crowd")
    before = sum(not_taken_up(cast.near))
    with flood(cast.near) as answers:
        while answers.total() < FLOOD:
            connect(offer_from_wire(cast.near.open_link("another worker").offer), Deadline.after(20)).close()
            time.sleep(0.2)
        assert cast.bare.draw(SHORT, hosts(SHORT, cast.near)).servers() == ["near"]
    wait_until(lambda: sum(not_taken_up(cast.near)) - before > GIVEN_UP, "the offers to be given up")
    one_by_one, _ = not_taken_up(cast.near)
    assert one_by_one < GIVEN_UP, "the log is short"


@contextlib.contextmanager
def flood(server: ControlNetServer) -> Iterator[Counter[str]]:
    """A stranger asks for offers at a steady rate, until the block ends; how many calls had each status."""
    answers, stopped = Counter[str](), threading.Event()

    def run() -> None:
        due = time.monotonic()
        while not stopped.is_set():
            answers[answer_of(server)] += 1
            due += 1 / FLOOD_PER_S
            time.sleep(max(0.0, due - time.monotonic()))

    stranger = threading.Thread(target=run, daemon=True)
    stranger.start()
    try:
        yield answers
    finally:
        stopped.set()
        stranger.join(10)


def answer_of(server: ControlNetServer) -> str:
    try:
        server.open_link("stranger")
    except grpc.RpcError as error:
        typed = from_rpc_error(error)
        assert isinstance(typed, LinksFull), typed
        assert typed.retry_after_s
        return str(error.code().name)
    return "OK"


def not_taken_up(server: ControlNetServer) -> tuple[int, int]:
    """Offers, as the log counts them: one by one, and in sums."""
    events = server.service.events()
    one_by_one = sum(event["event"] == "an offer of a link was not used" for event in events)
    sums = (int(event["offers"]) for event in events if event["event"] == "more offers of links were not used")
    return one_by_one, sum(sums)


def test_on_a_slow_link_a_similar_controlnet_is_pipelined(cast: Cast) -> None:
    """The last one: the link stays slow."""
    spec = controlled(("edges", IMAGES["edges"], 0.8), fidelity=generation_pb2.FIDELITY_BALANCED)
    told = hosts(spec, cast.far)
    told[0].similarity = 0.99
    cast.throttle.bytes_per_s = SLOW_BYTES_PER_S
    drawn = cast.bare.draw(spec, told)
    (use,) = drawn.provenance.controlnets
    assert drawn.picture is not None
    assert use.mode == generation_pb2.RESIDUAL_MODE_PIPELINED
    assert use.stale_steps > 0
    assert not drawn.provenance.exact


def once(act: Any) -> Any:
    """Calls it when KILL_AT steps are done."""
    done: list[int] = []

    def on_step(steps: int) -> None:
        if steps >= KILL_AT and not done:
            done.append(steps)
            act()

    return on_step
