"""The quality harness on cases whose figures are known."""

from __future__ import annotations

import random

import PIL.Image
import PIL.ImageFilter
import pytest
import torch

from bottega.miniature.scenes import Scene, held_out_scenes, random_layout, render
from load.miniature.quality import Clip, frechet_distance, load_miniature, perceptual_distances, ssim, ssim_within


@pytest.fixture(scope="module")
def clip() -> Clip:
    return load_miniature()


def _pictures(scenes: list[Scene], seed: int = 0) -> list[PIL.Image.Image]:
    rng = random.Random(seed)
    return [render(random_layout(scene, rng)) for scene in scenes]


def _grey(level: int) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (32, 32), (level, level, level))


def test_ssim_within_a_region_takes_the_windows_whose_centres_lie_there() -> None:
    """One half is lighter: windows that reach over the border see both."""
    one, other = _grey(100), _grey(100)
    other.paste((150, 150, 150), (16, 0, 32, 32))
    region = torch.zeros(32, 32, dtype=torch.bool)
    region[:, :11] = True

    assert ssim_within(one, other, region) == pytest.approx(1.0)
    assert ssim_within(one, other, ~region) < 0.95
    assert ssim_within(one, other, torch.ones_like(region)) == pytest.approx(ssim(one, other))


def test_frechet_distance_of_a_shifted_set_is_the_squared_shift() -> None:
    features = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))

    assert frechet_distance(features, features + 0.5) == pytest.approx(8 * 0.5**2, rel=1e-4)


def test_perceptual_distance_orders_pictures_as_eyes_do(clip: Clip) -> None:
    scenes = held_out_scenes(20, things=1)
    pictures, others = _pictures(scenes), _pictures(held_out_scenes(20, things=1, seed=9))
    softened = [picture.filter(PIL.ImageFilter.GaussianBlur(0.7)) for picture in pictures]

    same, soft, other = (
        float(perceptual_distances(clip, pictures, compared).mean()) for compared in (pictures, softened, others)
    )

    assert same == pytest.approx(0.0, abs=1e-6)
    assert same < soft < other
