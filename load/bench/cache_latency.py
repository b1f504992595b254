"""What does the approximate cache cost a request beside the steps that it saves?

Hits by K, and misses, through the suite, with a model whose steps are long. Each round draws one request without the
cache, one that asks and finds nothing similar enough, and one hit for each K; medians. A hit is compared with the same
request without the cache less K steps of its denoising; a miss, which is asked for and recorded, with the request
without the cache. The worker has a core of its own.

A run takes 6 minutes on two cores.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from bottega.addons.cache.starts import FRACTIONS, recorded_steps
from bottega.client import CacheProfile, LengthClass, Picture, SkipProfile
from bottega.rules import SamplerName
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet
from load.bench.suites import Suite, check_apart, stage_s, suite
from tests.support.waiting import wait_until

# About 100 ms a guided step on one core.
SHAPE = BenchShape(sample_size=24)
# Words that no other prompt here has; each is a prompt of its own.
_MISS = "a small green ring number {} at the top"
_SAMPLERS: tuple[SamplerName, ...] = ("euler", "euler_ancestral")
_NEVER, _ALWAYS = 1.0, -1.0
_RECORDED_S = 30.0
WANTED_HIT, WANTED_MISS = 0.03, 0.01
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of all requests, for each sampler", smallest=1),
    Option("--steps", 50, "of a picture, from 20", smallest=20),
    Option("--samplers", _SAMPLERS, "to measure with", choices=_SAMPLERS, smallest=_SAMPLERS[:1]),
)


@dataclass(slots=True, kw_only=True)
class Timed:
    """Seconds of requests, an entry for each round."""

    full: list[float] = field(default_factory=list)
    """Without the cache."""
    denoise: list[float] = field(default_factory=list)
    """Of their denoising alone."""
    misses: list[float] = field(default_factory=list)
    hits: dict[int, list[float]] = field(default_factory=dict)
    """By K."""
    from_steps: dict[int, int] = field(default_factory=dict)
    """By K, the first step that a hit was made of."""
    late: int = 0
    """Hits whose answer came too late for K."""

    @property
    def miss_overhead(self) -> float:
        """The share of a request that asking in vain and recording take."""
        return median(self.misses) / median(self.full) - 1.0

    def ideal(self, step: int, steps: int) -> float:
        """Return the seconds of a request that is spared so many steps, and nothing else."""
        return median(self.full) - median(self.denoise) * step / steps

    def hit_overhead(self, step: int, steps: int) -> float:
        """Return the seconds that a hit at K takes beyond that, as a share of a full request."""
        return (median(self.hits[step]) - self.ideal(step, steps)) / median(self.full)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure each sampler."""
    write_bench_model(folder / "model", SHAPE.for_run(smallest=options.smallest))
    services: Mapping[str, Mapping[str, object]] = {
        # Only in this way does every question have the answer that the profile of the moment.
        "cache": {"exploration": 0.0, "row_pictures": 1, "predictor": False},
        "worker": {"engine": {"model": str(folder / "model"), "model_name": "bench", "threads": 1}},
    }
    with suite(folder / "suite", services, cores={"cache": 1, "worker": 0}) as running:
        check_apart(running.members["worker"], running.members["cache"])
        timed = {
            sampler: _Requests(running, sampler, options.steps).measure(options.rounds) for sampler in options.samplers
        }
    _fill(sheet, timed, options.steps)


class _Requests:
    """Requests of one suite with one sampler."""

    def __init__(self, running: Suite, sampler: SamplerName, steps: int) -> None:
        self._running = running
        self._sampler = sampler
        self._steps = steps

    def measure(self, rounds: int) -> Timed:
        """Return the times of the rounds but the first one, which pays for what is made once."""
        timed = Timed(hits={step: [] for step in recorded_steps(self._steps)})
        for seed in (1_000, 1_001):  # what is asked for the first time is not recorded
            self._draw(PROMPT, seed, fidelity="exact")
        wait_until(lambda: self._recorded, "the prompt to be recorded", within_s=_RECORDED_S)
        for number in range(rounds + 1):
            self._round(number, timed if number else Timed(hits={step: [] for step in timed.hits}))
        return timed

    def _round(self, number: int, timed: Timed) -> None:
        picture, seconds = self._draw(PROMPT, number, approximate_cache=False)
        timed.full.append(seconds)
        timed.denoise.append(stage_s(picture, "denoise"))
        self._set_profile(dict.fromkeys(FRACTIONS, _NEVER))
        picture, seconds = self._draw(_MISS.format(f"{self._sampler} {number}"), number, approximate_cache=True)
        assert not picture.provenance.cached_starts, "nothing is similar enough"
        timed.misses.append(seconds)
        for fraction, step in zip(FRACTIONS, recorded_steps(self._steps), strict=True):
            self._set_profile({fraction: _ALWAYS})
            picture, seconds = self._draw(PROMPT, number, approximate_cache=True)
            if not picture.provenance.cached_starts:  # the answer came after so many steps
                timed.late += 1
                continue
            (start,) = picture.provenance.cached_starts
            assert start.entry.endswith(f"@{step}"), "the profile allows this step alone"
            timed.hits[step].append(seconds)
            timed.from_steps[step] = start.from_step

    @property
    def _recorded(self) -> bool:
        entries = self._running.client.cache_entries()
        return any(each.parameters.prompt == PROMPT and each.parameters.seed == 1_001 for each in entries)

    def _set_profile(self, least: Mapping[float, float]) -> None:
        """Set similarities by the fraction of the steps; a fraction that is not there is never skipped."""
        balanced = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds=least),))
        profile = CacheProfile(model_hash=self._running.model_hash, balanced=balanced, about="a bench")
        self._running.client.set_cache_profile(profile)

    def _draw(self, prompt: str, seed: int, **options: Any) -> tuple[Picture, float]:
        common = {"sampler": self._sampler, "num_inference_steps": self._steps, "guidance_scale": GUIDANCE_SCALE}
        return self._running.draw(prompt, seed=seed, **{"fidelity": "balanced", **common, **options})


def _fill(sheet: Sheet, timed: Mapping[str, Timed], steps: int) -> None:
    sheet.values["steps"] = steps
    overheads: list[float] = []
    for sampler, each in timed.items():
        full, step_ms = median(each.full), 1000 * median(each.denoise) / steps
        what, bar = f"{sampler}: a request without the cache", f"steps of {step_ms:.0f} ms"
        sheet.figure(what, full, "{:.2f} s", key=f"full_s_{sampler}", bar=bar)
        key, bar = f"miss_overhead_{sampler}", f"at most {WANTED_MISS:g}"
        sheet.figure("    a miss", each.miss_overhead, "{:+.4f}", key=key, bar=bar)
        sheet.values[f"late_{sampler}"] = each.late
        for step in (step for step, drawn in each.hits.items() if drawn):
            overhead, hit_s = each.hit_overhead(step, steps), median(each.hits[step])
            overheads.append(overhead)
            what = f"    a hit at {step}, which begins at step {each.from_steps[step]}"
            sheet.row(what, f"{hit_s:.2f} s, {overhead:+.4f}")
            sheet.values |= {f"hit_overhead_{sampler}_{step}": overhead, f"hit_s_{sampler}_{step}": hit_s}
    worst, bar = max(overheads, default=math.nan), f"at most {WANTED_HIT:g} of a request"
    sheet.figure("the worst hit", worst, "{:+.4f}", key="hit_overhead", bar=bar)
    worst, bar = max(each.miss_overhead for each in timed.values()), f"at most {WANTED_MISS:g}"
    sheet.figure("the worst miss", worst, "{:+.4f}", key="miss_overhead", bar=bar)


if __name__ == "__main__":
    sys.exit(BENCH.command())
