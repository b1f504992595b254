"""What is done to the gateway's memory of jobs: one caller submits and cancels as fast as it can, with long prompts."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc

from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import CancelJobRequest, SubmitJobRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.chaos.gateways import LONG_STEPS, SEEDS, Order, check_order, look_first, new_id, submit
from tests.chaos.scene import DRAW_TIMEOUT_S, Scene

# Four of the longest texts: 64 KiB of each job, so that 2,100 jobs are more than is remembered by default.
_TEXT = "a" * (16 << 10)
_CALLERS = 8
# It sweeps every second.
_SWEPT_S = 2.5


def flood_cancels(scene: Scene, *, times: int, rng: random.Random) -> None:
    """So many jobs; what was finished before is still there afterwards, and what is drawn meanwhile comes."""
    look_first(scene)
    finished = [_finish(scene, seed) for seed in SEEDS]
    drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
    drawing.wait_for_step(rng.randint(1, LONG_STEPS // 4))
    began = time.monotonic()
    calls = iter(range(times))
    with ThreadPoolExecutor(_CALLERS) as callers:
        cancelled = sum(callers.map(lambda _: _flood(scene, calls), range(_CALLERS)))
    scene.tally.figures["cancelled"] = cancelled
    scene.tally.figures["cancelled_per_s"] = cancelled / (time.monotonic() - began)
    time.sleep(_SWEPT_S)
    scene.check(drawing)
    for order in finished:
        check_order(scene, order)
        if submit(scene, replace(order, job_id="")).job_id != order.job_id:
            scene.tally.faults.append(f"{order.request_id} means another job now")
    scene.tally.reached("cancelled", times)


def _finish(scene: Scene, seed: int) -> Order:
    order = submit(scene, Order(request_id=new_id(), seed=seed))
    scene.client.job(order.job_id).result(timeout_s=DRAW_TIMEOUT_S)
    return order


def _flood(scene: Scene, calls: Iterator[int]) -> int:
    """Submits and cancels one job after the other, by the raw contract; how many were cancelled."""
    cancelled = 0
    spec = GenerationSpec(prompt=_TEXT, prompt_2=_TEXT, negative_prompt=_TEXT, negative_prompt_2=_TEXT)
    with grpc.insecure_channel(scene.address, options=channel_options()) as channel:
        stub = ImageServiceStub(channel)
        for _ in calls:
            try:
                job = stub.SubmitJob(SubmitJobRequest(spec=spec), timeout=20).job
                stub.CancelJob(CancelJobRequest(job_id=job.job_id), timeout=20)
            except grpc.RpcError as error:
                scene.tally.faults.append(f"the flood was told {from_rpc_error(error).message}")
            else:
                cancelled += 1
    return cancelled
