"""What is done to webhooks: their receiver fails at random, and the gateway is killed while it delivers."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bottega.errors import BottegaError
from bottega.rpc.security.tenant_file import new_webhook_secret
from tests.chaos.scene import OPTIONS, PROMPT, Scene
from tests.support.waiting import wait_until
from tests.support.webhook_receiver import Delivery, Receiver, receiving

# Jobs that end in the time between two deaths of the gateway: every fifth is drawn, the others are cancelled.
JOBS_PER_LIFE = 50
_DRAWN_EVERY = 5
_CALLERS = 8
# Of all deliveries, those that fail.
FAILURES = 0.3
# The gateway dies within this time after the first job of its life has ended.
_DIES_WITHIN_S = 0.5


def kill_delivering_gateways(scene: Scene, *, times: int, rng: random.Random, jobs: int = JOBS_PER_LIFE) -> None:
    """kill -9 while jobs end and their ends are announced; each event must come, with one ID."""
    secret = new_webhook_secret()
    with receiving_in_thread(secret) as receiver:
        receiver.answer = failing(rng)
        scene.gateway_options["webhooks"] = webhooks_config(scene.folder, secret)
        scene.gateway.kill()
        scene.start_gateway()
        scene.wait_for_workers(1)
        ended: list[str] = []
        with ThreadPoolExecutor(_CALLERS) as callers:
            for _ in range(times):
                calls = [callers.submit(_end_a_job, scene, receiver.url, number) for number in range(jobs)]
                wait_until(lambda: any(call.done() for call in calls), "a job to end")  # noqa: B023 - it is over then
                time.sleep(rng.uniform(0.0, _DIES_WITHIN_S))
                scene.gateway.kill()
                scene.tally.count("kills")
                scene.start_gateway()
                ended.extend(job_id for call in calls if (job_id := call.result()))
        receiver.answer = lambda _: 204  # what still waits is delivered at its next try
        wait_until(lambda: set(ended) <= jobs_of(receiver), "all events")
    check_deliveries(scene, receiver, ended)
    scene.tally.figures["webhooks_delivered"] = len(jobs_of(receiver))
    scene.tally.figures["webhooks_delivered_twice"] = sum(count > 1 for count in receiver.counts().values())
    scene.tally.reached("webhooks_delivered", 0.9 * jobs * times)


def check_deliveries(scene: Scene, receiver: Receiver, ended: list[str]) -> None:
    """Count events that did not come, and jobs that had several."""
    scene.tally.lost += len(set(ended) - jobs_of(receiver))
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for delivery in receiver.deliveries:
        ids[delivery.data["job_id"]].add(delivery.event_id)
    scene.tally.double += sum(len(of_job) > 1 for of_job in ids.values())
    if receiver.refused:
        scene.tally.faults.append(f"{receiver.refused} deliveries had a wrong signature")


def jobs_of(receiver: Receiver) -> set[str]:
    """Return the jobs whose events were accepted."""
    return {delivery.data["job_id"] for delivery in tuple(receiver.accepted)}


def failing(rng: random.Random) -> Callable[[Delivery], int]:
    """Return what answers a part of deliveries with errors."""

    def answer(_: Delivery) -> int:
        return rng.choice((429, 500, 503)) if rng.random() < FAILURES else 204

    return answer


def webhooks_config(folder: Path, secret: str) -> dict[str, object]:
    """Return a gateway's configuration that allows receivers on loopback and repeats soon."""
    file = folder / "webhook-secret"
    file.write_text(secret)
    file.chmod(0o600)
    hosts: dict[str, object] = {"hosts": ["127.0.0.1"], "networks": ["127.0.0.1/32"], "ports": [], "plain_http": True}
    return {**hosts, "secrets": str(file), "first_retry_s": 0.1, "max_retry_s": 1.0}


@contextlib.contextmanager
def receiving_in_thread(secret: str) -> Iterator[Receiver]:
    """Serve a receiver in a thread of its own until the block ends."""
    ready, over = threading.Event(), asyncio.Event()
    made: list[Receiver] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with receiving(secret) as receiver:
            made.append(receiver)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30.0), "the receiver does not start"
        yield made[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def _end_a_job(scene: Scene, url: str, number: int) -> str:
    """Submit a job and see it end; "" if the SDK gave up."""
    try:
        job = scene.client.submit(
            PROMPT,
            seed=number,
            num_inference_steps=1,
            request_id=f"chaos-{secrets.token_hex(8)}",
            webhook=url,
            **OPTIONS,
        )
        if number % _DRAWN_EVERY:
            job.cancel()
        else:
            job.result()
    except BottegaError as error:
        scene.tally.client_errors += 1
        scene.tally.faults.append(f"the client saw {error.reason_name}: {error.message}")
        return ""
    return job.id
