"""The quality harness on cases whose figures are known."""

from __future__ import annotations

import random

import PIL.Image
import PIL.ImageFilter
import pytest
import torch

from bottega.miniature.scenes import Scene, caption, held_out_scenes, random_layout, render
from load.miniature.quality import (
    Clip,
    frechet_distance,
    load_miniature,
    measure,
    perceptual_distances,
    ssim,
    ssim_within,
)


@pytest.fixture(scope="module")
def clip() -> Clip:
    return load_miniature()


def _pictures(scenes: list[Scene], seed: int = 0) -> list[PIL.Image.Image]:
    rng = random.Random(seed)
    return [render(random_layout(scene, rng)) for scene in scenes]


def _grey(level: int) -> PIL.Image.Image:
    return PIL.Image.new("RGB", (32, 32), (level, level, level))


def test_ssim_of_two_greys_is_the_papers_luminance_term() -> None:
    c1 = (0.01 * 255) ** 2

    assert ssim(_grey(100), _grey(150)) == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1))


def test_ssim_within_a_region_takes_the_windows_whose_centres_lie_there() -> None:
    """One half is lighter: windows that reach over the border see both."""
    one, other = _grey(100), _grey(100)
    other.paste((150, 150, 150), (16, 0, 32, 32))
    region = torch.zeros(32, 32, dtype=torch.bool)
    region[:, :11] = True

    assert ssim_within(one, other, region) == pytest.approx(1.0)
    assert ssim_within(one, other, ~region) < 0.95
    assert ssim_within(one, other, torch.ones_like(region)) == pytest.approx(ssim(one, other))


def test_ssim_within_refuses_a_region_without_windows_and_one_of_another_size() -> None:
    corner = torch.zeros(32, 32, dtype=torch.bool)
    corner[:5, :5] = True

    with pytest.raises(ValueError, match="no window"):
        ssim_within(_grey(1), _grey(2), corner)
    with pytest.raises(ValueError, match="region of the pictures' size"):
        ssim_within(_grey(1), _grey(2), corner[:16])


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


def test_measure_gives_all_figures_at_once(clip: Clip) -> None:
    scenes = held_out_scenes(80, things=1)
    pictures, captions = _pictures(scenes), [caption(scene) for scene in scenes]

    alone = measure(clip, pictures, captions)
    compared = measure(clip, pictures, captions, pictures)

    assert alone.clip_score == compared.clip_score > 0
    assert (alone.frechet, alone.perceptual, alone.ssim) == (None, None, None)
    assert compared.ssim == pytest.approx(1.0)
    assert compared.frechet == pytest.approx(0.0, abs=1e-4)
    assert compared.perceptual == pytest.approx(0.0, abs=1e-6)
