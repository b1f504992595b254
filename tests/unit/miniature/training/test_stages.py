"""The miniature's training: every stage learns what it should and leaves the rest."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import STYLES, caption, held_out_scenes
from load.miniature.training.attention import PlainAttention
from load.miniature.training.corpus import Corpus, Latents, draw_corpus, encode, with_styles
from load.miniature.training.loop import Budget, Stage, run
from load.miniature.training.noise import ErrorWeights, error_weight
from load.miniature.training.parts import Parts, load_parts, save_parts
from load.miniature.training.text import TextRecipe, TextStage
from load.miniature.training.unet import UnetRecipe, UnetStage
from load.miniature.training.vae import VaeRecipe, VaeStage

STEPS = 50


def _stage(name: str, corpus: Corpus, latents: Latents) -> tuple[Stage, Parts]:
    """With fresh networks, or a worn decoder, so that there is something to learn."""
    torch.manual_seed(0)
    parts = load_parts(WEIGHTS, fresh=("text_encoder", "text_encoder_2", "clip_vision", "unet"))
    with torch.no_grad():
        for parameter in parts["vae"].decoder.parameters() if name in {"vae", "decoder"} else ():
            parameter.mul_(1.0 + 0.1 * torch.randn_like(parameter))
    if name == "unet":
        return UnetStage(parts, corpus, latents, UnetRecipe(rows=4)), parts
    if name in {"vae", "decoder"}:
        return VaeStage(parts, corpus, latents if name == "decoder" else None, VaeRecipe(rows=2)), parts
    return TextStage(parts, corpus, TextRecipe(rows=8, vision_only=name == "vision")), parts


@pytest.mark.parametrize(
    "name", ["text", pytest.param("vision", marks=pytest.mark.slow), pytest.param("unet", marks=pytest.mark.slow)]
)
def test_a_stage_learns_within_fifty_steps(
    name: str, corpus: Corpus, latents: Latents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _ = _stage(name, corpus, latents)
    step, losses = stage.step, list[float]()

    def noted(number: int, rate: float) -> float:
        losses.append(step(number, rate))
        return losses[-1]

    monkeypatch.setattr(stage, "step", noted)

    assert run(stage, Budget(steps=STEPS), tmp_path) == STEPS

    assert sum(losses[-10:]) < 0.95 * sum(losses[:10])


def test_the_decoder_learns_and_the_encoder_stays(corpus: Corpus, latents: Latents, tmp_path: Path) -> None:
    stage, parts = _stage("decoder", corpus, latents)
    encoder = {name: tensor.clone() for name, tensor in parts["vae"].encoder.state_dict().items()}
    rows = torch.arange(8)
    before = _decoding_error(parts, corpus, latents, rows)

    run(stage, Budget(steps=STEPS), tmp_path)
    stage.finish()

    assert _decoding_error(parts, corpus, latents, rows) < before
    assert all(torch.equal(encoder[name], tensor) for name, tensor in parts["vae"].encoder.state_dict().items())


def test_the_vae_learns_plain_pictures_and_every_style(corpus: Corpus) -> None:
    mixed = with_styles(corpus)

    assert torch.equal(mixed.images[::2], corpus.images[::2])
    for turn, row in enumerate(range(1, len(corpus), 2)):
        picture = STYLES[list(STYLES)[turn % len(STYLES)]](corpus.layouts[row])
        assert mixed.images[row].permute(1, 2, 0).numpy().tobytes() == picture.tobytes()


@pytest.mark.slow
def test_the_vae_learns_as_a_whole(corpus: Corpus, latents: Latents, tmp_path: Path) -> None:
    stage, parts = _stage("vae", corpus, latents)
    vae, pictures = parts["vae"], corpus.pictures(torch.arange(8))
    encoder = {name: parameter.detach().clone() for name, parameter in vae.encoder.named_parameters()}
    before = _round_trip_error(vae, pictures)

    run(stage, Budget(steps=STEPS), tmp_path)
    stage.finish()

    assert _round_trip_error(vae, pictures) < before
    assert all(not torch.equal(encoder[name], parameter) for name, parameter in vae.encoder.named_parameters())
    with torch.no_grad():
        latent = vae.encode(corpus.pictures(torch.arange(len(corpus)))).latent_dist.mode()
    assert float(latent.std()) * vae.config.scaling_factor == pytest.approx(1.0, abs=0.05)
    save_parts(parts, tmp_path / "model")
    kept = load_parts(tmp_path / "model")["vae"]
    assert "_name_or_path" not in (tmp_path / "model" / "vae" / "config.json").read_text()
    assert kept.config.scaling_factor == vae.config.scaling_factor != load_parts(WEIGHTS)["vae"].config.scaling_factor


def test_latents_are_kept_for_the_next_run_of_the_same_pictures(
    corpus: Corpus, latents: Latents, tmp_path: Path
) -> None:
    parts = load_parts(WEIGHTS)
    first = encode(corpus, parts, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns

    again = encode(corpus, parts, tmp_path)

    assert file.stat().st_mtime_ns == written
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.mean, latents.mean)

    encode(draw_corpus(2, seed=2), parts, tmp_path)

    assert len(list(tmp_path.iterdir())) == 1, "those of other pictures take their place"


def test_near_misses_tell_nothing_of_held_out_scenes(corpus: Corpus) -> None:
    held_out = {caption(scene) for things in (1, 2) for scene in held_out_scenes(600, things=things)}
    rng = random.Random(0)

    misses = {miss for _ in range(150) for miss in corpus.near_misses(torch.arange(len(corpus)), rng)}

    assert len(misses) > 500
    assert not held_out & misses


def test_the_vision_stage_leaves_text_encoders_that_were_trained_on_since(
    corpus: Corpus, latents: Latents, tmp_path: Path
) -> None:
    run(_stage("vision", corpus, latents)[0], Budget(steps=1), tmp_path)
    stage, parts = _stage("vision", corpus, latents)
    with torch.no_grad():
        for parameter in parts["text_encoder"].parameters():
            parameter.fill_(0.5)

    run(stage, Budget(steps=2), tmp_path)

    assert all(bool((parameter == 0.5).all()) for parameter in parts["text_encoder"].parameters())


def test_plain_attention_is_stock_attention(told: dict[str, Any]) -> None:
    unet: Any = UNet2DConditionModel.from_pretrained(WEIGHTS / "unet", use_safetensors=True).float()

    with torch.no_grad():
        stock = unet(**told).sample
        unet.set_attn_processor(PlainAttention())
        plain = unet(**told).sample

    torch.testing.assert_close(plain, stock, atol=1e-5, rtol=1e-5)


def test_noisy_steps_count_most_and_clean_ones_least() -> None:
    weights = error_weight(torch.tensor([0.01, 0.3, 0.9, 0.999]), ErrorWeights())

    assert weights.tolist() == sorted(weights.tolist(), reverse=True)
    assert float(weights[0]) == ErrorWeights().loud_cap


def _decoding_error(parts: Parts, corpus: Corpus, latents: Latents, rows: torch.Tensor) -> float:
    with torch.no_grad():
        drawn = parts["vae"].decode(latents.mean[rows].float()).sample
    return float((drawn - corpus.pictures(rows)).abs().mean())


def _round_trip_error(vae: Any, pictures: torch.Tensor) -> float:
    with torch.no_grad():
        return float((vae.decode(vae.encode(pictures).latent_dist.mode()).sample - pictures).abs().mean())
