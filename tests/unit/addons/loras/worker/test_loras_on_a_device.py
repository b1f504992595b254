"""A worker's LoRAs have their part of its device's memory, before any is there."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import pytest

from bottega.addons.loras.config import LorasConfig
from bottega.addons.loras.worker import addon as worker_loras
from bottega.device.heartbeat import Heartbeat
from bottega.device.memory_plan import MemoryPlan, open_memory_plan
from bottega.engine.addon import EngineAddOnContext
from bottega.model.model import Model
from bottega.transport import LinkCounters, ServiceOffer
from tests.support.manual_engine import load
from tests.support.memory_device import MemoryDevice

MIB = 1 << 20
# Of which MemoryPlan leaves 512 MiB to the device's libraries.
LIBRARIES_MIB = 512


@pytest.fixture(scope="module")
def model() -> Model:
    return load()


class NoOffers:
    """There is no store."""

    def request(self, *_: object, **__: object) -> Future[ServiceOffer]:
        raise AssertionError("nothing is fetched")


def made_on(model: Model, device_mib: int, *, budget_bytes: int) -> MemoryPlan:
    device = MemoryDevice((device_mib + LIBRARIES_MIB) * MIB)
    plan = open_memory_plan(device, 0)
    context = EngineAddOnContext(
        sections=[LorasConfig(budget_bytes=budget_bytes)],
        fixed_rows=0,
        model=replace(model, runtime=device, memory=plan),
        offers=NoOffers(),
        counters=LinkCounters(),
        heartbeat=Heartbeat(),
    )
    made = worker_loras.create(context)
    # A third of it is for groups.
    assert 3 * made._cache._downloads._budget_bytes // 2 == plan.reserved["LoRAs"]
    assert made.weights._unmerged._stacked_bytes == plan.reserved["LoRAs"] // 3
    return plan


def test_what_is_kept_of_loras_and_stacked_for_groups_is_set_aside(model: Model) -> None:
    assert made_on(model, 8000, budget_bytes=600 * MIB).reserved == {"LoRAs": 900 * MIB}


def test_a_small_device_keeps_fewer_and_leaves_the_rest_to_forwards(model: Model) -> None:
    plan = made_on(model, 1200, budget_bytes=600 * MIB)
    assert (plan.reserved, plan.left_bytes) == ({"LoRAs": 300 * MIB}, 900 * MIB)
