"""An engine whose device's memory ends: groups are split, pictures that do not fit are refused, and nobody else is."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.device import heartbeat as heartbeat_module
from bottega.device.heartbeat import Heartbeat
from bottega.device.memory_plan import MemoryPlan
from bottega.engine.denoiser import Denoiser
from bottega.engine.events import JobFinished
from bottega.engine.forward import Network, Prediction
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.engine.times import KnownTimes
from bottega.errors import TooLarge
from bottega.model.backbones.unet import UNetBackbone
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half, Row
from tests.fakes.fake_time import FakeTime
from tests.samples.masked_networks import small_unet
from tests.samples.small_model import SIZE
from tests.support.engines import make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.memory_device import MemoryDevice, taking
from tests.support.stock import assert_same_image
from tests.support.waiting import wait_until

SPEC = ResolvedSpec(prompt="a red star", num_inference_steps=3, width=SIZE, height=SIZE, seed=3)
# The small model's latents have 8 x 8 elements; a row takes 256 KiB of a device so, a decoding 1 MiB.
ROW_BYTES, DECODING_BYTES = 4096, 16384
ROW, DECODING = 64 * ROW_BYTES, 64 * DECODING_BYTES
TOGETHER = EngineLimits(max_rows=8, max_wait_turns=0)


def engine_on(device: MemoryDevice, model: Model, plan: MemoryPlan, limits: EngineLimits = TOGETHER) -> ManualEngine:
    return ManualEngine(make_engine(replace(model, runtime=device, memory=plan), limits))


def orders(count: int) -> list[EngineOrder]:
    return [EngineOrder(key=key, spec=replace(SPEC, seed=key)) for key in range(count)]


def images(easel: ManualEngine, count: int) -> list[Drawing]:
    drawings = [easel.submit(order) for order in orders(count)]
    easel.run()
    return drawings


def assert_drawn_alike(drawings: Sequence[Drawing], others: Sequence[Drawing]) -> None:
    for one, other in zip(drawings, others, strict=True):
        assert isinstance(one.events[-1], JobFinished)
        assert_same_image(one.pixels[0], other.pixels[0])


def test_a_group_that_finds_no_memory_is_split_until_it_does_and_stays_so(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    easy = images(ManualEngine(make_engine(model, TOGETHER)), 3)
    device = MemoryDevice(max(2 * ROW, DECODING))
    with taking(device, model, row_bytes=2 * ROW_BYTES, decoding_bytes=DECODING_BYTES) as widths:
        tight = images(engine_on(device, model, MemoryPlan()), 3)
    assert max(widths) == 2
    assert_drawn_alike(tight, easy)
    assert len([record for record in caplog.records if "is split" in record.message]) <= 4  # not at every turn


@pytest.mark.parametrize(("row_bytes", "decoding_bytes"), [(9 * ROW_BYTES, 1), (1, 9 * DECODING_BYTES)])
def test_a_picture_that_fits_not_even_alone_is_refused_by_its_size_and_the_next_one_is_drawn(
    model: Model, row_bytes: int, decoding_bytes: int
) -> None:
    """In the forward or in the decoding: nothing was measured of it before."""
    device = MemoryDevice(2 * DECODING)
    easel = engine_on(device, model, MemoryPlan())
    with taking(device, model, row_bytes=row_bytes, decoding_bytes=decoding_bytes):
        large = easel.draw(EngineOrder(key="large", spec=SPEC))
    assert isinstance(large.error, TooLarge)
    assert large.error.message.startswith("the device does not have enough memory for 32x32")
    assert large.error.metadata == {"limit": "device_memory", "size": "32x32"}
    assert isinstance(easel.draw(EngineOrder(key="next", spec=SPEC)).events[-1], JobFinished)


def test_what_does_not_fit_is_refused_when_it_comes_by_what_the_warm_up_measured(model: Model) -> None:
    device = MemoryDevice(8 * DECODING)
    plan = MemoryPlan(3 * DECODING)
    plan.reserve("model", DECODING)
    easel = engine_on(device, model, plan, replace(TOGETHER, max_pixels=1 << 20))
    with taking(device, model, row_bytes=4 * ROW_BYTES, decoding_bytes=DECODING_BYTES):
        easel.engine.warm_up()
        with pytest.raises(
            TooLarge, match=r"64x64 needs about 4 MiB .* 2 of 3 MiB are left beside model 1 MiB"
        ) as caught:
            easel.engine.submit(EngineOrder(key="large", spec=replace(SPEC, width=2 * SIZE, height=2 * SIZE)))
        assert caught.value.metadata == {"limit": "device_memory", "needed_mib": "4", "device_memory_mib": "3"}
        assert isinstance(easel.draw(EngineOrder(key="small", spec=SPEC)).events[-1], JobFinished)


def test_groups_are_no_wider_than_what_is_left_beside_a_decoding_before_any_memory_is_missing(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    device = MemoryDevice(8 * DECODING)
    plan = MemoryPlan(DECODING + 4 * ROW)
    easel = engine_on(device, model, plan)
    with taking(device, model, row_bytes=ROW_BYTES, decoding_bytes=DECODING_BYTES) as widths:
        easel.engine.warm_up()
        widths.clear()
        images(easel, 3)
    assert max(widths) == 4
    assert "is split" not in caplog.text


def blank_row(owner: str, half: Half = Half.CONDITIONAL) -> Row:
    embeds = Embeds(prompt=torch.zeros(2, 3), added={"text_embeds": torch.zeros(3), "time_ids": torch.zeros(6)})
    return Row(owner=owner, step=0, half=half, sample=torch.zeros(4, 8, 8), timestep=torch.tensor(1.0), embeds=embeds)


class ScriptedDenoiser(Denoiser):
    """most: rows that find memory. late: rows that are late. held: what failed forwards had computed."""

    def __init__(self, *, most: int = 99, late: Sequence[Row] = (), **options: Any) -> None:
        super().__init__(Network(backbone=UNetBackbone(small_unet())), **options)
        self.held: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []
        self._most = most
        self._late = late

    def forward(self, rows: Sequence[Row]) -> Prediction:
        gc.disable()  # what is freed is freed by itself
        self.alive.append(sum(held() is not None for held in self.held))
        computed = torch.zeros(1000)
        if len(rows) > self._most:
            self.held.append(weakref.ref(computed))
            raise torch.OutOfMemoryError("tried to allocate 2 TiB")
        gc.enable()
        return Prediction(
            noise={row: row.sample for row in rows if row not in self._late}, times=KnownTimes(seconds=0.5)
        )


def test_an_owner_of_whom_one_part_was_late_is_late_with_all_rows() -> None:
    rows = [blank_row(owner, half) for owner in ("one", "other") for half in Half]
    prediction = ScriptedDenoiser(most=1, late=[rows[1]]).predict(rows)
    assert list(prediction.noise) == rows[2:]
    assert prediction.seconds == 4 * 0.5


def test_what_a_failed_forward_had_computed_is_freed_before_its_parts_run() -> None:
    denoiser = ScriptedDenoiser(most=1)
    denoiser.predict([blank_row(str(owner)) for owner in range(4)])
    assert len(denoiser.held) == 3
    assert set(denoiser.alive) == {0}


def test_the_heart_beats_from_a_thread_while_the_first_forward_of_a_kind_compiles() -> None:
    heartbeat = Heartbeat()
    beats: list[str] = []
    heartbeat.subscribe_covered(lambda: beats.append("compiling"))

    class Compiling(ScriptedDenoiser):
        def forward(self, rows: Sequence[Row]) -> Prediction:
            if len(rows) == 1:
                wait_until(lambda: bool(beats), "a beat")
            return super().forward(rows)

    denoiser = Compiling(heartbeat=heartbeat, compile_s=60.0)
    denoiser.predict([blank_row("one")])
    before = len(beats)
    beats.extend(["ours", "ours"])
    denoiser.predict([blank_row("one")])  # the same kind: nothing compiles any more
    assert len(beats) == before + 2


def test_a_compiler_that_takes_longer_than_its_deadline_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, heartbeat, beats = FakeTime(), Heartbeat(), list[None]()
    monkeypatch.setattr(heartbeat_module, "monotonic", clock.monotonic)
    heartbeat.subscribe_covered(lambda: beats.append(None))
    with heartbeat.covering(0.05):
        wait_until(lambda: bool(beats), "the first beat")
        clock.now += 0.05
        beating = {"compiling"}
        wait_until(lambda: not beating & {thread.name for thread in threading.enumerate()}, "the last beat")
