"""What the benches of the approximate cache compute: overheads, diversity, and what starts from which latent."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega.cache.store.settings import StoreSettings
from bottega.cache.store.store import LatentStore
from bottega.diffusion.cached_starts import JobRecording, LatentQuestion
from bottega.diffusion.spec import ResolvedSpec
from bottega.latents.names import FRACTIONS
from bottega.miniature.scenes import random_layout, random_scene, render
from bottega.v1.cache_pb2 import CacheProfile, CacheQuestion
from bottega.v1.generation_pb2 import FIDELITY_BALANCED
from load.bench.cache_diversity import pairwise_ssim
from load.bench.cache_engine import StoreLatents
from load.bench.cache_latency import Timed
from load.bench.cache_pairs import accuracy_of, scene_of

HASH = "ab" * 32
PLAIN, WITH_LORA = "1" * 64, "2" * 64
STEPS = 30
EMBEDDING = torch.tensor([3.0, 4.0, 0.0, 0.0])


def test_a_hit_is_compared_with_a_request_that_is_spared_just_its_steps() -> None:
    timed = Timed(full=[9.0, 11.0, 10.0], denoise=[8.0], misses=[10.1, 10.05, 12.0], hits={25: [6.3, 6.2, 9.0]})

    assert timed.ideal(25, 50) == pytest.approx(10.0 - 4.0)
    assert timed.hit_overhead(25, 50) == pytest.approx(0.03)
    assert timed.miss_overhead == pytest.approx(0.01)


def test_pictures_that_are_all_the_same_have_a_pairwise_ssim_of_one_and_others_less() -> None:
    rng = random.Random(0)
    pictures = [render(random_layout(random_scene(rng, things=1), rng)) for _ in range(3)]

    assert pairwise_ssim([pictures[0]] * 3) == pytest.approx(1.0)
    assert pairwise_ssim(pictures) < 0.9
    assert pairwise_ssim([pictures[0], pictures[0], pictures[1]]) == pytest.approx(
        (1.0 + 2 * pairwise_ssim(pictures[:2])) / 3
    )


def test_accuracy_is_the_share_of_pictures_that_show_all_of_their_prompt() -> None:
    prompts = ["a big red star on the left on a blue background", "a big red ring on the left on a blue background"]
    pictures = [render(random_layout(scene_of(prompts[0]), random.Random(0)))] * 2

    assert accuracy_of(pictures, prompts) == 0.5


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LatentStore]:
    """Every similarity is enough for half of the steps."""
    settings = StoreSettings(
        folder=tmp_path, budget_bytes=1 << 20, exploration=0.0, predictor=False, plain_for_loras=True
    )
    store = LatentStore(settings)
    store.start()
    profile = CacheProfile(model_hash=HASH)
    thresholds = profile.balanced.add(max_words=0).thresholds
    for fraction in FRACTIONS:
        thresholds.add(fraction=fraction, similarity=-1.0)
    store.set_profile(profile)
    yield store
    store.close()


def _question(key: str, **fields: Any) -> LatentQuestion:
    header = CacheQuestion(
        key=key, model_hash=HASH, steps=STEPS, images=1, fidelity=FIDELITY_BALANCED, words=3, step_s=0.1, **fields
    )
    return LatentQuestion(header=header, embedding=EMBEDDING)


def test_what_the_engine_records_in_the_store_it_is_given_again(store: LatentStore) -> None:
    source = StoreLatents(store)
    latents = {step: torch.full((4, 16, 16), float(step)) for step in (3, 6, 9, 12, 15)}
    for _ in range(2):  # a key is recorded from its second question on
        source.ask(_question(PLAIN)).result(0)
    source.record(
        JobRecording(
            key=PLAIN,
            model_hash=HASH,
            spec=ResolvedSpec(prompt="a red star", seed=5, num_inference_steps=STEPS, width=64, height=64),
            embedding=EMBEDDING,
            pixels=torch.zeros((64, 64, 3), dtype=torch.uint8),
            latents=latents,
        )
    )
    assert store.flush(10.0)
    (entry,) = store.entries(HASH, 10)
    assert (entry.parameters.prompt, entry.parameters.seed) == ("a red star", 5)

    plain = source.ask(_question(PLAIN)).result(0)
    assert [hit.step for hit in plain.header.hits] == [15]
    assert torch.equal(plain.latents[0], latents[15])
    bounded = source.ask(_question(WITH_LORA, plain_key=PLAIN, plain_steps=6)).result(0)
    assert [hit.step for hit in bounded.header.hits] == [6]
    assert torch.equal(bounded.latents[0], latents[6])
