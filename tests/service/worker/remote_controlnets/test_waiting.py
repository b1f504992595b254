"""A worker's engine with ControlNets on servers in this process, at the ends of real links: latents, waits, losses."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.controlnets.engine import LocalControlNets
from bottega.addons.controlnets.engine.messages import ControlMessageKind
from bottega.addons.controlnets.engine.provider import ControlHosts, ControlInput, ControlServer
from bottega.addons.controlnets.worker import StalenessPolicy
from bottega.controlnet import model_registry, worker_link
from bottega.device_links.tensor_messages import TensorMessage, message_of
from bottega.engine.events import JobAdvanced, JobCheckpointed, JobStarted
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.errors import InternalError, NoControlNet, TooLarge, Unavailable
from bottega.model.model import Model
from bottega.model.rows import Row
from bottega.transport import Limits, number_message
from bottega.v1.generation_pb2 import RESIDUAL_MODE_PIPELINED, RESIDUAL_MODE_SYNCHRONOUS
from bottega.v1.hosted_pb2 import HOSTED_STATE_LOADING, HOSTED_STATE_ON_DISK
from tests.fakes.scripted_controlnet_link import Script, ScriptedServer
from tests.samples.controlnets import Gate, control_image, control_spec, layout_of, shelf_of
from tests.support import linked_servers
from tests.support.addon_messages import placed, placements
from tests.support.controlled_engine import ALONE, NAMES, PLAIN, Desk, Pair, alone, controlled, on, steps_done
from tests.support.linked_servers import LinkedServer, linked_server
from tests.support.stock import assert_close
from tests.support.waiting import wait_until

# Of a server that is silent, and of one that computes nothing.
SILENCE_S = 0.6
STALL_S = 2.0
IMPATIENT = {"is silent": {"silence_s": SILENCE_S}, "computes nothing, and answers pings": {"stall_s": STALL_S}}


CASES = {
    "one": controlled((0, 0.8)),
    "two": controlled((0, 0.8), (1, 1.3)),
    "three": controlled((2, 0.5), (0, 0.8), (1, 1.3)),
    "unguided": controlled((2, 1.1), spec=replace(PLAIN, guidance_scale=1.0)),
    "in the middle": controlled((0, 1.0), control_guidance_start=0.2, control_guidance_end=0.8),
    "guess mode of two": controlled((0, 1.2), (2, 0.6), guess_mode=True),
}


@pytest.mark.parametrize("case", CASES)
def test_on_a_server_it_ends_to_the_last_bit_as_in_the_engines_own_process(
    model: Model, local: LocalControlNets, near: LinkedServer, far: LinkedServer, case: str
) -> None:
    order = CASES[case]
    expected = alone(model, local, order)
    for server in (near, far):
        drawing = Desk(model, linked_servers.Offers(server)).draw(on(order, server))
        assert torch.equal(drawing.latents[0], expected)
        assert {tuple(use.servers) for use in drawing.record.provenance.controlnets} == {(server.server.name,)}
        assert all(
            use.stale_steps == 0 and use.mode == RESIDUAL_MODE_SYNCHRONOUS
            for use in drawing.record.provenance.controlnets
        )


def test_jobs_in_company_end_as_alone_and_give_everything_back(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    orders = [
        replace(
            on(controlled((seed % 3, 0.9), spec=replace(PLAIN, seed=seed, width=64 + 32 * (seed % 3))), near), key=seed
        )
        for seed in range(6)
    ]
    desk = Desk(model, linked_servers.Offers(near), EngineLimits(max_rows=8), slots=2)
    drawings = desk.easel.run({0: orders[:3], 2: orders[3:]})
    for order in orders:
        assert_close(drawings[order.key].latents[0], alone(model, local, order))
    wait_until(lambda: not near.links.sessions, "the sessions to end")
    assert near.beats > near.executor.batches  # from between the blocks of each
    assert near.registry.cache.used_bytes > 0  # they stay loaded
    assert desk.controlnets.servers == ["near"]


def test_the_next_step_is_computed_while_the_engine_tells_of_the_last_one(model: Model, near: LinkedServer) -> None:
    desk = Desk(model, linked_servers.Offers(near), EngineLimits(max_rows=2, progress_interval_s=1e-9))
    computed = near.executor.batches
    drawing = desk.easel.submit(on(controlled((0, 0.8)), near))
    while not steps_done(drawing):
        for event in desk.easel.engine.turn():
            drawing.events.append(event)
            if isinstance(event, JobAdvanced):
                wait_until(lambda: near.executor.batches == computed + 2, "two forwards")
    desk.easel.run()
    assert near.executor.batches == computed + PLAIN.num_inference_steps, "no step is computed twice"


def test_a_server_that_cannot_be_reached_is_passed_over(
    model: Model, local: LocalControlNets, near: LinkedServer
) -> None:
    offers = linked_servers.Offers(near)
    gone = ControlServer(name="gone", address="gone")
    order = on(controlled((0, 0.8)), near)
    hosts = replace(near.at("edges"), servers=(gone, near.server))
    drawing = Desk(model, offers).draw(replace(order, addons=placed([hosts])))
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert [address for address, _ in offers.asked] == ["gone", "near"]
    assert drawing.record.provenance.controlnets[0].servers == ["near"]


def test_what_the_link_has_no_room_for_is_refused_and_the_others_go_on(
    model: Model, local: LocalControlNets, folders: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_link, "_LIMITS", Limits(slots=8, slot_bytes=1 << 20))
    with linked_server("narrow", folders, tmp_path) as narrow:
        fits = on(controlled((0, 0.8)), narrow)
        image = control_image(1, 600, 600)
        spec = replace(PLAIN, controlnets=(control_spec("edges", image),))
        large = on(EngineOrder(key="large", spec=spec, control_images=(image,)), narrow)
        desk = Desk(model, linked_servers.Offers(narrow))
        drawings = desk.easel.run({0: [fits], 2: [large]})
    assert isinstance(drawings["large"].error, TooLarge)
    assert drawings[fits.key].record.provenance.controlnets[0].servers == ["narrow"]
    assert_close(drawings[fits.key].latents[0], alone(model, local, fits))


def empty_answer(number: int) -> TensorMessage:
    """The answer to a step without any residuals."""
    return message_of({ControlMessageKind.RESIDUALS.value: torch.tensor([number, 0])}, headers=1)


SCRIPTS = {
    "dies in its first answer": Script(dies_at_step=1),
    # Long enough for the blocks to run that need no more than is here.
    "dies before the last residuals": Script(dies_at_step=1, dies_after_points=4, dies_after_s=0.2),
    "is silent": Script(silent_at_step=1),
    "computes nothing, and answers pings": Script(hangs_at_step=1),
    "refuses the sessions": Script(refuses_loans=Unavailable("not now")),
    "opens other sessions": Script(opens_others=True),
    "refuses a step": Script(refuses_steps=InternalError("a shared forward pass failed")),
    "answers what nobody asked": Script(lies=lambda number: empty_answer(number + 7)),
    "answers other residuals": Script(lies=lambda number: empty_answer(number)),
    "says what only workers say": Script(lies=lambda number: number_message(ControlMessageKind.STEP, number)),
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_whatever_a_server_does_wrong_another_one_finishes_the_same_latent(
    model: Model, local: LocalControlNets, near: LinkedServer, tmp_path: Path, what: str
) -> None:
    # The residuals of the server that goes wrong are 0: any that were used would be seen.
    order = controlled((0, 0.8), (1, 0.5), spec=replace(PLAIN, num_inference_steps=2))
    bad = ScriptedServer("bad", tmp_path, SCRIPTS[what], tuple(layout_of(model).shapes(8, 8)))
    began_s = time.monotonic()
    desk = Desk(model, Pair(bad, near), ALONE, **IMPATIENT.get(what, {}))
    drawing = desk.draw(on(order, bad, near))
    bad.close()
    assert (
        drawing.record.provenance.controlnets[0].servers[-1] == "near"
    )  # first: a job that failed has a latent as well
    assert torch.equal(drawing.latents[0], alone(model, local, order))
    assert time.monotonic() - began_s < 10


def test_a_job_that_moves_to_a_server_that_still_loads_holds_up_nobody(
    model: Model,
    local: LocalControlNets,
    folders: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    monkeypatch.setattr(model_registry, "load_controlnet", gate)
    order = controlled((0, 0.8), spec=replace(PLAIN, num_inference_steps=3))
    bad = ScriptedServer("bad", tmp_path, Script(dies_at_step=1), tuple(layout_of(model).shapes(8, 8)))
    with linked_server("slow", folders, tmp_path) as slow:
        desk = Desk(model, Pair(bad, slow))
        moving = desk.easel.submit(on(order, bad, slow))
        wait_until(lambda: desk.easel.turn() is not None and bool(moving.all(JobStarted)), "it to begin")
        other = desk.easel.submit(EngineOrder(key="other", spec=replace(PLAIN, width=96)))
        wait_until(lambda: desk.easel.turn() is not None and other.ended, "the other one to end")
        assert gate.waiting.is_set()
        assert not moving.ended
        states = {net.name: net.state for net in slow.registry.report({})}
        assert states == dict.fromkeys(NAMES, HOSTED_STATE_ON_DISK) | {"edges": HOSTED_STATE_LOADING}
        gate.open()
        desk.easel.run()
    bad.close()
    assert torch.equal(moving.latents[0], alone(model, local, order))
    assert len(moving.all(JobStarted)) == 1
    assert moving.record.provenance.controlnets[0].servers == ["bad", "slow"]
    assert moving.record.seconds["controlnets"] > 0


@pytest.mark.parametrize("what", ["dies in its first answer", "refuses a step"])
def test_without_another_server_the_engine_finishes_it_or_says_that_nobody_can(
    model: Model, folders: Mapping[str, Path], local: LocalControlNets, tmp_path: Path, what: str
) -> None:
    order = controlled((0, 0.8), spec=replace(PLAIN, num_inference_steps=2))
    bad = ScriptedServer("bad", tmp_path, SCRIPTS[what], tuple(layout_of(model).shapes(8, 8)))
    with shelf_of(model, folders) as shelf:
        desk = Desk(model, Pair(bad, None), local=LocalControlNets(shelf, digests={"edges": "d"}), silence_s=SILENCE_S)
        drawing = desk.draw(on(order, bad))
        assert torch.equal(drawing.latents[0], alone(model, local, order))
        assert drawing.record.provenance.controlnets[0].servers == ["bad", ""]
        other = on(order, bad)
        elsewhere = placed([ControlHosts(digest="another version", servers=(bad.server,))])
        failed = desk.draw(replace(other, addons=elsewhere))
    assert isinstance(failed.error, NoControlNet)
    failed = Desk(model, Pair(bad, None), silence_s=SILENCE_S).draw(on(order, bad))
    bad.close()
    assert isinstance(failed.error, NoControlNet)
    assert failed.error.metadata == {"controlnets": "edges", "servers": "bad"}


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
            self._now[row.owner, row.half] = self._answers[row.owner, row.half, handle]

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
