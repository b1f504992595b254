"""What is fuzzed, as processes: a gateway, a worker, a ControlNet server, stores of LoRAs, latents, activations; HTTP.

They are small enough to show growth. Server, stores and cache stand alone: a ControlNet server that runs nothing has
joined the gateway (hosting.py).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil

from bottega import kinds
from bottega.client import Client
from bottega.miniature import WEIGHTS
from bottega.transport import Deadline, Limits, Link, connect
from bottega.v1 import (
    activations_pb2,
    activations_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    controlnet_pb2,
    controlnet_pb2_grpc,
    lora_pb2,
    lora_pb2_grpc,
)
from tests.fuzz.activations import SOURCE
from tests.fuzz.calls import Caller, calling
from tests.fuzz.case import Case
from tests.fuzz.cases import corpus
from tests.fuzz.controlnets import NET, ROOT_PREFIX
from tests.fuzz.hosting import HOSTED, hosting
from tests.fuzz.judging import fault, mismatch
from tests.fuzz.lora_store import LOST, NAME, ROOT, registered
from tests.fuzz.webhooks import allowing
from tests.samples.hostile_controlnets import hostile_folders
from tests.support.offers import ask_offer
from tests.support.running_activations import Recorded, record_template
from tests.support.running_cache import embedding, record
from tests.support.services import FREE_PORTS, SMALL_ENGINE, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

# Small bounds are full after the first requests: what grows later is a leak.
# Every join is under a name of its own, which is kept for a lease; how often and how many may join is no matter here.
_FLEET = {"listen": "127.0.0.1:0", "max_calls": 8192, "max_members_per_peer": 2000}
_GATEWAY: Mapping[str, object] = {
    "max_jobs": 200,
    "max_queued": 64,
    "max_members": 2000,
    "fleet": {**_FLEET, "joins_per_s": 10_000, "joins_per_s_by_name": 10_000},
}
_ENGINE = {**SMALL_ENGINE, "max_pixels": 128 * 128}
_NETS: Mapping[str, object] = {
    "name": "alone",
    "gateway": "",
    "server": FREE_PORTS,
    "engine": {"threads": 1, "budget_bytes": 8 << 20},  # of 3.2 MiB each
    "controlnets": {NET: str(WEIGHTS / "controlnets" / NET)},
}
_STORE: dict[str, object] = {
    "name": "store",
    "gateway": "",
    "server": FREE_PORTS,
    "imports": {"root": str(ROOT)},
}
_CACHE: Mapping[str, object] = {"name": "cache", "gateway": "", "server": FREE_PORTS}
_ACTIVATIONS: Mapping[str, object] = {"name": "activations", "gateway": "", "server": FREE_PORTS}
_JOIN_S = 10.0
_IMPORT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """A gateway and its worker, and the others. digest: of the ControlNet that is hosted."""

    gateway: Service
    worker: Service
    nets: Service
    store: Service
    cache: Service
    activations: Service
    http: Service
    digest: str
    caller: Caller
    client: Client
    loras: lora_pb2_grpc.LoraServiceStub

    def corpus(self) -> Iterator[Case]:
        """The fixed corpus for this house, with a job and a LoRA that it needs."""
        return corpus(self.draw(), self.digest, self.bring())

    def draw(self) -> str:
        """A job that has completed, with one picture."""
        return self.client.generate("a circle", model="miniature", num_inference_steps=2).job_id

    def bring(self) -> str:
        """Return the digest of the canonical form of the LoRA "ink", which is brought if the store lacks it."""
        try:  # an import is a process of its own
            return self.loras.GetLora(lora_pb2.GetLoraRequest(name=NAME), timeout=_JOIN_S).lora.digest
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        return self.loras.RegisterLora(registered(), timeout=_IMPORT_S).lora.digest

    def lose(self) -> str:
        """Has the store have a LoRA in quarantine, by taking its row out of the catalogue; its id there."""
        self.loras.RegisterLora(registered(name=LOST, path="striped"), timeout=_IMPORT_S)
        catalogue = self.store.log.with_name(f"{self.store.name}.state") / "loras" / "catalogue.db"
        with closing(sqlite3.connect(catalogue, timeout=_JOIN_S)) as connection, connection:
            connection.execute("DELETE FROM loras WHERE name = ?", (LOST,))

        def found() -> list[str]:
            loras = self.loras.ListQuarantine(lora_pb2.ListQuarantineRequest(), timeout=_JOIN_S).loras
            return [lora.id for lora in loras if lora.name == LOST]

        wait_until(lambda: bool(found()), "it to be in quarantine")
        return found()[0]

    def keep(self) -> str:
        """Has the cache have an entry; its name."""
        channel = self.caller.channels["CacheService"]
        entries: cache_pb2_grpc.CacheServiceStub = cache_pb2_grpc.CacheServiceStub(channel)
        with _linked(self.cache, kinds.CACHE) as link:
            record(link, embedding(0))

            def found() -> list[str]:
                listed = entries.ListCacheEntries(cache_pb2.ListCacheEntriesRequest(), timeout=_JOIN_S).entries
                return [entry.entry for entry in listed]

            wait_until(lambda: bool(found()), "the recording to be kept")
            return found()[0]

    def template(self) -> str:
        """Has the activation store have a template; its id."""
        channel = self.caller.channels["ActivationService"]
        store: activations_pb2_grpc.ActivationServiceStub = activations_pb2_grpc.ActivationServiceStub(channel)
        made = Recorded(source=SOURCE)

        def found() -> bool:
            listed = store.ListStoredTemplates(activations_pb2.ListStoredTemplatesRequest(), timeout=_JOIN_S)
            return any(template.id == made.id for template in listed.templates)

        if not found():
            with _linked(self.activations, kinds.ACTIVATIONS) as link:
                record_template(link, made)
                wait_until(found, "the template to be kept")
        return made.id

    def dead(self) -> list[str]:
        return [service.name for service in self.services if service.process.poll() is not None]

    @property
    def called(self) -> tuple[Service, ...]:
        """Those that are called with gRPC."""
        return self.gateway, self.worker, self.nets, self.store, self.cache, self.activations

    @property
    def services(self) -> tuple[Service, ...]:
        return *self.called, self.http

    def engines_lost(self) -> int:
        """How often one of them has had to start another engine."""
        return sum(event.get("event") == "engine lost" for each in self.services for event in each.events())

    def errors(self) -> list[str]:
        """What they have logged as errors."""
        found = [event for service in self.services for event in service.events()]
        return [str(event) for event in found if event.get("level") in {"ERROR", "CRITICAL"}]

    def memory_bytes(self) -> Mapping[str, int]:
        """Resident memory of every process of theirs that is alive, by what it is."""
        found = {}
        for service in self.services:
            this = psutil.Process(service.process.pid)
            for number, process in enumerate([this, *this.children(recursive=True)]):
                part = f" {_module(process)} {number}" if number else ""
                found[f"{service.name}{part}"] = process.memory_info().rss
        return found


def replay(house: House, cases: Iterable[Case]) -> list[str]:
    """Send these cases; return what was answered otherwise than it must be."""
    wrong = []
    for case in cases:
        outcome = house.caller.call(case.method, case.raw)
        if problem := fault(case.method, case.raw, outcome) or mismatch(case, outcome):
            wrong.append(f"{case.method}, {case.name}: {problem}")
    return wrong


@contextmanager
def running_house(services: Services) -> Iterator[House]:
    """Starts all; the worker has joined."""
    with tempfile.TemporaryDirectory(prefix=ROOT_PREFIX) as folder:
        root = Path(folder).resolve()
        shutil.copytree(WEIGHTS / "controlnets" / NET, root / NET)
        hostile_folders(root)
        with _house(services, root) as house:
            yield house


@contextmanager
def _house(services: Services, root: Path) -> Iterator[House]:
    with allowing() as webhooks:
        gateway = services.start("gateway", gateway_config(**_GATEWAY, webhooks=webhooks), name="gateway")
    worker = services.start("worker", worker_config(gateway.fleet, name="fuzzed", engine=_ENGINE), name="worker")
    nets = services.start("controlnet", {**_NETS, "root": str(root)}, name="nets")
    store = services.start("loras", _STORE, name="store")
    cache = services.start("cache", _CACHE, name="cache")
    activations = services.start("activations", _ACTIVATIONS, name="activations")
    addresses = {"gateway": gateway.address, "fleet": gateway.fleet}
    config = {**addresses, "server": FREE_PORTS, "fetch": {"hosts": ["*"]}}
    http = services.start("http", config, name="http")
    with (
        Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client,
        calling(gateway, worker, nets, store, cache, activations) as caller,
        hosting(caller.channels["FleetService"]),
    ):
        wait_until(lambda: bool(client.models()), "the worker to join")
        wait_until(lambda: len(client.controlnets()) == len(HOSTED), "the ControlNets to be reported")
        to_nets: controlnet_pb2_grpc.ControlNetServiceStub = controlnet_pb2_grpc.ControlNetServiceStub(
            caller.channels["ControlNetService"]
        )
        (net,) = to_nets.ListControlNets(controlnet_pb2.ListControlNetsRequest(), timeout=_JOIN_S).controlnets
        yield House(
            gateway=gateway,
            worker=worker,
            nets=nets,
            store=store,
            cache=cache,
            activations=activations,
            http=http,
            digest=net.digest,
            caller=caller,
            client=client,
            loras=lora_pb2_grpc.LoraServiceStub(caller.channels["LoraService"]),
        )


def _linked(service: Service, kind: str) -> Link:
    """A worker's link to a service of that kind."""
    return connect(ask_offer(service.address, kind).offer, Deadline.after(_JOIN_S), limits=Limits())


def _module(process: psutil.Process) -> str:
    words = process.cmdline()
    module = next((word for word in words if word.startswith("bottega.")), words[0] if words else "?")
    return os.path.basename(module).rpartition(".")[2]  # noqa: PTH119 - no path, a module's name
