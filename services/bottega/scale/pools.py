"""The decision of a scaler which instance of a pool starts or stops next. No process is started here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from bottega.scale.config import PoolConfig, ScaleConfig
from bottega.v1 import fleet_pb2


class UnitState(Enum):
    """The state of a unit."""

    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    RESTARTING = "restarting"
    """Its process has ended, and its manager is about to start it again."""
    FAILED = "failed"


_UP = (UnitState.STARTING, UnitState.READY)


@dataclass(slots=True, kw_only=True)
class _Instance:
    """An instance as it was last seen."""

    state: UnitState = UnitState.STOPPED
    starting_since: float | None = None
    """When its start was first seen, on the monotonic clock; None unless it starts."""
    was_ready: bool = False
    """Whether it was ready since it was started."""
    failures: int = 0
    """Number of starts in a row that failed."""
    retry_at: float = 0.0
    """Time before which it is not started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """The units that a pool starts and stops now."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """Those in `stop` that did not start."""


@dataclass(slots=True, kw_only=True)
class Pool:
    """The instances of one pool, and the number of them that should run."""

    config: PoolConfig
    rules: ScaleConfig
    target: int | None = None
    """Number that the gateway asked for last; None before it was heard, when the minimum runs."""
    idle: frozenset[str] = frozenset()
    """Names of services that have nothing to do, by the last message of the gateway."""
    _instances: dict[str, _Instance] = field(init=False)
    """By unit, in the order of the configuration."""

    def __post_init__(self) -> None:
        self._instances = {self.config.unit(name): _Instance() for name in self.config.instances}

    @property
    def units(self) -> tuple[str, ...]:
        """Names of all units."""
        return tuple(self._instances)

    def plan(
        self, states: Mapping[str, UnitState], now: float, *, is_idle: Callable[[str], bool] = lambda unit: False
    ) -> Actions:
        """Note the states of all units, and return what to start and stop.

        Args:
            states: By unit. A unit that is missing is as it was.
            now: Time on a monotonic clock.
            is_idle: Returns whether a unit that is ready has nothing to do; asked only if one has to stop.
        """
        failed = tuple(
            unit
            for unit, instance in self._instances.items()
            if unit in states and self._has_failed(instance, states[unit], now)
        )
        up = [unit for unit, instance in self._instances.items() if instance.state in _UP]
        wanted = self.config.minimum if self.target is None else self.target
        wanted = min(max(wanted, self.config.minimum), len(self._instances))
        startable = [
            unit
            for unit, instance in self._instances.items()
            if instance.state is UnitState.STOPPED and instance.retry_at <= now
        ]
        start = tuple(startable[: max(0, wanted - len(up))])
        stop = tuple(self._dispensable(up, is_idle)[: len(up) - wanted]) if len(up) > wanted else ()
        for unit in start:
            instance = self._instances[unit]
            instance.state, instance.starting_since, instance.was_ready = UnitState.STARTING, now, False
        for unit in (*stop, *failed):
            self._instances[unit].state, self._instances[unit].starting_since = UnitState.STOPPING, None
        return Actions(start=start, stop=(*stop, *failed), failed=failed)

    def _dispensable(self, up: Sequence[str], is_idle: Callable[[str], bool]) -> Sequence[str]:
        """Return units in the order in which they stop: those that serve nothing yet, idle ones, the last ones."""

        def order(unit: str) -> tuple[bool, bool, int]:
            ready = self._instances[unit].state is UnitState.READY
            return ready, ready and not is_idle(unit), -up.index(unit)

        return sorted(up, key=order)

    def message(self, now: float) -> fleet_pb2.Pool:
        """Return the report to the gateway."""
        instances = self._instances.values()
        return fleet_pb2.Pool(
            kind=self.config.kind,
            model=self.config.model,
            minimum=self.config.minimum,
            maximum=len(self._instances),
            ready=sum(instance.state is UnitState.READY for instance in instances),
            starting_s=[
                max(0.0, now - (instance.starting_since or now))
                for instance in instances
                if instance.state is UnitState.STARTING
            ],
            failed=sum(instance.retry_at > now and instance.state not in _UP for instance in instances),
        )

    def _has_failed(self, instance: _Instance, state: UnitState, now: float) -> bool:
        """Note the state of an instance. Return whether its start has just failed."""
        if state is UnitState.FAILED and instance.state not in _UP:
            state = UnitState.STOPPED  # counted already, or before this scaler; systemd keeps it until the next start
        if state is UnitState.RESTARTING:
            # A service that was ready and died is restarted by its manager. One that never was is given up.
            state = UnitState.STARTING if instance.was_ready else UnitState.FAILED
        if state is UnitState.READY:
            instance.was_ready, instance.failures = True, 0
        if state is UnitState.STARTING:
            if instance.starting_since is None:
                instance.starting_since = now
            if now - instance.starting_since > self.rules.start_limit_s:
                state = UnitState.FAILED
        else:
            instance.starting_since = None
        if state is UnitState.FAILED and instance.state is UnitState.STOPPING:
            state = UnitState.STOPPED  # counted already
        instance.state = state
        if state is not UnitState.FAILED:
            return False
        pause_s = min(self.rules.first_retry_s * 2.0**instance.failures, self.rules.max_retry_s)
        instance.failures = min(instance.failures + 1, 32)
        instance.retry_at, instance.was_ready = now + pause_s, False
        return True
