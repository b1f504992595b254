"""What it costs a service to be scraped once a second: processor time, while it has nothing else to do.

All six services run as processes and have been at work, so that the series of their metrics are there. Each is left
alone and scraped in turn, and the shares of a core that its own process took are compared. What is asked for at the
gateway's port for Prometheus to find the others comes along, as often as it asks.
"""

from __future__ import annotations

import argparse
import os
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from bottega.client import Client
from bottega.gateway.gateway import TARGETS_PATH
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.suite import JOIN_TIMEOUT_S
from tests.support.services import FREE_PORTS, Service, Services, gateway_config, worker_config
from tests.support.waiting import wait_until

WANTED_SHARE = 0.01
PICTURES = 8
# Prometheus asks where services are every five seconds (deploy/prometheus).
TARGETS_EVERY_S = 5
SETTLE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a service. shares: of a core that scrapes took, one for each round. series, size_bytes: of one scrape."""

    shares: Sequence[float]
    series: int
    size_bytes: int


def main() -> None:
    """Measures and reports."""
    options = _options()
    with scratch() as folder, Services(folder) as services:
        suite = _start(services, folder)
        time.sleep(SETTLE_S)
        costs = _measure(suite, options)
    _report(costs, options)


def _start(services: Services, folder: Path) -> dict[str, Service]:
    gateway = services.start("gateway", gateway_config())
    joined = {"gateway": gateway.fleet, "server": FREE_PORTS}
    suite = {"gateway": gateway}
    for kind in ("loras", "cache", "activations"):
        suite[kind] = services.start(kind, {**joined, "name": kind, "folder": str(folder / kind), "min_free_bytes": 0})
    suite["controlnet"] = services.start("controlnet", {**joined, "name": "controlnet", "engine": {"threads": 1}})
    engine = {"model": "miniature", "threads": 1}
    suite["worker"] = services.start("worker", worker_config(gateway.fleet, name="worker", engine=engine))
    with Client(gateway.address, fleet_address=gateway.fleet, timeout_s=60.0) as client:
        wait_until(lambda: bool(client.models()), "the worker to join", within_s=JOIN_TIMEOUT_S)
        wait_until(lambda: len(client.fleet().members) == len(suite), "all to join", within_s=JOIN_TIMEOUT_S)
        for seed in range(PICTURES):
            client.generate("a big red star on a blue background", seed=seed, num_inference_steps=4 + seed)
    return suite


def _measure(suite: Mapping[str, Service], options: argparse.Namespace) -> dict[str, Cost]:
    shares: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.rounds):
        alone, scraped = (_spent(suite, options.seconds, scraping=scraping) for scraping in (False, True))
        for kind in suite:
            shares[kind].append((scraped[kind] - alone[kind]) / options.seconds)
    texts = {kind: _read(service, "/metrics") for kind, service in suite.items()}
    return {
        kind: Cost(
            shares=shares[kind],
            series=sum(not line.startswith(b"#") for line in text.splitlines()),
            size_bytes=len(text),
        )
        for kind, text in texts.items()
    }


def _spent(suite: Mapping[str, Service], seconds: int, *, scraping: bool) -> dict[str, float]:
    """Processor seconds of each service's own process within so many seconds."""
    before = {kind: _processor_s(service) for kind, service in suite.items()}
    began = time.monotonic()
    for second in range(seconds):
        time.sleep(max(0.0, began + second - time.monotonic()))
        for service in suite.values() if scraping else ():
            _read(service, "/metrics")
        if scraping and second % TARGETS_EVERY_S == 0:
            _read(suite["gateway"], TARGETS_PATH)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {kind: _processor_s(service) - before[kind] for kind, service in suite.items()}


def _processor_s(service: Service) -> float:
    times = psutil.Process(service.process.pid).cpu_times()
    return float(times.user + times.system)


def _read(service: Service, path: str) -> bytes:
    with urllib.request.urlopen(f"http://{service.metrics}{path}", timeout=5) as answer:
        return bytes(answer.read())


def _report(costs: Mapping[str, Cost], options: argparse.Namespace) -> None:
    shares = {kind: median(cost.shares) for kind, cost in costs.items()}
    worst = max(shares.values())
    rows = [
        (
            f"{kind}: {cost.series} series, {cost.size_bytes / 1024:.0f} KiB",
            f"{shares[kind]:.4f}",
            f"{min(cost.shares):.4f} to {max(cost.shares):.4f}",
        )
        for kind, cost in costs.items()
    ]
    rows.append(("the dearest (scrape_cpu_share)", f"{worst:.4f}", f"at most {WANTED_SHARE}"))
    values = {"scrape_cpu_share": worst, **{f"{kind}_share": share for kind, share in shares.items()}}
    values |= {"rounds": options.rounds, "seconds": options.seconds, "cores": os.cpu_count() or 1}
    report("scrape", rows, values, heads=("of a core", "rounds"))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20, help="of a round's halves: alone, and scraped once a second")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


if __name__ == "__main__":
    main()
