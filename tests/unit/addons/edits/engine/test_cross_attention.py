"""What is kept of prompts from step to step, and when it is made again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel

from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
from bottega.addons.edits.engine.masked.transformer import PromptCache
from bottega.addons.loras.engine import UnmergedLoras
from bottega.device.memory_plan import MemoryPlan
from bottega.engine.denoiser import Denoiser
from bottega.model.rows import Row
from bottega.model_files.family_names import UNET
from tests.samples.masked_networks import StepInMemory, denoiser_of, plain_row, random_loras, recording, small_unet


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    return small_unet()


@pytest.fixture
def denoiser(unet: UNet2DConditionModel) -> Denoiser:
    return denoiser_of(unet, MaskedBackbone(unet), row_weights=UnmergedLoras(unet, UNET))


@contextmanager
def projections(unet: UNet2DConditionModel) -> Iterator[list[int]]:
    """Rows of each projection of prompts in the block, of one layer."""
    layer, seen = unet.mid_block.attentions[0].transformer_blocks[1].attn2.to_k, list[int]()
    handle = layer.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0])))
    yield seen
    handle.remove()


def edit_row(seed: int) -> Row:
    return recording(plain_row(seed), StepInMemory())


def test_a_prompt_is_projected_once_for_all_steps(unet: UNet2DConditionModel, denoiser: Denoiser) -> None:
    first, other = edit_row(1), edit_row(2)
    later = replace(first, step=1, sample=plain_row(7).sample, timestep=torch.tensor(21.0))
    with projections(unet) as seen:
        denoiser.predict([first])
        ours = denoiser.predict([later]).noise[later]
        assert seen == [1]
        denoiser.predict([later, other])
        denoiser.predict([other, later])
        denoiser.predict([later])
        assert seen == [1, 2]
    plain = denoiser_of(unet).predict([later]).noise[later]
    assert (ours - plain).abs().max() < 1e-5


def test_loras_that_come_later_project_it_anew(unet: UNet2DConditionModel, denoiser: Denoiser) -> None:
    row = edit_row(1)
    styled = replace(row, loras=random_loras(unet, 3, ("attn2.to_k", "attn2.to_v")))
    without = denoiser.predict([row]).noise[row]
    ours = denoiser.predict([styled]).noise[styled]
    plain = denoiser_of(unet, row_weights=UnmergedLoras(unet, UNET)).predict([styled]).noise[styled]
    assert (ours - plain).abs().max() < 1e-5
    assert (ours - without).abs().max() > 0.01
    assert torch.equal(denoiser.predict([row]).noise[row], without)


def test_what_is_kept_of_prompts_is_bounded_and_goes_with_them() -> None:
    prompts = [torch.zeros(7, 8) for _ in range(3)]
    cache = PromptCache(budget_bytes=2 * 8 * 8)
    for prompt in prompts[:2]:
        (entry,) = cache.of([(prompt, None)])
        entry.keep("block", torch.zeros(2, 4), torch.zeros(2, 4))
        entry.keep("block", torch.ones(2, 4), torch.ones(2, 4))
    first, second = cache.of([(prompts[0], None), (prompts[1], None)])
    assert cache.size_bytes == 2 * 8 * 8
    assert first.layers["block"][0].sum() == 0 != len(second.layers)
    (third,) = cache.of([(prompts[2], None)])
    third.keep("block", torch.zeros(2, 4), torch.zeros(2, 4))
    assert not cache.of([(prompts[0], None)])[0].layers, "the one that was used least recently is gone"
    assert cache.of([(prompts[1], None)])[0].layers
    assert not cache.of([(prompts[1], "loras")])[0].layers
    del prompts[1], prompt
    cache.of([])
    assert cache.size_bytes == 8 * 8


def test_what_is_kept_of_prompts_has_a_part_of_what_is_left_of_the_device() -> None:
    of_prompt = 8 * 8
    memory = MemoryPlan(30 * of_prompt)
    memory.reserve("model", 10 * of_prompt)
    cache = PromptCache(memory=memory)
    assert "prompts of edits" not in memory.reserved, "who draws no edits has all"
    cache.of([])
    assert memory.reserved["prompts of edits"] == 2 * of_prompt, "a tenth of what is left"
    prompts = [torch.zeros(7, 8) for _ in range(3)]
    for prompt in prompts:
        (entry,) = cache.of([(prompt, None)])
        entry.keep("block", torch.zeros(2, 4), torch.zeros(2, 4))
    assert cache.of([(prompts[1], None)])[0].layers
    assert not cache.of([(prompts[0], None)])[0].layers, "there is room for two"
    assert memory.reserved["prompts of edits"] == 2 * of_prompt, "what is promised stays"
    PromptCache(budget_bytes=of_prompt, memory=memory).of([])
    assert memory.reserved["prompts of edits"] == of_prompt, "no more than it may keep"
