"""The suite for benches of the approximate cache: a gateway, a cache and a worker, as processes of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bottega import kinds
from bottega.client import Client
from load.bench.controlnet_suite import pinned
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

JOIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCast:
    """Whom to start. folder: for configurations, logs and the cache's files.

    model: "miniature", or a folder; name: what requests call it. engine, cache: settings of the worker's engine and of
    the cache. apart: whether the worker has the first core, and all others the second one.
    """

    folder: Path
    model: str = "miniature"
    name: str = "miniature"
    engine: Mapping[str, object] = field(default_factory=dict)
    cache: Mapping[str, object] = field(default_factory=dict)
    apart: bool = False

    def core(self, number: int) -> AbstractContextManager[None]:
        """What is started in the block runs there."""
        return pinned(number) if self.apart else nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSuite:
    """What runs. client: of its gateway."""

    client: Client
    gateway: Service
    cache: Service
    worker: Service

    @property
    def model_hash(self) -> str:
        """Of the model that is served."""
        (model,) = self.client.models()
        return model.model_hash


@contextmanager
def suite(cast: CacheCast) -> Iterator[CacheSuite]:
    """All of it, stopped in the end."""
    cast.folder.mkdir(parents=True, exist_ok=True)
    with Services(cast.folder) as services:
        with cast.core(1):
            gateway = services.start("gateway", gateway_config())
            cache = services.start("cache", _cache_config(cast, gateway))
        with cast.core(0):
            engine = {"model": cast.model, "model_name": cast.name, **cast.engine}
            worker = services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=600) as client:
            wait_until(lambda: bool(client.models()) and _has_cache(client), "all to join", within_s=JOIN_S)
            yield CacheSuite(client=client, gateway=gateway, cache=cache, worker=worker)


def check_apart(running: CacheSuite) -> None:
    """Raises where the worker shares a core with the cache: what is measured would be that they take turns."""
    theirs = [os.sched_getaffinity(each.process.pid) for each in (running.worker, running.cache)]
    if theirs[0] & theirs[1]:
        raise SystemExit(f"worker and cache need a core each; they have {theirs[0]} and {theirs[1]}")


def _cache_config(cast: CacheCast, gateway: Service) -> dict[str, object]:
    return {
        "name": "cache",
        "gateway": gateway.fleet,
        "server": FREE_PORTS,
        "folder": str(cast.folder / "cache"),
        **cast.cache,
    }


def _has_cache(client: Client) -> bool:
    return any(member.kind == kinds.CACHE for member in client.fleet().members)
