"""What is done to the gateway: killed around acknowledgement while it has work of all kinds, and kept from its disk."""

from __future__ import annotations

import contextlib
import random
import resource
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import grpc
import psutil

from bottega.client import JobState, Picture
from bottega.errors import BottegaError, JobNotFound, StorageUnavailable
from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1.generation_pb2 import SAMPLER_EULER_ANCESTRAL, GenerationSpec
from bottega.v1.image_pb2 import SubmitJobRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.chaos.scene import DRAW_TIMEOUT_S, OPTIONS, PROMPT, Scene
from tests.support import lost_files
from tests.support.waiting import wait_until

STEPS = 4
LONG_STEPS = 60
SEEDS = (21, 22, 23, 24)
# The gateway dies within this time after its callers have called: some of them have their answer then, some have not.
AROUND_S = 0.04
# A gateway that died is ready again within this time.
READY_S = 3.0
# Of all orders, on each side of their acknowledgement.
LEAST_SHARE = 0.1
# A disk that is back is found out about within this time, and taken up.
HEALED_S = 5.0
# What happens to the job store's file.
LOSSES = (lost_files.unlink_all, lost_files.replace_by_nothing, lost_files.truncate_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A job that was submitted. job_id: empty when that was not acknowledged."""

    request_id: str
    seed: int
    job_id: str = ""
    refusal: BottegaError | None = None


def kill_gateways(scene: Scene, *, times: int, rng: random.Random, ready_s: float = READY_S) -> None:
    """kill -9 while jobs are submitted and one is drawn; then every order must end once, as the same job.

    The worker goes on with what it draws, and is found with it: no step of that runs again.
    ready_s: within which the gateway must serve again.
    """
    look_first(scene)
    for number in range(times):
        scene.wait_for_workers(1)
        drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
        drawing.wait_for_step(rng.randint(1, LONG_STEPS // 2))
        with _submitting(scene) as submitting:
            _wait_for_the_moment(number, submitting, rng)
            scene.gateway.kill()
            orders = [each.result() for each in submitting]
        began = time.monotonic()
        scene.start_gateway()
        took_s = time.monotonic() - began
        scene.tally.most("gateway_ready_s", took_s)
        scene.tally.check("seconds until the gateway was ready again", took_s, ready_s)
        for order in orders:
            check_order(scene, order)
        _expect_adopted(scene, scene.check(drawing))
        scene.tally.count("kills")
    for side in ("acknowledged", "unacknowledged"):
        scene.tally.reached(side, LEAST_SHARE * len(SEEDS) * times)


def fill_disks(scene: Scene, *, times: int, rng: random.Random) -> None:
    """No file of the gateway can grow: nothing is taken, what was read can be read, and nothing is lost."""
    look_first(scene)
    for _ in range(times):
        drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
        status = drawing.wait_for_step(rng.randint(1, LONG_STEPS // 2))
        with _full(scene):
            time.sleep(0.2)
            with _submitting(scene) as submitting:
                orders = [each.result() for each in submitting]
            for order in orders:
                _expect_refusal(scene, order)
            if status is not None:
                wait_until(lambda job=status: not scene.who_draws(job.job_id), "the last step")  # type: ignore[misc]
                time.sleep(1.0)  # it has come to its end, which cannot be written
                _expect_untold(scene, status.job_id)
        began = time.monotonic()
        healed = Order(request_id=new_id(), seed=SEEDS[1])
        while not healed.job_id and time.monotonic() - began < DRAW_TIMEOUT_S:
            healed = submit(scene, healed)
            time.sleep(0.05)
        scene.tally.most("disk_healed_s", time.monotonic() - began)
        scene.tally.check("seconds until jobs were taken again", time.monotonic() - began, HEALED_S)
        for order in (*orders, healed):
            check_order(scene, order)
        scene.check(drawing)
        scene.tally.count("times")
    scene.tally.reached("refused_while_full", len(SEEDS) * times)
    scene.tally.reached("ended_while_full", times / 2)


def lose_job_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """The file of the job store is deleted, replaced or truncated under load, and the gateway killed after that.

    What was acknowledged from then on, and what was being drawn, must end.
    """
    look_first(scene)
    for number in range(times):
        scene.wait_for_workers(1)
        drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
        drawing.wait_for_step(rng.randint(1, LONG_STEPS // 2))
        LOSSES[number % len(LOSSES)](scene.folder / "state" / "jobs.sqlite")
        with ThreadPoolExecutor(len(SEEDS)) as callers:
            orders = list(callers.map(lambda seed: _submit_until_taken(scene, seed), SEEDS))
        scene.gateway.kill()
        scene.start_gateway()
        for order in orders:
            check_order(scene, order)
        scene.check(drawing)
        scene.tally.count("losses")
    scene.tally.reached("losses", times)
    scene.tally.reached("refused_while_lost", times / 2)


def _submit_until_taken(scene: Scene, seed: int) -> Order:
    order = Order(request_id=new_id(), seed=seed)
    ends = time.monotonic() + DRAW_TIMEOUT_S
    while not order.job_id and time.monotonic() < ends:
        order = submit(scene, order)
        if order.refusal is not None:
            if not isinstance(order.refusal, StorageUnavailable):
                scene.tally.faults.append(f"without its job store the gateway said: {order.refusal.message}")
            scene.tally.count("refused_while_lost")
            time.sleep(0.1)
    return order


def look_first(scene: Scene) -> None:
    scene.look_first(SEEDS, STEPS)
    scene.undisturbed(SEEDS[0], LONG_STEPS)


@contextlib.contextmanager
def _submitting(scene: Scene) -> Iterator[list[Future[Order]]]:
    """Callers that submit one job each, at the same time."""
    with ThreadPoolExecutor(len(SEEDS)) as callers:
        yield [callers.submit(submit, scene, Order(request_id=new_id(), seed=seed)) for seed in SEEDS]


def _wait_for_the_moment(number: int, submitting: list[Future[Order]], rng: random.Random) -> None:
    """By turns: the first acknowledgement, which must be durable already, and any moment, at first the earliest."""
    if number % 2:
        wait(submitting, return_when=FIRST_COMPLETED)
    elif number:
        time.sleep(rng.uniform(0, AROUND_S))


def submit(scene: Scene, order: Order, *, address: str = "") -> Order:
    """The order with what came of it, as the raw contract tells: nothing is retried. address: of one of gateways."""
    spec = GenerationSpec(
        prompt=PROMPT,
        seed=order.seed,
        num_inference_steps=STEPS,
        guidance_scale=OPTIONS["guidance_scale"],
        sampler=SAMPLER_EULER_ANCESTRAL,
    )
    with grpc.insecure_channel(address or scene.address, options=channel_options()) as channel:
        request = SubmitJobRequest(request_id=order.request_id, spec=spec)
        try:
            job = ImageServiceStub(channel).SubmitJob(request, timeout=10.0).job
        except grpc.RpcError as error:
            return Order(request_id=order.request_id, seed=order.seed, refusal=from_rpc_error(error))
    return Order(request_id=order.request_id, seed=order.seed, job_id=job.job_id)


def check_order(scene: Scene, order: Order) -> None:
    """An acknowledged job ends as that job; one that was not may be had by asking again. The picture is the same."""
    tally = scene.tally
    tally.count("acknowledged" if order.job_id else "unacknowledged")
    try:
        picture = _picture(scene, order)
    except JobNotFound:
        tally.lost += 1
    except BottegaError as error:
        tally.client_errors += 1
        tally.faults.append(f"the client saw {error.reason_name}: {error.message}")
    else:
        if picture.data != scene.undisturbed(order.seed, STEPS):
            tally.different_images += 1


def _picture(scene: Scene, order: Order) -> Picture:
    if order.job_id:
        return scene.client.job(order.job_id).result(timeout_s=DRAW_TIMEOUT_S)[0]
    return scene.client.generate(
        PROMPT,
        request_id=order.request_id,
        seed=order.seed,
        num_inference_steps=STEPS,
        timeout_s=DRAW_TIMEOUT_S,
        **OPTIONS,
    )


def _expect_refusal(scene: Scene, order: Order) -> None:
    refusal = order.refusal
    if isinstance(refusal, StorageUnavailable) and refusal.retry_after_s:
        scene.tally.count("refused_while_full")
    else:
        scene.tally.faults.append(f"with a full disk a caller was told: {refusal.message if refusal else 'yes'}")


def _expect_untold(scene: Scene, job_id: str) -> None:
    """A picture that could not be written is not said to be done, and can be asked about all the same."""
    state = scene.client.job(job_id).status().state
    if state is JobState.RUNNING:
        scene.tally.count("ended_while_full")
    else:
        scene.tally.faults.append(f"with a full disk a job was told to be {state.name}")


def _expect_adopted(scene: Scene, picture: Picture | None) -> None:
    """None: as counted already."""
    if picture is not None:
        scene.tally.check("attempts at a picture whose gateway was killed", picture.provenance.attempts, 1)
        scene.tally.check("steps of it that ran again", picture.provenance.repeated_steps, 0)


@contextlib.contextmanager
def _full(scene: Scene) -> Iterator[None]:
    """In the block the gateway can write no byte to any file."""
    gateway = psutil.Process(scene.gateway.process.pid)
    _, hard = gateway.rlimit(psutil.RLIMIT_FSIZE)
    gateway.rlimit(psutil.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        gateway.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))
        wait_until(gateway.is_running, "the gateway to have survived")


def new_id() -> str:
    """A request_id that nobody has had."""
    return f"chaos-{secrets.token_hex(8)}"
