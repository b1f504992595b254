"""Edits that may compute masked blocks alone, and an engine with recordings in its memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import PIL.Image
from torch import Tensor

from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.engine.addon import EngineAddOn
from bottega.engine.job import EngineOrder
from bottega.engine.latent_step import Edit
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.v1.generation_pb2 import Provenance
from tests.samples.edits import box_mask, edit_order, template
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine

SPEC = ResolvedSpec(
    prompt="a small green circle",
    num_inference_steps=4,
    width=64,
    height=64,
    seed=5,
    strength=0.9999,
    guidance_scale=3.0,
)
IMAGE = template()
LEFT, RIGHT = box_mask((4, 4, 24, 40)), box_mask((44, 20, 60, 60))


class EditDesk(ManualEngine):
    """An engine that records. `sparse` is that of EngineEdits, and `options` are those of make_engine."""

    def __init__(
        self,
        model: Model,
        *,
        mib: int = 64,
        addons: tuple[EngineAddOn, ...] = (),
        fixed_rows: int = 0,
        sparse: bool = True,
        **options: Any,
    ) -> None:
        self.source = self.make_source(mib << 20)
        self.edits = EngineEdits(model, self.source, fixed_rows=fixed_rows > 0, sparse=sparse)
        limits = EngineLimits(max_rows=64, max_wait_turns=0, fixed_rows=fixed_rows)
        super().__init__(make_engine(model, limits, addons=(*addons, self.edits), **options))

    def make_source(self, budget_bytes: int) -> MemoryActivations:
        return MemoryActivations(budget_bytes)


def masked_order(
    spec: ResolvedSpec = SPEC,
    mask: PIL.Image.Image = LEFT,
    *,
    image: PIL.Image.Image = IMAGE,
    key: object = "edit",
    any_prompt: bool = True,
    **facts: Any,
) -> EngineOrder:
    """any_prompt: see EditSpec. facts: of the order."""
    order = edit_order(spec, image, mask, key=key)
    assert order.spec.edit is not None
    edit = replace(order.spec.edit, masked_blocks=True, any_prompt=any_prompt)
    return replace(order, spec=replace(order.spec, edit=edit), **facts)


def redrawn(order: EngineOrder) -> Tensor:
    """Where its latents are redrawn, bool [height, width], for latents of four pixels an element."""
    assert order.mask is not None
    mask: Tensor = order.mask[::4, ::4] > 0
    return mask


def outside(latent: Tensor, order: EngineOrder) -> Tensor:
    """What of a latent an edit does not redraw."""
    return latent[0, :, ~redrawn(order)]


def inside(latent: Tensor, order: EngineOrder) -> Tensor:
    """What of a latent an edit redraws."""
    return latent[0, :, redrawn(order)]


FIRST = masked_order(key="first")
SECOND = masked_order(replace(SPEC, prompt="a red star", seed=6), key="second")
ELSEWHERE = masked_order(replace(SPEC, prompt="a red star", seed=7), RIGHT, key="elsewhere")


def edited(drawing: Drawing) -> Edit:
    assert drawing.job is not None
    edit = drawing.job.requests[0].edit
    assert edit is not None
    return edit


def edit_record(desk: EditDesk, order: EngineOrder) -> Provenance:
    """Of an edit that it draws."""
    record = desk.draw(order).record.provenance
    assert record.HasField("mask")
    return record


def drawn_alone(model: Model, order: EngineOrder) -> Drawing:
    """The same edit by an engine that records nothing."""
    return ManualEngine(make_engine(model, TOGETHER)).draw(order)
