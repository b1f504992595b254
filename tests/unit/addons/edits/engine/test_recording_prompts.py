"""Whether blocks follow the prompt, and what edits take from a recording with another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bottega.addons.edits.engine.prompts import LEAST_COSINE, PromptCosines
from bottega.engine.events import (
    JobFailed,
)
from bottega.model.model import Model
from tests.samples.masked_edits import (
    FIRST,
    SECOND,
    EditDesk,
    edit_record,
    masked_order,
)


def following(model: Model) -> EditDesk:
    """A desk whose model's blocks follow the prompt."""
    desk = EditDesk(model)
    desk.edits.cosines = PromptCosines(cosines={"a": LEAST_COSINE - 0.1})
    return desk


def test_where_blocks_follow_the_prompt_the_half_that_has_it_is_computed_for_another_one(model: Model) -> None:
    desk = following(model)
    desk.draw(FIRST)
    other = replace(SECOND.spec, prompt="a yellow square")
    cautious = edit_record(desk, masked_order(other, key="cautious", any_prompt=False))
    assert cautious.blocks_reused == cautious.blocks_total / 2
    assert cautious.recorded, "what was computed in full takes the other prompt's place"
    again = edit_record(desk, masked_order(other, key="again", any_prompt=False))
    assert again.blocks_reused == again.blocks_total
    insisting = edit_record(desk, masked_order(SECOND.spec, key="insisting"))
    assert insisting.blocks_reused == insisting.blocks_total
    (recording,) = desk.source.recordings
    assert recording.is_idle


def test_where_blocks_follow_the_prompt_two_prompts_on_one_image_do_not_drive_each_other_out(model: Model) -> None:
    desk = following(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    alone_bytes = recording.size_bytes
    prompts = ("a yellow square", FIRST.spec.prompt, "a yellow square", FIRST.spec.prompt)
    records = [
        edit_record(desk, masked_order(replace(FIRST.spec, prompt=prompt), key=number, any_prompt=False))
        for number, prompt in enumerate(prompts)
    ]
    assert [record.blocks_reused / record.blocks_total for record in records] == [0.5, 1.0, 1.0, 1.0]
    assert recording.size_bytes == 1.5 * alone_bytes
    edit_record(desk, masked_order(replace(FIRST.spec, prompt="a blue ring"), key="third", any_prompt=False))
    assert recording.size_bytes == 1.5 * alone_bytes, "no third one is kept"


def test_without_room_for_two_prompts_the_newer_one_stays(model: Model) -> None:
    desk = following(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    recording.budget_bytes = recording.size_bytes
    other = replace(FIRST.spec, prompt="a yellow square")
    records = [
        edit_record(desk, masked_order(spec, key=number, any_prompt=False))
        for number, spec in enumerate((other, other, FIRST.spec))
    ]
    assert [record.blocks_reused / record.blocks_total for record in records] == [0.5, 1.0, 0.5]
    assert recording.size_bytes == recording.budget_bytes


def test_where_blocks_follow_the_prompt_an_unguided_edit_with_another_one_computes_all_and_says_so(
    model: Model,
) -> None:
    desk = following(model)
    unguided = replace(FIRST.spec, guidance_scale=1.0)
    desk.draw(masked_order(unguided, key="first"))
    other = replace(unguided, prompt="a yellow square", seed=9)
    record = edit_record(desk, masked_order(other, key="other", any_prompt=False))
    assert record.blocks_reused == 0
    assert "another prompt" in record.computed_all_because


def test_how_far_blocks_follow_the_prompt_is_measured_before_the_first_use(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    before = desk.edits.cosines
    assert before is None
    desk.draw(masked_order(SECOND.spec, key="asked", any_prompt=False))
    measured: PromptCosines | None = desk.edits.cosines
    assert measured is not None
    cosines: Mapping[str, float] = measured.cosines
    assert set(cosines) == set(desk.edits.blocks)
    assert all(-1 <= cosine < 1 for cosine in cosines.values())


def test_an_edit_that_fails_before_its_first_step_gives_the_recording_back(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    hook = model.backbone.unet.mid_block.register_forward_pre_hook(fail)
    try:
        # How far blocks follow the prompt is measured first.
        failed = desk.draw(masked_order(replace(SECOND.spec, prompt="a yellow square"), key="failed", any_prompt=False))
    finally:
        hook.remove()
    (recording,) = desk.source.recordings
    assert isinstance(failed.events[-1], JobFailed)
    assert recording.uses == 1
    assert recording.is_idle
