"""What is done to the gateway's memory of jobs: one caller submits and cancels as fast as it can, with long prompts."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from bottega.errors import BottegaError, JobNotFound
from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.image_pb2 import CancelJobRequest, SubmitJobRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.chaos.scene import DRAW_TIMEOUT_S, PROMPT, Scene

STEPS = 4
LONG_STEPS = 60
SEEDS = (31, 32, 33, 34)
# Four of the longest texts: 64 KiB of each job, so that 2,100 jobs are more than is remembered by default.
_TEXT = "a" * (16 << 10)
_CALLERS = 8
# It sweeps every second.
_SWEPT_S = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A job of somebody else's that was drawn before."""

    request_id: str
    seed: int
    job_id: str


def flood_cancels(scene: Scene, *, jobs: int, rng: random.Random) -> None:
    """So many jobs; what was finished before is still there afterwards, and what is drawn meanwhile comes."""
    for seed in SEEDS:
        scene.undisturbed(seed, STEPS)
    scene.undisturbed(SEEDS[0], LONG_STEPS)
    finished = [_finish(scene, seed) for seed in SEEDS]
    drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
    drawing.wait_for_step(rng.randint(1, LONG_STEPS // 4))
    began = time.monotonic()
    calls = iter(range(jobs))
    with ThreadPoolExecutor(_CALLERS) as callers:
        cancelled = sum(callers.map(lambda _: _flood(scene, calls), range(_CALLERS)))
    scene.tally.figures["cancelled"] = cancelled
    scene.tally.figures["cancelled_per_s"] = cancelled / (time.monotonic() - began)
    time.sleep(_SWEPT_S)
    scene.check(drawing)
    for job in finished:
        _check(scene, job)
    scene.tally.reached("cancelled", jobs)


def _finish(scene: Scene, seed: int) -> Finished:
    request_id = f"chaos-{secrets.token_hex(8)}"
    job = scene.client.submit(PROMPT, request_id=request_id, seed=seed, num_inference_steps=STEPS, **scene.options)
    job.result(timeout_s=DRAW_TIMEOUT_S)
    return Finished(request_id=request_id, seed=seed, job_id=job.id)


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


def _check(scene: Scene, finished: Finished) -> None:
    """The job and its picture are there, and its request_id still means it."""
    tally = scene.tally
    try:
        picture = scene.client.job(finished.job_id).result(timeout_s=DRAW_TIMEOUT_S)[0]
        again = scene.client.submit(
            PROMPT, request_id=finished.request_id, seed=finished.seed, num_inference_steps=STEPS, **scene.options
        )
    except JobNotFound:
        tally.lost += 1
    except BottegaError as error:
        tally.client_errors += 1
        tally.faults.append(f"the client saw {error.reason_name}: {error.message}")
    else:
        tally.different_images += picture.data != scene.undisturbed(finished.seed, STEPS)
        if again.id != finished.job_id:
            tally.faults.append(f"{finished.request_id} means another job now")
