"""Sparse convolutions against the plain backbone, and how a mask is covered with rectangles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from bottega.addons.edits.engine.activations import EditActivations, edit_activations
from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
from bottega.addons.edits.engine.masked.tokens import MaskTokens, dilate, finest_stride
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.addons.edits.engine.sparse.pieces import Rectangle, cover, pays
from bottega.addons.loras.engine.unmerged import UnmergedLoras
from bottega.engine.encode import encode_prompts
from bottega.engine.forward import stack
from bottega.engine.spec import ResolvedSpec
from bottega.model.backbone import Backbone
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.rows import Row
from bottega.model_files.family_names import UNET
from tests.samples.masked_networks import (
    StepInMemory,
    box,
    denoiser_of,
    masked,
    patch,
    plain_row,
    point_shapes,
    random_loras,
    recording,
    small_unet,
)
from tests.support.manual_engine import load

# Outputs are of the order of 1; a recording rounds to 11 bits in each block, feature map and norm.
EXACT, FLOAT16 = 1e-5, 1e-2
SIZE = (32, 32)
MASKS = {
    "corner": box(27, 29, 5, 3, size=SIZE),
    "border": box(10, 0, 7, 3, size=SIZE),
    "middle": box(11, 13, 6, 5, size=SIZE),
    "two": box(0, 3, 4, 4, size=SIZE) | box(22, 22, 6, 4, size=SIZE),
    "corners that touch": box(4, 4, 6, 6, size=SIZE) | box(10, 10, 6, 6, size=SIZE),
    "most": box(1, 0, 29, 32, size=SIZE),
}


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    return small_unet()


def noise_of(unet: UNet2DConditionModel, rows: Sequence[Row], *, sparse: bool = True) -> list[Tensor]:
    """What the plain backbone predicts, or the masked one with sparse convolutions."""
    backbone = MaskedBackbone(unet, maps=SparseMaps()) if sparse else None
    prediction = denoiser_of(unet, backbone).predict(rows)
    return [prediction.noise[row] for row in rows]


def recorded_of(unet: UNet2DConditionModel, row: Row) -> StepInMemory:
    recorded = StepInMemory()
    noise_of(unet, [recording(row, recorded)])
    return recorded


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference."""
    return float((ours - theirs).abs().max())


@pytest.mark.parametrize("options", [{}, {"use_linear_projection": False}], ids=["SDXL", "projections of 1 x 1"])
def test_rows_that_compute_everything_get_what_the_plain_backbone_predicts(options: dict[str, Any]) -> None:
    unet = small_unet(**options)
    rows = [plain_row(seed, size=SIZE) for seed in range(4)]
    plain = noise_of(unet, rows, sparse=False)
    everything = EditActivations(computed=torch.ones(SIZE, dtype=torch.bool), recorded=StepInMemory())
    of_template = masked(rows[3], recorded_of(unet, rows[3]), MASKS["middle"])
    group = [rows[0], recording(rows[1], StepInMemory()), replace(rows[2], activations=everything), of_template]
    ours = noise_of(unet, group)
    assert max(map(distance, ours[:3], plain)) < EXACT
    assert distance(ours[3], plain[3]) < FLOAT16


@pytest.mark.parametrize("corner", [(4, 6), (0, 0), (-6, -8)], ids=str)
def test_sizes_that_do_not_halve_evenly_are_served(unet: UNet2DConditionModel, corner: tuple[int, int]) -> None:
    size = (25, 31)
    row = plain_row(1, size=size)
    computed = box(corner[0] % size[0], corner[1] % size[1], 6, 8, size=size)
    (plain,) = noise_of(unet, [row], sparse=False)
    (ours,) = noise_of(unet, [masked(row, recorded_of(unet, row), computed)])
    assert distance(ours, plain) < FLOAT16


def test_rows_with_different_masks_share_a_forward(unet: UNet2DConditionModel) -> None:
    rows = [plain_row(seed, size=SIZE) for seed in range(len(MASKS))]
    edits = [masked(row, recorded_of(unet, row), mask) for row, mask in zip(rows, MASKS.values(), strict=True)]
    changed = [replace(edit, sample=edit.sample + mask) for edit, mask in zip(edits, MASKS.values(), strict=True)]
    alone = [noise_of(unet, [edit])[0] for edit in changed]
    together = noise_of(unet, [plain_row(99, size=SIZE), *changed, recording(plain_row(98, size=SIZE), StepInMemory())])
    assert max(map(distance, together[1:-1], alone)) < EXACT


def inside(computed: Tensor, output: Tensor) -> Tensor:
    """Where rectangles compute a map of this size: bool [height, width]."""
    height, width = output.shape[-2:]
    rectangles = cover(MaskTokens(computed).at(height, width).mask.numpy())
    if not pays(rectangles, height, width):
        return torch.ones(height, width, dtype=torch.bool)
    computes = torch.zeros(height, width, dtype=torch.bool)
    for each in rectangles:
        computes[each.rows, each.columns] = True
    return computes


@contextmanager
def outputs_of(unet: UNet2DConditionModel, kinds: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """What the layers whose path ends so put out meanwhile."""
    seen: dict[str, Tensor] = {}
    handles = [
        module.register_forward_hook(lambda _, __, output, path=path: seen.update({path: output}))
        for path, module in unet.named_modules()
        if path.endswith(tuple(kinds))
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_convolutions_compute_rectangles_around_masks_alone(unet: UNet2DConditionModel) -> None:
    row, computed = plain_row(1, size=SIZE), MASKS["two"]
    recorded = recorded_of(unet, row)
    with outputs_of(unet, ("conv1", "conv2", "conv_out", "conv_shortcut", "samplers.0.conv")) as seen:
        noise_of(unet, [masked(row, recorded, computed)])
    assert len(seen) > 10
    for path, output in seen.items():
        assert output.shape[-2:].numel() < SIZE[0] * SIZE[1] * 0.25, path


def by_definition(unet: UNet2DConditionModel, edit: Row, template: Row, recorded: StepInMemory) -> Tensor:
    """What the plain network predicts where the recording takes the place of all that rectangles do not compute: of
    each layer's output, and in the statistics of norms."""
    activations = edit_activations(edit.activations)
    assert activations is not None
    assert activations.computed is not None
    computed = activations.computed
    with outputs_of(unet, ("norm1", "norm2", ".norm", "conv_norm_out")):
        inputs: dict[str, Tensor] = {}
        norms = {path: module for path, module in unet.named_modules() if isinstance(module, nn.GroupNorm)}
        handles = [
            norm.register_forward_pre_hook(lambda _, args, path=path: inputs.update({path: args[0]}))
            for path, norm in norms.items()
        ]
        noise_of(unet, [template], sparse=False)
        for handle in handles:
            handle.remove()

    def normed(norm: nn.GroupNorm, path: str, taken: Tensor) -> Tensor:
        whole = torch.where(inside(computed, taken), taken, inputs[path])
        grouped = whole.reshape(1, norm.num_groups, -1)
        each = norm.num_channels // norm.num_groups
        mean, variance = (
            value.repeat_interleave(each, 1)[:, :, None, None]
            for value in (grouped.mean(2), grouped.var(2, correction=0))
        )
        scaled: Tensor = (taken - mean) / (variance + norm.eps).sqrt()
        return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]

    handles = [
        norm.register_forward_hook(lambda norm, args, _, path=path: normed(norm, path, args[0]))
        for path, norm in norms.items()
    ]
    for name, kept in recorded.outputs.items():
        path, _, what = name.partition(":")
        if what == "moments":
            continue
        if what == "map":

            def replaced(_: object, __: object, output: Tensor, kept: Tensor = kept) -> Tensor:
                tokens = output.dim() == 3  # of proj_in, where that is linear
                maps = output.transpose(1, 2).reshape(1, *kept.shape) if tokens else output
                made = torch.where(inside(computed, maps), maps, kept.to(output.dtype))
                return made.flatten(2).transpose(1, 2) if tokens else made
        else:

            def replaced(_: object, __: object, output: Tensor, kept: Tensor = kept) -> Tensor:
                side = int(len(kept) ** 0.5)
                mask = MaskTokens(computed).at(side, side).mask.flatten()[:, None]
                return torch.where(mask, output, kept.to(output.dtype))

        handles.append(unet.get_submodule(path).register_forward_hook(replaced))
    (noise,) = noise_of(unet, [replace(edit, activations=None)], sparse=False)
    for handle in handles:
        handle.remove()
    return noise


@pytest.mark.parametrize("mask", MASKS)
def test_rectangles_are_computed_and_the_rest_is_the_recordings(unet: UNet2DConditionModel, mask: str) -> None:
    """Of an edit that is another picture inside the mask."""
    template, computed = plain_row(1, size=SIZE), MASKS[mask]
    recorded = recorded_of(unet, template)
    other = plain_row(2, size=SIZE)
    edit = masked(replace(other, sample=torch.where(computed, other.sample, template.sample)), recorded, computed)
    (ours,) = noise_of(unet, [edit])
    assert distance(ours, by_definition(unet, edit, template, recorded)) < FLOAT16
    (full,) = noise_of(unet, [replace(edit, activations=None)], sparse=False)
    assert distance(ours, full) > 5 * FLOAT16


def test_a_layer_that_was_not_recorded_is_computed_in_full(unet: UNet2DConditionModel) -> None:
    row = plain_row(1, size=SIZE)
    recorded = recorded_of(unet, row)
    (plain,) = noise_of(unet, [row], sparse=False)
    whole = dict(recorded.outputs)
    for missing in ("resnets.0:map", "norm2:moments", "samplers.0:map", "proj_in:map", "conv_out:map", ":map"):
        recorded.outputs = {name: kept for name, kept in whole.items() if not name.endswith(missing)}
        assert len(recorded.outputs) < len(whole)
        (ours,) = noise_of(unet, [masked(row, recorded, MASKS["middle"])])
        assert distance(ours, plain) < FLOAT16, missing


def test_an_edit_records_what_it_computes_and_hands_on_the_rest(unet: UNet2DConditionModel) -> None:
    recorded, again, computed = recorded_of(unet, plain_row(1, size=SIZE)), StepInMemory(), MASKS["two"]
    noise_of(unet, [masked(plain_row(2, size=SIZE), recorded, computed, again)])
    assert again.outputs.keys() == recorded.outputs.keys()
    for name, output in again.outputs.items():
        if ":" in name:
            computes = inside(computed, output)
            assert torch.equal(output[:, ~computes], recorded.outputs[name][:, ~computes]), name
            assert distance(output[:, computes].float(), recorded.outputs[name][:, computes].float()) > 0.01, name


def test_loras_beside_the_weights_count_in_rectangles_as_they_do_in_the_weights(unet: UNet2DConditionModel) -> None:
    layers = (
        "conv1",
        "conv2",
        "samplers.0.conv",
        "proj_in",
        "time_emb_proj",
        "conv_shortcut",
        "attn1.to_q",
        "conv_out",
    )
    template, computed = plain_row(1, size=SIZE), MASKS["two"]
    recorded = recorded_of(unet, template)
    sets = [random_loras(unet, seed, layers) for seed in range(2)]
    edits = [
        masked(replace(plain_row(seed, size=SIZE), loras=each), recorded, computed)
        for seed, each in enumerate(sets, start=2)
    ]
    group = [edits[0], plain_row(9, size=SIZE), edits[1]]
    backbone = MaskedBackbone(unet, maps=SparseMaps())
    beside = denoiser_of(unet, backbone, row_weights=UnmergedLoras(unet, UNET)).predict(group)
    for edit, each in zip(edits, sets, strict=True):
        patched = small_unet()
        patch(patched, each)
        (inside_weights,) = noise_of(patched, [replace(edit, loras=None)])
        assert distance(beside.noise[edit], inside_weights) < EXACT * 10
        (without,) = noise_of(unet, [replace(edit, loras=None)])
        assert distance(inside_weights, without) > 0.05


def predicted(backbone: Backbone, row: Row, residuals: Sequence[Tensor]) -> Tensor:
    """With these added at the residual points."""
    with torch.inference_mode():
        activations = backbone.begin(stack([row]))
        for block in backbone.blocks:
            for point in block.needs:
                activations.points[point][0] += residuals[point]
            block.run(activations)
        return backbone.finish(activations)[0]


def test_residuals_are_added_to_all_of_a_map(unet: UNet2DConditionModel) -> None:
    row, computed, recorded = plain_row(1, size=SIZE), MASKS["border"], StepInMemory()
    generator = torch.Generator().manual_seed(5)
    residuals = [torch.randn(shape, generator=generator) * 0.3 for shape in point_shapes(unet, SIZE)]
    plain = predicted(UNetBackbone(unet), row, residuals)
    backbone = MaskedBackbone(unet, maps=SparseMaps())
    assert distance(predicted(backbone, recording(row, recorded), residuals), plain) < EXACT
    assert distance(predicted(backbone, masked(row, recorded, computed), residuals), plain) < FLOAT16
    assert distance(predicted(UNetBackbone(unet), row, [0 * each for each in residuals]), plain) > 0.1


def test_residuals_count_once_without_a_middle_block() -> None:
    """Pruned models have none, and the last skip connection is what the middle block would have got."""
    unet = small_unet(mid_block_type=None)
    row = plain_row(1, size=SIZE)
    generator = torch.Generator().manual_seed(5)
    residuals = [torch.randn(shape, generator=generator) * 0.3 for shape in point_shapes(unet, SIZE)]
    with torch.inference_mode():
        stock = unet(
            row.sample[None],
            row.timestep,
            row.embeds.prompt[None],
            down_block_additional_residuals=tuple(residual[None] for residual in residuals[:-1]),
            mid_block_additional_residual=residuals[-1][None],
        ).sample[0]
    assert distance(predicted(UNetBackbone(unet), row, residuals), stock) < EXACT


def test_on_a_trained_model_what_is_redrawn_is_nearly_what_the_full_computation_makes_of_it() -> None:
    """Of the recording's prompt: a margin of one token leaves it nothing else that it could miss."""
    model, redrawn = load(), MASKS["middle"]
    unet = model.backbone.network
    computed = dilate(redrawn, 1, finest_stride(unet))
    sample, other = (torch.randn(4, *SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    conditions = encode_prompts(model, ResolvedSpec(prompt="a big red star on the left on a blue background"))
    template = plain_row(1, sample=sample, timestep=torch.tensor(701.0), embeds=conditions.conditional)
    edited = replace(template, sample=torch.where(redrawn, sample + 0.7 * other, sample))
    (full,) = noise_of(unet, [edited], sparse=False)
    recorded = recorded_of(unet, template)
    (ours,) = noise_of(unet, [masked(edited, recorded, computed)])
    (as_recorded,) = noise_of(unet, [template], sparse=False)
    assert distance(as_recorded[:, redrawn], full[:, redrawn]) > 0.5
    assert float((ours - full)[:, redrawn].square().mean().sqrt()) < 0.03


def filled(*boxes: tuple[int, int, int, int], side: int = 32) -> np.ndarray:
    mask = np.zeros((side, side), bool)
    for top, left, height, width in boxes:
        mask[top : top + height, left : left + width] = True
    return mask


def test_parts_far_from_each_other_are_rectangles_of_their_own() -> None:
    assert cover(filled()) == ()
    assert set(cover(filled((0, 0, 3, 4), (20, 25, 6, 2)))) == {
        Rectangle(top=0, left=0, height=3, width=4),
        Rectangle(top=20, left=25, height=6, width=2),
    }


def test_parts_side_by_side_are_one_where_that_costs_less() -> None:
    assert cover(filled((4, 4, 8, 8), (4, 13, 8, 8))) == (Rectangle(top=4, left=4, height=8, width=17),)


@pytest.mark.parametrize("seed", range(8))
def test_all_is_covered_once_and_never_for_more_than_the_bounding_box(seed: int) -> None:
    generator = np.random.default_rng(seed)
    mask = filled(*((*generator.integers(0, 28, 2), *generator.integers(1, 9, 2)) for _ in range(seed % 4 + 1)))
    rectangles = cover(mask)
    times = np.zeros(mask.shape, int)
    for each in rectangles:
        times[each.rows, each.columns] += 1
    assert times.max() == 1
    assert times[mask].min() == 1
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    box = Rectangle(top=0, left=0, height=int(np.ptp(rows)) + 1, width=int(np.ptp(columns)) + 1)
    assert sum(each.cost for each in rectangles) <= box.cost


def test_rectangles_of_nearly_everything_do_not_pay() -> None:
    assert not pays(cover(filled((0, 0, 31, 31))), 32, 32)
    assert pays(cover(filled((0, 0, 24, 24))), 32, 32)
