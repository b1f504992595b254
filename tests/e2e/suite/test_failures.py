"""What dies in the middle of a picture changes when it is ready, never what it shows."""

from __future__ import annotations

import itertools
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

from bottega.client import Client, Picture
from tests.e2e.conftest import ENGINE
from tests.support.services import START_TIMEOUT_S, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# Two workers draw on all cores, and losses are to be noticed in time.
pytestmark = pytest.mark.alone

PROMPT = "a big yellow square on a black background"
# Draws noise at every step: a resumed request needs its generator, not only its latent.
OPTIONS: dict[str, Any] = {"num_inference_steps": 120, "guidance_scale": 4.0, "sampler": "euler_ancestral", "seed": 3}
# So late that drawing from the start again repeats far more than what a resumed attempt may.
LATE = 80
# A checkpoint is due after a tenth of the steps at the latest, and the newest may die on its way to the gateway.
MOST_REPEATED = 2 * OPTIONS["num_inference_steps"] // 10
# services/bottega/gateway/README.md, what is promised: a worker is out of the fleet within this time.
NOTICED_S = 2.0
# What asking takes on busy cores.
ASKING_S = 0.5


@dataclass(slots=True, kw_only=True)
class Pair:
    """A gateway with two workers, which tests may end and have started again: that takes its time, beside the tests."""

    services: Services
    gateway: Service
    client: Client
    booting: ThreadPoolExecutor
    workers: dict[str, Future[Service]] = field(default_factory=dict)
    lives: Iterator[int] = field(default_factory=itertools.count)

    def boot(self, *names: str) -> None:
        """Has these workers started."""
        for name in names:
            self.workers[name] = self.booting.submit(self._start, name, f"{name}-{next(self.lives)}")

    def worker(self, name: str) -> Service:
        """The newest life of a worker, once it has joined."""
        return self.workers[name].result(START_TIMEOUT_S)

    def wait_for_both(self) -> None:
        """Until both have joined."""
        for name in "ab":
            self.worker(name)

    def _start(self, name: str, life: str) -> Service:
        config = worker_config(self.gateway.fleet, name=name, engine=ENGINE)
        worker = self.services.start("worker", config, name=life)
        wait_until(lambda: name in self.joined(), f"{name} to join", within_s=NOTICED_S + ASKING_S)
        return worker

    def joined(self) -> set[str]:
        """Names of the workers that the gateway knows."""
        return {member.registration.name for member in self.client.fleet().members} & {"a", "b"}

    def busy(self) -> str:
        """Name of the worker that runs something; empty when none does."""
        names = [member.registration.name for member in self.client.fleet().members if member.load.running]
        return names[0] if names else ""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Services(tmp_path_factory.mktemp("pair")) as services:
        gateway = services.start("gateway", gateway_config())
        with (
            Client(gateway.address, fleet_address=gateway.fleet, timeout_s=90.0) as client,
            ThreadPoolExecutor(2) as booting,
        ):
            pair = Pair(services=services, gateway=gateway, client=client, booting=booting)
            pair.boot("a", "b")
            yield pair


@pytest.fixture(scope="module")
def undisturbed(pair: Pair) -> Picture:
    """The picture as it is when nothing dies."""
    pair.worker("a")
    return pair.client.generate(PROMPT, **OPTIONS)


class Drawing:
    """A picture that is being drawn while a test goes on; `steps` are those done when `start` returns."""

    def __init__(self, pair: Pair, steps: int) -> None:
        self._picture: list[Picture] = []
        self._thread = threading.Thread(
            target=lambda: self._picture.append(pair.client.generate(PROMPT, **OPTIONS)), daemon=True
        )
        self._thread.start()
        wait_until(lambda: bool(pair.busy()), "a worker to take the request")
        wait_until(lambda: pair.client.list_jobs(page_size=1).jobs[0].steps_done >= steps, f"{steps} steps")

    def picture(self) -> Picture:
        """The finished picture."""
        self._thread.join(90.0)
        assert self._picture, "no picture came"
        return self._picture[0]


def test_a_worker_killed_in_mid_request_leaves_the_same_picture(pair: Pair, undisturbed: Picture) -> None:
    pair.wait_for_both()
    drawing = Drawing(pair, steps=LATE)
    killed = pair.busy()
    pair.worker(killed).kill()
    wait_until(lambda: killed not in pair.joined(), "the death to be noticed", within_s=NOTICED_S + ASKING_S)
    pair.boot(killed)
    picture = drawing.picture()

    assert picture.data == undisturbed.data
    assert picture.provenance.attempts == 2
    assert picture.provenance.worker not in {"", killed}
    assert picture.provenance.repeated_steps <= MOST_REPEATED


def test_a_worker_that_is_told_to_stop_loses_no_picture(pair: Pair, undisturbed: Picture) -> None:
    drawing = Drawing(pair, steps=20)
    name = pair.busy()

    assert pair.worker(name).stop() == 0

    pair.boot(name)
    assert drawing.picture().data == undisturbed.data


def test_a_worker_that_hangs_is_noticed_within_two_seconds_and_comes_back(pair: Pair) -> None:
    process = pair.worker("a").process
    process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: "a" not in pair.joined(), "the silence to be noticed", within_s=NOTICED_S + ASKING_S)
    finally:
        process.send_signal(signal.SIGCONT)

    wait_until(lambda: "a" in pair.joined(), "the worker to come back")


def test_a_gateway_that_is_told_to_stop_finishes_what_runs(pair: Pair) -> None:
    """The last one: nothing is left to draw with."""
    pair.wait_for_both()
    drawing = Drawing(pair, steps=20)

    assert pair.gateway.stop() == 0

    assert drawing.picture().provenance.attempts == 1
    assert [pair.worker(name).stop() for name in "ab"] == [0, 0]
