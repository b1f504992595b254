"""What is settled before the first run of a day: files, what requests take alone, and what the day before left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from load.bench.cache import embed
from load.bench.cache_replay import profile
from load.bench.cache_thresholds import thresholds
from load.bench.day_figures import Scale
from load.bench.day_files import build_world
from load.bench.day_options import DayOptions
from load.bench.day_plain import AloneTimes, PlainSide, faster_with_fusing, warm_up_plain
from load.bench.day_reference import DayReference
from load.bench.day_requests import DayShape, RequestClass, rate_for
from load.bench.day_suite import DaySuite, prepare
from load.bench.day_world import World
from load.replay.prompt_stream import prompts
from load.replay.requests import PlannedRequest

# Added to the seed of the first day: the day before has other requests than any that follows.
_DAY_BEFORE = 1_000_000
# Whose similarities say from which on a latent is used.
_PROMPTS = 2000
# A template is recorded by one edit, and completed by the next: the first leaves out what its own mask covers.
_RECORDING_EDITS = 2
_RECORDING_MASK = 0.01
# Times what the slowest request takes alone: longer than an answer in time, for all of them.
_PATIENCE = 4.0
# Of each of its requests: nobody waits for them, and several are drawn at once.
_PREPARING_DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """All of it. days: requests of each round. rate_per_s: at which they come, on average. fuse: whether the plain
    server puts LoRAs into weights. prepared: state of the suite's stores, of which each run has a copy.
    """

    world: World
    scale: Scale
    days: Sequence[Sequence[PlannedRequest]]
    rate_per_s: float
    fuse: bool
    prepared: Path
    options: DayOptions


def settle(folder: Path, options: DayOptions) -> Day:
    """Takes some minutes, and says what it finds. Raises ConfigError for a mix of which no day can be made."""
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
    print("asks what requests take alone", flush=True)
    with DayReference(world.model, options.threads) as process:
        pace = _pace(PlainSide(process=process, world=world), shape, options)
    print(f"{pace.rate_per_s:.3f} requests a second on average", flush=True)
    world.prepare(request for requests in pace.days for request in requests)
    day = Day(
        world=world,
        scale=Scale(
            alone_s=pace.alone_s,
            deadline_s=options.deadline_s or _PATIENCE * max(pace.alone_s.values()),
        ),
        days=pace.days,
        rate_per_s=pace.rate_per_s,
        fuse=pace.fuse,
        prepared=folder / "prepared",
        options=options,
    )
    _live_the_day_before(day, shape)
    return day


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """How much comes, by what the plain server takes. See Day."""

    fuse: bool
    alone_s: Mapping[RequestClass, float]
    rate_per_s: float
    days: Sequence[Sequence[PlannedRequest]]


def _pace(side: PlainSide, shape: DayShape, options: DayOptions) -> _Pace:
    samples = [shape.sample(seed) for seed in _seeds(options)]
    sample = [request for requests in samples for request in requests]
    warm_up_plain(side, sample)
    if with_loras := next((request for request in sample if request.loras and not request.controlnets), None):
        side = faster_with_fusing(side, with_loras)
    alone = AloneTimes(side=side)
    rate_per_s = rate_for(samples, alone.of, load=options.load, length_s=options.length_s)
    days = [shape.requests(rate_per_s, seed) for seed in _seeds(options)]
    for requests in days:
        for request in requests:
            alone.of(request)
    return _Pace(fuse=side.fuse, alone_s=alone.seconds, rate_per_s=rate_per_s, days=days)


def _seeds(options: DayOptions) -> range:
    """One for each day."""
    return range(options.seed, options.seed + options.rounds)


def _live_the_day_before(day: Day, shape: DayShape) -> None:
    """Recordings of all templates, and pictures in the cache."""
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
    print(f"lives the day before: {len(before)} requests", flush=True)
    prepare(suite, before, profile(thresholds(embed(stream))))


def _recording_edits(requests: Iterable[PlannedRequest]) -> list[PlannedRequest]:
    """Edits of small parts: all templates once, and then again."""
    kinds = {(request.template, request.steps): request for request in requests if request.kind == "edit"}
    return [
        replace(request, seed=number, mask_ratio=_RECORDING_MASK, loras=())
        for number in range(_RECORDING_EDITS)
        for request in kinds.values()
    ]


def _plain_draws(requests: Sequence[PlannedRequest]) -> list[PlannedRequest]:
    """Those whose latents others may start from: control images and LoRAs would have to be the same."""
    return [request for request in requests if request.kind == "draw" and not request.controlnets and not request.loras]
