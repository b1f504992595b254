"""Soaks a suite: `python -m load.soak --minutes 60`, as `make soak MINUTES=60`.

The last line is JSON; lost and double must be 0, and each growth at most .01. The exit status is 1 where one of these
is missed, or where less than 99 % of the requests went out on time, and at once where a service does not come back. The
logs are in the folder for samples where requests were not answered as they should be.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from bottega.client import AsyncClient, RetryPolicy
from load.replay.arrivals import ArrivalShape
from load.replay.driver import replay
from load.replay.gateway_sender import GatewaySender
from load.replay.mix import AdapterShape, DrawShape, EditShape, Mix
from load.replay.pictures import Pictures
from load.replay.plan import plan
from load.replay.prompt_stream import StreamShape
from load.replay.requests import PlannedRequest
from load.soak.faults import EVERY_S, Fault, Faults
from load.soak.judgement import Soaked, judge
from load.soak.levels import AGAIN, MEASURED, Sample, draw_samples, take_sample
from load.soak.suite import CONTROLNETS, LORAS, SoakSuite

# A day's shapes, at a size that the budgets are made for.
SIZE = 64
RATE_PER_S = 1.0
_SAMPLE_S = 2.0
# Of a request: a service that was killed is back long before.
_DEADLINE_S = 120.0
# Of clients that ask while the gateway is away.
_RETRY = RetryPolicy(patience_s=90.0, reach_s=90.0)


def mix_of(minutes: float) -> Mix:
    """Return a mix of a constant mean rate: half edits, ControlNets and LoRAs on half of the rest."""
    return Mix(
        minutes=minutes,
        rate_per_s=RATE_PER_S,
        arrivals=ArrivalShape(),
        prompts=StreamShape(topics=40, users=6),
        draws=DrawShape(steps={10: 1.0, 15: 1.0}),
        edits=EditShape(share=0.5, steps={10: 1.0}, templates=40),
        controlnets=AdapterShape(service="B", names=CONTROLNETS, of_draws=0.5, of_edits=0.2),
        loras=AdapterShape(service="B", names=LORAS, of_draws=0.5, of_edits=0.2),
    )


def main() -> int:
    """Soak, report and return the exit status."""
    options = _options()
    requests = plan(mix_of(options.minutes), options.seed)
    with tempfile.TemporaryDirectory(prefix="bottega-soak-") as folder, SoakSuite(Path(folder)) as suite:
        print(f"{len(requests)} requests in {options.minutes:g} minutes, a fault every {options.every:g} s", flush=True)
        options.output.mkdir(parents=True, exist_ok=True)
        well = False
        try:
            soaked = asyncio.run(_soak(suite, requests, options))
            well = soaked.answered_well
        finally:
            if not well:
                shutil.copytree(suite.logs, options.output / "logs", dirs_exist_ok=True)
    _write(soaked.samples, options.output / "samples.csv")
    draw_samples(soaked.samples, options.output / "samples.png")
    return 0 if judge(soaked, 60.0 * options.minutes) else 1


async def _soak(suite: SoakSuite, requests: Sequence[PlannedRequest], options: argparse.Namespace) -> Soaked:
    pictures = Pictures(width=SIZE, height=SIZE)
    pictures.prepare(requests)
    began_s = time.monotonic()

    def since_s() -> float:
        return time.monotonic() - began_s

    def told(fault: Fault) -> None:
        print(f"{since_s():6.0f} s: {fault}", flush=True)

    samples: list[Sample] = []
    numbers = itertools.count(1)

    def name(request: PlannedRequest) -> str:
        """Return an id of its own for each request: an identical one is another order."""
        return f"soak-{next(numbers)}-{request.seed}"

    async with AsyncClient(suite.address, fleet_address=suite.fleet_address, retry=_RETRY) as client:
        sender = GatewaySender(
            client,
            pictures,
            deadline_s=_DEADLINE_S,
            options={"masked_blocks": True},
            request_id=name,
        )
        sampling = asyncio.create_task(_sample(suite, samples, since_s))
        try:
            again_after_s = 60.0 * options.minutes * AGAIN
            with Faults(
                suite, seed=options.seed, told=told, every_s=options.every, again_after_s=again_after_s
            ) as faults:
                replaying = asyncio.create_task(replay(requests, sender.send, deadline_s=_DEADLINE_S))
                while not replaying.done() and faults.failed is None:
                    await asyncio.wait([replaying], timeout=_SAMPLE_S)
                if faults.failed is not None:
                    replaying.cancel()
                    await asyncio.wait([replaying])
                    raise faults.failed
                replayed = await replaying
        finally:
            sampling.cancel()
    if faults.failed is not None:  # in one that was under way when the last request had its answer
        raise faults.failed
    # What attached to a job that had ended already is no second completion of it.
    completed = Counter(name for name in suite.completed() if name)
    return Soaked(samples=samples, faults=faults.done, replayed=replayed, completed=completed)


async def _sample(suite: SoakSuite, samples: list[Sample], since_s: Callable[[], float]) -> None:
    while True:
        samples.append(await asyncio.to_thread(take_sample, since_s(), suite.processes(), suite.state))
        await asyncio.sleep(_SAMPLE_S)


def _write(samples: Sequence[Sample], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ("at_s", *MEASURED))
        writer.writeheader()
        writer.writerows(map(asdict, samples))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds from fault to fault (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults (default: 0)")
    parser.add_argument(
        "--output", type=Path, default=Path("out/soak"), help="folder of the samples (default: out/soak)"
    )
    options = parser.parse_args()
    if not 1.0 <= options.minutes <= 24 * 60:
        parser.error("--minutes: 1 to 1440")
    if options.every < 1.0:
        parser.error("--every: at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
