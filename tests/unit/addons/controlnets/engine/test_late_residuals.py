"""What a forward does when residuals are late: whom it waits for, for how long, and what the others get."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from time import perf_counter

import pytest
import torch
from torch import Tensor

from bottega.engine import forward
from bottega.engine.denoiser import Denoiser
from bottega.engine.encode import encode_prompts
from bottega.engine.forward import Network
from bottega.engine.request import ActiveControl, Request
from bottega.engine.spec import ResolvedSpec
from bottega.errors import Unavailable
from bottega.model.model import Model
from bottega.model.rows import Row
from tests.samples.small_model import SIZE
from tests.support import delayed_device
from tests.support.delayed_device import DelayedDevice

WAIT_S = 0.05


@dataclass(kw_only=True)
class Residuals:
    """Adds one number everywhere. A row is late until it was waited for so often; for ever where that is None.

    timeouts_s: for how long each wait was to be at most.
    """

    late: dict[object, int | None] = field(default_factory=dict)
    dies_after: dict[object, int] = field(default_factory=dict)
    timeouts_s: list[float] = field(default_factory=list)

    def ask(self, rows: list[Row]) -> None:
        assert all(row.controls for row in rows)

    def ask_ahead(self, rows: list[Row]) -> None:
        """Nothing is gained by it here."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return self.late.get(row.owner, 0) == 0 and min(points) >= self.dies_after.get(row.owner, 0)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        assert not any(self.ready(row, points) for row in rows)
        self.timeouts_s.append(timeout_s)
        time.sleep(min(timeout_s, WAIT_S))
        for owner in {row.owner for row in rows}:
            left = self.late.get(owner, 0)
            self.late[owner] = left - 1 if left else left

    def is_void(self, row: Row) -> bool:
        return False

    def take(self, row: Row, point: int) -> list[Tensor]:
        return [torch.tensor(0.1)]

    def is_shared(self, row: Row) -> bool:
        return False


def request(model: Model, seed: int, *, controlled: bool) -> Request:
    spec = ResolvedSpec(prompt="a star", num_inference_steps=4, width=SIZE, height=SIZE, seed=seed)
    made = Request(model, spec, encode_prompts(model, spec))
    if controlled:
        made.controls = (ActiveControl(handle="net", first=0, last=4),)
    return made


def rows_of(*requests: Request) -> list[Row]:
    return [row for each in requests for row in each.rows()]


def build(model: Model, residuals: Residuals, fixed_rows: int = 0) -> Denoiser:
    return Denoiser(Network(backbone=model.backbone, residuals=residuals, fixed_rows=fixed_rows))


def test_where_all_are_late_the_forward_waits_and_its_time_does_not_count_that(model: Model) -> None:
    late = request(model, 1, controlled=True)
    residuals = Residuals(late={late: 2})
    began_s = perf_counter()
    prediction = build(model, residuals).predict(rows_of(late))
    assert len(prediction.noise) == 2
    assert len(residuals.timeouts_s) == 2
    assert perf_counter() - began_s - prediction.seconds >= 2 * WAIT_S


def test_what_a_device_idles_for_residuals_is_counted_when_it_has_got_there(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is behind, and gets to the first wait only in its middle."""
    late, now_s, device = request(model, 1, controlled=True), 0.0, DelayedDevice()

    class BusyFirst(Residuals):
        def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
            nonlocal now_s
            super().wait(rows, points, timeout_s)
            now_s += 1.0
            device.finish()
            now_s += 1.0

    def tick() -> float:
        nonlocal now_s
        now_s += 0.001
        return now_s

    monkeypatch.setattr(delayed_device, "perf_counter", tick)
    denoiser = Denoiser(Network(backbone=model.backbone, residuals=BusyFirst(late={late: 1}), device=device))
    times = denoiser.predict(rows_of(late)).times
    assert not times.ready
    times.wait()
    assert times.waited_s == pytest.approx(1.0, abs=0.1), "of two seconds in which the thread waited"
    assert 0 < times.encoder_s < times.seconds
    assert device.waits == 1


@pytest.mark.parametrize("fixed_rows", [0, 6])
def test_where_others_can_go_on_nobody_waits(model: Model, fixed_rows: int) -> None:
    late, plain = request(model, 1, controlled=True), request(model, 2, controlled=False)
    residuals = Residuals(late={late: None})
    prediction = build(model, residuals, fixed_rows).predict(rows_of(late, plain))
    assert {row.owner for row in prediction.noise} == {plain}
    assert residuals.timeouts_s == []


def test_residuals_that_never_come_end_the_wait(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "RESIDUAL_TIMEOUT_S", 0.2)
    late = request(model, 1, controlled=True)
    with pytest.raises(Unavailable, match=r"within 0\.2 s"):
        build(model, Residuals(late={late: None})).predict(rows_of(late))


def test_with_fixed_rows_a_late_neighbour_changes_no_bit(model: Model) -> None:
    plain, other, late = (request(model, seed, controlled=seed == 3) for seed in (1, 2, 3))
    predict = build(model, Residuals(late={late: None}), fixed_rows=8).predict
    alone = list(predict(rows_of(plain)).noise.values())
    beside = predict(rows_of(other, late, plain)).noise
    together = [noise for row, noise in beside.items() if row.owner is plain]
    assert all(torch.equal(one, two) for one, two in zip(alone, together, strict=True))
    assert {row.owner for row in beside} == {plain, other}


@pytest.mark.parametrize("fixed_rows", [0, 8])
def test_a_controlnet_that_dies_in_the_middle_holds_the_others_up_for_a_moment_only(
    model: Model, fixed_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "STRAGGLER_S", 0.1)
    dying, other = request(model, 1, controlled=True), request(model, 2, controlled=True)
    deep, shallow = model.backbone.blocks[-2].needs, model.backbone.blocks[-1].needs
    assert min(deep) > min(shallow)
    residuals = Residuals(dies_after={dying: min(deep)})
    expected = build(model, Residuals(), fixed_rows).predict(rows_of(dying, other)).noise
    noise = build(model, residuals, fixed_rows).predict(rows_of(dying, other)).noise
    assert 0 < max(residuals.timeouts_s) <= 0.1
    assert {row.owner for row in noise} == {other}
    wanted = [noise for row, noise in expected.items() if row.owner is other]
    assert all((ours - theirs).abs().max() < 1e-5 for ours, theirs in zip(noise.values(), wanted, strict=True))
