"""What the approximate cache costs a request beside the steps that it saves: hits by K, and misses, through the suite.

A model whose steps are long. Each round draws one request without the cache, one that asks and finds nothing similar
enough, and one hit for each K; medians. A hit is compared with the same request without the cache less K steps of its
denoising; a miss, which is asked for and recorded, with the request without the cache.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bottega.addons.cache.wire import recorded_steps
from bottega.addons.cache.wire.starts import FRACTIONS
from bottega.client import CacheProfile, LengthClass, Picture, SkipProfile
from bottega.client.types.options import SamplerName
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.cache_suite import CacheCast, CacheSuite, check_apart, suite
from load.bench.report import report
from load.bench.scratch import scratch
from tests.support.waiting import wait_until

# About 100 ms a guided step on one core.
SHAPE = BenchShape(sample_size=24)
STEPS = 50
GUIDANCE_SCALE = 5.0
PROMPT = "a big red star on the left on a blue background"
# Words that no other prompt here has; each is a prompt of its own.
_MISS = "a small green ring number {} at the top"
_SAMPLERS: tuple[SamplerName, ...] = ("euler", "euler_ancestral")
_NEVER, _ALWAYS = 1.0, -1.0
_RECORDED_S = 30.0
WANTED_HIT, WANTED_MISS = 0.03, 0.01


@dataclass(slots=True, kw_only=True)
class Timed:
    """Seconds of requests, an entry for each round. full: without the cache; denoise: of its denoising alone.

    hits: by K. from_steps: by K, the first step that a hit was made of. late: hits whose answer came too late for K.
    """

    full: list[float] = field(default_factory=list)
    denoise: list[float] = field(default_factory=list)
    misses: list[float] = field(default_factory=list)
    hits: dict[int, list[float]] = field(default_factory=dict)
    from_steps: dict[int, int] = field(default_factory=dict)
    late: int = 0

    @property
    def miss_overhead(self) -> float:
        """Of a request, what asking in vain and recording take."""
        return median(self.misses) / median(self.full) - 1.0

    def ideal(self, step: int, steps: int) -> float:
        """Seconds of a request that is spared so many steps, and nothing else."""
        return median(self.full) - median(self.denoise) * step / steps

    def hit_overhead(self, step: int, steps: int) -> float:
        """What a hit at K takes beyond that, as a share of a full request."""
        return (median(self.hits[step]) - self.ideal(step, steps)) / median(self.full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One suite."""

    running: CacheSuite
    sampler: SamplerName
    steps: int

    def measure(self, rounds: int) -> Timed:
        """The first round is not counted: it pays for what is made once."""
        timed = Timed(hits={step: [] for step in recorded_steps(self.steps)})
        self._record()
        for number in range(rounds + 1):
            self._round(number, timed if number else Timed(hits={step: [] for step in timed.hits}))
        return timed

    def _round(self, number: int, timed: Timed) -> None:
        picture, seconds = self._draw(PROMPT, number, approximate_cache=False)
        timed.full.append(seconds)
        timed.denoise.append(_stage_s(picture, "denoise"))
        self._set_profile(dict.fromkeys(FRACTIONS, _NEVER))
        picture, seconds = self._draw(_MISS.format(f"{self.sampler} {number}"), number, approximate_cache=True)
        assert not picture.provenance.cached_starts, "nothing is similar enough"
        timed.misses.append(seconds)
        for fraction, step in zip(FRACTIONS, recorded_steps(self.steps), strict=True):
            self._set_profile({fraction: _ALWAYS})
            picture, seconds = self._draw(PROMPT, number, approximate_cache=True)
            if not picture.provenance.cached_starts:  # the answer came after so many steps
                timed.late += 1
                continue
            (start,) = picture.provenance.cached_starts
            assert start.entry.endswith(f"@{step}"), "the profile allows this step alone"
            timed.hits[step].append(seconds)
            timed.from_steps[step] = start.from_step

    def _record(self) -> None:
        """Has the prompt's latents recorded: what is asked for the first time is not."""
        for seed in (1_000, 1_001):
            self._draw(PROMPT, seed, fidelity="exact")
        wait_until(lambda: self._recorded, "the prompt to be recorded", within_s=_RECORDED_S)

    @property
    def _recorded(self) -> bool:
        entries = self.running.client.cache_entries()
        return any(each.parameters.prompt == PROMPT and each.parameters.seed == 1_001 for each in entries)

    def _set_profile(self, least: Mapping[float, float]) -> None:
        """least: similarity, by the fraction of the steps; one that is not there is never skipped."""
        balanced = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds=least),))
        profile = CacheProfile(model_hash=self.running.model_hash, balanced=balanced, about="a bench")
        self.running.client.set_cache_profile(profile)

    def _draw(self, prompt: str, seed: int, **options: Any) -> tuple[Picture, float]:
        """fidelity: balanced, where not said otherwise."""
        began_s = time.perf_counter()
        picture = self.running.client.generate(
            prompt,
            seed=seed,
            sampler=self.sampler,
            num_inference_steps=self.steps,
            guidance_scale=GUIDANCE_SCALE,
            **{"fidelity": "balanced", **options},
        )
        return picture, time.perf_counter() - began_s


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    with scratch() as folder:
        write_bench_model(folder / "model", SHAPE)
        # Only in this way does every question have the answer that the profile of the moment says.
        cache = {"exploration": 0.0, "row_pictures": 1, "predictor": False}
        engine = {"threads": 1}
        cast = CacheCast(
            folder=folder / "suite", model=str(folder / "model"), name="bench", engine=engine, cache=cache, apart=True
        )
        with suite(cast) as running:
            check_apart(running)
            timed = {
                sampler: Bench(running=running, sampler=sampler, steps=options.steps).measure(options.rounds)
                for sampler in options.samplers
            }
    _report(timed, options.steps)


def _report(timed: Mapping[str, Timed], steps: int) -> None:
    rows: list[tuple[str, str, str]] = []
    values: dict[str, float] = {"steps": steps}
    overheads: list[float] = []
    for sampler, each in timed.items():
        full, step_ms = median(each.full), 1000 * median(each.denoise) / steps
        rows.append((f"{sampler}: a request without the cache", f"{full:.2f} s", f"steps of {step_ms:.0f} ms"))
        rows.append((f"    a miss (miss_overhead_{sampler})", f"{each.miss_overhead:+.4f}", f"at most {WANTED_MISS:g}"))
        values |= {f"full_s_{sampler}": full, f"miss_overhead_{sampler}": each.miss_overhead}
        values[f"late_{sampler}"] = each.late
        for step in (step for step, drawn in each.hits.items() if drawn):
            overhead = each.hit_overhead(step, steps)
            overheads.append(overhead)
            said = f"{median(each.hits[step]):.2f} s, {overhead:+.4f}"
            rows.append((f"    a hit at {step}, which begins at step {each.from_steps[step]}", said, ""))
            values |= {f"hit_overhead_{sampler}_{step}": overhead, f"hit_s_{sampler}_{step}": median(each.hits[step])}
    worst_miss = max(each.miss_overhead for each in timed.values())
    rows += [
        ("the worst hit (hit_overhead)", f"{max(overheads):+.4f}", f"at most {WANTED_HIT:g} of a request"),
        ("the worst miss (miss_overhead)", f"{worst_miss:+.4f}", f"at most {WANTED_MISS:g}"),
    ]
    report("cache_latency", rows, {**values, "hit_overhead": max(overheads), "miss_overhead": worst_miss})


def _stage_s(picture: Picture, stage: str) -> float:
    return next(spent.seconds for spent in picture.provenance.times if spent.stage == stage)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-cache-latency", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all requests, for each sampler (default: 5)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"of a picture, from 20 (default: {STEPS})")
    parser.add_argument("--samplers", nargs="*", choices=_SAMPLERS, default=_SAMPLERS, help="(default: both)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
