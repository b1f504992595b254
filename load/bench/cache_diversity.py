"""Do pictures of one prompt stay various where they start from cached latents?

Rows of six, as a person sees them: of one request, and of six requests one after the other, whose first pictures are
recorded as in production. Both take turns with a row from noise, whose mean pairwise SSIM theirs is compared with.
Prompts leave open what stands where, or on which ground: what a prompt says, all of its pictures have in common anyhow.

A run takes 8 minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

import PIL.Image
import torch
from google.protobuf import json_format

from bottega.addons.cache.client.samples import miniature_pairs
from bottega.addons.cache.starts import FRACTIONS
from bottega.cache.store.settings import StoreSettings
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import random_scene, unplaced_caption
from bottega.v1.cache_pb2 import CacheLengthClass, CacheProfile, CacheThreshold
from load.bench.cache_engine import Ask, CachedEngine, Drawn, cached_engine
from load.bench.framework import Bench, Option, Sheet
from load.miniature.quality import ssim

ROW = 6
"""Pictures that a person sees beside each other."""

WANTED_GAP = 0.05
PROFILE = WEIGHTS / "cache_profile.json"
# Between the seeds of two rows.
_APART = 1000
_WARM_SEED = 5_000_000
BENCH = Bench(
    __file__,
    __doc__,
    Option("--prompts", 24, "of which rows are drawn", smallest=1),
    Option("--entries", 100, "of other prompts, to begin with", smallest=2),
    Option("--steps", 30, "of each picture", smallest=10),
    Option("--seed", 0, "of the first picture"),
    Option("--row-pictures", ROW, "as in the cache's configuration"),
    Option("--fraction", None, "latents up to this share serve any prompt, in place of the profile", kind=float),
    Option("--threads", 2, "of torch"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of pictures of one prompt."""

    pictures: tuple[PIL.Image.Image, ...]
    started: int
    """Pictures that started from a latent."""
    saved: float
    """Share of the steps of all pictures that starts saved."""

    @property
    def ssim(self) -> float:
        """Mean SSIM of all pairs: 1 where all pictures are the same."""
        return pairwise_ssim(self.pictures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Rows by prompt: from noise, of one request, and of several requests."""

    none: tuple[Row, ...]
    one: tuple[Row, ...]
    several: tuple[Row, ...]

    def gap(self, rows: Sequence[Row]) -> tuple[float, float]:
        """Return how much more alike rows are than those from noise, and the standard error of that."""
        gaps = [row.ssim - none.ssim for row, none in zip(rows, self.none, strict=True)]
        return mean(gaps), stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else 0.0


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Fill a store, and draw rows."""
    profile = read_profile(PROFILE)
    if options.fraction:
        profile = profile_to(options.fraction, profile)
    torch.set_num_threads(options.threads)
    with cached_engine(folder, settings(folder, row_pictures=options.row_pictures)) as engine:
        engine.store.set_profile(profile)
        warm(engine, options.entries, steps=options.steps)
        prompts = open_prompts(options.prompts)
        fill(sheet, measure_diversity(engine, prompts, seed=options.seed, steps=options.steps))


def measure_diversity(engine: CachedEngine, prompts: Sequence[str], *, seed: int = 0, steps: int = 30) -> Diversity:
    """Draw the rows of each prompt, by turns."""
    none, one, several = list[Row](), list[Row](), list[Row]()

    def ask(prompt: str, seed: int, num_images: int, *, cached: bool) -> Ask:
        return Ask(prompt=prompt, seed=seed, steps=steps, num_images=num_images, cached=cached, recorded=cached)

    for number, prompt in enumerate(prompts):
        seeds = range(seed + 3 * number * _APART, seed + 3 * (number + 1) * _APART, _APART)
        none.append(_row(engine.draw([ask(prompt, seeds[0], ROW, cached=False)])))
        one.append(_row(engine.draw([ask(prompt, seeds[1], ROW, cached=True)])))
        drawn = [engine.draw([ask(prompt, seeds[2] + place, 1, cached=True)]) for place in range(ROW)]
        several.append(_row([each for request in drawn for each in request]))
    return Diversity(none=tuple(none), one=tuple(one), several=tuple(several))


def _row(drawn: Sequence[Drawn]) -> Row:
    """Return the pictures of these requests as a row."""
    starts = [start for each in drawn for start in each.starts if start is not None]
    made = sum(each.ask.steps * each.ask.num_images for each in drawn)
    return Row(
        pictures=tuple(picture for each in drawn for picture in each.pictures),
        started=len(starts),
        saved=sum(start.skipped_steps for start in starts) / made,
    )


def pairwise_ssim(pictures: Sequence[PIL.Image.Image]) -> float:
    """Return the mean over all pairs: 1 where all are the same."""
    return mean(ssim(one, other) for one, other in combinations(pictures, 2))


def open_prompts(count: int, *, seed: int = 3) -> list[str]:
    """Return so many different prompts that leave things open, as people's do."""
    rng = random.Random(seed)
    prompts: dict[str, None] = {}
    while len(prompts) < count:
        scene = random_scene(rng, things=1 + len(prompts) % 4 // 3)
        whole = unplaced_caption(scene)
        thing, _, _ = whole.partition(" on ")
        prompts[(thing, whole, f"{thing} on the left", whole)[len(prompts) % 4]] = None
    return list(prompts)


def warm(engine: CachedEngine, entries: int, *, steps: int = 30) -> None:
    """Have so many pictures of other prompts recorded, each with a seed of its own."""
    prompts = [pair.first for pair in miniature_pairs(entries + 1, seed=17)]
    asks = [
        Ask(prompt=prompt, seed=_WARM_SEED + number, steps=steps, recorded=True)
        for number, prompt in enumerate(prompts)
    ]
    engine.draw(asks)


def read_profile(path: Path) -> CacheProfile:
    """Return the profile in a file."""
    return json_format.Parse(path.read_text(encoding="utf-8"), CacheProfile())


def profile_to(fraction: float, measured: CacheProfile) -> CacheProfile:
    """Return a profile by which latents after up to that share of the steps stand for any prompt's."""
    thresholds = [CacheThreshold(fraction=each, similarity=-1.0) for each in FRACTIONS if each <= fraction]
    enough = [CacheLengthClass(thresholds=thresholds)]
    return CacheProfile(model_hash=measured.model_hash, balanced=enough, fast=enough)


def settings(folder: Path, *, row_pictures: int) -> StoreSettings:
    """Return those of a cache with default configuration."""
    return StoreSettings(folder=folder / "store", budget_bytes=1 << 30, row_pictures=row_pictures, seed=0)


def fill(sheet: Sheet, diversity: Diversity) -> None:
    """Report how alike rows are."""
    alike = sheet.values["ssim_none"] = mean(row.ssim for row in diversity.none)
    for suffix, what, rows in (
        ("", f"SSIM of {ROW} pictures of a request: noise, cached", diversity.one),
        ("_several", f"SSIM of {ROW} requests one after the other: noise, cached", diversity.several),
    ):
        gap, error = diversity.gap(rows)
        saved, started = mean(row.saved for row in rows), mean(row.started for row in rows) / ROW
        sheet.row(what, f"{alike:.3f}, {mean(row.ssim for row in rows):.3f}")
        sheet.figure(
            "    difference",
            gap,
            f"{{:+.3f}} (+- {error:.3f})",
            key=f"ssim_gap{suffix}",
            bar=f"within {WANTED_GAP:g}",
        )
        sheet.row("    from a latent, of all pictures; steps saved", f"{started:.2f}, {saved:.3f}")
        name = suffix or "_one"
        sheet.values |= {f"ssim_gap{suffix}_error": error, f"steps_saved{name}": saved, f"started{name}": started}


if __name__ == "__main__":
    sys.exit(BENCH.command())
