"""The scaler: joins the fleet with its pools, and starts and stops services until as many run as the gateway wants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from prometheus_client import Counter

from bottega import kinds
from bottega.background_tasks import BackgroundTasks
from bottega.errors import BottegaError, Unavailable
from bottega.rpc.fleet_membership import FleetMembership, registration_of
from bottega.rpc.server import Server
from bottega.scale.config import PoolConfig, ScaleConfig, check_configuration, check_instances
from bottega.scale.pools import Pool
from bottega.scale.units import Units
from bottega.v1 import fleet_pb2

# Time between two looks at the units.
_LOOK_S = 1.0

_log = logging.getLogger(__name__)


class Scaler:
    """Keeps as many services running as the gateway asks for, within the bounds of the pools.

    While the gateway cannot be reached, it keeps those that run.
    """

    def __init__(self, config: ScaleConfig, server: Server, units: Units) -> None:
        self._config = config
        self._server = server
        self._units = units
        self._pools = [Pool(config=pool, rules=config) for pool in config.pools]
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks("scaling", max_tasks=1)
        self._membership: FleetMembership | None = None
        self._trouble = ""
        self._configured: dict[Path, tuple[int, str]] = {}
        """When configurations of services changed, in ns, and the names in them."""
        self.failed: asyncio.Future[BottegaError] = asyncio.get_running_loop().create_future()
        self._starts = Counter("bottega_scale_starts", "Services started.", ("kind", "model"), registry=server.registry)
        self._failed_starts = Counter(
            "bottega_scale_failed_starts",
            "Services that were started and did not become ready.",
            ("kind", "model"),
            registry=server.registry,
        )

    async def start(self) -> None:
        """Look at the units once, and keep looking in the background. Raise ConfigError if a unit is missing."""
        check_configuration(self._config)
        check_instances(self._config)
        await self._look()
        name = self._config.name or f"{kinds.SCALE}-{self._server.address}"
        self._membership = FleetMembership(
            self._config.gateway,
            registration_of(self._server, kind=kinds.SCALE, name=name),
            load=self._load,
            on_targets=self._note_targets,
            channels=self._server.channels,
        )
        self._membership.start()
        self._tasks.start(self._keep_looking())

    async def stop(self) -> None:
        """Start and stop nothing any more, and leave the fleet. Child processes drain and end."""
        await self._tasks.cancel()
        await self._units.close()
        if self._membership is not None:
            await self._membership.stop()

    def _load(self) -> fleet_pb2.Load:
        now = time.monotonic()
        return fleet_pb2.Load(pools=[pool.message(now) for pool in self._pools])

    def _note_targets(self, targets: Sequence[fleet_pb2.PoolTarget]) -> None:
        known = {(target.kind, target.model): target for target in targets}
        for pool in self._pools:
            target = known.get((pool.config.kind, pool.config.model))
            count = pool.target if target is None else target.count
            pool.idle = pool.idle if target is None else frozenset(target.idle)
            if count != pool.target:
                facts = {"kind": pool.config.kind, "model": pool.config.model, "count": count, "before": pool.target}
                _log.info("the gateway asks for another number of services", extra=facts)
                pool.target = count
                self._changed.set()

    async def _keep_looking(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._changed.wait()
            self._changed.clear()
            try:
                await self._look()
            except BottegaError as error:
                self.failed.set_result(error)
                return

    async def _look(self) -> None:
        """Start and stop what the targets ask for. Raise ConfigError if that can never work."""
        try:
            states = await self._units.states([unit for pool in self._pools for unit in pool.units])
        except Unavailable as error:
            self._note_trouble(error.message)
            return
        trouble, before = "", self._load()
        for pool in self._pools:
            actions = pool.plan(states, time.monotonic(), is_idle=functools.partial(self._is_idle, pool))
            labels = pool.config.kind, pool.config.model
            for unit in actions.failed:
                self._failed_starts.labels(*labels).inc()
                _log.warning("a service did not start; it is tried again after a pause", extra={"unit": unit})
            try:
                for unit in actions.stop:
                    _log.info("stopping a service", extra={"unit": unit})
                    await self._units.stop(unit)
                for unit in actions.start:
                    _log.info("starting a service", extra={"unit": unit})
                    self._starts.labels(*labels).inc()
                    await self._units.start(unit)
            except Unavailable as error:  # the next look sees what was done
                trouble = error.message
        self._note_trouble(trouble)
        if self._membership is not None and self._load().pools != before.pools:
            self._membership.report_soon()

    def _is_idle(self, pool: Pool, unit: str) -> bool:
        """Return whether the gateway named the service of a unit as one that has nothing to do."""
        return self._name(pool.config, unit) in pool.idle

    def _name(self, pool: PoolConfig, unit: str) -> str:
        """Return the name of a unit's service in the fleet: its configured one, or the default.

        A name that comes from a certificate alone is not known here.
        """
        (instance,) = [name for name in pool.instances if pool.unit(name) == unit]
        path = self._config.file_of(pool, instance)
        default = f"{pool.kind}-{socket.gethostname()}-{self._units.pids.get(unit, 0)}"
        try:
            changed_ns = path.stat().st_mtime_ns
            if self._configured.get(path, (0, ""))[0] != changed_ns:
                values = yaml.safe_load(path.read_text(encoding="utf-8"))
                name = values.get("name") if isinstance(values, dict) else None
                self._configured[path] = changed_ns, str(name or "")
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            return default
        return self._configured[path][1] or default

    def _note_trouble(self, text: str) -> None:
        """Log that the manager refuses calls, once for each reason."""
        if text and text != self._trouble:
            _log.warning("services cannot be started or stopped; it is tried again", extra={"text": text})
        self._trouble = text
