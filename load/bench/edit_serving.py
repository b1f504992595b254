"""How do edits served by the suite compare with Diffusers' inpainting, one by one from a queue?

Compared are latencies at the same arrivals, and capacity. Capacity comes from the suite, a gateway and a worker as
processes, with clients that wait for each picture. Latencies come from the same engine in this process, on the clock of
edit_queue, with what the suite takes beside its engine added to each: so idle time is not waited for, and there are
enough arrivals for a p95. A queue whose server takes one edit at a time is computed from what Diffusers' edits took in
this run.

A run takes 18 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import PIL.Image

from bottega.client import AsyncClient
from bottega.engine.limits import EngineLimits
from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE, SIZE, placed_mask, square_box, template, write_template
from load.bench.edit_queue import Arriving, EditDesk, serve, step_by_step
from load.bench.engine_runs import ACCELERATIONS
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet, closed_loop, percentile
from load.bench.side_process import Side
from load.bench.stock import STRENGTH, stock
from load.bench.suites import print_accelerations, suite
from load.bench.typical_arrivals import one_by_one, typical_arrivals
from load.replay.trace_shape import PUBLIC

CLIENTS = 8
TIMEOUT_S = 600.0
# Of Diffusers' capacity, and of the requests that come at it: a p95 at full load grows with their number for Diffusers.
LOADS = {0.8: 1.0, 1.0: 2.5}
WANTED = {
    "p95_reduction_80": 0.6,
    "p95_reduction_100": 0.88,
    "throughput_ratio": 2.2,
    "throughput_ratio_sparse": 3.0,
}
_FAR_APART_S = 1e4
_ACTIVATIONS_MIB = 4096
BENCH = Bench(
    __file__,
    __doc__,
    Option("--requests", 40, "at .8; 2.5 times as many at full load", smallest=2),
    Option("--steps", 5, "of these edits; one less runs", smallest=3),
    Option("--capacity-edits", 10, "of each capacity", smallest=2),
    Option("--capacity-steps", 10, "of these edits", smallest=3),
    Option("--alone-edits", 3, "through the suite, one by one", smallest=1),
    Option("--reference-edits", 1, "of Diffusers, each time"),
    Option("--threads", 2, "of torch, on each side"),
    exclusive_cores=True,
)


class EditSuite:
    """Draws edits of the one template through a gateway, each with so many steps."""

    def __init__(self, client: AsyncClient, steps: int) -> None:
        self._client = client
        self._steps = steps
        self._image = _png(template())

    async def edit(self, share: float, seed: int) -> float:
        """Draw an edit whose mask has this share of the tokens; return the seconds from the call to the picture."""
        mask = _png(PIL.Image.fromarray(placed_mask(share, random.Random(seed))))
        began_s = time.perf_counter()
        picture = await self._client.edit(
            self._image,
            mask,
            PROMPT,
            seed=seed,
            num_inference_steps=self._steps,
            guidance_scale=GUIDANCE_SCALE,
            strength=STRENGTH,
            width=SIZE,
            height=SIZE,
            fidelity="fast",
        )
        seconds = time.perf_counter() - began_s
        made = picture.provenance
        if not (made.mask.recorded or made.blocks_reused):
            raise RuntimeError(f"an edit computed all of itself: {made.mask.computed_all_because}")
        return seconds

    async def record(self) -> None:
        """Record the template: the second edit completes what the first one did not record."""
        await self.alone([0.0, 0.0])

    async def alone(self, shares: Sequence[float]) -> list[float]:
        """Draw one after the other."""
        return [await self.edit(share, seed) for seed, share in enumerate(shares)]

    async def per_s(self, shares: Sequence[float], clients: int) -> float:
        """Return edits per second of clients that each wait for their last one."""
        return await closed_loop(
            lambda number: self.edit(shares[number], number), requests=len(shares), clients=clients
        )


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds, and edits per second."""

    diffusers: list[float] = field(default_factory=list)
    """Seconds of single edits by Diffusers."""
    long: list[float] = field(default_factory=list)
    """Seconds of those with the steps of the capacities."""
    per_s: dict[bool, float] = field(default_factory=dict)
    """Edits per second through the suite, with convolutions in full (False) and sparse."""
    alone: list[float] = field(default_factory=list)
    """Seconds of single edits through the suite."""
    engine_alone: list[float] = field(default_factory=list)
    """Seconds of the same ones in an engine."""
    theirs: dict[float, list[float]] = field(default_factory=dict)
    """Latencies of Diffusers' queue, by load."""
    ours: dict[float, list[float]] = field(default_factory=dict)
    """Latencies of the engine, by load."""

    @property
    def added_s(self) -> float:
        """Seconds that the suite takes beside its engine."""
        return max(0.0, median(self.alone) - median(self.engine_alone))

    def reduction(self, load: float) -> float:
        """Return the share of Diffusers' p95 that is saved."""
        own = [each + self.added_s for each in self.ours[load]]
        return 1.0 - percentile(own, 0.95) / percentile(self.theirs[load], 0.95)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure capacity through the suite, and latencies in an engine."""
    measured, model = Measured(), folder / "model"
    write_bench_model(model, EDIT_SHAPE.for_run(smallest=options.smallest))
    image = write_template(folder)
    with Side(stock, threads=options.threads, exclusive_cores=True, model=model) as theirs:

        def diffusers(steps: int) -> list[float]:
            """Draw some edits, whose masks do not matter to Diffusers."""
            shares = _shares(options.reference_edits, "reference")
            questions = ({"images": [image], "boxes": [square_box(share)]} for share in shares)
            return [theirs.ask(prompts=[PROMPT], seeds=[0], steps=steps, **each)["seconds"] for each in questions]

        diffusers(options.steps)  # pays for what is made once
        for sparse in (False, True):
            engine = {
                "model": str(model),
                "model_name": "bench",
                "threads": options.threads,
                "exclusive_cores": True,
                "accelerations": list(ACCELERATIONS),
                "edits": {"sparse_convolutions": sparse, "activations_mib": _ACTIVATIONS_MIB},
            }
            with suite(folder / f"{sparse=}", {"worker": {"engine": engine}}) as running:
                print_accelerations(running.client)
                drawing = _through_suite(running.address, diffusers, measured, options)
                measured.per_s[sparse] = asyncio.run(drawing)
        _in_engine(model, diffusers, measured, options)
    _fill(sheet, measured)


async def _through_suite(
    address: str, diffusers: Callable[[int], list[float]], measured: Measured, options: argparse.Namespace
) -> float:
    """Return edits per second, with Diffusers measured before and after; then draw edits alone."""
    async with AsyncClient(address, timeout_s=TIMEOUT_S) as client:
        long = EditSuite(client, options.capacity_steps)
        await long.record()
        shares = _shares(options.capacity_edits, "capacity")
        await long.per_s(shares[:2], CLIENTS)  # pays for what is made once
        measured.long += await asyncio.to_thread(diffusers, options.capacity_steps)
        per_s = await long.per_s(shares, CLIENTS)
        measured.long += await asyncio.to_thread(diffusers, options.capacity_steps)
        short = EditSuite(client, options.steps)
        await short.record()  # other timesteps
        measured.alone = await short.alone(_shares(options.alone_edits, "alone"))
    return per_s


def _in_engine(
    model: Path, diffusers: Callable[[int], list[float]], measured: Measured, options: argparse.Namespace
) -> None:
    """Measure latencies at the same arrivals, by load."""
    desk = EditDesk(model, steps=(options.steps,), threads=options.threads)
    engine = desk.engine(EngineLimits())
    desk.record(engine)

    def ours(at_s: Sequence[float], what: str) -> list[float]:
        shares, chance = _shares(len(at_s), what), random.Random(what)
        orders = [desk.order(number, share, chance, options.steps) for number, share in enumerate(shares)]
        arriving = [Arriving(at_s=when, order=order) for when, order in zip(at_s, orders, strict=True)]
        return list(serve(engine, arriving, step_by_step).took_s)

    ours([0.0] * 4, "warm")
    measured.engine_alone = ours([number * _FAR_APART_S for number in range(options.alone_edits)], "alone")
    for load, times in LOADS.items():
        measured.diffusers += diffusers(options.steps)
        capacity_per_s = 1.0 / mean(measured.diffusers)
        count = round(times * options.requests)
        at_s = typical_arrivals(load * capacity_per_s, count, capacity_per_s=capacity_per_s)
        measured.ours[load] = ours(at_s, f"load {load}")
        measured.theirs[load] = one_by_one(at_s, itertools.cycle(measured.diffusers))


def _fill(sheet: Sheet, measured: Measured) -> None:
    sheet.figure("an edit alone, Diffusers", mean(measured.diffusers), "{:.2f} s", key="diffusers_s")
    sheet.figure("    the suite, sparse convolutions", median(measured.alone), "{:.2f} s", key="suite_alone_s")
    sheet.figure("    of which beside its engine", measured.added_s, "{:.2f} s", key="suite_added_s")
    sheet.values["engine_alone_s"] = median(measured.engine_alone)
    for load in LOADS:
        name = round(100 * load)
        theirs_s, ours_s = (percentile(of[load], 0.95) for of in (measured.theirs, measured.ours))
        what = f"p95 at {load:g} of Diffusers' capacity, Diffusers and the engine"
        sheet.row(what, f"{theirs_s:.1f} s, {ours_s:.2f} s")
        sheet.values |= {f"diffusers_p95_s_{name}": theirs_s, f"engine_p95_s_{name}": ours_s}
        sheet.values[f"p95_reduction_{name}"] = measured.reduction(load)
    for sparse, per_s in measured.per_s.items():
        sheet.values["throughput_ratio_sparse" if sparse else "throughput_ratio"] = per_s * mean(measured.long)
    for key, wanted in WANTED.items():
        sheet.row(key, f"{sheet.values[key]:.3f}", f"at least {wanted:g}")


def _shares(count: int, what: str) -> list[float]:
    """Return shares of masks, the same ones every time for the same use."""
    return list(itertools.islice(PUBLIC.draw(random.Random(what)), count))


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(BENCH.command())
