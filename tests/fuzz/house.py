"""What is fuzzed: a gateway and a worker of the embedded model as real processes, small enough to show growth.

A ControlNet server has joined them in name only (hosting.py).

Knows how they are set up and how much memory they have; sends nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass

import grpc
import psutil

from bottega.client import Client
from bottega.rpc.channel import channel_options
from tests.fuzz.calls import Caller
from tests.fuzz.hosting import HOSTED, hosting
from tests.running import Service, Services, gateway_config, wait_until, worker_config

# Small bounds are full after the first requests: what grows later is a leak.
_GATEWAY = {"max_jobs": 200, "max_queued": 64}
_ENGINE = {"model": "miniature", "threads": 1, "max_pixels": 128 * 128}
_JOIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """A gateway and its worker."""

    gateway: Service
    worker: Service
    caller: Caller
    client: Client

    def draw(self) -> str:
        """A job that has completed, with one picture."""
        return self.client.generate("a circle", model="miniature", num_inference_steps=2).job_id

    def dead(self) -> list[str]:
        """Which of the two have ended."""
        return [service.name for service in (self.gateway, self.worker) if service.process.poll() is not None]

    def engines_lost(self) -> int:
        """How often the worker has had to start another engine."""
        return sum(event.get("event") == "engine lost" for event in self.worker.events())

    def errors(self) -> list[str]:
        """What the two have logged as errors."""
        found = [event for service in (self.gateway, self.worker) for event in service.events()]
        return [str(event) for event in found if event.get("level") in {"ERROR", "CRITICAL"}]

    def memory_bytes(self) -> Mapping[str, int]:
        """Resident memory of every process of the two that is alive, by what it is."""
        found = {}
        for service in (self.gateway, self.worker):
            this = psutil.Process(service.process.pid)
            for number, process in enumerate([this, *this.children(recursive=True)]):
                part = f" {_module(process)} {number}" if number else ""
                found[f"{service.name}{part}"] = process.memory_info().rss
        return found


@contextmanager
def running_house(services: Services) -> Iterator[House]:
    """Starts both; the worker has joined."""
    gateway = services.start("bottega.gateway", gateway_config(**_GATEWAY), name="gateway")
    worker = services.start(
        "bottega.worker", worker_config(gateway.address, name="fuzzed", engine=_ENGINE), name="worker"
    )
    options = channel_options()
    with (
        Client(gateway.address, timeout_s=60.0) as client,
        grpc.insecure_channel(gateway.address, options=options) as to_gateway,
        grpc.insecure_channel(worker.address, options=options) as to_worker,
        hosting(to_gateway),
    ):
        wait_until(lambda: bool(client.models()), _JOIN_S, "the worker to join")
        wait_until(lambda: len(client.controlnets()) == len(HOSTED), _JOIN_S, "the ControlNets to be reported")
        with closing(Caller(to_gateway, to_worker)) as caller:
            yield House(gateway=gateway, worker=worker, caller=caller, client=client)


def _module(process: psutil.Process) -> str:
    words = process.cmdline()
    module = next((word for word in words if word.startswith("bottega.")), words[0] if words else "?")
    return os.path.basename(module).rpartition(".")[2]  # noqa: PTH119 - no path, a module's name
