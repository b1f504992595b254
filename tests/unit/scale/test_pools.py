"""Which instance of a pool starts or stops next, by the states of its units."""

from __future__ import annotations

from pathlib import Path

import pytest

from bottega.config import parse
from bottega.errors import ConfigError
from bottega.scale.config import PoolConfig, ScaleConfig, check_configuration, check_instances
from bottega.scale.pools import Actions, Pool, UnitState

RULES = ScaleConfig(start_limit_s=100.0, first_retry_s=10.0, max_retry_s=30.0)


def unit(name: str) -> str:
    return f"bottega-worker@{name}.service"


class Host:
    """A pool of four instances, and their units, which start at once unless they fail."""

    def __init__(self, *, minimum: int = 1) -> None:
        self.pool = Pool(config=PoolConfig(model="m", minimum=minimum, instances=("a", "b", "c", "d")), rules=RULES)
        self.states = dict.fromkeys(self.pool.units, UnitState.STOPPED)
        self.now = 1000.0

    def look(self, after_s: float = 1.0) -> Actions:
        self.now += after_s
        actions = self.pool.plan(self.states, self.now)
        self.states |= dict.fromkeys(actions.start, UnitState.STARTING)
        self.states |= dict.fromkeys(actions.stop, UnitState.STOPPING)
        return actions

    def set(self, state: UnitState, *names: str) -> None:
        self.states |= {unit(name): state for name in names}


def test_the_minimum_runs_before_the_gateway_is_heard() -> None:
    host = Host(minimum=2)
    assert host.look().start == (unit("a"), unit("b"))
    assert host.look() == Actions()


def test_instances_start_in_order_and_the_last_ones_stop() -> None:
    host = Host()
    host.pool.target = 3
    assert host.look().start == (unit("a"), unit("b"), unit("c"))
    host.set(UnitState.READY, "a", "b")
    host.pool.target = 2
    assert host.look().stop == (unit("c"),), "it serves nothing yet"
    host.set(UnitState.STOPPED, "c")
    host.pool.target = 1
    assert host.look().stop == (unit("b"),)


def test_one_that_has_nothing_to_do_stops_before_one_that_works() -> None:
    host = Host()
    host.pool.target = 4
    host.look()
    host.set(UnitState.READY, "a", "b", "c")
    host.pool.target = 1
    asked: list[str] = []

    def is_idle(one: str) -> bool:
        asked.append(one)
        return one == unit("b")

    stopped = host.pool.plan(host.states, host.now, is_idle=is_idle).stop
    assert stopped == (unit("d"), unit("b"), unit("c")), "d serves nothing yet"
    asked.clear()
    host.pool.plan(dict.fromkeys(host.pool.units, UnitState.STOPPED), host.now, is_idle=is_idle)
    assert not asked


def test_a_unit_that_stops_is_not_started_before_it_has_stopped() -> None:
    host = Host(minimum=0)
    host.pool.target = 4
    host.look()
    host.set(UnitState.READY, "a", "b", "c", "d")
    host.look()
    host.pool.target = 3
    assert host.look().stop == (unit("d"),)
    host.pool.target = 4
    assert host.look() == Actions()
    host.set(UnitState.STOPPED, "d")
    assert host.look().start == (unit("d"),)


def test_a_failed_start_is_repeated_later_and_later_and_another_one_starts() -> None:
    host = Host()
    assert host.look().start == (unit("a"),)
    host.set(UnitState.FAILED, "a")
    tried = host.look()
    assert (tried.failed, tried.start) == ((unit("a"),), (unit("b"),))
    host.set(UnitState.FAILED, "a", "b")  # as systemd says until the next start
    for _ in range(3):
        host.look(0.1)
    report = host.pool.message(host.now)
    assert (report.maximum, report.failed, report.ready) == (4, 2, 0)
    host = Host()
    pauses: list[float] = []
    for name in ("b", "c", "d"):
        host.set(UnitState.READY, name)
    host.pool.target = 4
    since = host.now
    for _ in range(200):
        actions = host.look()
        if unit("a") in actions.start:
            pauses.append(host.now - since)
        if actions.failed:
            host.set(UnitState.STOPPED, "a")
            since = host.now
        elif host.states[unit("a")] is UnitState.STARTING:
            host.set(UnitState.FAILED, "a")
    assert [round(pause) for pause in pauses[:5]] == [1, 10, 20, 30, 30]


def test_a_unit_that_stays_failed_is_counted_once_a_start_and_retried() -> None:
    host = Host()
    host.set(UnitState.FAILED, "a", "b", "c", "d")  # they had failed before the scaler started
    starts, failures = 0, 0
    for _ in range(200):
        actions = host.look()
        starts, failures = starts + len(actions.start), failures + len(actions.failed)
        host.set(UnitState.FAILED, "a", "b", "c", "d")  # as systemd says until the next start, which fails as well
    assert failures > 4 * 4, "each is tried again at least every 30 s"
    assert starts - failures in {0, 1}, "a failure belongs to a start"


def test_only_a_service_that_was_ready_is_left_to_its_manager() -> None:
    host, other = Host(), Host()
    host.look()
    host.set(UnitState.READY, "a")
    host.look()
    other.look()
    for each in (host, other):
        each.set(UnitState.RESTARTING, "a")
    assert (host.look(), other.look().failed) == (Actions(), (unit("a"),))


def test_a_start_that_takes_too_long_has_failed() -> None:
    host = Host()
    host.look()
    assert host.look(99.0) == Actions()
    assert host.look(2.0).failed == (unit("a"),)


def test_the_gateway_hears_how_long_services_have_been_starting() -> None:
    host = Host()
    host.pool.target = 2
    host.look()
    host.set(UnitState.READY, "a")
    host.look(5.0)
    report = host.pool.message(host.now)
    assert (report.kind, report.model, report.minimum, report.ready) == ("worker", "m", 1, 1)
    assert list(report.starting_s) == [5.0]


@pytest.mark.parametrize(
    ("pool", "rule"),
    [
        ({"minimum": 2}, "minimum is 2, but there are 1 instances"),
        ({"minimum": 0, "kind": "controlnet"}, "minimum must be at least 1"),
        ({"minimum": 0, "kind": "decode"}, "no worker with the role decode is there"),
        ({"instances": ["a", "a"]}, "without duplicates"),
        ({"instances": ["../a"]}, "no name of an instance"),
        ({"instances": []}, "instances"),
        ({"kind": "cache"}, "kind"),
        ({"model": ""}, "model"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_by_its_key(pool: dict[str, object], rule: str) -> None:
    whole = {"model": "m", "minimum": 1, "instances": ["a"], **pool}
    with pytest.raises(ConfigError, match="pools") as caught:
        parse(ScaleConfig, {"pools": [whole]}, source="scale.yaml")
    assert rule in caught.value.message


def test_a_unit_in_two_pools_is_refused() -> None:
    pools = [{"model": model, "instances": ["a"]} for model in ("m", "n")]
    with pytest.raises(ConfigError, match=r"bottega-worker@a\.service is in several pools"):
        parse(ScaleConfig, {"pools": pools}, source="scale.yaml")
    with pytest.raises(ConfigError, match="each kind and model must be there once"):
        parse(ScaleConfig, {"pools": [pools[0], {**pools[0], "instances": ["b"]}]}, source="scale.yaml")


def test_a_missing_configuration_of_an_instance_is_named(tmp_path: Path) -> None:
    missing = r"{}/workers/a.yaml, the configuration of bottega-worker@a"
    pools = (PoolConfig(kind="decode", model="m", instances=("a",)),)
    with pytest.raises(ConfigError, match=missing.format(tmp_path)):
        check_configuration(ScaleConfig(folder=str(tmp_path), pools=pools))
    elsewhere = ScaleConfig(folder="/nowhere", pools=pools)
    check_configuration(elsewhere)
    with pytest.raises(ConfigError, match=missing.format("/nowhere")):
        check_instances(elsewhere)
    with pytest.raises(ConfigError, match="pools: name at least one"):
        check_configuration(ScaleConfig())
