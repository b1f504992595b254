"""Which rows share a ControlNet server's forwards, whose answer comes when, and what a failure costs whom."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bottega.addons.controlnets.engine import ControlNetCache, ControlRow, ControlSession
from bottega.addons.controlnets.engine.provider import ControlInput
from bottega.controlnet.batch_executor import BatchExecutor, Residuals, ResidualStream, StepRequest
from bottega.device.device import Event
from bottega.device.devices import CpuDevice, CpuEvent
from bottega.device.memory_plan import MemoryPlan
from bottega.errors import BottegaError, InternalError, TooLarge
from bottega.fair_order import Share
from bottega.model.backbone import POOLED
from bottega.model.model import Model
from bottega.model.rows import Embeds, Half
from tests.samples.controlnets import control_image, random_controlnet, save, shelf_of
from tests.samples.family_models import control_networks, family_model
from tests.support.delayed_device import STEPS, DelayedDevice
from tests.support.manual_engine import load

LOAD_S = 20.0
_EVERYBODYS = Share()


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


@pytest.fixture(scope="module")
def cache(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlNetCache]:
    nets = {name: random_controlnet(model.backbone.network, seed) for seed, name in enumerate(("edges", "depth"))}
    folders: dict[str, Path] = save(nets, tmp_path_factory.mktemp("nets"))
    with shelf_of(model, folders) as cache:
        yield cache


class Outcomes:
    """What came of the works that were put."""

    def __init__(self, executor: BatchExecutor) -> None:
        self.executor = executor
        self.ended: dict[str, Sequence[Residuals] | BottegaError] = {}

    def submit(self, name: str, rows: Sequence[ControlRow], owner: object = "worker", *, alone: bool = False) -> None:
        def done(outcome: Sequence[Residuals] | BottegaError) -> None:
            self.ended[name] = outcome

        self.executor.submit(StepRequest(owner=owner, rows=rows, done=done, alone=alone))


def session(
    cache: ControlNetCache, net: str = "edges", side: int = 64, scale: float = 1.0, share: Share = _EVERYBODYS
) -> ControlSession:
    embeds = Embeds(prompt=torch.randn(77, 128), added={"text_embeds": torch.randn(64), "time_ids": torch.zeros(6)})
    halves = dict.fromkeys(Half, embeds)
    control = ControlInput(
        name=net, images=(control_image(1),), height=side, width=side, halves=halves, scale=scale, share=share
    )
    (loaded,) = cache.borrow([net]).values.result(LOAD_S)
    return ControlSession(loaded, control)


def rows(*sessions: ControlSession, side: int = 16) -> list[ControlRow]:
    return [
        ControlRow(session=each, half=half, sample=torch.randn(4, side, side), timestep=torch.tensor(500.0))
        for each in sessions
        for half in Half
    ]


def test_a_waiting_executor_is_woken_for_other_work() -> None:
    executor = BatchExecutor(max_rows=16)
    executor.wake()
    executor.run_batch(600.0)
    waiting = threading.Thread(target=executor.run_batch, args=[600.0], daemon=True)
    waiting.start()
    executor.wake()
    waiting.join(LOAD_S)
    assert not waiting.is_alive()


def test_steps_of_several_workers_share_a_forward_and_each_gets_its_own_rows(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    asked = {name: rows(session(cache)) for name in ("one", "two", "three")}
    for name, mine in asked.items():
        outcomes.submit(name, mine, owner=name)
    outcomes.executor.run_batch(0.0)
    assert (outcomes.executor.batches, outcomes.executor.rows) == (1, 6)
    for name, mine in asked.items():
        alone = Outcomes(BatchExecutor(max_rows=16))
        alone.submit(name, mine)
        alone.executor.run_batch(0.0)
        for together, apart in zip(residuals(outcomes, name), residuals(alone, name), strict=True):
            for one, other in zip(together.by_point, apart.by_point, strict=True):
                torch.testing.assert_close(one[together.place], other[apart.place], atol=1e-4, rtol=1e-4)


def test_another_controlnet_and_another_size_take_forwards_of_their_own_and_the_oldest_is_first(
    cache: ControlNetCache,
) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("edges", rows(session(cache)))
    outcomes.submit("depth", rows(session(cache, "depth")))
    outcomes.submit("large", rows(session(cache, side=128), side=32))
    outcomes.submit("edges too", rows(session(cache)))
    order: list[set[str]] = []
    for _ in range(3):
        outcomes.executor.run_batch(0.0)
        order.append(set(outcomes.ended) - set().union(*order))
    assert order == [{"edges", "edges too"}, {"depth"}, {"large"}]
    assert not outcomes.executor.busy


def test_a_step_with_two_controlnets_is_answered_when_both_are_done(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("both", rows(session(cache), session(cache, "depth")))
    outcomes.executor.run_batch(0.0)
    assert not outcomes.ended
    outcomes.executor.run_batch(0.0)
    assert len(residuals(outcomes, "both")) == 4


def test_a_forward_has_no_more_rows_than_it_may(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=3))
    outcomes.submit("one", rows(session(cache)))
    outcomes.submit("two", rows(session(cache)))
    outcomes.executor.run_batch(0.0)
    assert set(outcomes.ended) == {"one"}
    outcomes.executor.run_batch(0.0)
    assert outcomes.executor.rows == 4
    assert set(outcomes.ended) == {"one", "two"}


class SteadyEvent(CpuEvent):
    """A tenth of a second after the event before."""

    def seconds_since(self, earlier: Event) -> float:
        return 0.1


class SteadyDevice(CpuDevice):
    """Every forward takes a tenth of a second."""

    def record(self) -> Event:
        return SteadyEvent()


def test_a_tenants_flood_delays_another_tenants_step_by_no_forward(cache: ControlNetCache) -> None:
    """The flood has eight steps of sixteen rows, from four workers, and the other tenant one of two rows."""
    outcomes = Outcomes(BatchExecutor(max_rows=4, device=SteadyDevice()))
    flood = rows(*[session(cache, share=Share(tenant="flood"))] * 8)
    for number in range(8):
        outcomes.submit(f"flood {number}", flood, owner=f"worker {number % 4}")
    outcomes.executor.run_batch(0.0)
    light = session(cache, "depth", share=Share(tenant="light"))
    for number in range(3):
        outcomes.submit(f"light {number}", rows(light))
        outcomes.executor.run_batch(0.0)
        assert f"light {number}" in outcomes.ended
        outcomes.executor.run_batch(0.0)  # the flood's, while the light tenant's worker makes its step
    assert outcomes.executor.rows == 4 + 3 * (2 + 4), "the flood computes meanwhile"


def test_tenants_with_steps_at_all_times_share_the_device_by_weight(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=2, device=SteadyDevice()))
    for tenant, weight, net in (("light", 1.0, "edges"), ("heavy", 3.0, "depth")):
        mine = rows(session(cache, net, share=Share(tenant=tenant, weight=weight)))
        for number in range(16):
            outcomes.submit(f"{tenant} {number}", mine)
    for _ in range(16):
        outcomes.executor.run_batch(0.0)
    ended = Counter(name.split()[0] for name in outcomes.ended)
    assert ended == {"heavy": 12, "light": 4}


def test_a_forward_that_fails_costs_only_the_step_that_makes_it_fail(
    cache: ControlNetCache, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16, fixed_rows=8))
    bad = rows(session(cache))
    bad[0].session.halves[Half.UNCONDITIONAL] = Embeds(
        prompt=torch.randn(77, 128), added={"text_embeds": torch.randn(7), "time_ids": torch.zeros(6)}
    )
    outcomes.submit("bad", bad)
    outcomes.submit("good", rows(session(cache)))
    for _ in range(3):
        outcomes.executor.run_batch(0.0)
    assert isinstance(outcomes.ended["bad"], InternalError)
    assert logged_errors(caplog) == ["a job failed"], "once, and not for the step that was retried"
    assert [len(row.by_point[0]) for row in residuals(outcomes, "good")] == [8, 8], "it keeps the padding"


class BreakingDevice(CpuDevice):
    """error: what every call says, from when on there is one, as that of a CUDA context that is lost."""

    error: RuntimeError | None = None

    def record(self) -> Event:
        self.synchronize()
        return super().record()

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_device_that_is_lost_ends_the_process_and_refuses_no_step_after_the_first(cache: ControlNetCache) -> None:
    device = BreakingDevice()
    outcomes = Outcomes(BatchExecutor(max_rows=16, device=device))
    wrong = rows(session(cache))
    wrong[0] = replace(wrong[0], sample=torch.randn(3, 16, 16))
    outcomes.submit("wrong", wrong[:1])
    outcomes.executor.run_batch(0.0)
    assert isinstance(outcomes.ended["wrong"], InternalError), "a device that is well goes on"
    outcomes.submit("well", rows(session(cache)))
    outcomes.executor.run_batch(0.0)
    assert len(residuals(outcomes, "well")) == 2

    device.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    outcomes.submit("lost", rows(session(cache)))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        outcomes.executor.run_batch(0.0)
    assert isinstance(outcomes.ended["lost"], InternalError)


def test_what_waits_of_a_worker_that_has_gone_is_forgotten(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    outcomes.submit("gone", rows(session(cache)), owner="gone")
    outcomes.submit("here", rows(session(cache)), owner="here")
    outcomes.executor.drop_owner("gone")
    outcomes.executor.run_batch(0.0)
    assert set(outcomes.ended) == {"here"}
    assert outcomes.executor.rows == 2


def residuals(outcomes: Outcomes, name: str) -> Sequence[Residuals]:
    outcome = outcomes.ended[name]
    assert not isinstance(outcome, BottegaError)
    return outcome


def test_a_forward_is_waited_for_and_nothing_else_of_the_device(cache: ControlNetCache) -> None:
    device = DelayedDevice()
    outcomes = Outcomes(BatchExecutor(max_rows=16, device=device))
    with device.stream("loading"):
        loaded = device.record()
    outcomes.submit("one", rows(session(cache)))
    outcomes.executor.run_batch(0.0)
    assert len(residuals(outcomes, "one")) == 2
    assert not loaded.done, "what is loaded meanwhile holds no answer up"
    assert device.waits == 1
    with device.running(0.05, STEPS):
        seconds = outcomes.executor.seconds
        outcomes.submit("two", rows(session(cache)))
        outcomes.executor.run_batch(0.0)
    assert outcomes.executor.seconds - seconds >= 0.05, "as the device took, not as it was enqueued"


def logged_errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


def test_rows_that_find_no_memory_together_go_in_parts(
    cache: ControlNetCache, caplog: pytest.LogCaptureFixture
) -> None:
    memory = MemoryPlan()
    outcomes = Outcomes(BatchExecutor(max_rows=16, memory=memory))
    several = [session(cache) for _ in range(3)]
    sizes: list[int] = []

    def allocate(_module: object, given: tuple[torch.Tensor, ...]) -> None:
        sizes.append(len(given[0]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    hook = several[0].net.network.register_forward_pre_hook(allocate)
    try:
        for number, each in enumerate(several):
            outcomes.submit(str(number), rows(each))
        for _ in range(8):
            outcomes.executor.run_batch(0.0)
        assert sizes == [6, 3, 1, 1, 1, 1, 1, 1], "halves, until they fit"
    finally:
        hook.remove()
    assert all(len(residuals(outcomes, str(number))) == 2 for number in range(3))
    assert not logged_errors(caplog), "every step succeeded"


def test_no_memory_after_the_first_residual_makes_later_batches_smaller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps whose residuals were handed out fail. A step with a row in a later batch goes on."""
    halves = {half: Embeds(prompt=torch.randn(9, 96), added={POOLED: torch.randn(64)}) for half in Half}
    control = ControlInput(
        name="net", images=(torch.randn(16, 8, 8),), height=32, width=32, halves=halves, latent_scaling=(0.06, 1.5)
    )
    sizes: list[int] = []

    def allocate(_module: object, _positional: object, given: dict[str, torch.Tensor]) -> None:
        sizes.append(len(given["hidden_states"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    outcomes = Outcomes(BatchExecutor(max_rows=16))
    with shelf_of(load(family_model("SD 3")), save({"net": control_networks("SD 3")[0]}, tmp_path)) as cache:
        (net,) = cache.borrow(["net"]).values.result(LOAD_S)
        net.network.transformer_blocks[1].register_forward_pre_hook(allocate, with_kwargs=True)
        for again in (False, True):
            for number in range(3):
                sample, timestep = torch.randn(16, 8, 8), torch.tensor(500.0)
                one = ControlSession(net, control)
                mine = [ControlRow(session=one, half=half, sample=sample, timestep=timestep) for half in Half]
                outcomes.submit(f"{number} again" if again else str(number), mine)
            while outcomes.executor.busy:
                outcomes.executor.run_batch(0.0)
    assert sizes == [6, 3, 1, 1, 1, 1], "halves, until they fit"
    failed = {name for name, outcome in outcomes.ended.items() if isinstance(outcome, TooLarge)}
    assert failed == {"0", "1", "2", "0 again"}
    assert len(logged_errors(caplog)) == 2, "once for each batch that failed"


def test_the_time_of_streamed_residuals_is_the_devices() -> None:
    device, stream = DelayedDevice(), ResidualStream()
    first, last = device.record(), device.record()
    for point, event in enumerate((first, last)):
        stream.add(point, torch.zeros(1), event)
    assert stream.streamed_s == last.seconds_since(first)


def test_a_row_that_finds_no_memory_by_itself_is_refused_with_the_reason(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16))
    one = session(cache)

    def allocate(_module: object, _given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = one.net.network.register_forward_pre_hook(allocate)
    try:
        outcomes.submit("one", rows(one))
        for _ in range(3):
            outcomes.executor.run_batch(0.0)
    finally:
        hook.remove()
    refused = outcomes.ended["one"]
    assert isinstance(refused, TooLarge)
    assert refused.metadata == {"limit": "device_memory"}


def test_rows_say_whether_others_were_computed_beside_them(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=4))
    outcomes.submit("one", rows(session(cache)), owner="one")
    outcomes.submit("other", rows(session(cache)), owner="other")
    outcomes.submit("alone", rows(session(cache)), owner="one", alone=True)
    outcomes.submit("two images", [*rows(twice := session(cache)), *rows(twice)])
    outcomes.submit("half of it", rows(session(cache, "depth"))[:1])
    while outcomes.executor.busy:
        outcomes.executor.run_batch(0.0)
    shared = {name: any(row.shared for row in residuals(outcomes, name)) for name in outcomes.ended}
    assert shared == {"one": True, "other": True, "alone": False, "two images": True, "half of it": True}


def test_a_step_that_is_to_be_alone_has_a_forward_for_each_session_and_no_padding(cache: ControlNetCache) -> None:
    outcomes = Outcomes(BatchExecutor(max_rows=16, fixed_rows=8))
    outcomes.submit("padded", rows(session(cache)))
    outcomes.submit("alone", rows(session(cache), session(cache)), alone=True)
    outcomes.submit("padded, too", rows(session(cache)))
    while outcomes.executor.busy:
        outcomes.executor.run_batch(0.0)
    assert outcomes.executor.batches == 3
    assert [row.shared for row in residuals(outcomes, "alone")] == [False] * 4
    assert [len(row.by_point[0]) for row in residuals(outcomes, "alone")] == [2] * 4
    assert [row.shared for row in residuals(outcomes, "padded")] == [True] * 2
