"""What is done to the gateway by callers who want nothing of it: idle connections, half requests, streams that wait.

Everybody else must get the same pictures meanwhile, and short calls their answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import grpc
import psutil

from bottega.client import Client
from bottega.errors import QueueFull
from bottega.rpc.channel import channel_options, open_channel
from bottega.rpc.status import from_rpc_error
from bottega.v1 import image_pb2_grpc
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import GenerateRequest, WatchJobRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.chaos.scene import TENANTS, Scene
from tests.support.crowds import alive, connections
from tests.support.flooders import cancel_at_once, flooding

SEEDS = (31, 32, 33)
STEPS = 30
# Of what is watched: it must outlast the asking for all streams, since those of a picture that is done make room.
WATCHED_STEPS = 200
# Over the 1,024 files that a shell lets a process open.
IDLE = 1_150
HALF_REQUESTS = 300
HALF = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
# Over all streams that a service has open at once.
STREAMS = 2_100
# A connection has at most 640 calls at once: a client waits with more.
STREAMS_OF_CONNECTION = 525
# Half of max_streams, for one host, where others have none.
ADMITTED = 1_024
ATTACKS = ("empty_loras", "nested", "large_images", "large_id", "silent:5", "pings:45000")
# Calls a second without a key over two connections of another host.
STRANGERS = "strangers:10000:2:0"
STRANGERS_FROM = "127.0.0.2"
# Calls that are cancelled within milliseconds.
CANCELLED = 200
ATTACK_S = 20.0
# Of the gateway beside them, and beside strangers.
MOST_MIB, MOST_STRANGE_MIB = 768.0, 1024.0
# Of a short call, on busy cores.
SHORT_CALL_S = 5.0


def flood_connections(scene: Scene, *, times: int, rng: random.Random) -> None:
    """Thousands of connections without a call, to both ports of the gateway, while pictures are drawn."""
    scene.look_first(SEEDS, STEPS)
    for _ in range(times):
        with (
            connections(scene.address, IDLE) as idle,
            connections(scene.gateway.metrics, HALF_REQUESTS, says=HALF),
        ):
            _draw_meanwhile(scene, rng)
            _scrape(scene)
            scene.tally.most("idle_connections", alive(idle))
        _draw_meanwhile(scene, rng)
        scene.tally.count("floods")
    scene.tally.reached("floods", times)
    scene.tally.reached("idle_connections", IDLE)


def flood_streams(scene: Scene, *, times: int, rng: random.Random) -> None:
    """One caller watches a job by the thousand, while others draw, and ask how their jobs stand."""
    scene.look_first(SEEDS, STEPS)
    scene.undisturbed(SEEDS[0], WATCHED_STEPS)
    for _ in range(times):
        drawing = scene.draw(seed=SEEDS[0], steps=WATCHED_STEPS)
        status = drawing.wait_for_step(1)
        if status is not None:
            with _watched(scene, status.job_id):
                _draw_meanwhile(scene, rng)
            scene.tally.count("floods")
        scene.check(drawing)
    scene.tally.reached("floods", times / 2)
    scene.tally.reached("refused_streams", STREAMS - ADMITTED)


def flood_messages(scene: Scene, *, times: int, rng: random.Random) -> None:
    """Callers send the largest and most nested messages, and pings, while others draw and ask how their jobs stand."""
    _flood(scene, lambda: flooding(scene.address, ATTACKS, seconds=ATTACK_S), times=times, rng=rng, most_mib=MOST_MIB)


def flood_strangers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """Callers without a key come by the ten thousand, while a tenant draws and asks how its jobs stand."""

    def attack() -> AbstractContextManager[object]:
        return flooding(scene.address, [STRANGERS], seconds=ATTACK_S, source=STRANGERS_FROM)

    _flood(scene, attack, times=times, rng=rng, most_mib=MOST_STRANGE_MIB)


def _flood(
    scene: Scene,
    attack: Callable[[], AbstractContextManager[object]],
    *,
    times: int,
    rng: random.Random,
    most_mib: float,
) -> None:
    scene.look_first(SEEDS, STEPS)
    gateway = psutil.Process(scene.gateway.process.pid)
    for _ in range(times):
        with attack():
            ends = time.monotonic() + ATTACK_S
            while time.monotonic() < ends:
                _draw_meanwhile(scene, rng)
                scene.tally.most("gateway_mib", gateway.memory_info().rss >> 20)
        scene.tally.count("floods")
    scene.tally.check("MiB of the gateway", scene.tally.figures.get("gateway_mib", 0.0), most_mib)
    scene.tally.reached("floods", times)


def cancel_within_quota(scene: Scene, *, times: int, rng: random.Random) -> None:
    """A tenant cancels its calls within milliseconds, so as not to be counted, while another one draws."""
    scene.look_first(SEEDS, STEPS)
    for _ in range(times):
        asyncio.run(_cancel_calls(scene, scene.keys["rash"]))
        _draw_meanwhile(scene, rng)
    with Client(scene.address, api_key=scene.keys["rash"]) as rash:
        jobs = len(rash.list_jobs(page_size=100).jobs)
    scene.tally.figures["jobs_of_the_rash"] = jobs
    # A minute may begin anew meanwhile.
    scene.tally.check("jobs of a tenant that cancels", jobs, 2 * (TENANTS["rash"].per_minute or 0))
    scene.tally.reached("jobs_of_the_rash", 1)


async def _cancel_calls(scene: Scene, key: str) -> None:
    async with open_channel(scene.address, api_key=key) as channel:
        images: image_pb2_grpc.ImageServiceAsyncStub = image_pb2_grpc.ImageServiceStub(channel)
        await cancel_at_once(
            lambda prompt: images.Generate(GenerateRequest(spec=GenerationSpec(prompt=prompt))), CANCELLED
        )


def _draw_meanwhile(scene: Scene, rng: random.Random) -> None:
    drawings = [scene.draw(seed=seed, steps=STEPS) for seed in rng.sample(SEEDS, 2)]
    while not all(drawing.over for drawing in drawings):
        began = time.monotonic()
        scene.client.list_jobs(page_size=5)
        scene.joined()
        scene.tally.most("short_calls_s", time.monotonic() - began)
        time.sleep(0.05)
    scene.tally.check("seconds of two short calls", scene.tally.figures.get("short_calls_s", 0.0), SHORT_CALL_S)
    for drawing in drawings:
        if scene.check(drawing) is not None:
            scene.tally.count("pictures")


def _scrape(scene: Scene) -> None:
    with urllib.request.urlopen(f"http://{scene.gateway.metrics}/metrics", timeout=SHORT_CALL_S) as answer:
        if b"bottega_rpc_in_flight" not in answer.read():
            scene.tally.faults.append("a scrape has no metrics")


@contextlib.contextmanager
def _watched(scene: Scene, job_id: str) -> Iterator[None]:
    """One host asks for so many streams; those that are refused must hear why, and when to come back."""
    with contextlib.ExitStack() as stack:
        channels = [
            stack.enter_context(grpc.insecure_channel(scene.address, options=channel_options()))
            for _ in range(STREAMS // STREAMS_OF_CONNECTION)
        ]
        request = WatchJobRequest(job_id=job_id)
        watches = [
            ImageServiceStub(channel).WatchJob(request) for channel in channels for _ in range(STREAMS_OF_CONNECTION)
        ]
        for watch in watches:
            try:
                next(watch, None)
            except grpc.RpcError as error:
                _count_refusal(scene, error)
        yield


def _count_refusal(scene: Scene, error: grpc.RpcError) -> None:
    refused = from_rpc_error(error)
    if isinstance(refused, QueueFull) and refused.retry_after_s:
        scene.tally.count("refused_streams")
    else:
        scene.tally.faults.append(f"a watcher was told {type(refused).__name__}: {refused.message}")
