"""Whether pictures of one prompt stay various where they start from cached latents: eight seeds, mean pairwise SSIM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import mean

import PIL.Image

from load.bench.cache_engine import Ask, CachedEngine, Drawn
from load.miniature.quality import ssim

SEEDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Diversity:
    """Mean pairwise SSIM of the pictures of a prompt, over the prompts.

    none: without cache. one: eight pictures of one request, each with an entry of its own. several: eight requests.
    started: the share of the pictures of `one`, and of `several`, that started from latents.
    """

    none: float
    one: float
    several: float
    started: tuple[float, float]


def measure_diversity(engine: CachedEngine, prompts: Sequence[str]) -> Diversity:
    """All prompts should find latents."""
    asks = [Ask(prompt=prompt, seed=100 * number, num_images=SEEDS) for number, prompt in enumerate(prompts)]
    none = engine.draw(asks)
    one = engine.draw([_cached(ask, ask.seed, SEEDS) for ask in asks])
    several = engine.draw([_cached(ask, ask.seed + seed, 1) for ask in asks for seed in range(SEEDS)])
    groups = [several[place : place + SEEDS] for place in range(0, len(several), SEEDS)]
    return Diversity(
        none=mean(pairwise_ssim(each.pictures) for each in none),
        one=mean(pairwise_ssim(each.pictures) for each in one),
        several=mean(pairwise_ssim([each.picture for each in group]) for group in groups),
        started=(_started(one), _started(several)),
    )


def pairwise_ssim(pictures: Sequence[PIL.Image.Image]) -> float:
    """Mean over all pairs: 1 where all are the same."""
    return mean(ssim(one, other) for one, other in combinations(pictures, 2))


def _cached(ask: Ask, seed: int, num_images: int) -> Ask:
    return Ask(prompt=ask.prompt, seed=seed, num_images=num_images, cached=True)


def _started(drawn: Sequence[Drawn]) -> float:
    return mean(start is not None for each in drawn for start in each.starts)
