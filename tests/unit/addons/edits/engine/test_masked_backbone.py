"""The masked backbone against the plain one: what it computes, what it takes from recordings, and what it records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import Tensor, nn

from bottega.addons.edits.engine.activations import EditActivations
from bottega.addons.edits.engine.masked.backbone import (
    MaskedBackbone,
    UnsupportedNetwork,
    make_masked_backbone,
    transformer_blocks,
)
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.model.rows import Row
from tests.samples.masked_networks import StepInMemory, box, denoiser_of, masked, plain_row, recording, small_unet

# Outputs are of the order of 1; a recording rounds to 11 bits in each of 13 blocks.
EXACT, FLOAT16 = 1e-5, 5e-3
MASKS = {
    "corner": box(0, 0, 3, 3),
    "middle": box(5, 6, 4, 7),
    "most": box(1, 0, 13, 16),
    "two": box(0, 1, 2, 2) | box(9, 9, 3, 1),
}


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    return small_unet()


def noise_of(unet: UNet2DConditionModel, rows: Sequence[Row]) -> list[Tensor]:
    """What the masked backbone predicts."""
    prediction = denoiser_of(unet, MaskedBackbone(unet)).predict(rows)
    return [prediction.noise[row] for row in rows]


def plain_noise_of(unet: UNet2DConditionModel, rows: Sequence[Row]) -> list[Tensor]:
    """What the plain backbone predicts."""
    prediction = denoiser_of(unet).predict(rows)
    return [prediction.noise[row] for row in rows]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference."""
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_linear_projection": False},
        {"down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D")},
    ],
    ids=["SDXL", "projections that are convolutions", "attention in the finest level"],
)
def test_rows_that_are_computed_in_full_get_what_the_plain_backbone_predicts(options: dict[str, Any]) -> None:
    unet = small_unet(**options)
    rows = [plain_row(seed) for seed in range(3)]
    plain = plain_noise_of(unet, rows)
    recorded = StepInMemory()
    everything = EditActivations(computed=torch.ones(16, 16, dtype=torch.bool), recorded=StepInMemory())
    ours = noise_of(unet, [rows[0], recording(rows[1], recorded), replace(rows[2], activations=everything)])
    assert max(map(distance, ours, plain)) < EXACT
    names = transformer_blocks(unet)
    assert set(names) <= set(recorded.outputs)
    assert len(names) == sum(path.endswith(".attn1") for path, _ in unet.named_modules())
    assert distance(plain[0], plain[1]) > 0.5


@pytest.mark.parametrize("size", [(10, 14), (9, 13)], ids=str)
def test_sizes_that_do_not_halve_evenly_are_served(unet: UNet2DConditionModel, size: tuple[int, int]) -> None:
    row, recorded = plain_row(1, size=size), StepInMemory()
    (plain,) = plain_noise_of(unet, [row])
    (first,) = noise_of(unet, [recording(row, recorded)])
    (ours,) = noise_of(unet, [masked(row, recorded, box(3, 2, 4, 5, size=size))])
    assert distance(first, plain) < EXACT
    assert distance(ours, plain) < FLOAT16


def test_queries_and_feed_forward_are_computed_for_masked_tokens_alone(unet: UNet2DConditionModel) -> None:
    row, recorded, computed = plain_row(1), StepInMemory(), MASKS["middle"]
    noise_of(unet, [recording(row, recorded)])
    seen: dict[str, int] = {}
    handles = [
        module.register_forward_pre_hook(lambda _, inputs, path=path: seen.update({path: inputs[0].shape[:-1].numel()}))
        for path, module in unet.named_modules()
        if isinstance(module, nn.Linear) and ".attentions." in path
    ]
    noise_of(unet, [masked(row, recorded, computed), plain_row(2)])
    for handle in handles:
        handle.remove()
    tokens = {8: 3 * 4 + 64, 4: 2 * 3 + 16}  # by side of a level: those that the box touches, and the plain row's
    for path, items in seen.items():
        side = 8 if path.startswith(("down_blocks.1", "up_blocks.1")) else 4
        if path.endswith((".proj_in", "attn1.to_k", "attn1.to_v")):
            assert items == 2 * side * side, path
        elif path.endswith(("attn2.to_k", "attn2.to_v")):
            assert items == 2 * 7, path
        else:
            assert items == tokens[side], path


def by_definition(unet: UNet2DConditionModel, row: Row, recorded: StepInMemory, computed: Tensor) -> Tensor:
    """What the plain network predicts where each output that was recorded takes the place of what it makes itself of
    unmasked tokens."""
    tokens, handles = MaskTokens(computed), []
    for name, kept in recorded.outputs.items():
        module = unet.get_submodule(name)
        side = int(len(kept) ** 0.5)
        inside = tokens.at(side, side).mask.flatten()[:, None]

        def replaced(_: object, __: object, output: Tensor, kept: Tensor = kept, inside: Tensor = inside) -> Tensor:
            return torch.where(inside, output, kept.to(output.dtype))

        handles.append(module.register_forward_hook(replaced))
    (noise,) = plain_noise_of(unet, [row])
    for handle in handles:
        handle.remove()
    return noise


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_masked_is_computed_and_the_rest_is_the_recordings(unet: UNet2DConditionModel, mask: str) -> None:
    """Of an edit that is another picture inside the mask."""
    template, recorded, computed = plain_row(1), StepInMemory(), MASKS[mask]
    noise_of(unet, [recording(template, recorded)])
    edit = replace(plain_row(2), sample=torch.where(computed, plain_row(2).sample, template.sample))
    (ours,) = noise_of(unet, [masked(edit, recorded, computed)])
    assert distance(ours, by_definition(unet, edit, recorded, computed)) < EXACT
    (full,) = plain_noise_of(unet, [edit])
    assert distance(ours, full) > 0.05


def test_a_masked_row_records_what_it_computes_and_hands_on_the_rest(unet: UNet2DConditionModel) -> None:
    recorded, again, computed = StepInMemory(), StepInMemory(), MASKS["middle"]
    noise_of(unet, [recording(plain_row(1), recorded)])
    noise_of(unet, [masked(plain_row(2), recorded, computed, again)])
    assert again.outputs.keys() == recorded.outputs.keys()
    for name, output in again.outputs.items():
        inside = MaskTokens(computed).at(int(len(output) ** 0.5), int(len(output) ** 0.5)).mask.flatten()
        assert torch.equal(output[~inside], recorded.outputs[name][~inside])
        assert not torch.isclose(output[inside], recorded.outputs[name][inside]).all(1).any()


def test_a_block_that_was_not_recorded_is_computed_in_full(unet: UNet2DConditionModel) -> None:
    row, recorded = plain_row(1), StepInMemory()
    (plain,) = noise_of(unet, [recording(row, recorded)])
    whole = dict(recorded.outputs)
    denoiser = denoiser_of(unet, MaskedBackbone(unet))
    edit = masked(row, recorded, MASKS["corner"])
    reuses = []
    for kept in (len(whole), len(whole) // 2, 0):
        recorded.outputs = dict(list(whole.items())[:kept])
        recorded.asked.clear()
        recorded.reused.clear()
        prediction = denoiser.predict([edit, plain_row(2)])
        assert distance(prediction.noise[edit], plain) < (FLOAT16 if kept else EXACT)
        reuses.append(len(recorded.reused))
        assert len(set(recorded.asked)) == len(recorded.asked), "each was asked for once"
    assert reuses[0] == len(whole) > reuses[1] > reuses[2] == 0


def test_a_map_that_computes_nothing_gives_what_was_recorded(unet: UNet2DConditionModel) -> None:
    row, recorded = plain_row(1), StepInMemory()
    (plain,) = noise_of(unet, [recording(row, recorded)])
    empty = masked(row, recorded, torch.zeros(16, 16, dtype=torch.bool))
    for rows in ([empty], [plain_row(2), empty]):
        assert distance(noise_of(unet, rows)[-1], plain) < FLOAT16


def test_without_rows_of_edits_and_with_fixed_rows_the_plain_backbone_runs(unet: UNet2DConditionModel) -> None:
    class NeverBegun(MaskedBackbone):
        def begin(self, inputs: object) -> object:  # type: ignore[override]
            raise AssertionError

    never = NeverBegun(unet)
    row, recorded = plain_row(1), StepInMemory()
    (plain,) = plain_noise_of(unet, [row])
    prediction = denoiser_of(unet, never).predict([row])
    assert torch.equal(prediction.noise[row], plain)
    edit = masked(row, recorded, MASKS["corner"], recorded)
    fixed = denoiser_of(unet, never, fixed_rows=4).predict([edit])
    assert distance(fixed.noise[edit], plain) < EXACT
    assert not recorded.reused
    assert not recorded.outputs


def test_half_precision_is_served() -> None:
    dtype = torch.bfloat16
    unet, row, recorded = small_unet().to(dtype), plain_row(1), StepInMemory()
    embeds = replace(row.embeds, prompt=row.embeds.prompt.to(dtype))
    row = replace(row, sample=row.sample.to(dtype), embeds=embeds)
    (plain,) = noise_of(unet, [recording(row, recorded)])
    (ours,) = noise_of(unet, [masked(row, recorded, MASKS["middle"])])
    assert ours.dtype == dtype
    assert distance(ours.float(), plain.float()) < 0.3


def test_networks_of_other_parts_are_refused_with_the_part() -> None:
    unet = small_unet()
    unet.set_attn_processor(AttnProcessor())
    with pytest.raises(UnsupportedNetwork, match="the processor AttnProcessor"):
        make_masked_backbone(unet)
    unet = small_unet()
    unet.enable_freeu(0.9, 0.2, 1.1, 1.2)
    with pytest.raises(UnsupportedNetwork, match="FreeU"):
        make_masked_backbone(unet)
    others: dict[str, dict[str, Any]] = {
        "AttnDownBlock2D": {"down_block_types": ("AttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D")},
        "a DualTransformer2DModel": {"dual_cross_attention": True},
        "does not have one self-attention": {"only_cross_attention": True},
    }
    for part, options in others.items():
        with pytest.raises(UnsupportedNetwork, match=part):
            make_masked_backbone(small_unet(**options))
