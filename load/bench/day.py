"""What does one compressed production day take the whole suite, against a plain Diffusers server on the same cores?

The day is a mix of load/replay/mixes: edits and pictures, with ControlNets and LoRAs, by hours, with bursts. The plain
server draws static batches in one process, without a cache of anything. Each side has the machine to itself; they take
turns, and get the same requests at the same times. An answer counts that comes within three times what its request
takes alone on the plain server. Then come days of the suite without one technique each.

A run takes 80 minutes on two cores, 40 with `--rows none`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bottega.errors import ConfigError
from load.bench import day_page
from load.bench.cache_stream import embed, profile, thresholds
from load.bench.day_figures import (
    IN_TIME,
    PLAIN,
    SUITE,
    WANTED,
    Comparison,
    DayRun,
    Figures,
    Scale,
    Uses,
    kinds,
    slowest,
)
from load.bench.day_requests import DayShape, RequestClass, rate_for, warm_up_requests
from load.bench.day_sides import (
    ALL,
    LABELS,
    AloneTimes,
    DaySuite,
    PlainSide,
    Techniques,
    World,
    build_world,
    copy_state,
    without_each,
)
from load.bench.framework import CORES, Bench, Option, Row, Sheet
from load.bench.side_process import Side
from load.bench.stock import stock
from load.bench.suites import children_processor_s
from load.replay.driver import replay
from load.replay.prompt_stream import prompts
from load.replay.requests import PlannedRequest

# Added to the seed of the first day: the day before has other requests than any that follows.
_DAY_BEFORE = 1_000_000
# Prompts whose similarities give the thresholds of cached latents.
_PROMPTS = 2000
# A template is recorded by one edit, and completed by the next: the first leaves out what its own mask covers.
_RECORDING_EDITS = 2
_RECORDING_MASK = 0.01
# Times what the slowest request takes alone: longer than an answer in time, for all of them.
_PATIENCE = 4.0
# Of each request of the day before, of which several are drawn at once.
_PREPARING_DEADLINE_S = 900.0


def _above_0(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return number


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


BENCH = Bench(
    __file__,
    __doc__,
    Option("--minutes", 5.0, "that a day takes", smallest=0.5, kind=_above_0),
    Option("--rounds", 1, "days of both sides, each another one", kind=_count),
    Option(
        "--rows",
        ["all"],
        f"techniques that a day is drawn without: {', '.join(LABELS)}; all, or none",
        choices=[*LABELS, "all", "none"],
        smallest=["controlnet_server"],
    ),
    Option("--mix", "day", "of load/replay/mixes, or a TOML file"),
    Option("--seed", 1, "of the first day"),
    Option("--load", 0.8, "of what the plain server draws one by one", smallest=2.0, kind=_above_0),
    Option("--steps-share", 0.4, "of the mix's steps, those that are made", smallest=0.1, kind=_above_0),
    Option("--templates", 12, "that are edited", smallest=2, kind=_count),
    Option("--controlnets", 8, "that there are", smallest=2, kind=_count),
    Option("--loras", 12, "that there are", smallest=2, kind=_count),
    Option("--day-before", 60, "pictures that the cache has seen, at most", smallest=4),
    Option("--threads", CORES, "of each engine", kind=_count),
    Option(
        "--deadline-s",
        None,
        "of a request; by default four times what the slowest one takes alone",
        smallest=120.0,
        kind=_above_0,
    ),
    Option("--page", Path("out/bench-day.html"), "to write", kind=Path),
    heads=(PLAIN, SUITE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """Settings that are made before the first run."""

    world: World
    scale: Scale
    days: Sequence[Sequence[PlannedRequest]]
    """Requests of each round."""
    rate_per_s: float
    """Mean rate of requests."""
    fuse: bool
    """Whether the plain server puts LoRAs into weights."""
    prepared: Path
    """State of the suite's stores, of which each run has a copy."""
    options: argparse.Namespace

    @property
    def length_s(self) -> float:
        """Seconds of a day."""
        return 60.0 * float(self.options.minutes)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> int:
    """Run both sides in turns, then the suite without each technique; return 1 where a run is void."""
    try:
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.touch()
    except OSError as error:  # now, not after an hour
        raise ConfigError(f"{options.page} cannot be written: {error.strerror}") from None
    day = _settle(folder, options)
    plain: list[DayRun] = []
    suite: list[DayRun] = []
    for number, requests in enumerate(day.days):
        plain.append(_print_run(PLAIN, day, _plain_day(day, requests)))
        suite.append(_print_run(SUITE, day, _suite_day(day, requests, ALL, folder / f"suite-{number}")))
    without = {}
    for name in rows_of(options):
        run = _suite_day(day, day.days[0], without_each()[name], folder / f"without-{name}")
        without[name] = Figures(runs=[_print_run(f"without {LABELS[name]}", day, run)], scale=day.scale)
    comparison = Comparison(
        plain=Figures(runs=plain, scale=day.scale), suite=Figures(runs=suite, scale=day.scale), without=without
    )
    html = day_page.page(comparison, options, day.rate_per_s)
    options.page.write_text(html, encoding="utf-8")
    print(f"page: {options.page}")
    sheet.rows += rows(comparison)
    sheet.values |= comparison.values()
    for why in comparison.void:
        print(why, file=sys.stderr)
    return 1 if comparison.void else 0


def rows_of(options: argparse.Namespace) -> list[str]:
    """Return the techniques that a day is drawn without."""
    return [name for name in LABELS if name in options.rows or "all" in options.rows]


def _plain_day(day: Day, requests: Sequence[PlannedRequest]) -> DayRun:
    with Side(stock, threads=day.options.threads, exclusive_cores=True, model=day.world.model) as process:
        side = PlainSide(process=process, world=day.world, fuse=day.fuse)
        side.warm_up(requests)

        async def run() -> DayRun:
            async with side.serving() as send:
                before_s = children_processor_s()
                replayed = await replay(requests, send, deadline_s=day.scale.deadline_s, length_s=day.length_s)
                return DayRun(replayed=replayed, processor_s=children_processor_s() - before_s)

        return asyncio.run(run())


def _suite_day(day: Day, requests: Sequence[PlannedRequest], techniques: Techniques, folder: Path) -> DayRun:
    """Run a suite that is started for it, in the state that the day before left."""
    suite = DaySuite(
        world=day.world,
        folder=folder / "services",
        state=copy_state(day.prepared, folder / "state"),
        threads=day.options.threads,
        deadline_s=day.scale.deadline_s,
        techniques=techniques,
    )
    uses, deadline_s = Uses(), day.scale.deadline_s
    with suite.running() as running:

        async def run() -> DayRun:
            await suite.warm_up(running, warm_up_requests(requests, list(day.world.controlnets)))
            async with suite.sending(running, uses.add) as sender:
                before_s = children_processor_s()
                replayed = await replay(requests, sender.send, deadline_s=deadline_s, length_s=day.length_s)
                spent_s = children_processor_s() - before_s
                return DayRun(replayed=replayed, processor_s=spent_s, uses=uses)

        return asyncio.run(run())


def _print_run(name: str, day: Day, run: DayRun) -> DayRun:
    """Print a run's result at once: all of them together take long."""
    figures = Figures(runs=[run], scale=day.scale)
    result = f"{len(figures.answers)} requests, {figures.good_share:.0%} in time, p95 {figures.latency_s(0.95):.1f} s"
    print("; ".join([f"{name}: {result}", *figures.uses, *figures.reasons, *figures.void]), flush=True)
    return run


def _settle(folder: Path, options: argparse.Namespace) -> Day:
    """Write files, measure what requests take alone, and draw the day before; this takes some minutes.

    Raises ConfigError for a mix of which no day can be made.
    """
    print("writes the model, ControlNets and LoRAs", flush=True)
    world = build_world(folder / "world", controlnets=options.controlnets, loras=options.loras)
    shape = DayShape(
        mix=options.mix,
        minutes=options.minutes,
        steps_share=options.steps_share,
        templates=options.templates,
        controlnets=list(world.controlnets),
        loras=list(world.loras),
    )
    print("measures what requests take alone", flush=True)
    with Side(stock, threads=options.threads, exclusive_cores=True, model=world.model) as process:
        pace = _pace(PlainSide(process=process, world=world), shape, options)
    print(f"{pace.rate_per_s:.3f} requests a second on average", flush=True)
    world.prepare(request for requests in pace.days for request in requests)
    day = Day(
        world=world,
        scale=Scale(alone_s=pace.alone_s, deadline_s=options.deadline_s or _PATIENCE * max(pace.alone_s.values())),
        days=pace.days,
        rate_per_s=pace.rate_per_s,
        fuse=pace.fuse,
        prepared=folder / "prepared",
        options=options,
    )
    _draw_the_day_before(day, shape)
    return day


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    fuse: bool
    alone_s: Mapping[RequestClass, float]
    rate_per_s: float
    days: Sequence[Sequence[PlannedRequest]]


def _pace(side: PlainSide, shape: DayShape, options: argparse.Namespace) -> _Pace:
    """Return how many requests come, by what the plain server takes."""
    seeds = range(options.seed, options.seed + options.rounds)
    samples = [shape.sample(seed) for seed in seeds]
    sample = [request for requests in samples for request in requests]
    side.warm_up(sample)
    if with_loras := next((request for request in sample if request.loras and not request.controlnets), None):
        side = side.with_faster_loras(with_loras)
    alone = AloneTimes(side=side)
    rate_per_s = rate_for(samples, alone.of, load=options.load, length_s=60.0 * options.minutes)
    days = [shape.requests(rate_per_s, seed) for seed in seeds]
    for requests in days:
        for request in requests:
            alone.of(request)
    return _Pace(fuse=side.fuse, alone_s=alone.seconds, rate_per_s=rate_per_s, days=days)


def _draw_the_day_before(day: Day, shape: DayShape) -> None:
    """Leave recordings of all templates, and pictures in the cache."""
    suite = DaySuite(
        world=day.world,
        folder=day.prepared / "services",
        state=day.prepared,
        threads=day.options.threads,
        deadline_s=_PREPARING_DEADLINE_S,
    )
    seed = day.options.seed + _DAY_BEFORE
    drawn = _plain_draws(shape.sample(seed))[: day.options.day_before]
    before = [*_recording_edits(request for requests in day.days for request in requests), *drawn]
    day.world.prepare(before)
    stream = prompts(_PROMPTS, shape.at(day.rate_per_s).prompts, seed=seed)
    print(f"draws the day before: {len(before)} requests", flush=True)
    suite.prepare(before, profile(thresholds(embed(stream))))


def _recording_edits(requests: Iterable[PlannedRequest]) -> list[PlannedRequest]:
    """Return edits of small parts: all templates once, and then again."""
    edited = {(request.template, request.steps): request for request in requests if request.kind == "edit"}
    return [
        replace(request, seed=number, mask_ratio=_RECORDING_MASK, loras=())
        for number in range(_RECORDING_EDITS)
        for request in edited.values()
    ]


def _plain_draws(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Return those from whose latents others may start: control images and LoRAs would have to be the same."""
    return [request for request in requests if request.kind == "draw" and not request.controlnets and not request.loras]


def rows(comparison: Comparison) -> Iterator[Row]:
    """Yield the table: both sides, their ratios, the kinds and the slowest requests, and each technique's worth."""
    plain, suite = comparison.plain, comparison.suite
    yield f"answers within {IN_TIME:g} times the time alone", f"{plain.good_share:.1%}", f"{suite.good_share:.1%}"
    for share in (0.5, 0.95, 0.99):
        yield f"p{100 * share:g}", f"{plain.latency_s(share):.2f} s", f"{suite.latency_s(share):.2f} s"
    yield "pictures a core-minute", f"{plain.per_core_minute:.1f}", f"{suite.per_core_minute:.1f}"
    for what, key, ratio in (
        ("suite over plain, answers in time", "goodput_ratio", comparison.goodput_ratio),
        ("plain over suite, p95", "p95_ratio", comparison.p95_ratio),
    ):
        yield f"{what} ({key}, wanted {WANTED[key]:g})", "", f"{ratio:.2f}"
    for kind in kinds(comparison):
        yield f"{kind.requests} {kind.name}: p50, p95, in time", f"{kind.plain}", f"{kind.suite}"
        yield "    alone; of the suite's turns, their part", f"{kind.alone_s:.1f} s", f"{kind.turns_s:.1f} s"
    for slow in slowest(comparison):
        what = f"slow: {RequestClass.of(slow.request)}, {slow.alone_s:.1f} s alone, came at {slow.request.at_s:.0f} s"
        where = f" ({slow.where})" if slow.where else ""
        yield what, f"{slow.plain_s:.1f} s", f"{slow.suite_s:.1f} s{where}"
    for name, figures in comparison.without.items():
        goodput, p95 = comparison.worth(name)
        shown = f"{figures.good_share:.1%}, {figures.latency_s(0.95):.2f} s; {goodput:.2f}, {p95:.2f}"
        yield f"without {LABELS[name]}: in time, p95; worth", "", shown


if __name__ == "__main__":
    try:
        sys.exit(BENCH.command())
    except ConfigError as error:
        sys.exit(str(error))
