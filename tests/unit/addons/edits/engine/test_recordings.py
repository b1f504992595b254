"""A template's first edit records, and later ones take from it what they do not redraw."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bottega.addons.edits.engine.recordings.step import RecordedStep
from bottega.engine.events import (
    JobAdvanced,
)
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from tests.samples.masked_edits import (
    ELSEWHERE,
    FIRST,
    SECOND,
    EditDesk,
    drawn_alone,
    edited,
    inside,
    outside,
)


def recorded(step: RecordedStep, name: str) -> Tensor:
    tensor = step.get(name)
    assert tensor is not None
    return tensor


def test_the_first_edit_computes_in_full_and_records_and_the_second_one_uses_it(model: Model) -> None:
    desk = EditDesk(model)
    first, second = desk.draw(FIRST), desk.draw(SECOND)
    assert first.record.exact
    assert first.record.edit is not None
    assert first.record.edit.recorded
    assert first.record.edit.computed_all_because == "it is the first edit of this image"
    assert first.record.edit.blocks_total == 0
    torch.testing.assert_close(first.latents[0], drawn_alone(model, FIRST).latents[0], atol=1e-5, rtol=0)
    record = second.record.edit
    assert record is not None
    assert not second.record.exact
    # Four transformer blocks, two halves, three steps.
    assert (record.blocks_reused, record.blocks_total) == (24, 24)
    assert record.recording == desk.source.recordings[0].id
    assert 0 < record.computed_share < 0.6
    assert first.record.edit.dilated_share == record.dilated_share == record.computed_share
    assert not record.computed_all_because
    assert desk.edits.counts["blocks_reused"] == 24
    assert desk.edits.counts["hits"] == 1


def test_an_edit_that_takes_the_noise_of_a_recording_alone_names_it(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    recording.forget_steps(lambda step: True)  # as a store that has lost its sections
    drawn = desk.draw(SECOND)
    assert drawn.record.edit is not None
    assert (drawn.record.edit.blocks_reused, drawn.record.exact) == (0, False)
    assert drawn.record.edit.recording == recording.id


def test_two_seeds_on_one_template_differ_inside_only(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    one, other = desk.draw(SECOND), desk.draw(replace(SECOND, key="third", spec=replace(SECOND.spec, seed=99)))
    assert torch.equal(edited(one).image_latent, edited(other).image_latent)
    assert torch.equal(outside(edited(one).noise, SECOND), outside(edited(other).noise, SECOND))
    assert not torch.equal(inside(edited(one).noise, SECOND), inside(edited(other).noise, SECOND))
    assert torch.equal(outside(one.latents[0], SECOND), outside(other.latents[0], SECOND))
    assert not torch.equal(inside(one.latents[0], SECOND), inside(other.latents[0], SECOND))


def test_inside_the_mask_the_noise_is_that_of_the_request(model: Model) -> None:
    desk = EditDesk(model)
    first, second, alone = desk.draw(FIRST), desk.draw(SECOND), drawn_alone(model, SECOND)
    assert torch.equal(inside(edited(second).noise, SECOND), inside(edited(alone).noise, SECOND))
    assert torch.equal(outside(edited(second).noise, SECOND), outside(edited(first).noise, SECOND))


def test_the_same_edit_again_draws_what_the_full_computation_draws_of_the_same_noise(model: Model) -> None:
    """The recording is of this very edit: what it does not compute is what it would have computed."""
    desk = EditDesk(model)
    first, again = desk.draw(FIRST), desk.draw(replace(FIRST, key="again"))
    assert again.record.edit is not None
    assert again.record.edit.blocks_reused
    # Activations are kept in float16.
    torch.testing.assert_close(again.latents[0], first.latents[0], atol=0.02, rtol=0)


def test_an_edit_elsewhere_completes_the_recording(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    share = recording.valid_share
    completing = desk.draw(ELSEWHERE)
    assert completing.record.edit is not None
    assert completing.record.edit.recorded
    assert share < recording.valid_share == 1.0
    again = desk.draw(replace(ELSEWHERE, key="again"))
    assert again.record.edit is not None
    assert not again.record.edit.recorded
    assert again.record.edit.computed_share < completing.record.edit.computed_share


def test_an_edit_of_the_same_place_completes_nothing(model: Model) -> None:
    """What it computes there is its own."""
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    share = recording.valid_share
    again = desk.draw(SECOND)
    assert again.record.edit is not None
    assert not again.record.edit.recorded
    assert recording.valid_share == share < 1.0


def test_what_completes_a_recording_is_what_the_template_puts_out_there(model: Model) -> None:
    """The second edit computes the place of the first one's mask, and writes it; nothing else is touched."""
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    before = {(key, name): recorded(step, name).clone() for key, step in recording.steps.items() for name in step.names}
    valid = {key: step.valid for key, step in recording.steps.items()}
    desk.draw(ELSEWHERE)
    for key, step in recording.steps.items():
        tokens = valid[key][::2, ::2].flatten()
        for name in desk.edits.blocks:
            tensor = recorded(step, name)
            assert torch.equal(tensor[tokens], before[key, name][tokens])
            assert not torch.equal(tensor[~tokens], before[key, name][~tokens])


def test_an_edit_whose_activations_float16_has_no_room_for_leaves_the_recording_as_it_was(model: Model) -> None:
    """What it completed would be read by every later edit of the template."""
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    share = recording.valid_share
    (block,) = desk.edits.blocks[-1:]
    last = model.backbone.unet.get_submodule(block)
    hook = last.register_forward_hook(lambda module, given, output: output * 1e9)
    try:
        beyond = desk.draw(ELSEWHERE)
    finally:
        hook.remove()
    assert beyond.record.edit is not None
    assert beyond.record.edit.blocks_reused
    assert not beyond.record.edit.recorded
    assert recording.valid_share == share < 1.0
    assert all(bool(recorded(step, block).isfinite().all()) for step in recording.steps.values())
    later = desk.draw(replace(ELSEWHERE, key="later"))
    assert later.record.edit is not None
    assert later.record.edit.recorded
    assert bool(later.latents[0].isfinite().all())


def test_while_a_template_is_recorded_others_of_it_compute_in_full_and_record_nothing(model: Model) -> None:
    desk = EditDesk(model)
    drawings = desk.run({0: [FIRST, SECOND]})
    record = drawings["second"].record.edit
    assert record is not None
    assert record.computed_all_because == "another edit is recording this image"
    assert drawings["second"].record.exact
    assert len(desk.source.recordings) == 1
    assert desk.source.counts["recorded"] == 1


def test_of_several_images_the_first_one_is_recorded_and_all_read(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(replace(FIRST, spec=replace(FIRST.spec, num_images=2)))
    both = desk.draw(replace(SECOND, spec=replace(SECOND.spec, num_images=2)))
    assert both.record.edit is not None
    assert both.record.edit.blocks_reused == both.record.edit.blocks_total == 48
    assert torch.equal(outside(both.latents[0], SECOND), outside(both.latents[1], SECOND))


def test_within_a_template_s_budget_the_blocks_that_save_most_are_recorded_and_reused(model: Model) -> None:
    whole, desk = EditDesk(model), EditDesk(model)
    in_full = whole.draw(FIRST)
    size_bytes = whole.source.recordings[0].size_bytes
    desk.edits.template_budget_bytes = size_bytes // 3
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    assert 0 < recording.size_bytes <= size_bytes // 3
    (names,) = {frozenset(step.names) for step in recording.steps.values()}
    everything = next(iter(whole.source.recordings[0].steps.values()))
    assert names < set(everything.names)
    again = desk.draw(replace(FIRST, key="again"))
    assert again.record.edit is not None
    assert again.record.edit.blocks_reused
    torch.testing.assert_close(again.latents[0], in_full.latents[0], atol=0.02, rtol=0)
    other = desk.draw(replace(SECOND, spec=replace(SECOND.spec, num_inference_steps=7)))
    assert other.record.edit is not None
    assert recording.size_bytes <= size_bytes // 3, "further timesteps have no more room"


def test_edits_and_plain_jobs_share_turns(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    plain = EngineOrder(key="plain", spec=ResolvedSpec(prompt="a star", num_inference_steps=4, width=64, height=64))
    alone = drawn_alone(model, plain)
    drawings = desk.run({0: [SECOND, ELSEWHERE, plain]})
    torch.testing.assert_close(drawings["plain"].latents[0], alone.latents[0], atol=1e-4, rtol=0)
    assert drawings["plain"].record.mean_group_requests > 1
    assert drawings["plain"].record.exact
    assert drawings["second"].all(JobAdvanced)
