"""What does it gain that a second server loads a hot ControlNet?

Two ControlNet servers have a core and a thread each, and a worker shares both cores. Requests, all with the same
ControlNet several times, come at random (Poisson), at twice what one server gets done with requests that follow each
other. On one side the second server has no memory for the ControlNet, on the other it has. The gateway decides.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bottega.client import AsyncClient, ControlNet
from load.bench.bench_model import BenchShape, write_bench_controlnet, write_bench_model, write_gradient
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, closed_loop, percentile
from load.bench.suites import CALL_S, Suite, suite

SHAPE = BenchShape(block_out_channels=(64, 128, 256), transformer_layers=(1, 2), sample_size=16)
WANTED = 0.7
# Bytes in which no ControlNet fits.
_NO_ROOM = 1
_ROOM = 1 << 30
_CLIENTS = 3
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 60, "of each side", smallest=4),
    Option("--steps", 12, "of a picture", smallest=2),
    Option("--nets", 8, "sessions of the ControlNet in a request", smallest=2),
    Option("--rate", 2.0, "times what one server gets done"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """The latencies of one side, and the number of sessions by server."""

    took_s: Sequence[float]
    sessions: Mapping[str, int]


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure the capacity of one server, then both sides at the same arrivals."""
    shape, model = SHAPE.for_run(smallest=options.smallest), folder / "model"
    write_bench_model(model, shape)
    net = write_bench_controlnet(model, folder / "net", shape, seed=1)
    pictures = _Pictures(write_gradient(folder / "image.png", shape.side), options)
    with _running(folder / "one", model, net, second_bytes=_NO_ROOM) as one:
        pictures.draw_some(one)
        per_s = pictures.capacity_per_s(one)
        alone = pictures.at_rate(one, options.rate * per_s)
    with _running(folder / "two", model, net, second_bytes=_ROOM) as two:
        pictures.draw_some(two)
        both = pictures.at_rate(two, options.rate * per_s)
    p95_s = {name: percentile(side.took_s, 0.95) for name, side in (("one", alone), ("two", both))}
    share = both.sessions.get("controlnet-1", 0) / max(1, sum(both.sessions.values()))
    sheet.figure("requests a second, one server", per_s, "{:.2f}", key="capacity_per_s")
    sheet.figure("p95 at twice that, one server", p95_s["one"], "{:.1f} s", key="one_p95_s")
    sheet.figure("    two servers", p95_s["two"], "{:.1f} s", key="two_p95_s")
    bar = f"at most {WANTED:g}"
    sheet.figure("    two over one", p95_s["two"] / p95_s["one"], "{:.2f}", key="p95_ratio", bar=bar)
    sheet.figure("share of sessions at the second server", share, "{:.2f}", key="second_share", bar="at least 0.2")


def _running(folder: Path, model: Path, net: Path, *, second_bytes: int) -> AbstractContextManager[Suite]:
    """Run a worker and two servers, each on a core of its own. The first server loads the ControlNet first."""

    def server(budget_bytes: int) -> dict[str, object]:
        return {"engine": {"threads": 1, "budget_bytes": budget_bytes}, "controlnets": {"edges": str(net)}}

    services: dict[str, Mapping[str, object]] = {
        "controlnet-0": server(_ROOM),
        "controlnet-1": server(second_bytes),
        "worker": {"engine": {"model": str(model), "threads": 1}},
    }
    return suite(folder, services, cores={"controlnet-0": 0, "controlnet-1": 1})


class _Pictures:
    """Requests with one ControlNet several times."""

    def __init__(self, image: Path, options: argparse.Namespace) -> None:
        self._image = image
        self._options = options

    def draw_some(self, running: Suite) -> None:
        """Load what is needed and measure turns, before anything counts."""
        running.client.warm_controlnet("edges")
        for seed in range(2):
            running.draw(PROMPT, **self._drawing(seed))

    def capacity_per_s(self, running: Suite) -> float:
        """Return requests per second of clients that each start the next one when their last one is done."""

        async def measured() -> float:
            async with AsyncClient(running.address, timeout_s=CALL_S) as client:
                return await closed_loop(
                    lambda number: client.generate(PROMPT, **self._drawing(number)),
                    requests=max(_CLIENTS, self._options.requests // 4),
                    clients=_CLIENTS,
                )

        return asyncio.run(measured())

    def at_rate(self, running: Suite, per_s: float) -> _Served:
        """Send the requests at random times, the same ones for every side."""
        chance = random.Random("hot ControlNet")
        at_s = list(itertools.accumulate(chance.expovariate(per_s) for _ in range(self._options.requests)))
        sessions: Counter[str] = Counter()

        async def one(client: AsyncClient, number: int, due_s: float) -> float:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            picture = await client.generate(PROMPT, **self._drawing(number))
            sessions.update(use.servers[0] for use in picture.provenance.controlnets)
            return time.monotonic() - due_s

        async def all_of_them() -> list[float]:
            async with AsyncClient(running.address, timeout_s=CALL_S) as client:
                began_s = time.monotonic()
                return await asyncio.gather(
                    *(one(client, number, began_s + after_s) for number, after_s in enumerate(at_s))
                )

        return _Served(took_s=asyncio.run(all_of_them()), sessions=sessions)

    def _drawing(self, seed: int) -> dict[str, Any]:
        return {
            "seed": seed,
            "num_inference_steps": self._options.steps,
            "guidance_scale": GUIDANCE_SCALE,
            "controlnets": [ControlNet("edges", self._image, controlnet_conditioning_scale=0.2)] * self._options.nets,
            "timeout_s": CALL_S,
        }


if __name__ == "__main__":
    sys.exit(BENCH.command())
