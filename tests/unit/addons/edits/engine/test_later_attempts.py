"""Later attempts at edits, with the recording that an earlier one has used, and without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega import kinds
from bottega.engine.events import (
    JobCheckpointed,
)
from bottega.engine.job import EngineOrder
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.v1.activations_pb2 import EditDecision
from tests.samples.masked_edits import (
    FIRST,
    SECOND,
    EditDesk,
    edited,
    outside,
)


def half_drawn(desk: EditDesk, order: EngineOrder) -> tuple[bytes, dict[str, bytes]]:
    """A checkpoint of an attempt that ends in the middle, and what it has decided."""
    drawing = desk.submit(order)
    while not drawing.all(JobCheckpointed):
        desk.turn()
    desk.engine.cancel(order.key)
    assert drawing.job is not None
    return drawing.all(JobCheckpointed)[-1].data, dict(drawing.job.decided)


def test_a_resumed_edit_whose_recording_is_gone_keeps_its_noise(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    whole = desk.draw(SECOND)
    checkpoint, decisions = half_drawn(desk, replace(SECOND, key="half"))
    elsewhere = EditDesk(model).draw(replace(SECOND, checkpoint=checkpoint, decisions=decisions))
    assert torch.equal(edited(elsewhere).noise, edited(whole).noise)
    assert torch.equal(outside(elsewhere.latents[0], SECOND), outside(whole.latents[0], SECOND))
    assert elsewhere.record.edit is not None
    said = "the recording that an earlier attempt used is gone; step 2 is the first that was made without it"
    assert elsewhere.record.edit.computed_all_because == said
    assert not elsewhere.record.edit.recorded
    assert not elsewhere.record.exact
    assert elsewhere.record.edit.recording == desk.source.recordings[0].id


def test_an_attempt_from_the_beginning_draws_with_the_same_noise_without_the_recording(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    whole = desk.draw(SECOND)
    assert whole.job is not None
    elsewhere = EditDesk(model).draw(replace(SECOND, decisions=dict(whole.job.decided)))
    assert torch.equal(edited(elsewhere).noise, edited(whole).noise)
    assert torch.equal(edited(elsewhere).image_latent, edited(whole).image_latent)
    assert elsewhere.record.edit is not None
    assert (elsewhere.record.exact, elsewhere.record.edit.recording) == (False, desk.source.recordings[0].id)


def test_an_attempt_that_finds_the_recording_goes_on_with_it(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    whole = desk.draw(SECOND)
    assert whole.record.edit is not None
    checkpoint, decisions = half_drawn(desk, replace(SECOND, key="half"))
    resumed = desk.draw(replace(SECOND, key="resumed", checkpoint=checkpoint, decisions=decisions))
    assert resumed.record.edit is not None
    assert 0 < resumed.record.edit.blocks_reused < whole.record.edit.blocks_reused
    torch.testing.assert_close(resumed.latents[0], whole.latents[0], atol=1e-5, rtol=0)


def test_an_attempt_that_began_with_its_own_noise_never_turns_to_a_recording(model: Model) -> None:
    desk = EditDesk(model)
    alone = EditDesk(model)
    whole = alone.draw(SECOND)
    assert whole.job is not None
    decisions = dict(whole.job.decided)
    desk.draw(FIRST)
    again = desk.draw(replace(SECOND, decisions=decisions))
    assert torch.equal(edited(again).noise, edited(whole).noise)
    assert again.record.exact
    assert again.record.edit is not None
    assert again.record.edit.computed_all_because == "an earlier attempt began without the recording"


@pytest.mark.parametrize("decision", [b"\xff", EditDecision(recording="x").SerializeToString()])
def test_a_decision_that_nobody_has_made_is_refused(model: Model, decision: bytes) -> None:
    with pytest.raises(InvalidRequest):
        EditDesk(model).engine.submit(replace(FIRST, decisions={kinds.ACTIVATIONS: decision}))
