"""The training of a ControlNet: it learns, nothing else does, and its prompts say other places."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from diffusers import ControlNetModel

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import DRAWN, PLACES, caption, held_out_scenes
from load.miniature.training.controlnet import ControlNetRecipe, ControlNetStage, fresh_controlnet
from load.miniature.training.corpus import Corpus, Latents, draw_corpus
from load.miniature.training.parts import load_parts


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
