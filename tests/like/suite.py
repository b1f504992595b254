"""A suite with every service, in which approximate techniques happen often."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bottega import kinds
from bottega.client import CacheProfile, Client, LengthClass, SkipProfile
from bottega.client.suite.plan import free_ports
from bottega.miniature import WEIGHTS
from tests.like.requests import CONTROLNETS
from tests.samples.lora_files import Part, base_shapes, kohya, save
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

LORAS = ("striped", "checked", "dusk")
LATE_LORAS = ("late-1", "late-2", "late-3")
# The workers keep no LoRA that no request waits for, and the store sends a megabyte in half a second: some steps.
_ENGINE: Mapping[str, object] = {"model": "miniature", "threads": 1, "max_rows": 8, "loras": {"budget_bytes": 1}}
_STORE_BYTES_PER_S = 2_000_000
# Whatever was recorded under a key stands for up to a third of the steps.
_FRACTIONS = (0.1, 0.2, 0.3)
_JOIN_S = 120.0
_CACHE: Mapping[str, object] = {"name": "cache", "exploration": 0.0, "min_free_bytes": 0, "plain_for_loras": True}
_ACTIVATIONS: Mapping[str, object] = {"name": "activations", "min_free_bytes": 0}


@contextmanager
def running_suite(folder: Path, *, pair: bool = False) -> Iterator[Client]:
    """Run a suite whose services have joined.

    Args:
        folder: Of configurations, logs and states.
        pair: Whether there are two workers that compute rows of each other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with Services(folder) as services, ThreadPoolExecutor(6) as pool:
        gateway = services.start("gateway", gateway_config())
        starting = [pool.submit(services.start, "worker", config) for config in _workers(gateway, pair=pair)]
        for kind, config in _others(gateway):
            starting.append(pool.submit(services.start, kind, config))
        for each in starting:
            each.result()
        with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=120.0) as client:
            wait_until(lambda: bool(client.models()), "the workers to join", within_s=_JOIN_S)
            wait_until(
                lambda: _kinds(client) >= {kinds.CACHE, kinds.ACTIVATIONS}, "the stores to join", within_s=_JOIN_S
            )
            wait_until(lambda: len(client.controlnets()) == len(CONTROLNETS), "the ControlNets", within_s=_JOIN_S)
            add_loras(client, folder)
            allow_cached_starts(client)
            yield client


def add_loras(client: Client, folder: Path) -> None:
    """Add LoRAs that take some steps to load, and wait until all are there."""
    for number, name in enumerate(LATE_LORAS):
        shapes = base_shapes("unet")
        parts = {("unet", path): Part(rank=16, alpha=4.0) for path in shapes if path.endswith(("to_q", "to_v"))}
        client.add_lora(name, save(kohya(parts, seed=number)[0], folder / f"{name}.safetensors"), base="miniature")
    wait_until(lambda: len(client.loras()) >= len(LORAS) + len(LATE_LORAS), "the LoRAs", within_s=_JOIN_S)


def allow_cached_starts(client: Client) -> None:
    """Let whatever was recorded under a key stand for the first steps of any prompt's picture."""
    (model,) = client.models()
    thresholds = dict.fromkeys(_FRACTIONS, -1.0)
    enough = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds=thresholds),))
    client.set_cache_profile(CacheProfile(model_hash=model.model_hash, balanced=enough, fast=enough))


def other_services(gateway: Service) -> list[tuple[str, dict[str, object]]]:
    """Return kind and configuration of the cache, the activation store and the ControlNet server."""
    common: dict[str, object] = {"gateway": gateway.fleet, "server": FREE_PORTS}
    nets = {name: str(WEIGHTS / "controlnets" / name) for name in CONTROLNETS}
    return [
        (kinds.CACHE, {**common, **_CACHE}),
        (kinds.ACTIVATIONS, {**common, **_ACTIVATIONS}),
        (kinds.CONTROLNET, {**common, "name": "nets", "engine": {"threads": 1}, "controlnets": nets}),
    ]


def _others(gateway: Service) -> list[tuple[str, dict[str, object]]]:
    loras: dict[str, object] = {
        "name": "loras",
        "gateway": gateway.fleet,
        "server": FREE_PORTS,
        "links": {"bytes_per_s": _STORE_BYTES_PER_S},
        "loras": {name: {"path": f"miniature/{name}"} for name in LORAS},
    }
    return [*other_services(gateway), (kinds.LORAS, loras)]


def _workers(gateway: Service, *, pair: bool) -> Iterator[dict[str, object]]:
    if not pair:
        yield worker_config(gateway.fleet, name="w", engine=_ENGINE)
        return
    ports = dict(zip("ab", free_ports(2), strict=True))
    for name, other in ("ab", "ba"):
        engine = {**_ENGINE, "peer": {"address": f"127.0.0.1:{ports[other]}"}}
        config = worker_config(gateway.fleet, name=name, engine=engine)
        yield {**config, "server": {"listen": f"127.0.0.1:{ports[name]}", "metrics_listen": "127.0.0.1:0"}}


def _kinds(client: Client) -> set[str]:
    return {member.kind for member in client.fleet().members}
