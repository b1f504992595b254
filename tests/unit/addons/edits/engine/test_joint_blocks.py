"""Masked blocks of transformers that attend to image and text jointly, against the plain blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import ModelMixin
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.backbone import make_masked_backbone, transformer_blocks
from bottega.addons.edits.engine.masked.checks import unsupported
from bottega.addons.edits.engine.masked.tokens import MaskTokens
from bottega.addons.edits.engine.recordings.recording import prompt_of
from bottega.addons.edits.engine.recordings.step import ProjectionsRoom, StepProjections
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.rows import Half, Row
from tests.samples.edits import box_mask, template
from tests.samples.family_models import SIZE, Z_IMAGE, family_model, sampler_of
from tests.samples.masked_edits import EditDesk, drawn_alone, masked_order
from tests.samples.masked_networks import (
    PROMPT_TOKENS,
    StepInMemory,
    box,
    denoiser_of,
    masked,
    plain_row,
    recording,
    small_flux,
    small_joint,
)
from tests.support.manual_engine import load
from tests.support.stock import assert_close

# Outputs are of the order of 1; a recording in half precision rounds to 11 bits in each of 3 blocks.
EXACT, FLOAT16 = 2e-5, 2e-2
NETWORKS: Mapping[str, Callable[[], ModelMixin]] = {
    "SD 3": functools.partial(small_joint, qk_norm=None, dual_attention_layers=()),
    "SD 3.5": small_joint,
    "Flux": small_flux,
}
MASKS = {"corner": box(0, 0, 3, 3), "two": box(0, 1, 2, 2) | box(9, 9, 3, 1), "most": box(1, 0, 13, 16)}
TOKENS, SMALL_TOKENS = 64, 9
"""Of a picture: all, and those under SMALL."""
SMALL = box(4, 4, 6, 6)


@pytest.fixture(scope="module", params=NETWORKS)
def network(request: pytest.FixtureRequest) -> ModelMixin:
    return NETWORKS[request.param]()


def noise_of(network: ModelMixin, *rows: Row) -> list[Tensor]:
    """What the masked blocks predict."""
    prediction = denoiser_of(network, make_masked_backbone(network)).predict(rows)
    return [prediction.noise[row] for row in rows]


def plain_noise_of(network: ModelMixin, *rows: Row) -> list[Tensor]:
    """What the plain blocks predict."""
    prediction = denoiser_of(network).predict(rows)
    return [prediction.noise[row] for row in rows]


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference."""
    return float((ours - theirs).abs().max())


def recorded_of(network: ModelMixin, row: Row, dtype: torch.dtype = torch.float16) -> StepInMemory:
    recorded = StepInMemory(dtype=dtype)
    noise_of(network, recording(row, recorded))
    return recorded


def edit_of(network: ModelMixin, computed: Tensor, seed: int = 2) -> tuple[Row, StepInMemory]:
    """Another picture inside the mask than the one that was recorded, with the same prompt."""
    recorded = recorded_of(network, plain_row(1))
    sample = torch.where(computed, plain_row(seed).sample, plain_row(1).sample)
    return replace(plain_row(1), sample=sample, owner=seed), recorded


def test_rows_that_compute_all_tokens_get_what_the_plain_blocks_predict(network: ModelMixin) -> None:
    rows = [plain_row(seed) for seed in range(3)]
    plain = plain_noise_of(network, *rows)
    recorded, everything = StepInMemory(), torch.ones(16, 16, dtype=torch.bool)
    other = recorded_of(network, plain_row(9))
    ours = noise_of(network, rows[0], recording(rows[1], recorded), masked(rows[2], other, everything))
    assert max(map(distance, ours, plain)) < EXACT
    assert tuple(recorded.outputs) == transformer_blocks(network)
    assert not other.reused
    assert distance(plain[0], plain[1]) > 0.5


def by_definition(network: ModelMixin, row: Row, recorded: StepInMemory, computed: Tensor) -> Tensor:
    """Return the prediction of the plain blocks if recorded outputs replace their outputs for unmasked tokens."""
    inside, handles = MaskTokens(computed).at(8, 8).mask.flatten()[:, None], []
    for name, kept in recorded.outputs.items():

        def replaced(_: object, __: object, output: Any, kept: Tensor = kept) -> Any:
            if isinstance(output, Tensor):
                return torch.where(inside, output, kept.to(output.dtype))
            text, image = output
            return text, torch.where(inside, image, kept.to(image.dtype))

        handles.append(network.get_submodule(name).register_forward_hook(replaced))
    (noise,) = plain_noise_of(network, row)
    for handle in handles:
        handle.remove()
    return noise


@pytest.mark.parametrize("mask", MASKS)
def test_what_is_masked_is_computed_and_the_rest_is_the_recordings(network: ModelMixin, mask: str) -> None:
    """The batch also has plain rows, and another edit that reuses everything."""
    computed = MASKS[mask]
    edit, recorded = edit_of(network, computed)
    wanted = by_definition(network, edit, recorded, computed)
    plain, empty = plain_row(5), masked(plain_row(1), recorded, torch.zeros(16, 16, dtype=torch.bool))
    ours, beside, reused = noise_of(network, masked(edit, recorded, computed), plain, empty)
    assert distance(ours, wanted) < EXACT
    full, of_plain, of_template = plain_noise_of(network, edit, plain, plain_row(1))
    assert distance(ours, full) > 0.05
    assert distance(beside, of_plain) < EXACT
    assert distance(reused, of_template) < FLOAT16


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, EXACT), (torch.float16, FLOAT16)])
def test_a_recording_of_the_same_latents_gives_the_exact_prediction(
    network: ModelMixin, dtype: torch.dtype, bound: float
) -> None:
    row = plain_row(1)
    (plain,) = plain_noise_of(network, row)
    (ours,) = noise_of(network, masked(row, recorded_of(network, row, dtype), SMALL))
    assert distance(ours, plain) < bound


def tokens_of_layers(network: ModelMixin, *rows: Row) -> dict[str, int]:
    """Return how many tokens each projection of a forward pass gets, in all of its calls."""
    seen: dict[str, int] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, inputs, path=path: seen.update({path: seen.get(path, 0) + inputs[0].shape[:-1].numel()})
        )
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear) and path.startswith(("transformer_blocks", "single_", "proj_out"))
    ]
    noise_of(network, *rows)
    for handle in handles:
        handle.remove()
    return seen


def text_tokens(path: str, rows: int) -> int:
    """Return how many tokens of texts a projection gets that gets those of pictures too."""
    # Nothing reads the text's tokens after the last block, so that they are only attended to.
    only_read = path.startswith("single_transformer_blocks.1") and not path.endswith((".to_k", ".to_v"))
    return rows * PROMPT_TOKENS if path.startswith("single_") and not only_read else 0


def test_masked_tokens_and_those_of_the_text_are_computed_alone(network: ModelMixin) -> None:
    edit, recorded = edit_of(network, SMALL)
    seen = tokens_of_layers(network, masked(edit, recorded, SMALL), plain_row(5))
    assert "transformer_blocks.2.attn.add_q_proj" not in seen, "nothing reads the text's tokens after the last block"
    for path, tokens in seen.items():
        if "norm" in path:
            assert tokens == 2, path
        elif path.endswith((".to_k", ".to_v")):
            assert tokens == 2 * TOKENS + text_tokens(path, 2), path
        elif ".add_" in path or "_context" in path or "to_add_out" in path:
            assert tokens == 2 * PROMPT_TOKENS, path
        else:
            assert tokens == TOKENS + SMALL_TOKENS + text_tokens(path, 2), path


def test_cached_keys_and_values_give_the_same_with_less_work(network: ModelMixin) -> None:
    kept = StepProjections(ProjectionsRoom(left_bytes=1 << 30))
    for number, seed in enumerate((2, 3)):
        edit, recorded = edit_of(network, SMALL, seed)
        (wanted,) = noise_of(network, masked(edit, recorded, SMALL))
        row = masked(edit, replace(recorded, projections=kept), SMALL)
        seen = tokens_of_layers(network, row)
        of_pictures = {seen[path] - text_tokens(path, 1) for path in seen if path.endswith((".to_k", ".to_v"))}
        assert of_pictures == {SMALL_TOKENS if number else TOKENS}
        (ours,) = noise_of(network, row)
        assert distance(ours, wanted) < EXACT


def test_a_blocks_attentions_are_cached_together_or_not_at_all() -> None:
    """The first block and the last one have two."""
    network = small_joint()
    edit, recorded = edit_of(network, SMALL)
    names = [name for name, module in network.named_modules() if name.endswith((".attn", ".attn2"))]

    def cached(room_bytes: int) -> StepProjections:
        kept = StepProjections(ProjectionsRoom(left_bytes=room_bytes))
        noise_of(network, masked(edit, replace(recorded, projections=kept), SMALL))
        return kept

    each_bytes = cached(1 << 30).size_bytes // len(names)
    held = [
        [name.removeprefix("transformer_blocks.") for name in names if kept.get(name)]
        for kept in (cached(each_bytes * count) for count in range(len(names) + 1))
    ]
    first, middle, last = ["0.attn", "0.attn2"], ["1.attn"], ["2.attn", "2.attn2"]
    assert held == [[], middle, first, first + middle, first + middle, first + middle + last]


def test_a_block_that_was_not_recorded_is_computed_in_full(network: ModelMixin) -> None:
    row = plain_row(1)
    recorded = recorded_of(network, row, torch.float32)
    (plain,) = plain_noise_of(network, row)
    names = transformer_blocks(network)
    for kept in (names[:1], names[1:], names[1:2], ()):
        some = StepInMemory({name: recorded.outputs[name] for name in kept})
        ours, _ = noise_of(network, masked(row, some, SMALL), plain_row(5))
        assert distance(ours, plain) < EXACT
        assert (some.reused, len(some.asked)) == (set(kept), len(names))


def test_a_masked_row_records_what_it_computes_and_hands_on_the_rest(network: ModelMixin) -> None:
    edit, recorded = edit_of(network, SMALL)
    again, inside = StepInMemory(), MaskTokens(SMALL).at(8, 8).mask.flatten()
    noise_of(network, masked(edit, recorded, SMALL, again))
    assert again.outputs.keys() == recorded.outputs.keys()
    for name, output in again.outputs.items():
        assert torch.equal(output[~inside], recorded.outputs[name][~inside])
        assert not torch.isclose(output[inside], recorded.outputs[name][inside]).all(1).any()


@pytest.mark.parametrize("make", [small_joint, small_flux])
def test_half_precision_is_served(make: Callable[[], ModelMixin]) -> None:
    dtype, row, network = torch.bfloat16, plain_row(1), make()
    (exact,) = plain_noise_of(network, row)
    network.to(dtype)
    row = replace(row, sample=row.sample.to(dtype), embeds=row.embeds.map(lambda each: each.to(dtype)))
    (plain,) = plain_noise_of(network, row)
    (ours,) = noise_of(network, masked(row, recorded_of(network, row), SMALL))
    assert ours.dtype == dtype
    assert distance(ours.float(), exact) < 1.5 * distance(plain.float(), exact)


def test_transformers_of_other_parts_are_refused_with_the_part() -> None:
    network, flux = small_joint(), small_flux()
    network.enable_forward_chunking()
    assert unsupported(network) == "a feed-forward layer is not in one piece"
    network.disable_forward_chunking()
    network.fuse_qkv_projections()
    assert unsupported(network) == "an attention layer has the processor FusedJointAttnProcessor2_0"
    assert unsupported(small_joint(patch_size=3)) == "the side of a patch is no power of 2"
    flux.fuse_qkv_projections()
    assert unsupported(flux) == "an attention layer fuses its projections"


def test_engines_of_z_image_start_and_compute_all_tokens() -> None:
    desk = EditDesk(load(family_model(Z_IMAGE)))
    assert desk.edits.unusable == "blocks of a ZImageTransformer2DModel cannot be masked yet"


# The rest is about whole edits.

MASK = box_mask((0, 0, 8, 8), SIZE, SIZE)
SPEC = ResolvedSpec(
    prompt="a star",
    num_inference_steps=4,
    width=SIZE,
    height=SIZE,
    seed=3,
    strength=0.9999,
    sampler=sampler_of("SD 3.5"),
)


@functools.cache
def model_of(family: str) -> Model:
    loaded = load(family_model(family))
    return replace(loaded, defaults=replace(loaded.defaults, width=SIZE, height=SIZE))


@pytest.fixture(scope="module", params=["SD 3.5", "Flux dev"])
def model(request: pytest.FixtureRequest) -> Model:
    return model_of(request.param)


def spec_of(model: Model) -> ResolvedSpec:
    """Return a spec with two halves of guidance."""
    return replace(SPEC, true_cfg_scale=3.0, negative_prompt="") if model.family.takes_true_cfg else SPEC


def edit_order(model: Model, key: str, *, any_prompt: bool = True, **changes: Any) -> EngineOrder:
    spec = replace(spec_of(model), **changes)
    return masked_order(spec, MASK, image=template(SIZE, SIZE), key=key, any_prompt=any_prompt)


def test_later_edits_compute_the_mask_alone_and_plain_requests_beside_them_are_exact(model: Model) -> None:
    desk, first = EditDesk(model), edit_order(model, "first")
    drawn = desk.draw(first)
    assert_close(drawn.latents[0], drawn_alone(model, first).latents[0])
    assert drawn.record.provenance.mask.recorded
    plain = EngineOrder(key="plain", spec=replace(spec_of(model), strength=None, seed=8))
    edits = [edit_order(model, "again"), edit_order(model, "other", prompt="a red heart", seed=4)]
    drawings = desk.run({0: [*edits, plain]})
    again, other = drawings["again"].record.provenance, drawings["other"].record.provenance
    blocks = len(model.backbone.blocks) * 2 * SPEC.num_inference_steps
    assert (again.blocks_reused, again.blocks_total) == (other.blocks_reused, other.blocks_total) == (blocks, blocks)
    assert again.mask.computed_share == other.mask.computed_share < 0.5
    # Recordings are float16.
    torch.testing.assert_close(drawings["again"].latents[0], drawn.latents[0], atol=0.02, rtol=0)
    assert not torch.equal(drawings["other"].latents[0], drawn.latents[0])
    assert drawings["plain"].record.provenance.mean_group_requests > 1
    alone = drawn_alone(model, plain)
    torch.testing.assert_close(drawings["plain"].latents[0], alone.latents[0], atol=1e-5, rtol=0)


def test_keys_and_values_are_cached_for_the_recorded_prompt_alone(model: Model) -> None:
    """They depend on the prompt, unlike those of UNets, and on the guidance scale if the network reads it."""
    desk = EditDesk(model)
    desk.draw(edit_order(model, "first"))
    (recording,) = desk.source.recordings

    def cached_bytes() -> dict[Half, int]:
        projections = {key.half: recording.projections(step, desk.edits.projections_room) for key, step in steps}
        return {half: each.size_bytes for half, each in projections.items()}

    steps = list(recording.steps.items())
    if model.embeds_guidance:
        desk.draw(edit_order(model, "guided", guidance_scale=9.0))
        assert cached_bytes() == dict.fromkeys(Half, 0)
    desk.draw(edit_order(model, "other", prompt="a red heart"))
    assert cached_bytes()[Half.CONDITIONAL] == 0 < cached_bytes()[Half.UNCONDITIONAL]
    desk.draw(edit_order(model, "same", seed=4))
    assert cached_bytes()[Half.CONDITIONAL] == cached_bytes()[Half.UNCONDITIONAL]
    prompts = {prompt_of(spec_of(model), half, embeds_guidance=model.embeds_guidance) for half in Half}
    assert {step.prompt for _, step in steps} == prompts


def test_blocks_are_measured_and_compared_under_two_prompts(model: Model) -> None:
    desk, names = EditDesk(model), [block.name for block in model.backbone.blocks]
    profile = desk.edits.profile_blocks(desk.engine, 0, 0)
    assert [block.name for block in profile.blocks] == names
    assert all(block.full_s > 0 and min(block.masked_s) > 0 for block in profile.blocks)
    # Prompts have as many tokens as the request's.
    desk.draw(edit_order(model, "first", max_sequence_length=20))
    desk.draw(edit_order(model, "other", prompt="a red heart", any_prompt=False, max_sequence_length=20))
    assert desk.edits.cosines is not None
    assert desk.edits.cosines.cosines.keys() == set(names[:-1])
    assert 0 < desk.edits.cosines.mean < 1


def test_a_small_template_has_the_block_that_saves_most() -> None:
    """The first block has two attentions. One in half precision takes 16 tokens of 32 channels."""
    model, forwards = model_of("SD 3.5"), 4 * 2
    desk = EditDesk(model)
    desk.edits.template_budget_bytes = forwards * 16 * 32 * 2
    desk.draw(edit_order(model, "first"))
    (recording,) = desk.source.recordings
    assert {name for step in recording.steps.values() for name in step.names} == {"transformer_blocks.0"}
    again = desk.draw(edit_order(model, "again")).record.provenance
    assert (again.blocks_reused, again.blocks_total) == (forwards, 3 * forwards)


def test_flux_fill_reuses_what_edits_that_begin_and_step_alike_have_recorded() -> None:
    """It does not put the image back: outside the mask too, its latents are what the network predicts."""
    model = model_of("Flux Fill")
    alike: dict[str, Any] = {"strength": 1.0, "guidance_scale": 30.0}
    desk, first = EditDesk(model), edit_order(model, "first", **alike)
    drawn = desk.draw(first)
    assert_close(drawn.latents[0], drawn_alone(model, first).latents[0])
    again = desk.draw(edit_order(model, "again", **alike))
    other = desk.draw(edit_order(model, "other", prompt="a red heart", seed=4, **alike))
    blocks = len(model.backbone.blocks) * SPEC.num_inference_steps
    for drawing in (again, other):
        record = drawing.record.provenance
        assert (record.blocks_reused, record.blocks_total) == (blocks, blocks)
        assert record.mask.computed_share < 0.5
    torch.testing.assert_close(again.latents[0], drawn.latents[0], atol=0.02, rtol=0)
    # A margin of one token is computed as well.
    rest = (..., slice(4, None), slice(4, None))
    torch.testing.assert_close(other.latents[0][rest], drawn.latents[0][rest], atol=0.02, rtol=0)
    assert not torch.isclose(other.latents[0][..., :2, :2], drawn.latents[0][..., :2, :2], atol=0.02).all()
    elsewhere = desk.draw(edit_order(model, "elsewhere", **{**alike, "strength": 0.8}))
    assert elsewhere.record.provenance.blocks_reused == 0
