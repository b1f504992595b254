"""A suite of real processes to be killed, frozen and restarted: one gateway, which keeps its port, and some workers."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from bottega import kinds
from bottega.client import Client, FleetMember, JobState, JobStatus, Picture
from bottega.client.suite.plan import free_ports
from bottega.errors import BottegaError
from bottega.rpc.security.tenant_file import UNBOUNDED, Quotas
from tests.chaos.tally import Tally
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.tenants import add_tenant
from tests.support.waiting import wait_until

PROMPT = "a big yellow square on a black background"
# A sampler that draws noise at every step: going on needs its generator, not only the latent.
OPTIONS: Mapping[str, Any] = {"guidance_scale": 4.0, "sampler": "euler_ancestral"}
# Groups are padded, so that a picture is the same byte for byte whoever is drawn beside it. Checkpoints are made by
# steps: every tenth of a request. Every step is told, so that one that runs again is known to have run before. No LoRA
# is kept, so that whoever dies while one is loaded dies in every request with one.
ENGINE = {
    "model": "miniature",
    "threads": 1,
    "max_rows": 4,
    "fixed_rows": 4,
    "checkpoint_interval_s": 60.0,
    "progress_interval_s": 0.001,
    "loras": {"budget_bytes": 1},
}
HANG_S = 3.0
# Of the scenes with tenants: who draws, and one that may have few jobs.
TENANTS = {"shop": UNBOUNDED, "rash": Quotas(per_minute=5)}
# Of the promises in services/bottega/gateway/README.md: a worker is out of the fleet within this time. Asking takes
# more on busy cores.
NOTICED_S = 2.0
ASKING_S = 0.5
# Booting takes 7 s with free cores; here several boot at once beside those who draw.
JOIN_TIMEOUT_S = 90.0
DRAW_TIMEOUT_S = 60.0


class Drawing:
    """A picture that is being drawn while something happens to the suite."""

    def __init__(self, client: Client, *, seed: int, steps: int, options: Mapping[str, Any]) -> None:
        self.request_id = f"chaos-{secrets.token_hex(8)}"
        self.seed, self.steps = seed, steps
        self._options = options
        self._client = client
        self._picture: Picture | None = None
        self._error: BottegaError | None = None
        self._thread = threading.Thread(target=self._draw, daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def status(self) -> JobStatus | None:
        """How the gateway says it stands."""
        for job in self._client.list_jobs(page_size=20).jobs:
            if job.request_id == self.request_id:
                return job
        return None

    def wait_for_step(self, step: int) -> JobStatus | None:
        """Waits until so many steps are done; None when it has ended before."""
        status: JobStatus | None = None

        def reached() -> bool:
            nonlocal status
            status = self.status()
            return self.over or (status is not None and status.steps_done >= step)

        wait_until(reached, f"{step} steps")
        return status if status is not None and status.state is JobState.RUNNING else None

    def picture(self, tally: Tally) -> Picture | None:
        """The picture; what went wrong instead is counted."""
        self._thread.join(DRAW_TIMEOUT_S + 10)
        if self._error is not None:
            tally.client_errors += 1
            tally.faults.append(f"the client saw {self._error.reason_name}: {self._error.message}")
        elif self._picture is None:
            tally.lost += 1
        return self._picture

    def _draw(self) -> None:
        try:
            self._picture = self._client.generate(
                PROMPT,
                seed=self.seed,
                num_inference_steps=self.steps,
                request_id=self.request_id,
                timeout_s=DRAW_TIMEOUT_S,
                **self._options,
            )
        except BottegaError as error:
            self._error = error


class Scene:
    """The suite. Use it in a `with` block.

    workers: their names. tenants: the gateway asks for API keys, those of `keys`, and the scene's client has one.
    options: of every picture. additions: what those of a seed have besides. gateway_options: of its later lives.
    worker_server: where its workers listen.
    """

    worker_server: Mapping[str, object] = FREE_PORTS

    def __init__(self, folder: Path, workers: tuple[str, ...], *, tenants: Mapping[str, Quotas] | None = None) -> None:
        self.folder = folder
        self.options = dict(OPTIONS)
        self.additions: dict[int, Mapping[str, Any]] = {}
        self.gateway_options: dict[str, object] = {}
        self.tally = Tally()
        self._services = Services(folder)
        self._port, self._fleet_port = free_ports(2)
        self._started = 0
        self._gateways: list[Service] = []
        self._workers: dict[str, Service] = {}
        self._booting = ThreadPoolExecutor(max_workers=2)
        self._undisturbed: dict[tuple[int, int], bytes] = {}
        self.workers = workers
        self._tenants = folder / "tenants.yaml"
        self.keys = {
            name: add_tenant(self._tenants, name, quotas=quotas) for name, quotas in {**(tenants or {})}.items()
        }
        self.client = Client(
            self.address,
            fleet_address=self.fleet_address,
            api_key=next(iter(self.keys.values()), None),
            timeout_s=DRAW_TIMEOUT_S,
        )

    @property
    def address(self) -> str:
        """host:port of the gateway, the same for all its lives."""
        return f"127.0.0.1:{self._port}"

    @property
    def fleet_address(self) -> str:
        """host:port where services join the gateway, the same for all its lives."""
        return f"127.0.0.1:{self._fleet_port}"

    @property
    def gateway(self) -> Service:
        """The gateway's newest life."""
        return self._gateways[-1]

    def __enter__(self) -> Scene:
        try:
            self.start_gateway()
            for booting in [self.boot(name) for name in self.workers]:
                booting.result(JOIN_TIMEOUT_S)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def start_gateway(self) -> Service:
        """Starts the gateway where it was; returns when it serves."""
        server = {"listen": self.address, "metrics_listen": "127.0.0.1:0"}
        fleet = {"listen": self.fleet_address}
        tenants = str(self._tenants) if self.keys else ""
        own = {"server": server, "fleet": fleet, "state": str(self.folder / "state"), "tenants": tenants}
        config = gateway_config(**own, **self.gateway_options)
        service = self._services.start("gateway", config, name=self._name("gateway"))
        self._gateways.append(service)
        return service

    def start_worker(self, name: str, engine: Mapping[str, object] = ENGINE, kind: str = kinds.WORKER) -> Service:
        """Starts a worker; returns when it has joined. kind: that of a worker with one role is another one."""
        config = worker_config(self.fleet_address, name=name, engine=engine, hang_s=HANG_S, server=self.worker_server)
        service = self._services.start("worker", config, name=self._name(name))
        self._workers[name] = service
        wait_until(lambda: name in {member.name for member in self.members(kind)}, f"{name} to join")
        return service

    def start_controlnets(self, name: str, nets: Mapping[str, Path]) -> Service:
        """Starts a ControlNet server that hosts these folders; returns when it has joined."""
        config = {
            "name": name,
            "gateway": self.fleet_address,
            "engine": {"threads": 1, "fixed_rows": ENGINE["fixed_rows"]},
            "controlnets": {net: str(folder) for net, folder in nets.items()},
            "catalogue": str(self.folder / f"{name}.db"),
        }
        service = self._services.start("controlnet", config, name=self._name(name))
        self._workers[name] = service
        wait_until(lambda: name in self.hosting(), f"{name} to join")
        return service

    def start_loras(self, bytes_per_s: int) -> Service:
        """Starts the LoRA store. bytes_per_s: to each worker."""
        return self._start_store(kinds.LORAS, links={"bytes_per_s": bytes_per_s})

    def start_cache(self) -> Service:
        """Starts the approximate cache."""
        # The same prompt is drawn again and again.
        return self._start_store(kinds.CACHE, exploration=0.0, row_pictures=1, min_free_bytes=0)

    def start_activations(self, bytes_per_s: int = 0) -> Service:
        """Starts the activation store. bytes_per_s: to each worker; 0 is all, and memory is shared."""
        return self._start_store(kinds.ACTIVATIONS, min_free_bytes=0, links={"bytes_per_s": bytes_per_s})

    def _start_store(self, kind: str, **settings: object) -> Service:
        """Starts a store, with what it had before; returns when it has joined."""
        place = {"gateway": self.fleet_address, "server": FREE_PORTS, "folder": str(self.folder / kind)}
        config = {"name": kind, **place, **settings}
        service = self._workers[kind] = self._services.start(kind, config, name=self._name(kind))
        wait_until(lambda: service.address in {member.address for member in self.members(kind)}, f"{kind} to join")
        return service

    def boot_loras(self, bytes_per_s: int) -> Future[Service]:
        """Starts the LoRA store while other things go on."""
        return self._booting.submit(self.start_loras, bytes_per_s)

    def boot(self, name: str, engine: Mapping[str, object] = ENGINE, kind: str = kinds.WORKER) -> Future[Service]:
        """Starts a worker while other things go on."""
        return self._booting.submit(self.start_worker, name, engine, kind)

    def boot_controlnets(self, name: str, nets: Mapping[str, Path]) -> Future[Service]:
        """Starts a ControlNet server while other things go on."""
        return self._booting.submit(self.start_controlnets, name, nets)

    def worker(self, name: str) -> Service:
        """The newest life of a worker, of a ControlNet server, or of "loras", "cache" or "activations", the stores."""
        return self._workers[name]

    def engine_of(self, name: str) -> psutil.Process:
        """The engine process of a worker, or of a ControlNet server."""
        front = psutil.Process(self.worker(name).process.pid)
        (engine,) = [child for child in front.children() if any(".engine" in part for part in child.cmdline())]
        return engine

    def members(self, kind: str = kinds.WORKER) -> list[FleetMember]:
        """The workers that the gateway knows, or members of another kind."""
        return [m for m in self.client.fleet().members if m.kind == kind]

    def hosting(self) -> dict[str, int]:
        """The ControlNet servers that the gateway knows and that host something, with their sessions, by name."""
        members = self.members(kinds.CONTROLNET)
        return {
            member.name: sum(net.sessions for net in member.load.hosted) for member in members if member.load.hosted
        }

    def joined(self) -> set[str]:
        """Names of the workers that the gateway knows."""
        return {member.name for member in self.members()}

    def wait_for_workers(self, count: int) -> None:
        """Waits until so many have joined."""
        wait_until(lambda: len(self.joined()) >= count, f"{count} workers")

    def who_draws(self, job_id: str) -> str:
        """The worker that has a job; empty when none says so."""
        for member in self.members():
            if any(running.job_id == job_id for running in member.load.running):
                return member.name
        return ""

    def draw(self, *, seed: int, steps: int) -> Drawing:
        options = {**self.options, **self.additions.get(seed, {})}
        return Drawing(self.client, seed=seed, steps=steps, options=options)

    def undisturbed(self, seed: int, steps: int) -> bytes:
        """The picture as it is when nothing happens."""
        if (seed, steps) not in self._undisturbed:
            picture = self.draw(seed=seed, steps=steps).picture(self.tally)
            assert picture is not None, self.tally.faults
            self._undisturbed[seed, steps] = picture.data
        return self._undisturbed[seed, steps]

    def look_first(self, seeds: Iterable[int], steps: int) -> None:
        for seed in seeds:
            self.undisturbed(seed, steps)

    def check(self, drawing: Drawing) -> Picture | None:
        """The finished picture, compared with the undisturbed one, which must have been drawn before."""
        picture = drawing.picture(self.tally)
        if picture is not None and picture.data != self._undisturbed[drawing.seed, drawing.steps]:
            self.tally.different_images += 1
        return picture

    def count_ends(self) -> None:
        """Looks into the gateways' logs for requests that were completed twice. Call it once, at the end."""
        lines = [line for gateway in self._gateways for line in gateway.events()]
        self.tally.ended(line["request_id"] for line in lines if line.get("event") == "job completed")

    def _name(self, name: str) -> str:
        self._started += 1
        return f"{name}-{self._started}"

    def _stop(self) -> None:
        self._booting.shutdown(wait=True, cancel_futures=True)
        for service in (*self._workers.values(), *self._gateways):
            if service.process.poll() is None:
                service.process.send_signal(signal.SIGCONT)  # a frozen one cannot end
        try:
            self._services.stop()
        finally:
            self.client.close()
