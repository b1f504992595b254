"""What does it cost a service to be scraped once a second?

Processor time, while it has nothing else to do. All six services run as processes and have been at work, so that the
series of their metrics are there. Each is left alone and scraped in turn, and the shares of a core that its own process
took are compared. What Prometheus asks the gateway's port for to find the others comes along, as often as it asks.

A run takes 4 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from bottega import kinds
from bottega.gateway.api.fleet_service import TARGETS_PATH
from load.bench.framework import CORES, Bench, Option, Sheet, medians
from load.bench.suites import processor_s, scraped, suite
from tests.support.services import Service

WANTED_SHARE = 0.01
PICTURES = 8
# Prometheus asks where services are every five seconds (deploy/prometheus).
TARGETS_EVERY_S = 5
SETTLE_S = 3.0
BENCH = Bench(
    __file__,
    __doc__,
    Option("--seconds", 20, "of a round's halves: alone, and scraped once a second", smallest=1),
    Option("--rounds", 5, "of both", smallest=1),
    heads=("of a core", "rounds"),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Start everything, let it work, and scrape it by turns."""
    services: dict[str, Mapping[str, object]] = {
        **{kind: {"min_free_bytes": 0} for kind in (kinds.LORAS, kinds.CACHE, kinds.ACTIVATIONS)},
        kinds.CONTROLNET: {"engine": {"threads": 1}},
        kinds.WORKER: {"engine": {"model": "miniature", "threads": 1}},
    }
    shares: dict[str, list[float]] = defaultdict(list)
    with suite(folder, services) as running:
        for seed in range(PICTURES):
            running.draw("a big red star on a blue background", seed=seed, num_inference_steps=4 + seed)
        here = {"gateway": running.gateway, **running.members}
        time.sleep(SETTLE_S)
        for _ in range(options.rounds):
            alone, asked = (_spent_s(here, options.seconds, scraping=scraping) for scraping in (False, True))
            for kind in here:
                shares[kind].append((asked[kind] - alone[kind]) / options.seconds)
        texts = {kind: scraped(service) for kind, service in here.items()}
    share = medians(shares)
    for kind, text in texts.items():
        series = sum(not line.startswith(b"#") for line in text.splitlines())
        what, spread = f"{kind}: {series} series, {len(text) / 1024:.0f} KiB", shares[kind]
        sheet.row(what, f"{share[kind]:.4f}", f"{min(spread):.4f} to {max(spread):.4f}")
        sheet.values[f"{kind}_share"] = share[kind]
    worst, bar = max(share.values()), f"at most {WANTED_SHARE}"
    sheet.figure("the dearest", worst, "{:.4f}", key="scrape_cpu_share", bar=bar)
    sheet.values |= {"rounds": options.rounds, "seconds": options.seconds, "cores": CORES}


def _spent_s(services: Mapping[str, Service], seconds: int, *, scraping: bool) -> dict[str, float]:
    """Return the processor seconds of each service's own process within so many seconds."""
    before = {kind: processor_s(service.process.pid) for kind, service in services.items()}
    began = time.monotonic()
    for second in range(seconds):
        time.sleep(max(0.0, began + second - time.monotonic()))
        for service in services.values() if scraping else ():
            scraped(service)
        if scraping and second % TARGETS_EVERY_S == 0:
            scraped(services["gateway"], TARGETS_PATH)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    return {kind: processor_s(service.process.pid) - before[kind] for kind, service in services.items()}


if __name__ == "__main__":
    sys.exit(BENCH.command())
