"""A worker's engine that goes on with residuals of the step before: where it may, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.addons.controlnets.worker import StalenessPolicy
from bottega.engine.events import JobCheckpointed
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.v1.generation_pb2 import RESIDUAL_MODE_PIPELINED
from tests.fakes.scripted_controlnet_link import Script, ScriptedServer
from tests.samples.controlnets import layout_of, shelf_of
from tests.support import linked_servers
from tests.support.addon_messages import placed, placements
from tests.support.controlled_engine import PLAIN, Desk, Pair, alone, controlled, on
from tests.support.linked_servers import LinkedServer
from tests.support.stock import assert_close


class AlwaysPipelined(StalenessPolicy):
    """Lets everybody who may go on with old residuals do so at once."""

    def allows(self, control: ControlInput, *, answer_s: float, transfer_s: float) -> bool:
        return control.may_be_stale


class StaleLocal(LocalControlNets):
    """Uses the residuals of the step before, after the first: what pipelined mode shall come to."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._before: dict[tuple[object, object], list[Tensor]] = {}
        self._now: dict[tuple[object, object], list[Tensor]] = {}

    def ask(self, rows: list[Row]) -> None:
        super().ask(rows)
        self._before, self._now = self._now, {}
        for row in rows:
            (handle,) = row.controls
            self._now[row.owner, row.half] = self._answers[row, handle]

    def take(self, row: Row, point: int) -> list[Tensor]:
        key = (row.owner, row.half)
        return [self._before.get(key, self._now[key])[point]]


def test_pipelined_steps_use_the_residuals_of_the_step_before_and_the_first_one_waits(
    model: Model, folders: Mapping[str, Path], near: LinkedServer
) -> None:
    order = on(controlled((0, 0.8)), near, stale_residuals=True)
    drawing = Desk(model, linked_servers.Offers(near), staleness=AlwaysPipelined()).draw(order)
    with shelf_of(model, folders) as shelf:
        expected = alone(model, StaleLocal(shelf), order)
    assert_close(drawing.latents[0], expected)
    (use,) = drawing.record.provenance.controlnets
    assert (use.mode, use.stale_steps) == (RESIDUAL_MODE_PIPELINED, PLAIN.num_inference_steps - 1)


def similar(order: EngineOrder) -> EngineOrder:
    """Its ControlNets' profiles let it go on with old residuals, where the link makes that pay."""
    hosts = placements(order.addons)
    for each in hosts:
        each.similarity = 0.999
    return replace(order, spec=replace(order.spec, stale_residuals=True), addons=placed(hosts))


def test_a_server_that_computes_for_long_is_waited_for(model: Model, far: LinkedServer) -> None:
    far.block_s = 0.02
    drawing = Desk(model, linked_servers.Offers(far)).draw(similar(on(controlled((0, 0.8)), far)))
    far.block_s = 0.0
    assert drawing.record.provenance.controlnets[0].waited_s > 0.3
    assert drawing.record.provenance.controlnets[0].stale_steps == 0


def test_who_wants_exact_pictures_waits_for_every_step(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    order = on(controlled((0, 0.8)), near)
    drawing = Desk(model, linked_servers.Offers(near), staleness=AlwaysPipelined()).draw(order)
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert drawing.record.provenance.controlnets[0].stale_steps == 0


def test_after_a_resume_the_first_pipelined_step_waits(model: Model, near: LinkedServer) -> None:
    order = on(controlled((0, 0.8)), near, stale_residuals=True)
    limits = EngineLimits(max_rows=2, checkpoint_interval_s=1e-9)
    first = Desk(model, linked_servers.Offers(near), limits, staleness=AlwaysPipelined()).draw(order)
    checkpoint = first.all(JobCheckpointed)[1]
    assert checkpoint.steps_done == 2
    resumed = replace(order, checkpoint=checkpoint.data)
    drawing = Desk(model, linked_servers.Offers(near), staleness=AlwaysPipelined()).draw(resumed)
    assert drawing.record.provenance.controlnets[0].stale_steps == PLAIN.num_inference_steps - 2 - 1


def test_a_pipelined_session_whose_server_dies_waits_for_the_first_step_elsewhere(
    model: Model, near: LinkedServer, tmp_path: Path
) -> None:
    script = Script(dies_at_step=2, dies_after_points=1)
    bad = ScriptedServer("bad", tmp_path, script, tuple(layout_of(model).shapes(8, 8)))
    order = on(controlled((0, 0.8)), bad, near, stale_residuals=True)
    drawing = Desk(model, Pair(bad, near), staleness=AlwaysPipelined()).draw(order)
    bad.close()
    (use,) = drawing.record.provenance.controlnets
    assert use.servers == ["bad", "near"]
    assert 0 < use.stale_steps < PLAIN.num_inference_steps - 1
