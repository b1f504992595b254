"""What the quality of cached starts is read from: the same prompts drawn in every way that is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean

import PIL.Image

from bottega.addons.cache.client.samples import PromptPair, miniature_pairs
from bottega.miniature.scenes import Scene, read_caption
from bottega.quality import oracle
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, Fidelity
from load.bench.cache_engine import Ask, CachedEngine, Drawn

# Pairs whose first prompts are drawn before any of their second ones.
_WAVE, _LEAST_WAVE = 100, 8
# So many times as many pairs are tried at most: others find nothing similar enough, and are the same picture anyhow.
MOST_TRIED = 6
# None of them is one of those that the profile was measured with.
_SEED = 1
# Seeds of the second pictures, of the other set, and of the first ones.
_OTHER_SEEDS, _FIRST_SEEDS = 1_000_000, 2_000_000

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedSet:
    """Of each prompt that started from a latent the pictures of every way, in one order.

    cached: from the latent. uncached: from noise, the same seed. fewer: from noise, as many steps as `cached` made.
    other: from noise, another seed. nearest: that of the entry itself. tried: prompts, of which these are those with a
    hit.
    """

    cached: tuple[Drawn, ...]
    uncached: tuple[Drawn, ...]
    fewer: tuple[Drawn, ...]
    other: tuple[Drawn, ...]
    nearest: tuple[PIL.Image.Image, ...]
    tried: int

    @property
    def prompts(self) -> list[str]:
        """Of each picture."""
        return [each.ask.prompt for each in self.cached]

    @property
    def steps_saved(self) -> float:
        """Of all steps, the share that the hits did not make."""
        return mean(_skipped(each) / each.ask.steps for each in self.cached)


def draw_pairs(
    engine: CachedEngine, wanted: int, tell: Progress, *, fidelity: Fidelity.ValueType = FIDELITY_BALANCED
) -> CachedSet:
    """So many prompts with a hit, or fewer where too few of those that may be tried have one.

    fidelity: under which pictures start from latents.
    """
    hits: list[Drawn] = []
    tried = 0
    pairs = miniature_pairs(MOST_TRIED * wanted, seed=_SEED)
    _make_known(engine)
    while len(hits) < wanted and tried < len(pairs):
        wave = pairs[tried : tried + min(_WAVE, max(wanted, _LEAST_WAVE))]
        hits += [each for each in _draw_wave(engine, wave, tried, fidelity) if each.start is not None]
        tried += len(wave)
        tell(f"{tried} pairs drawn, {len(hits)} of them started from a latent")
    cached = hits[:wanted]
    uncached = engine.draw([replace(each.ask, cached=False) for each in cached])
    tell("drawn from noise")
    fewer = engine.draw([replace(each.ask, cached=False, steps=each.ask.steps - _skipped(each)) for each in cached])
    tell("drawn with fewer steps")
    other = engine.draw([replace(each.ask, cached=False, seed=each.ask.seed + _OTHER_SEEDS) for each in cached])
    tell("drawn with other seeds")
    return CachedSet(
        cached=tuple(cached),
        uncached=tuple(uncached),
        fewer=tuple(fewer),
        other=tuple(other),
        nearest=tuple(_entry_picture(engine, each) for each in cached),
        tried=tried,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoraSet:
    """Pictures with a LoRA: exact, and from latents that were recorded without it, in one order."""

    exact: tuple[Drawn, ...]
    cached: tuple[Drawn, ...]


def draw_loras(engine: CachedEngine, asks: Sequence[Ask], name: str, bound: int) -> LoraSet:
    """Those of the asks that find a latent. bound: the latest step after which it was."""
    drawn = engine.draw([replace(ask, cached=True, loras=(name,), lora_bound=bound) for ask in asks])
    cached = [each for each in drawn if each.start is not None]
    assert all(each.start.without_loras for each in cached if each.start), "nothing was recorded with it"
    exact = engine.draw([replace(each.ask, cached=False, lora_bound=0) for each in cached])
    return LoraSet(exact=tuple(exact), cached=tuple(cached))


def accuracy(drawn: Sequence[Drawn]) -> float:
    """The share of pictures in which the oracle reads all that the prompt says."""
    return accuracy_of([each.picture for each in drawn], [each.ask.prompt for each in drawn])


def accuracy_of(pictures: Sequence[PIL.Image.Image], prompts: Sequence[str]) -> float:
    """The same of pictures for prompts."""
    read = zip(pictures, prompts, strict=True)
    return mean(oracle.agrees(oracle.read(picture), scene_of(prompt)) for picture, prompt in read)


def scene_of(prompt: str) -> Scene:
    """What it says; it is a sentence of the grammar."""
    scene = read_caption(prompt)
    assert scene is not None, "all prompts are of the grammar"
    return scene


def _make_known(engine: CachedEngine) -> None:
    """A key is recorded from its second question on, of a store that was started again, too."""
    engine.draw_now([Ask(prompt="a big red star on the left on a blue background", seed=0, recorded=True)])


def _draw_wave(
    engine: CachedEngine, pairs: Sequence[PromptPair], first: int, fidelity: Fidelity.ValueType
) -> list[Drawn]:
    numbers = range(first, first + len(pairs))
    engine.draw(
        [
            Ask(prompt=pair.first, seed=_FIRST_SEEDS + number, recorded=True)
            for number, pair in zip(numbers, pairs, strict=True)
        ]
    )
    return engine.draw(
        [
            Ask(prompt=pair.second, seed=number, cached=True, fidelity=fidelity)
            for number, pair in zip(numbers, pairs, strict=True)
        ]
    )


def _skipped(drawn: Drawn) -> int:
    assert drawn.start is not None, "it started from a latent"
    return drawn.start.skipped_steps


def _entry_picture(engine: CachedEngine, drawn: Drawn) -> PIL.Image.Image:
    """Plain retrieval: what the most similar prompt's picture was."""
    assert drawn.start is not None, "it started from a latent"
    details = engine.store.entry(drawn.start.entry)
    assert details is not None, "the store has room for all"
    assert details.picture is not None, "it is whole"
    return PIL.Image.fromarray(details.picture)
