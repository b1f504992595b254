"""Edits whose recordings are in a real activation store: every tier gives the same picture, and none a torn one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bottega import kinds
from bottega.addons.edits.engine import addon
from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.planner import LoadPlanner, LoadPolicy
from bottega.addons.edits.planning import BlockCost, StepPlan, follow
from bottega.addons.edits.worker import ActivationLinkSettings, ActivationSettings, StoreActivations
from bottega.engine.job import EngineOrder
from bottega.model.model import Model
from bottega.transport import LinkCounters
from bottega.v1.activations_pb2 import ActivationsOrder
from bottega.v1.generation_pb2 import Provenance
from tests.samples.edits import box_mask, template
from tests.samples.family_models import SIZE, family_model, sampler_of
from tests.samples.masked_edits import SPEC, masked_order
from tests.samples.small_model import small_model
from tests.support.activation_hosts import HostOffers, StoreHost, StoreProcess
from tests.support.engines import TOGETHER, make_engine
from tests.support.manual_engine import Drawing, ManualEngine, load
from tests.support.waiting import wait_until

FIRST = masked_order(key="first")
SECOND = masked_order(replace(SPEC, prompt="a red star", seed=6), key="second")
# What the first one's recording has, this one computes, but for what float16 leaves out.
AGAIN = replace(FIRST, key="again")
# Activations are kept in float16.
TOLERANCE = 0.02
# Four transformer blocks, two halves, three steps.
BLOCKS = 24
SECTIONS = 6
ANSWER_S = 30.0


@pytest.fixture(scope="module")
def model() -> Model:
    return load(small_model())


def everything(steps: Sequence[Sequence[BlockCost]], load_busy_s: float) -> list[StepPlan]:
    return follow(steps, [True] * sum(map(len, steps)), load_busy_s=load_busy_s)


class StoreDesk(ManualEngine):
    """A worker's engine with links to stores. waits: whether it loads everything, and waits for it. turns: that it
    plans at once."""

    def __init__(
        self, model: Model, offers: HostOffers, *, budget_bytes: int = 64 << 20, waits: bool = True, turns: int = 3
    ) -> None:
        link = ActivationLinkSettings(retry_s=0.05)
        settings = ActivationSettings(budget_bytes=budget_bytes, model_name="m", latent_scale=4, link=link)
        self.source = StoreActivations(settings, offers=offers, counters=LinkCounters())
        self.edits = EngineEdits(model, self.source)
        if waits:
            policy = LoadPolicy(choose=everything, patience=1e6, turns=turns)
            self.edits.planner = LoadPlanner(self.source, self.edits.times, policy)
        super().__init__(make_engine(model, TOGETHER, addons=(self.edits,)))
        self.edits.set_services(offers.addresses())
        self._hosts = offers.hosts
        wait_until(lambda: self.source.linked == len(offers.hosts), "the links")

    def wait_sent(self, recordings: int = 1) -> None:
        """Return when a store has so many templates: it makes them some time after the last part of them was sent."""
        wait_until(lambda: self.source.counts["uploaded"] >= recordings, "the recording")
        hosts = self._hosts.values()
        wait_until(lambda: sum(host.templates() for host in hosts) >= recordings, "its template in the store")


class Desks:
    """Makes engines, and ends them."""

    def __init__(self, model: Model, folder: Path, stack: ExitStack) -> None:
        self._model = model
        self._folder = folder
        self._stack = stack

    def host(self, *, unix: bool = True, **settings: int) -> StoreHost:
        """The store of the test, or the same again."""
        host = StoreHost(self._folder, unix=unix, **settings)
        self._stack.callback(host.close)
        return host

    def process(self, way: str = "unix") -> StoreProcess:
        """The store of the test, in a process."""
        process = StoreProcess(self._folder, way)
        self._stack.callback(process.close)
        return process

    def desk(self, host: StoreHost | StoreProcess, **options: Any) -> StoreDesk:
        desk = StoreDesk(self._model, HostOffers(store=host), **options)
        self._stack.callback(desk.source.set_stores, ())
        return desk


@pytest.fixture
def desks(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desks]:
    # An edit begins without the store's answer after a second, which a store on a busy machine may take.
    monkeypatch.setattr(addon, "_ANSWER_S", ANSWER_S)
    with ExitStack() as stack:
        yield Desks(model, tmp_path, stack)


def edit_of(drawing: Drawing) -> Provenance:
    assert drawing.record.provenance.HasField("mask")
    return drawing.record.provenance


def assert_close(drawing: Drawing, expected: Drawing) -> None:
    torch.testing.assert_close(drawing.latents[0], expected.latents[0], atol=TOLERANCE, rtol=0)


def started(desk: StoreDesk, order: EngineOrder, steps: int) -> Drawing:
    """An edit that has made so many steps."""
    drawing = desk.submit(order)
    while drawing.job is None or drawing.job.requests[0].step - drawing.job.requests[0].begin < steps:
        desk.turn()
    return drawing


@pytest.mark.parametrize("unix", [True, False], ids=["of the same host", "of another host"])
def test_another_worker_draws_the_same_picture_as_the_one_that_has_recorded(desks: Desks, unix: bool) -> None:
    host = desks.host(unix=unix)
    first = desks.desk(host)
    recorded = edit_of(first.draw(FIRST))
    assert recorded.mask.recorded
    first.wait_sent()
    in_memory = first.draw(SECOND)
    other = desks.desk(host)
    stored = other.draw(SECOND)
    assert torch.equal(stored.latents[0], in_memory.latents[0])
    assert (edit_of(stored).blocks_reused, edit_of(stored).blocks_total) == (BLOCKS, BLOCKS)
    assert edit_of(stored).mask.recording == edit_of(in_memory).mask.recording
    at_store = {(span.track, span.name): span for span in stored.trace.spans if span.service == "store"}
    assert {("look-ups", "search"), ("waits", "wait for its turn"), ("waits", "wait to be sent")} <= at_store.keys()
    assert (("sections", "send") in at_store) is not unix
    (asked,) = [span for span in stored.trace.spans if (span.name, span.service) == ("look-up", "")]
    search = at_store["look-ups", "search"]
    assert search.begin_s + search.seconds <= asked.begin_s + asked.seconds
    assert other.source.counts["loads"] >= 6
    held = sum(recording.held_bytes for recording in other.source.recordings)
    assert (held == 0) is unix
    again = other.draw(replace(SECOND, key="again"))
    assert torch.equal(again.latents[0], in_memory.latents[0])


def test_another_worker_uses_the_recording_of_a_transformer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addon, "_ANSWER_S", ANSWER_S)
    spec = replace(SPEC, width=SIZE, height=SIZE, sampler=sampler_of("SD 3.5"))
    order = masked_order(spec, box_mask((0, 0, 8, 8), SIZE, SIZE), image=template(SIZE, SIZE))
    with ExitStack() as stack:
        desks = Desks(load(family_model("SD 3.5")), tmp_path, stack)
        host = desks.host(unix=False)
        first = desks.desk(host)
        recorded = first.draw(order)
        first.wait_sent()
        other = desks.desk(host)
        stored = other.draw(replace(order, key="again"))
        assert_close(stored, recorded)
        # Three blocks, two halves, four steps.
        assert (edit_of(stored).blocks_reused, edit_of(stored).blocks_total) == (24, 24)
        assert other.edits.counts["blocks_loaded"] == 24


@pytest.mark.parametrize(("way", "steps"), [("unix", 1), ("tcp", 2)])
def test_an_edit_whose_store_is_killed_midway_goes_on_by_itself(desks: Desks, way: str, steps: int) -> None:
    """What is here stays; what was not loaded is computed."""
    process = desks.process(way)
    first = desks.desk(process)
    recorded = first.draw(FIRST)
    first.wait_sent()
    other = desks.desk(process, turns=1)
    drawing = started(other, AGAIN, steps)
    process.kill()
    other.run()
    assert_close(drawing, recorded)
    assert edit_of(drawing).blocks_reused == steps * BLOCKS // 3
    assert_close(other.draw(replace(AGAIN, key="later")), recorded)


def test_a_store_that_is_killed_while_it_is_given_a_recording_serves_nothing_torn(desks: Desks) -> None:
    process = desks.process()
    first = desks.desk(process)
    recorded = started(first, FIRST, 2)
    process.kill()
    first.run()
    assert edit_of(first.draw(AGAIN)).blocks_reused == BLOCKS, "its own is whole"
    process = desks.process()
    other = desks.desk(process)
    drawing = other.draw(AGAIN)
    assert edit_of(drawing).mask.recorded, "the store has nothing of it"
    assert torch.equal(drawing.latents[0], recorded.latents[0])


def test_what_is_damaged_on_the_disk_is_computed_and_recorded_again(desks: Desks, tmp_path: Path) -> None:
    host = desks.host()
    first = desks.desk(host)
    recorded = first.draw(FIRST)
    first.wait_sent()
    assert host.store.flush(20.0)
    host.close()
    files = [path for path in (tmp_path / "state" / "sections").rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: path.stat().st_size)[-3:]:
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 4
        path.chmod(0o600)
        path.write_bytes(data)
    host = desks.host()
    other = desks.desk(host)
    drawing = other.draw(AGAIN)
    assert_close(drawing, recorded)
    assert 0 < edit_of(drawing).blocks_reused < BLOCKS
    assert host.store.statistics().damaged == 3
    assert other.source.counts["loads_refused"] == 3
    assert host.store.statistics().sections == SECTIONS - 3
    assert_close(other.draw(replace(AGAIN, key="recording")), recorded)
    wait_until(lambda: host.store.statistics().sections == SECTIONS, "what was lost, again")
    assert edit_of(other.draw(replace(AGAIN, key="last"))).blocks_reused == BLOCKS
    assert edit_of(desks.desk(host).draw(AGAIN)).blocks_reused == BLOCKS


def test_a_tenant_has_nothing_of_another(desks: Desks) -> None:
    def of(order: EngineOrder, tenant: str) -> EngineOrder:
        return replace(order, addons={kinds.ACTIVATIONS: ActivationsOrder(tenant=tenant).SerializeToString()})

    host = desks.host()
    first = desks.desk(host)
    first.draw(of(FIRST, "one"))
    first.wait_sent()
    other = desks.desk(host)
    assert edit_of(other.draw(of(SECOND, "two"))).mask.recorded
    other.wait_sent()
    third = desks.desk(host)
    assert edit_of(third.draw(of(SECOND, "one"))).blocks_reused == BLOCKS
    assert len(host.store.templates(10)) == 2


def test_a_worker_of_another_host_with_room_for_half_of_it_loads_all_of_it(desks: Desks) -> None:
    """What an edit has passed goes for what it needs next; and what it needs last, at the beginning of the next one."""
    host = desks.host(unix=False)
    first = desks.desk(host)
    first.draw(FIRST)
    first.wait_sent()
    in_memory = first.draw(SECOND)
    (recording,) = first.source.recordings
    step_bytes = max(step.size_bytes for step in recording.steps.values())
    small = desks.desk(host, budget_bytes=3 * step_bytes, turns=1)
    for key in ("one", "other"):
        drawing = small.draw(replace(SECOND, key=key))
        assert torch.equal(drawing.latents[0], in_memory.latents[0])
        assert edit_of(drawing).blocks_reused == BLOCKS
    assert small.source.counts["loads_without_room"] == 0
