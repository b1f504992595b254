"""What is done to gateways that share their jobs: the scheduler is killed, frozen or cut off, PostgreSQL restarted.

S3 fails one call in ten meanwhile. Each gateway is on a host of its own if network namespaces can be made, so that it
can be cut off from everything; otherwise it is only cut off from the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import grpc

from bottega.client.suite.plan import free_ports
from bottega.errors import Unavailable
from bottega.rpc.channel import channel_options
from bottega.rpc.status import from_rpc_error
from bottega.v1.image_pb2 import ListJobsRequest
from bottega.v1.image_pb2_grpc import ImageServiceStub
from load.bench.framework import percentile
from tests.chaos.gateways import AROUND_S, SEEDS, STEPS, Order, check_order, new_id, submit
from tests.chaos.scene import DRAW_TIMEOUT_S, Drawing, Scene
from tests.support.cut_cable import Cable, laid
from tests.support.network_namespaces import SWITCH, SwitchedHost, make_switch
from tests.support.postgresql import PASSWORD, running_server
from tests.support.s3 import KEY, SECRET, failing_proxy, started
from tests.support.services import Service, gateway_config
from tests.support.waiting import wait_until

GATEWAYS = ("east", "west")
IN_NAMESPACE = "BOTTEGA_CHAOS_IN_NAMESPACE"
"""Environment variable that says that this process may make a switch in its network namespace."""
# Another gateway is the scheduler and answers within this time (README of the gateway).
TAKEOVER_S = 5.0
# The job that is drawn takes some seconds: it begins before a takeover, and ends while there is no scheduler or later.
LONG_STEPS = 40
# Share of the calls of S3 that fail.
S3_FAILING = 0.1
# The scheduler renews its lease, and finds out that it has lost it, within this time.
RENEWED_S = 1.0
# How long the scheduler is frozen: mostly much longer than its lease, sometimes a moment longer.
FROZEN_S = (30.0, 4.0, 30.0, 5.0, 30.0, 8.0)
# How long it is cut off: shorter and longer than it waits for the database before it ends.
CUT_S = (5.0, 20.0)
# Calls wait for longer than a disturbance that is at most so long.
SHORT_S = 9.0
# How long the database is away. The scheduler ends in the longest, and is started again before the database is.
AWAY_S = (0.2, 0.5, 1.0, 2.0, 20.0)


class SharedScene(Scene):
    """A suite with two gateways that share jobs in PostgreSQL and pictures in S3. All are real processes."""

    def __init__(self, folder: Path, workers: tuple[str, ...]) -> None:
        self._stack = contextlib.ExitStack()
        self.hosts: dict[str, SwitchedHost] = {}
        host = "127.0.0.1"
        if os.environ.get(IN_NAMESPACE):
            make_switch()
            host = SWITCH
            for number, name in enumerate(GATEWAYS, 2):
                self.hosts[name] = SwitchedHost(number)
                self._stack.callback(self.hosts[name].stop)
        self.worker_server = {"listen": f"{host}:0", "metrics_listen": "127.0.0.1:0", "insecure": True}
        self.database = self._stack.enter_context(running_server(durable=True))
        s3 = started("moto")
        self._stack.callback(s3.end)
        self.s3 = self._stack.enter_context(failing_proxy(s3, host=host))
        self.s3.failing = S3_FAILING
        access = {"AWS_ENDPOINT_URL": self.s3.url, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
        os.environ |= {**access, "AWS_REGION": "us-east-1"}
        self._objects = f"s3://{s3.bucket()}/pictures"
        self._database_name = self.database.new_database()
        target = f"127.0.0.1:{self.database.port}"
        self._cables = {name: self._stack.enter_context(_cable(target, host)) for name in GATEWAYS}
        ports = free_ports(2 * len(GATEWAYS))
        self._addresses = {}
        for name, public, fleet in zip(GATEWAYS, ports[::2], ports[1::2], strict=True):
            own = self.hosts[name].address if name in self.hosts else host
            self._addresses[name] = (f"{own}:{public}", f"{own}:{fleet}")
        self.running: dict[str, Service] = {}
        self.took_s: dict[str, list[float]] = {}
        """Seconds of takeovers, by what was done to the scheduler."""
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
                server={"listen": public, "metrics_listen": "127.0.0.1:0", "insecure": True},
                fleet={"listen": fleet, "insecure": True},
                state=str(self.folder / name),
                jobs=f"postgresql://postgres:{PASSWORD}@{self._cables[name].address}/{self._database_name}",
                objects=self._objects,
            )
            run_by = self.hosts[name].run_by if name in self.hosts else ()
            self.running[name] = self._services.start("gateway", config, name=self._name(name), run_by=run_by)
            self._gateways.append(self.running[name])
        return self.gateway

    @contextlib.contextmanager
    def frozen(self, name: str) -> Iterator[None]:
        """A gateway is stopped by SIGSTOP in the block."""
        process = self.running[name].process
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def cut_from_database(self, name: str) -> Iterator[None]:
        """Nothing comes through between a gateway and the database in the block, and neither end is told."""
        cable = self._cables[name]
        cable.go_dead()
        try:
            yield
        finally:
            cable.carry_again()

    def cut_from_all(self, name: str) -> contextlib.AbstractContextManager[None]:
        """The gateway's host is unplugged in the block; from the database only, if it has no host of its own."""
        return self.hosts[name].unplugged() if name in self.hosts else self.cut_from_database(name)

    def scheduler(self) -> str:
        """Name of the gateway that has become the scheduler last."""
        terms = {
            line["generation"]: name
            for name, service in self.running.items()
            for line in service.events()
            if line.get("event") == "this gateway is the scheduler"
        }
        return terms[max(terms)]

    def _stop(self) -> None:
        try:
            super()._stop()
        finally:
            self._stack.close()


def disturb_schedulers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """Do one thing after the other to the scheduler or the database, while jobs are submitted at both gateways.

    Another job is drawn, too. Each ends once, with the same picture. Gateways that end are started again, as by
    systemd.
    """
    assert isinstance(scene, SharedScene)
    if not scene.hosts:
        print("  a gateway is only cut off from the database: no network namespaces can be made here", flush=True)
    scene.look_first(SEEDS, STEPS)
    scene.undisturbed(SEEDS[0], LONG_STEPS)
    numbers = {fault: itertools.count() for fault in _FAULTS}
    try:
        for fault in _mixed(times, rng):
            drawing = _begin(scene, rng)
            with _submitting(scene) as submitting:
                time.sleep(rng.uniform(0, AROUND_S))
                with fault(scene, next(numbers[fault])):
                    _check(scene, [each.result() for each in submitting], drawing)
            _settle(scene)
            scene.tally.count(fault.__name__.removeprefix("_"))
            scene.tally.count("disturbances")
    finally:
        _report_takeovers(scene)
        scene.tally.figures |= {"s3_calls": scene.s3.requests, "s3_calls_failed": scene.s3.failed}
    scene.tally.reached("disturbances", times)
    scene.tally.reached("s3_calls_failed", 0.9 * S3_FAILING * scene.s3.requests)


def _mixed(times: int, rng: random.Random) -> Iterator[_Fault]:
    """So many faults; each has its share of every twenty."""
    while times > 0:
        some = [fault for fault, share in _FAULTS.items() for _ in range(share)]
        rng.shuffle(some)
        yield from some[:times]
        times -= len(some)


@contextlib.contextmanager
def _killed(scene: SharedScene, number: int) -> Iterator[None]:
    """kill -9 of the scheduler."""
    victim = scene.scheduler()
    scene.running[victim].kill()
    _wait_for_takeover(scene, victim, "killed")
    yield


@contextlib.contextmanager
def _frozen(scene: SharedScene, number: int) -> Iterator[None]:
    """SIGSTOP of the scheduler for longer than its lease: another takes over, and the woken one changes nothing."""
    victim = scene.scheduler()
    with _lasting(scene, victim, scene.frozen(victim), FROZEN_S[number % len(FROZEN_S)], "frozen"):
        yield


@contextlib.contextmanager
def _cut_from_database(scene: SharedScene, number: int) -> Iterator[None]:
    """The scheduler is cut off from the database and from nothing else."""
    victim = scene.scheduler()
    cut = scene.cut_from_database(victim)
    with _lasting(scene, victim, cut, CUT_S[number % len(CUT_S)], "cut_from_database"):
        yield


@contextlib.contextmanager
def _cut_from_all(scene: SharedScene, number: int) -> Iterator[None]:
    """The scheduler is cut off from everything: the database, S3, workers, callers and the other gateway."""
    victim = scene.scheduler()
    with _lasting(scene, victim, scene.cut_from_all(victim), CUT_S[number % len(CUT_S)], "cut_from_all"):
        yield


@contextlib.contextmanager
def _database_restarted(scene: SharedScene, number: int) -> Iterator[None]:
    """PostgreSQL is killed or stopped, and started again. Gateways that end meanwhile are started again at once."""
    (scene.database.kill if number % 2 else scene.database.stop)()
    with ThreadPoolExecutor(1) as supervisor:
        time.sleep(AWAY_S[number % len(AWAY_S)])
        starting = supervisor.submit(scene.start_gateway)
        time.sleep(0.1)
        scene.database.start()
        starting.result()
    yield


_Fault = Callable[[SharedScene, int], contextlib.AbstractContextManager[None]]
"""Does something to the suite; jobs are checked in its block. Its number says how many of its kind came before."""
_FAULTS: Mapping[_Fault, int] = {
    _killed: 8,
    _frozen: 3,
    _cut_from_database: 2,
    _cut_from_all: 3,
    _database_restarted: 4,
}
"""Shares of twenty."""


@contextlib.contextmanager
def _lasting(
    scene: SharedScene, victim: str, disturbance: contextlib.AbstractContextManager[None], lasts_s: float, name: str
) -> Iterator[None]:
    """Expect a takeover while something is done to the scheduler, and that it ends afterwards.

    Jobs are checked while a long disturbance lasts, and after a short one, when calls that waited are answered.
    """
    with disturbance:
        began = time.monotonic()
        _wait_for_takeover(scene, victim, name)
        if lasts_s > SHORT_S:
            yield
        time.sleep(max(0.0, lasts_s - (time.monotonic() - began)))
    if lasts_s <= SHORT_S:
        yield
    _expect_end(scene, victim)


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
def _cable(target: str, host: str) -> Iterator[Cable]:
    """A cable to host:port from an address of this machine, in a thread of its own."""
    loop = asyncio.new_event_loop()
    carrying = threading.Thread(target=loop.run_forever, name="cable")
    carrying.start()
    lying = laid(target, host=host)
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
    with ThreadPoolExecutor(len(orders)) as callers:
        for _ in callers.map(lambda order: check_order(scene, order), orders):
            pass
    scene.check(drawing)


def _settle(scene: SharedScene) -> None:
    """Start gateways that have ended, until both answer, and neither finds out that it has lost the lease."""

    def settled() -> bool:
        scene.start_gateway()
        if not all(_answers(scene.public(name)) for name in GATEWAYS):
            return False
        time.sleep(RENEWED_S)
        return all(service.process.poll() is None for service in scene.running.values())

    wait_until(settled, "both gateways to answer")


def _answers(address: str) -> bool:
    """Return whether a gateway answers a call about jobs, which it cannot without a scheduler."""
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        try:
            ImageServiceStub(channel).ListJobs(ListJobsRequest(page_size=1), timeout=DRAW_TIMEOUT_S)
        except grpc.RpcError as error:
            # A scheduler that is cut off still answers other gateways, until another takes over.
            if not isinstance(from_rpc_error(error), Unavailable):
                raise
            return False
    return True


def _wait_for_takeover(scene: SharedScene, victim: str, fault: str) -> None:
    """Measure the seconds until the other gateway is the scheduler and answers."""
    (other,) = (name for name in GATEWAYS if name != victim)
    began, began_at = time.monotonic(), time.time()
    wait_until(lambda: _answers(scene.public(other)) and scene.scheduler() == other, f"{other} to be the scheduler")
    took_s = time.monotonic() - began
    scene.took_s.setdefault(fault, []).append(took_s)
    if took_s > TAKEOVER_S:
        clock, load = time.strftime("%H:%M:%S", time.gmtime(began_at)), os.getloadavg()[0]
        print(f"  {clock}: {victim} was {fault}, {other} answered after {took_s:.2f} s; load {load:g}", flush=True)


def _report_takeovers(scene: SharedScene) -> None:
    """Check the 99th percentile of the seconds that takeovers took, and report how they are distributed."""
    rounded = {name: [round(seconds, 2) for seconds in sorted(some)] for name, some in scene.took_s.items()}
    print(f"  seconds of takeovers: {json.dumps(rounded)}", flush=True)
    every = [seconds for some in scene.took_s.values() for seconds in some]
    for name, some in ({"": every} | scene.took_s).items() if every else ():
        prefix = f"takeover_{name}_" if name else "takeover_"
        scene.tally.figures[f"{prefix}count"] = len(some)
        for percent in (50, 90, 99):
            scene.tally.figures[f"{prefix}p{percent}_s"] = percentile(some, percent / 100)
        scene.tally.figures[f"{prefix}max_s"] = max(some)
    if every:
        scene.tally.check("seconds of a takeover, 99th percentile", percentile(every, 0.99), TAKEOVER_S)
