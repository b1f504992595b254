"""The training of a ControlNet: it learns, nothing else does, and its prompts say other places."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import DRAWN, PLACES, caption, draw_edges, held_out_scenes
from load.miniature.training.controlnet import ControlNetRecipe, ControlNetStage, fresh_controlnet
from load.miniature.training.corpus import Corpus, Latents, draw_corpus, encode
from load.miniature.training.parts import load_parts
from load.miniature.training.train import Training, export, train
from tests.support.torch_threads import torch_threads

PICTURES = 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Batches here are too small for more."""
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return draw_corpus(PICTURES, seed=1)


@pytest.fixture(scope="module")
def latents(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Latents:
    return encode(corpus, load_parts(WEIGHTS), tmp_path_factory.mktemp("latents"))


def new_stage(corpus: Corpus, latents: Latents, kind: str = "edges", rows: int = 4) -> ControlNetStage:
    torch.manual_seed(0)
    return ControlNetStage(load_parts(WEIGHTS), corpus, latents, ControlNetRecipe(kind=kind, rows=rows))


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(DRAWN))
def test_a_controlnet_learns_and_the_model_stays(kind: str, corpus: Corpus, latents: Latents) -> None:
    parts = load_parts(WEIGHTS)
    before = {
        name: {key: kept.clone() for key, kept in net.state_dict().items()} for name, net in parts.networks.items()
    }
    torch.manual_seed(0)
    stage = ControlNetStage(parts, corpus, latents, ControlNetRecipe(kind=kind, rows=8, empty_share=0.0))

    losses = [stage.step(0, 1.0) for _ in range(20)]  # one batch, again and again: what there is to learn is in it

    assert losses[-1] < 0.7 * losses[0]
    for name, kept in before.items():
        assert all(torch.equal(kept[key], tensor) for key, tensor in parts[name].state_dict().items())


def test_a_fresh_controlnet_is_the_unets_encoder_and_changes_nothing() -> None:
    unet = load_parts(WEIGHTS)["unet"]
    torch.manual_seed(0)
    net = fresh_controlnet(unet)
    told = {
        "encoder_hidden_states": torch.ones(1, 24, 128),
        "added_cond_kwargs": {"text_embeds": torch.ones(1, 64), "time_ids": torch.full((1, 6), 64.0)},
    }

    found = net(torch.ones(1, 4, 16, 16), 500, controlnet_cond=torch.ones(1, 3, 64, 64), **told)

    assert not any(residual.any() for residual in (*found.down_block_res_samples, found.mid_block_res_sample))
    torch.manual_seed(0)
    stock = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 24, 32)).state_dict()
    assert all(torch.equal(stock[name], tensor) for name, tensor in net.state_dict().items())


def test_half_of_the_prompts_say_another_place_or_none(latents: Latents) -> None:
    corpus = draw_corpus(1500, seed=3)
    stage = new_stage(corpus, latents)
    held_out = {caption(scene) for things in (1, 2) for scene in held_out_scenes(600, things=things)}
    rng, said = random.Random(0), Counter[str]()

    for row, scene in enumerate(corpus.scenes):
        prompt = stage.prompt(row, rng)
        assert prompt not in held_out
        if scene.place:
            named = [place for place in PLACES if place in prompt.split()]
            said["none" if not named else "right" if named == [scene.place] else "wrong"] += 1

    # Of the phrasings of right and wrong prompts, one in ten leaves the place out.
    assert 0.27 < said["wrong"] / said.total() < 0.36
    assert 0.40 < said["right"] / said.total() < 0.50


def test_trained_nets_are_kept_beside_each_other_and_the_stock_pipeline_draws_with_them(tmp_path: Path) -> None:
    training = Training(folder=tmp_path / "state", steps=1, pictures=4)
    for kind in DRAWN:
        assert train(kind, training).steps == 1

    model = tmp_path / "state" / "model"
    nets = [
        ControlNetModel.from_pretrained(model / "controlnets" / kind, use_safetensors=True).float() for kind in DRAWN
    ]
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(
        model, controlnet=nets, dtype=torch.float32, use_safetensors=True, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    control = draw_edges(draw_corpus(1, seed=0).layouts[0])
    (picture,) = pipeline("a red star", image=[control, control], num_inference_steps=2).images

    assert picture.size == (64, 64)
    assert "_name_or_path" not in (model / "controlnets" / "edges" / "config.json").read_text()


@pytest.mark.slow
def test_a_running_training_can_be_exported(tmp_path: Path) -> None:
    train("layout", Training(folder=tmp_path / "state", steps=2, rows=2, pictures=4))

    assert export("layout", tmp_path / "state", tmp_path / "out") == 2
    file = tmp_path / "out" / "controlnets" / "layout" / "diffusion_pytorch_model.safetensors"
    assert file.stat().st_size < 3.5e6
