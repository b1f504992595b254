"""ControlNet servers and workers as real processes: the pictures of stock Diffusers, whoever dies on the way."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
from PIL import Image

from bottega.errors import ControlNetUnusable
from bottega.rpc.status import from_rpc_error
from bottega.v1 import generation_pb2, hosted_pb2
from bottega.v1.generation_pb2 import GenerationSpec
from load.bench.throttle import Throttle
from tests.samples.controlnets import control_image, random_controlnet, save
from tests.support.running_controlnets import ControlNetServer, House, Worker, controlled, hosts
from tests.support.services import Services
from tests.support.stock import Pixels, assert_same_image, load_stock, pixels_of, variant
from tests.support.waiting import wait_until

IMAGES = {"edges": control_image(1), "depth": control_image(2), "layout": control_image(3, 80, 112)}
# Long enough for a kill to land inside of it.
LONG = controlled(("edges", IMAGES["edges"], 0.8), num_inference_steps=40)
KILL_AT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """near: linked by shared memory. far: by TCP, with room for two of the three ControlNets.

    bare: a worker without ControlNets of its own.
    """

    near: ControlNetServer
    far: ControlNetServer
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
    with Services(folder) as services, ThreadPoolExecutor(3) as pool:
        house = House(services, folder, folders)
        near = pool.submit(house.server, "near")
        small = {"links_socket": None, "budget_bytes": int(2.5 * one_bytes)}
        far = pool.submit(house.server, "far", engine=small, root=str(folders["edges"].parent))
        bare = pool.submit(house.worker, "bare")
        yield Cast(near=near.result(), far=far.result(), bare=bare.result())


@pytest.fixture(scope="module")
def calm(cast: Cast) -> Pixels:
    """LONG, drawn while nobody died."""
    return cast.bare.draw(LONG, hosts(LONG, cast.near)).picture


def reference(stock: Any, nets: Mapping[str, ControlNetModel], spec: GenerationSpec) -> Pixels:
    """What stock makes of it."""
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


def test_with_three_controlnets_it_is_the_stock_pipelines_picture(
    cast: Cast, stock: Any, nets: Mapping[str, ControlNetModel]
) -> None:
    names = ("layout", "edges", "depth")
    spec = controlled(*((name, IMAGES[name], 0.5 + 0.3 * place) for place, name in enumerate(names)))
    drawn = cast.bare.draw(spec, hosts(spec, cast.near))
    assert_same_image(drawn.picture, reference(stock, nets, spec))
    uses = drawn.provenance.controlnets
    assert [(use.name, list(use.servers), use.stale_steps) for use in uses] == [(name, ["near"], 0) for name in names]
    assert all(use.waited_s > 0 for use in uses)
    assert drawn.provenance.exact
    assert drawn.provenance.encoder_s > 0


def test_one_request_may_use_two_servers(cast: Cast, stock: Any, nets: Mapping[str, ControlNetModel]) -> None:
    spec = controlled(("depth", IMAGES["depth"], 0.7), ("edges", IMAGES["edges"], 1.1))
    placed = [hosts(spec, cast.far)[0], hosts(spec, cast.near)[1]]
    drawn = cast.bare.draw(spec, placed)
    assert_same_image(drawn.picture, reference(stock, nets, spec))
    assert (drawn.servers(0), drawn.servers(1)) == (["far"], ["near"])
    linked = [event for event in cast.bare.service.events() if event["event"] == "linked to a ControlNet server"]
    assert {event["server"]: event["backend"] for event in linked} == {"near": "memfd", "far": "tcp"}


def test_a_server_that_dies_in_a_session_is_replaced_by_the_next(cast: Cast, calm: Pixels) -> None:
    drawn = cast.bare.draw(LONG, hosts(LONG, cast.near, cast.far), on_step=once(cast.near.kill_engine))
    assert_same_image(drawn.picture, calm)
    assert drawn.servers() == ["near", "far"]
    assert drawn.provenance.exact


def test_what_is_prefetched_is_loaded_before_anybody_asks(cast: Cast) -> None:
    assert cast.far.prefetch("layout", "unknown", "edges") == ["layout", "edges"]
    loaded = hosted_pb2.HOSTED_STATE_LOADED
    wait_until(lambda: cast.far.hosted()["layout"].state == loaded, "a prefetched ControlNet")


def test_another_controlnet_can_be_added_where_there_is_one_below_the_root(
    cast: Cast, folders: Mapping[str, Path], calm: Pixels
) -> None:
    hosted = cast.far.add("mine/edges", str(snapshot_of(folders["edges"])))
    assert hosted.digest == cast.far.hosted()["edges"].digest
    spec = controlled(("mine/edges", IMAGES["edges"], 0.8), num_inference_steps=LONG.num_inference_steps)
    assert_same_image(cast.bare.draw(spec, hosts(spec, cast.far)).picture, calm)
    with pytest.raises(grpc.RpcError) as refusal:
        cast.far.add("mine/x", ".")
    assert isinstance(from_rpc_error(refusal.value), ControlNetUnusable)
    assert "mine/x" not in cast.far.hosted()


def snapshot_of(net: Path) -> Path:
    """Beside that folder, a snapshot as the hub's client makes it: its files are links to blobs."""
    repo = net.parent / "models--owner--name"
    snapshot = repo / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    shutil.copytree(net, repo / "blobs")
    for file in net.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


def test_on_a_slow_link_a_similar_controlnet_is_pipelined(cast: Cast, slow: ControlNetServer) -> None:
    spec = controlled(("edges", IMAGES["edges"], 0.8), fidelity=generation_pb2.FIDELITY_BALANCED)
    told = hosts(spec, slow)
    told[0].similarity = 0.99
    drawn = cast.bare.draw(spec, told)
    (use,) = drawn.provenance.controlnets
    assert drawn.picture is not None
    assert use.mode == generation_pb2.RESIDUAL_MODE_PIPELINED
    assert use.stale_steps > 0
    assert not drawn.provenance.exact


@pytest.fixture(scope="module")
def slow(folders: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlNetServer]:
    """A server behind a link on which residuals take several times as long as a step."""
    folder = tmp_path_factory.mktemp("slow")
    with Services(folder) as services, Throttle(bytes_per_s=4e6) as throttle, socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        throttle.target = found.getsockname()[1]
        found.close()
        engine = {
            "links_socket": None,
            "links_listen": f"127.0.0.1:{throttle.target}",
            "links_advertised": f"127.0.0.1:{throttle.port}",
        }
        house = House(services, folder, {"edges": folders["edges"]})
        yield house.server("slow", engine=engine)


def once(act: Any) -> Any:
    """Calls it when KILL_AT steps are done."""
    done: list[int] = []

    def on_step(steps: int) -> None:
        if steps >= KILL_AT and not done:
            done.append(steps)
            act()

    return on_step
