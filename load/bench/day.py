"""One compressed production day through the whole suite, against a plain Diffusers server on the same cores.

The day is a mix of load/replay/mixes: edits and pictures, with ControlNets and LoRAs, by hours, with bursts. The plain
server draws static batches in one process, without a cache of anything. Each side has the machine to itself; they take
turns, and get the same requests at the same times. An answer counts that comes within three times what its request
takes alone on the plain server. Then come days of the suite without one technique each.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from bottega.errors import ConfigError
from load.bench import day_page
from load.bench.day_figures import PLAIN, SUITE, Comparison, DayRun, Figures
from load.bench.day_options import parse
from load.bench.day_plain import PlainSide, serving, warm_up_plain
from load.bench.day_reference import DayReference
from load.bench.day_requests import warm_up_requests
from load.bench.day_setting import Day, settle
from load.bench.day_suite import DaySuite, RunningDay, copy_state, running, sending, warm_up
from load.bench.day_table import rows
from load.bench.day_techniques import ALL, LABELS, Techniques, Uses, without_each
from load.bench.lora_suite import processor_s
from load.bench.report import report
from load.bench.scratch import scratch
from load.replay.driver import replay
from load.replay.requests import PlannedRequest


def measure(day: Day, folder: Path) -> Comparison:
    """Both sides in turns, then the suite without each technique. folder: for all that the runs write."""
    plain: list[DayRun] = []
    suite: list[DayRun] = []
    for number, requests in enumerate(day.days):
        plain.append(_told(PLAIN, day, plain_day(day, requests)))
        suite.append(_told(SUITE, day, suite_day(day, requests, ALL, folder / f"suite-{number}")))
    without = {}
    for name, techniques in without_each().items():
        if name in day.options.rows:
            run = suite_day(day, day.days[0], techniques, folder / f"without-{name}")
            without[name] = Figures(runs=[_told(f"without {LABELS[name]}", day, run)], scale=day.scale)
    return Comparison(
        plain=Figures(runs=plain, scale=day.scale), suite=Figures(runs=suite, scale=day.scale), without=without
    )


def plain_day(day: Day, requests: Sequence[PlannedRequest]) -> DayRun:
    """On the plain server, in a process of its own."""
    with DayReference(day.world.model, day.options.threads) as process:
        side = PlainSide(process=process, world=day.world, fuse=day.fuse)
        warm_up_plain(side, requests)
        return asyncio.run(_plain_day(day, side, requests))


async def _plain_day(day: Day, side: PlainSide, requests: Sequence[PlannedRequest]) -> DayRun:
    async with serving(side) as send:
        before_s = processor_s()
        replayed = await replay(requests, send, deadline_s=day.scale.deadline_s, length_s=day.options.length_s)
        return DayRun(replayed=replayed, processor_s=processor_s() - before_s)


def suite_day(day: Day, requests: Sequence[PlannedRequest], techniques: Techniques, folder: Path) -> DayRun:
    """Through a suite that is started for it, in the state that the day before left."""
    suite = DaySuite(
        world=day.world,
        folder=folder / "services",
        state=copy_state(day.prepared, folder / "state"),
        threads=day.options.threads,
        deadline_s=day.scale.deadline_s,
        techniques=techniques,
    )
    with running(suite) as where:
        return asyncio.run(_suite_day(day, suite, where, requests))


async def _suite_day(day: Day, suite: DaySuite, where: RunningDay, requests: Sequence[PlannedRequest]) -> DayRun:
    await warm_up(suite, where, warm_up_requests(requests, list(day.world.controlnets)))
    uses = Uses()
    async with sending(suite, where, uses.add) as sender:
        before_s = processor_s()
        replayed = await replay(requests, sender.send, deadline_s=day.scale.deadline_s, length_s=day.options.length_s)
        return DayRun(replayed=replayed, processor_s=processor_s() - before_s, uses=uses)


def _told(name: str, day: Day, run: DayRun) -> DayRun:
    """Says at once what a run came to: all of them together take long."""
    figures = Figures(runs=[run], scale=day.scale)
    said = f"{len(figures.answers)} requests, {figures.good_share:.0%} in time, p95 {figures.latency_s(0.95):.1f} s"
    print("; ".join([f"{name}: {said}", *figures.uses, *figures.reasons, *figures.void]), flush=True)
    return run


def main() -> int:
    """Prints the table and the line of JSON, and writes the page. 1 where a run says nothing."""
    options = parse(__doc__)
    try:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.touch()
    except OSError as error:  # now, not after an hour
        raise ConfigError(f"{options.page} cannot be written: {error.strerror}") from None
    with scratch() as folder:
        day = settle(folder, options)
        comparison = measure(day, folder)
    options.page.write_text(day_page.page(comparison, day.options, day.rate_per_s), encoding="utf-8")
    print(f"page: {options.page}")
    report("day", rows(comparison), comparison.values(), heads=(PLAIN, SUITE))
    for why in comparison.void:
        print(why, file=sys.stderr)
    return 1 if comparison.void else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(str(error))
