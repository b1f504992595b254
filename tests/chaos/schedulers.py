"""What is done to gateways that share their jobs: the scheduler is killed, frozen or cut off from their database.

The database is killed and restarted, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType

import grpc

from bottega.client.suite.plan import free_ports
from bottega.errors import StorageUnavailable
from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1.image_pb2 import ListJobsRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from tests.chaos.gateways import AROUND_S, LONG_STEPS, SEEDS, Order, check_order, look_first, new_id, submit
from tests.chaos.scene import DRAW_TIMEOUT_S, Drawing, Scene
from tests.support.cut_cable import Cable, laid
from tests.support.postgresql import PASSWORD, running_server
from tests.support.s3 import KEY, SECRET, started
from tests.support.services import Service, gateway_config
from tests.support.waiting import wait_until

GATEWAYS = ("east", "west")
# Another gateway is the scheduler and answers within this time (README of the gateway).
TAKEOVER_S = 5.0
# How long the scheduler is frozen: for longer than its lease, and a few times for much longer.
FROZEN_S = (4.0, 5.0, 6.0, 8.0, 30.0)
# How long it is cut off from the database: shorter and longer than it waits for the database before it ends.
CUT_S = (5.0, 20.0)
# How long the database is away. The scheduler ends in the longest, and is started again before the database is.
AWAY_S = (0.2, 0.5, 1.0, 2.0, 20.0)


class SharedScene(Scene):
    """A suite with two gateways that share jobs in PostgreSQL and pictures in S3. Both are real processes."""

    def __init__(self, folder: Path, workers: tuple[str, ...]) -> None:
        self._stack = contextlib.ExitStack()
        self.database = self._stack.enter_context(running_server(durable=True))
        s3 = started("moto")
        self._stack.callback(s3.end)
        access = {"AWS_ENDPOINT_URL": s3.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ |= {**access, "AWS_REGION": "us-east-1"}
        self._objects = f"s3://{s3.bucket()}/pictures"
        self._database_name = self.database.new_database()
        self._cables = {name: self._stack.enter_context(_cable(f"127.0.0.1:{self.database.port}")) for name in GATEWAYS}
        ports = free_ports(2 * len(GATEWAYS))
        self._addresses = {
            name: (f"127.0.0.1:{public}", f"127.0.0.1:{fleet}")
            for name, public, fleet in zip(GATEWAYS, ports[::2], ports[1::2], strict=True)
        }
        self.running: dict[str, Service] = {}
        super().__init__(folder, workers)

    @property
    def address(self) -> str:
        """The gateways' addresses, for clients."""
        return ",".join(public for public, _ in self._addresses.values())

    @property
    def fleet_address(self) -> str:
        """The gateways' addresses, for services."""
        return ",".join(fleet for _, fleet in self._addresses.values())

    def public(self, name: str) -> str:
        """Address of one gateway for callers."""
        return self._addresses[name][0]

    def start_gateway(self) -> Service:
        """Starts the gateways that do not run; returns when they serve."""
        for name, (public, fleet) in self._addresses.items():
            if name in self.running and self.running[name].process.poll() is None:
                continue
            config = gateway_config(
                name=name,
                server={"listen": public, "metrics_listen": "127.0.0.1:0"},
                fleet={"listen": fleet},
                state=str(self.folder / name),
                jobs=self._jobs(name),
                objects=self._objects,
            )
            self.running[name] = self._services.start("gateway", config, name=self._name(name))
            self._gateways.append(self.running[name])
        return self.gateway

    def _jobs(self, name: str) -> str:
        port = int(self._cables[name].address.rpartition(":")[2])
        return self.database.url(self._database_name, password=PASSWORD, port=port)

    @contextlib.contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """Nothing comes through between a gateway and the database in the block, and neither end is told."""
        cable = self._cables[name]
        cable.go_dead()
        try:
            yield
        finally:
            cable.carry_again()

    def scheduler(self) -> str:
        """Name of the gateway that has become the scheduler last."""
        terms = {
            line["generation"]: name
            for name, service in self.running.items()
            for line in service.events()
            if line.get("event") == "this gateway is the scheduler"
        }
        return terms[max(terms)]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)
        self._stack.close()


def kill_schedulers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the scheduler while jobs are submitted at both gateways and one is drawn: each ends once, the same."""
    assert isinstance(scene, SharedScene)
    look_first(scene)
    with _timing(scene) as took_s:
        for _ in range(times):
            drawing = _begin(scene, rng)
            with _submitting(scene) as submitting:
                time.sleep(rng.uniform(0, AROUND_S))
                victim = scene.scheduler()
                scene.running[victim].kill()
                took_s.append(_takeover_s(scene, victim))
                orders = [each.result() for each in submitting]
            scene.start_gateway()
            _check(scene, orders, drawing)
            scene.tally.count("kills")
    scene.tally.reached("kills", times)


def freeze_schedulers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """SIGSTOP of the scheduler for longer than its lease: another takes over, and the woken one changes nothing."""
    assert isinstance(scene, SharedScene)
    look_first(scene)
    with _timing(scene) as took_s:
        for number in range(times):
            drawing = _begin(scene, rng)
            victim = scene.scheduler()
            process = scene.running[victim].process
            with _submitting(scene) as submitting:
                time.sleep(rng.uniform(0, AROUND_S))
                process.send_signal(signal.SIGSTOP)
                began = time.monotonic()
                took_s.append(_takeover_s(scene, victim))
                time.sleep(max(0.0, FROZEN_S[number % len(FROZEN_S)] - (time.monotonic() - began)))
                process.send_signal(signal.SIGCONT)
                orders = [each.result() for each in submitting]
            _expect_end(scene, victim)
            scene.start_gateway()
            _check(scene, orders, drawing)
            scene.tally.count("freezes")
    scene.tally.reached("freezes", times)


def cut_schedulers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """The scheduler is cut off from the database, and from nothing else: another takes over, and it ends."""
    assert isinstance(scene, SharedScene)
    look_first(scene)
    with _timing(scene) as took_s:
        for number in range(times):
            drawing = _begin(scene, rng)
            victim = scene.scheduler()
            with _submitting(scene) as submitting:
                time.sleep(rng.uniform(0, AROUND_S))
                with scene.cut(victim):
                    began = time.monotonic()
                    took_s.append(_takeover_s(scene, victim))
                    time.sleep(max(0.0, CUT_S[number % len(CUT_S)] - (time.monotonic() - began)))
                orders = [each.result() for each in submitting]
            _expect_end(scene, victim)
            scene.start_gateway()
            _check(scene, orders, drawing)
            scene.tally.count("cuts")
    scene.tally.reached("cuts", times)


def restart_databases(scene: Scene, *, times: int, rng: random.Random) -> None:
    """PostgreSQL is killed or stopped, and started again, while jobs are submitted and drawn.

    Gateways that end meanwhile are started again at once, as systemd does.
    """
    assert isinstance(scene, SharedScene)
    look_first(scene)
    for number in range(times):
        drawing = _begin(scene, rng)
        with _submitting(scene) as submitting:
            time.sleep(rng.uniform(0, AROUND_S))
            (scene.database.kill if number % 2 else scene.database.stop)()
            with ThreadPoolExecutor(1) as supervisor:
                time.sleep(AWAY_S[number % len(AWAY_S)])
                starting = supervisor.submit(scene.start_gateway)
                time.sleep(0.1)
                scene.database.start()
                starting.result()
            orders = [each.result() for each in submitting]
        scene.start_gateway()  # one that lost its lease has ended
        _check(scene, orders, drawing)
        scene.tally.count("restarts")
    scene.tally.reached("restarts", times)


def _expect_end(scene: SharedScene, name: str) -> None:
    """A scheduler whose lease another gateway has taken ends, so that systemd starts it again."""
    try:
        status = scene.running[name].process.wait(30)
    except subprocess.TimeoutExpired:
        scene.tally.faults.append("a scheduler that lost its lease went on")
        scene.running[name].kill()
    else:
        scene.tally.check("exit status of a scheduler that lost its lease", abs(status), 1)


@contextlib.contextmanager
def _cable(target: str) -> Iterator[Cable]:
    """A cable to host:port, in a thread of its own."""
    loop = asyncio.new_event_loop()
    carrying = threading.Thread(target=loop.run_forever, name="cable")
    carrying.start()
    lying = laid(target)
    try:
        cable = asyncio.run_coroutine_threadsafe(lying.__aenter__(), loop).result(10)
        yield cable
        asyncio.run_coroutine_threadsafe(lying.__aexit__(None, None, None), loop).result(10)
        asyncio.run_coroutine_threadsafe(_ended(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        carrying.join()
        loop.close()


async def _ended() -> None:
    """Returns when all other tasks of the loop have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


def _begin(scene: SharedScene, rng: random.Random) -> Drawing:
    scene.wait_for_workers(1)
    drawing = scene.draw(seed=SEEDS[0], steps=LONG_STEPS)
    drawing.wait_for_step(rng.randint(1, LONG_STEPS // 2))
    return drawing


@contextlib.contextmanager
def _submitting(scene: SharedScene) -> Iterator[list[Future[Order]]]:
    """Callers that submit one job each at the same time, by turns at one gateway and the other."""
    with ThreadPoolExecutor(len(SEEDS)) as callers:
        yield [
            callers.submit(submit, scene, Order(request_id=new_id(), seed=seed), address=scene.public(name))
            for seed, name in zip(SEEDS, itertools.cycle(GATEWAYS), strict=False)
        ]


def _check(scene: SharedScene, orders: list[Order], drawing: Drawing) -> None:
    for order in orders:
        check_order(scene, order)
    scene.check(drawing)


def _takeover_s(scene: SharedScene, victim: str) -> float:
    """Seconds until the other gateway has answered a call about jobs, which it cannot without a scheduler."""
    (other,) = (name for name in GATEWAYS if name != victim)
    began = time.monotonic()
    with grpc.insecure_channel(scene.public(other), options=channel_options()) as channel:
        listing = ImageServiceStub(channel).ListJobs
        while True:
            try:
                listing(ListJobsRequest(page_size=1), timeout=DRAW_TIMEOUT_S)
                break
            except grpc.RpcError as error:
                # A scheduler that is cut off still answers other gateways, until another takes over.
                if not isinstance(from_rpc_error(error), StorageUnavailable):
                    raise
            time.sleep(0.1)
    wait_until(lambda: scene.scheduler() == other, f"{other} to be the scheduler")
    return time.monotonic() - began


@contextlib.contextmanager
def _timing(scene: SharedScene) -> Iterator[list[float]]:
    """Check the 99th percentile of the seconds that takeovers took."""
    took_s: list[float] = []
    yield took_s
    if took_s:
        took_s.sort()
        p99_s = took_s[min(len(took_s) - 1, int(0.99 * len(took_s)))]
        scene.tally.most("takeover_p99_s", p99_s)
        scene.tally.most("takeover_median_s", took_s[len(took_s) // 2])
        scene.tally.check("seconds of a takeover, 99th percentile", p99_s, TAKEOVER_S)
