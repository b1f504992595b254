"""What is done to the approximate cache: killed while pictures start from its latents and while it records others."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bottega.client import CacheProfile, LengthClass, Picture, SkipProfile
from tests.chaos.scene import Drawing, Scene
from tests.support.waiting import wait_until

STEPS = 20
# Latents after six steps of twenty stand for any prompt's of their key: no question but a key's first finds nothing.
_FRACTION = 0.3
_RECORDED_SEED, _SEED = 1, 2
# When a picture is finished, the cache still writes what it has left there; a kill comes within this time.
_WRITING_S = 0.3
_TRIES = 20
# What is recorded under it serves no other picture here.
_ANOTHER_KEY: Mapping[str, Any] = {"negative_prompt": "a circle"}


class _Undisturbed:
    """Pictures as they are when nothing happens, by the latent that they start from, "ENTRY@STEP"; "" is noise."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._pictures: dict[str, bytes] = {}

    def of(self, start: str) -> bytes:
        """Drawn when it is asked for the first time, with the latent pinned: the cache must be there."""
        if start not in self._pictures:
            how: Mapping[str, Any] = {"cache_entry": start} if start else {"approximate_cache": False}
            self._pictures[start] = _pixels(_finished(self._scene, _draw(self._scene, **how)))
        return self._pictures[start]


def kill_cache_stores(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 of the cache until so many kills have landed: in mid-picture, or while it writes what was drawn.

    Each time three pictures are drawn: one that may start from a latent, one that must (it is pinned), and an exact
    one, which is recorded. All come, and every pixel is as they say; what is pinned outlives every kill.
    """
    scene.start_cache()
    undisturbed, pin = _Undisturbed(scene), _record(scene)
    assert undisturbed.of(pin) != undisturbed.of(""), "a latent changes the picture"
    exact = _pixels(_finished(scene, _draw(scene, **_ANOTHER_KEY)))
    for _ in scene.tally.tries("kills", times):
        drawings = [_draw(scene, fidelity="balanced"), _draw(scene, cache_entry=pin), _draw(scene, **_ANOTHER_KEY)]
        writing = rng.random() < 0.5
        landed = _kill(scene, drawings, rng, writing=writing)
        scene.start_cache()
        free, pinned, other = (drawing.picture(scene.tally) for drawing in drawings)
        if free is None or pinned is None or other is None:
            return
        for picture in (free, pinned):
            scene.tally.different_images += _pixels(picture) != undisturbed.of(_start(picture))
        scene.tally.different_images += _pixels(other) != exact
        scene.tally.count("from_a_latent" if _start(free) else "from_noise")
        if landed:
            scene.tally.count("kills")
            scene.tally.count("kills_while_it_writes" if writing else "kills_in_mid_picture")


def _record(scene: Scene) -> str:
    """Lets every latent stand for every prompt, and has one recorded; the pin of a picture that started from it."""
    (model,) = scene.client.models()
    enough = SkipProfile(classes=(LengthClass(max_words=math.inf, thresholds={_FRACTION: -1.0}),))
    scene.client.set_cache_profile(CacheProfile(model_hash=model.model_hash, balanced=enough, fast=enough))
    for _ in range(_TRIES):  # a key's first picture is never recorded, none is before the worker has its link
        _finished(scene, _draw(scene, seed=_RECORDED_SEED))
        if scene.client.cache_entries():
            break
    for _ in range(_TRIES):  # nobody waits for an answer, so one may come too late
        if start := _start(_finished(scene, _draw(scene, fidelity="balanced"))):
            return start
    raise AssertionError(f"none of {_TRIES} pictures started from a latent")


def _start(picture: Picture) -> str:
    """The latent that a picture started from; empty for noise."""
    starts = picture.provenance.cached_starts
    return starts[0].entry if starts else ""


def _pixels(picture: Picture) -> bytes:
    """Without what the file says of how it was asked for."""
    return picture.pil().tobytes()


def _kill(scene: Scene, drawings: Sequence[Drawing], rng: random.Random, *, writing: bool) -> bool:
    """Kills the cache at a random moment; whether what it was to hit was still going on."""
    if writing:
        wait_until(lambda: any(drawing.over for drawing in drawings), "a picture")
        time.sleep(rng.uniform(0.0, _WRITING_S))
    else:
        drawings[0].wait_for_step(rng.randrange(STEPS - 2))
    landed = writing or not all(drawing.over for drawing in drawings)
    scene.worker("cache").kill()
    return landed


def _draw(scene: Scene, *, seed: int = _SEED, **options: Any) -> Drawing:
    return Drawing(scene.client, seed=seed, steps=STEPS, options={**scene.options, **options})


def _finished(scene: Scene, drawing: Drawing) -> Picture:
    picture = drawing.picture(scene.tally)
    assert picture is not None, scene.tally.faults
    return picture
