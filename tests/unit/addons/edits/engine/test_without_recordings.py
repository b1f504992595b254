"""Edits that record nothing or take nothing from a recording, and what they say of it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from bottega.addons.edits.engine.recordings.keys import rounded
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.events import (
    ControlUse,
    EngineRecord,
)
from bottega.engine.job import EngineOrder
from bottega.model.model import Model
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.masked_edits import (
    FIRST,
    LEFT,
    SECOND,
    SPEC,
    EditDesk,
    edit_record,
    masked_order,
)


def test_exact_edits_neither_read_nor_record(model: Model) -> None:
    desk = EditDesk(model)
    plain = replace(edit_order(SPEC, template(), LEFT), key="plain")
    before = desk.draw(plain)
    assert not desk.source.recordings
    assert before.record.edit is None
    desk.draw(FIRST)
    after = desk.draw(replace(plain, key="after"))
    assert torch.equal(before.latents[0], after.latents[0])
    assert after.record.exact


@pytest.mark.parametrize("late", [True, False])
def test_a_late_lora_leaves_no_recording(model: Model, late: bool) -> None:
    layers = {"style": {"unet": random_layers(model.backbone.unet, 1)}}
    source = LorasByHand.of(layers, here=not late)
    source.text |= {"style"}
    desk = EditDesk(model, loras=source)
    order = replace(FIRST, spec=replace(FIRST.spec, loras=(lora_spec("style", bound=3),)))
    drawing = desk.submit(order)
    desk.turn()
    desk.turn()
    source.come("style")
    desk.run()
    assert drawing.record.edit is not None
    assert drawing.record.edit.recorded is not late
    assert len(desk.source.recordings) == (0 if late else 1)
    if late:
        assert drawing.record.edit.computed_all_because.endswith("a LoRA arrived only after the first step")


FULL = box_mask((0, 0, 64, 64))

WHOLE = "it redraws the whole image, its mask's margin included"


def test_an_edit_that_redraws_all_takes_nothing_and_says_so(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    record = edit_record(desk, masked_order(mask=FULL, key="full"))
    assert (record.blocks_reused, record.computed_all_because) == (0, WHOLE)


def test_a_first_edit_that_redraws_all_records_nothing(model: Model) -> None:
    """It would take room, and give nobody anything."""
    desk = EditDesk(model)
    record = edit_record(desk, masked_order(mask=FULL, key="full"))
    assert (record.recorded, record.computed_all_because) == (False, WHOLE)
    assert not desk.source.recordings
    assert edit_record(desk, SECOND).recorded


def test_where_nothing_of_what_an_edit_does_not_redraw_is_recorded_it_says_so(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(masked_order(mask=box_mask((0, 0, 64, 48)), key="first"))
    record = edit_record(desk, masked_order(mask=box_mask((0, 40, 64, 64)), key="below"))
    assert record.blocks_reused == 0
    assert record.computed_all_because == "the recording lacks the part that the edit does not redraw"


def test_the_first_step_with_strength_1_is_neither_recorded_nor_taken(model: Model) -> None:
    """It begins with noise alone, outside the mask as well; other edits have the image there at its timestep."""
    desk = EditDesk(model)
    full = masked_order(replace(SPEC, strength=1.0), key="full")
    first = desk.draw(full)
    (recording,) = desk.source.recordings
    assert recording.step_count == 3
    assert first.job is not None
    assert rounded(first.job.requests[0].noise_levels[0]) not in {key.noise_level for key in recording.steps}
    # Half as large steps come by the same timestep, and record it.
    finer = edit_record(desk, masked_order(replace(SPEC, num_inference_steps=8), key="finer"))
    assert finer.recorded
    assert rounded(first.job.requests[0].noise_levels[0]) in {key.noise_level for key in recording.steps}
    again = edit_record(desk, replace(full, key="again"))
    assert again.blocks_reused == again.blocks_total * 3 / 4
    alone = edit_record(desk, masked_order(replace(SPEC, strength=1.0, num_inference_steps=1), key="alone"))
    assert alone.computed_all_because == "at strength 1 it begins with noise alone"


class _StaleJob(JobAddOn):
    def report(self, record: EngineRecord) -> EngineRecord:
        use = ControlUse(name="edges", image_digest="", begin_step=0, end_step=4, stale_steps=1)
        return replace(record, controlnets=(use,))


class _Stale(EngineAddOn):
    """ControlNets whose residuals were stale in one step."""

    kind: ClassVar[str] = "stale"

    def open(self, order: EngineOrder) -> JobAddOn:
        return _StaleJob()


def test_stale_residuals_leave_no_recording(model: Model) -> None:
    desk = EditDesk(model, addons=(_Stale(),))
    drawing = desk.draw(FIRST)
    assert drawing.record.edit is not None
    assert not drawing.record.edit.recorded
    assert "stale" in drawing.record.edit.computed_all_because
    assert not desk.source.recordings


def test_an_edit_that_is_cancelled_leaves_no_recording(model: Model) -> None:
    desk = EditDesk(model)
    desk.submit(FIRST)
    desk.turn()
    assert len(desk.source.recordings) == 1
    desk.engine.cancel(FIRST.key)
    assert not desk.source.recordings
    assert desk.source.counts["given_up"] == 1


@pytest.mark.parametrize(
    ("fixed_rows", "mib", "because"), [(8, 64, "fixed_rows is set"), (0, 0, "keeps no activations")]
)
def test_a_worker_that_cannot_reuse_says_why(model: Model, fixed_rows: int, mib: int, because: str) -> None:
    threads = torch.get_num_threads()
    desk = EditDesk(model, mib=mib, fixed_rows=fixed_rows * threads)
    for order in (FIRST, SECOND):
        record = desk.draw(order).record
        assert record.exact
        assert record.edit is not None
        assert because in record.edit.computed_all_because
        assert 0 < record.edit.dilated_share < 0.6


def test_a_recording_without_room_is_given_up(model: Model) -> None:
    desk = EditDesk(model, mib=64)
    desk.source = type(desk.source)(1000)
    desk.edits.source = desk.source
    record = desk.draw(FIRST).record.edit
    assert record is not None
    assert not record.recorded
    assert record.computed_all_because.endswith("its activations do not fit into memory")
    assert not desk.source.recordings
