"""The ControlNet server: it hosts the ControlNets of its catalogue, offers connections, and reports to the fleet.

It owns the engine process and the membership in the fleet. `service.py` converts between it and gRPC.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from bottega import kinds, rules
from bottega.background_tasks import BackgroundTasks
from bottega.controlnet.catalogue import ControlNetCatalogue, ProfileStore
from bottega.controlnet.config import ControlNetConfig
from bottega.controlnet.engine_client import (
    MAX_HOSTING_S,
    ControlNetEngineClient,
    ControlNetInspector,
    CopiedControlNets,
)
from bottega.controlnet.metrics import ControlNetMetrics
from bottega.errors import (
    BottegaError,
    ConfigError,
    ControlNetNotFound,
    Draining,
    EngineStarting,
    InternalError,
    Unavailable,
)
from bottega.model_files.controlnet_folder import read_controlnet_facts
from bottega.process.engine_supervisor import StartProgress
from bottega.process.memory import MemoryMeter
from bottega.rpc.fleet_membership import FleetMembership, StartingServer, registration_of
from bottega.v1 import fleet_pb2
from bottega.v1.controlnet_engine_pb2 import ControlNetEngineBeat, ControlNetEngineEvent, ControlNetEngineReady
from bottega.v1.hosted_pb2 import HOSTED_STATE_ON_DISK, Hosted, ResidualProfile
from bottega.v1.link_pb2 import LinkOffer, OpenLinkRequest

_log = logging.getLogger(__name__)

# Seconds after which a worker asks again for a connection to an engine that is starting.
_STARTING_S = 0.5


class ControlNetServer:
    """A ControlNet server behind its gRPC service. Call `start` first, and `drain` and `stop` at the end.

    Args:
        engine: The engine process, already spawned.
    """

    def __init__(
        self,
        config: ControlNetConfig,
        *,
        catalogue: ControlNetCatalogue,
        profiles: ProfileStore,
        engine: ControlNetEngineClient,
        inspector: ControlNetInspector,
        metrics: ControlNetMetrics,
        server: StartingServer,
    ) -> None:
        self.name = config.name or f"{kinds.CONTROLNET}-{socket.gethostname()}-{os.getpid()}"
        self.budget_bytes = config.engine.budget_bytes
        self.root, self.shared_catalogue = str(catalogue.root or ""), catalogue.shared
        self._config = config
        self._catalogue = catalogue
        self._profiles = profiles
        self._engine = engine
        self._inspector = inspector
        self._metrics = metrics
        self._server = server
        self._beat = ControlNetEngineBeat()
        self._hosted: list[Hosted] = []
        self._refused: dict[str, str] = {}
        """Reasons why the engine does not host some ControlNets of the catalogue, by name."""
        self._device, self._start_s = "", 0.0
        self._membership: FleetMembership | None = None
        self._first_hosting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._copies = CopiedControlNets()
        self.failed: asyncio.Future[BottegaError] = asyncio.get_running_loop().create_future()
        """Done with an error when no engine can be started any more and the process has to exit."""
        self._tasks = BackgroundTasks("watching of the engine")
        self._engine_wanted = self._draining = False
        self._on_demand = False
        """Whether the server still runs without an engine, until a request needs one."""
        self._hosting = BackgroundTasks("hosting of ControlNets")
        self._adding = asyncio.Lock()
        self._memory = MemoryMeter(self._pids)
        metrics.memory_bytes.set_function(lambda: self._memory.resident_bytes)
        metrics.budget_bytes.set(self.budget_bytes)
        self._drained = asyncio.Event()

    @property
    def hosted(self) -> list[Hosted]:
        """The hosted ControlNets sorted by name, as the engine last reported them, with their profiles."""
        return list(self._hosted)

    async def start(self) -> None:
        """Wait until the engine hosts everything that it can. With an engine on demand, wait until that is known.

        Raises ConfigError, DataLoss or StorageUnavailable if the catalogue cannot be used, and InternalError if the
        first engine does not start.
        """
        await self._catalogue.open()
        await self._profiles.read()
        # Added folders are untrusted: a process with limits checks them, not this one.
        if self._config.engine_on_demand and not any(map(self._catalogue.root_of, self._catalogue.folders)):
            await self._host_without_engine()
            return
        self._server.extend_start("starting the engine", within_s=self._config.start_stall_s)
        self._start_engine()
        await self._first_hosting

    async def open_link(self, request: OpenLinkRequest, *, caller: str) -> LinkOffer:
        """Return the offer of a connection for a worker, whose host is `caller`.

        Raises Draining, Unavailable, and the error with which the engine refuses.
        """
        if self._draining:
            raise Draining("the ControlNet server is stopping")
        self._start_engine()
        if not self._first_hosting.done():
            raise EngineStarting("the ControlNet server is starting its engine", retry_after_s=_STARTING_S)
        return await self._engine.open_link(request, caller=caller)

    def prefetch(
        self, names: list[str], *, unneeded: Sequence[str] = (), copies: bool = False, retry: bool = False
    ) -> list[str]:
        """Start to load the hosted ones of these ControlNets, and return their names. Raises Unavailable.

        Args:
            names: The most wanted ones first.
            unneeded: Names of those to evict, unless they are used or pinned.
            copies: Whether the scheduler wants replicas of hot ControlNets, which it evicts again when they are idle.
                Otherwise the ControlNets are replicas no more.
            retry: Whether those whose last load failed are loaded again.
        """
        hosted = {net.name for net in self._beat.controlnets}
        accepted = [name for name in dict.fromkeys(names) if name in hosted]
        if accepted and not self._draining:
            self._start_engine()
            if self._first_hosting.done():
                self._engine.prefetch(accepted, unneeded=unneeded, retry=retry)
                self._mark(accepted, copies=copies)
        elif unneeded and self._engine_wanted and self._first_hosting.done() and not self._draining:
            self._engine.prefetch([], unneeded=unneeded)
        return accepted

    def _mark(self, names: Sequence[str], *, copies: bool) -> None:
        """Remember which of the ControlNets are replicas, and report that."""
        if copies:
            self._copies.add(names, self._beat.controlnets)
        elif self._copies.keep(names):
            self._hosted = self._with_profiles(self._beat)
            self._report()

    async def pin(self, name: str, *, pinned: bool) -> Hosted:
        """Pin or unpin a ControlNet. The pin is stored.

        Raises ControlNetNotFound, Draining, StorageUnavailable, Unavailable.
        """
        if self._draining:
            raise Draining("the ControlNet server is stopping")
        if not any(net.name == name for net in self._beat.controlnets):
            served = ", ".join(net.name for net in self._beat.controlnets)
            raise ControlNetNotFound(f"{name} is not hosted here", metadata={"served": served})
        async with self._adding:
            await self._catalogue.pin(name, pinned=pinned)
            self._start_engine()
            await asyncio.shield(self._first_hosting)
            self._engine.pin(self._catalogue.pinned)
        _log.info("a ControlNet was pinned" if pinned else "a ControlNet was unpinned", extra={"controlnet": name})
        found = Hosted.FromString(next(net for net in self._hosted if net.name == name).SerializeToString())
        found.pinned = pinned
        return found

    async def add(self, name: str, folder: str, *, digest: str = "") -> Hosted:
        """Host another ControlNet and store it. `digest` is its hash in the shared catalogue; "" if a caller adds it.

        Raises InvalidRequest, ControlNetExists, TooLarge, ControlNetUnusable, StorageUnavailable, Unavailable.
        """
        async with self._adding:
            path = await asyncio.to_thread(self._catalogue.check_folder, name, folder, digest)
            self._start_engine()
            await asyncio.shield(self._first_hosting)
            await self._inspector.inspect(name, path, self._catalogue.root)
            await self._catalogue.add(name, path, share=not digest)  # first: what cannot be stored is not hosted
            hosted = await self._engine.host(name, path, self._catalogue.root)
        self._refused.pop(name, None)
        self._hosts_now(hosted)
        _log.info("a ControlNet was added and is hosted", extra={"controlnet": name, "folder": str(path)})
        return hosted

    async def set_profile(self, name: str, digest: str, profile: ResidualProfile, *, shared: bool = False) -> Hosted:
        """Store a measured profile of a hosted ControlNet. `shared` says that it comes from the shared catalogue.

        Raises ControlNetNotFound if none with that name and digest is hosted, and StorageUnavailable.
        """
        async with self._adding:
            if not any(net.name == name and net.digest == digest for net in self._beat.controlnets):
                served = ", ".join(net.name for net in self._beat.controlnets)
                raise ControlNetNotFound(f"{name} is not hosted here with that hash", metadata={"served": served})
            await self._profiles.set(digest, profile, share=not shared)
        self._hosted = self._with_profiles(self._beat)
        self._report()
        _log.info("a profile was stored", extra={"controlnet": name, "similarity": profile.similarity})
        return next(net for net in self._hosted if net.name == name)

    def load(self) -> fleet_pb2.Load:
        """Return the load to report to the fleet, with the hosted ControlNets."""
        beat, lookups = self._beat, self._beat.hits + self._beat.misses
        activity = fleet_pb2.Activity(steps=beat.rows, turns=beat.turns, lookups=lookups, hits=beat.hits)
        left_out = {**self._config.left_out, **self._catalogue.left_out, **self._refused}
        return fleet_pb2.Load(
            hosted=self._hosted,
            left_out=rules.report_left_out(kinds.CONTROLNET, left_out),
            draining=self._draining,
            memory_bytes=self._memory.resident_bytes,
            activity=activity,
            start_s=self._start_s,
            queued_rows=beat.queued_rows,
            budget_bytes=beat.budget_bytes or self.budget_bytes,
        )

    async def drain(self) -> None:
        """Open no more sessions, and wait until the open ones have ended."""
        self._draining = True
        self._drained.clear()
        self._report()
        if not self._hosted:
            return  # nothing was hosted, so no session can be open
        try:
            self._engine.drain()
        except Unavailable:
            return  # no engine, no sessions
        await self._drained.wait()  # the server's drain bounds the wait

    async def stop(self) -> None:
        """Leave the fleet and end the engine. Workers continue with other servers."""
        await self._leave()
        await self._tasks.cancel()
        await self._hosting.cancel()
        await self._inspector.stop()
        await self._engine.stop()
        await self._catalogue.close()

    def _start_engine(self) -> None:
        if not self._engine_wanted:
            self._engine_wanted = True
            self._tasks.start(self._watch_engine())

    async def _watch_engine(self) -> None:
        try:
            await self._engine.watch(self)
        except (ConfigError, InternalError) as error:
            serves = self._first_hosting.done() or self._on_demand
            if not self._first_hosting.done():
                self._fail_first_hosting(error)
            if serves:
                self.failed.set_result(error)

    def _fail_first_hosting(self, error: BottegaError) -> None:
        failed = self._first_hosting
        failed.set_exception(error)
        if self._on_demand:
            failed.exception()  # marks it as retrieved, because possibly nothing awaits it
            self._first_hosting = asyncio.get_running_loop().create_future()  # of the engine that is started next

    async def on_engine_starting(self, progress: StartProgress) -> None:
        """Ignore the event. This engine reports no stages: it is ready once its libraries are imported."""

    async def on_engine_ready(self, ready: ControlNetEngineReady) -> None:
        """Make a new engine host the catalogue."""
        _log.info("engine ready", extra={"device": ready.device, "pid": self._engine.pid})
        self._device = ready.device
        self._hosting.start(self._host_all())

    async def on_engine_event(self, event: ControlNetEngineEvent) -> None:
        """Handle an answer or a heartbeat of the engine."""
        if not event.HasField("beat"):
            self._engine.on_event(event)
            return
        if self._on_demand and not self._first_hosting.done():
            return  # the engine does not host everything yet
        before, self._beat = self._beat, event.beat
        self._hosted = self._with_profiles(event.beat)
        self._metrics.on_beat(event.beat)
        # A heartbeat from before the drain may have missed a session that was opened since.
        if event.beat.draining and not any(net.sessions for net in event.beat.controlnets):
            self._drained.set()
        if before.controlnets != event.beat.controlnets:
            self._report()

    async def on_engine_lost(self, why: str) -> None:
        """Stop serving and leave the fleet until there is another engine."""
        self._metrics.on_engine_lost()
        self._drained.set()
        self._hosting.cancel_soon()  # otherwise it would announce an engine that is gone
        self._engine.fail_calls(Unavailable(f"the ControlNet server's engine was lost: {why}"))
        if not self._first_hosting.done():
            self._fail_first_hosting(InternalError(f"the engine could not be started: {why}"))
            return
        await self._server.set_serving(False)
        await self._leave()
        self._beat, self._hosted = ControlNetEngineBeat(), []
        self._copies = CopiedControlNets()

    async def _host_all(self) -> None:
        """Make a new engine host the catalogue, then join the fleet and report the ControlNets that are not hosted."""
        self._refused = {}
        if self._catalogue.pinned:
            self._engine.pin(self._catalogue.pinned)
        for name, folder in self._catalogue.folders.items():
            if not self._first_hosting.done():
                self._server.extend_start(f"hosting ControlNet {name}", within_s=MAX_HOSTING_S)
            try:
                self._hosts_now(await self._host(name, folder))
            except BottegaError as error:
                self._refuse(name, folder, error)
        self._start_s = min(self._engine.age_s, rules.MAX_START_S)
        if not self._first_hosting.done():
            self._first_hosting.set_result(None)
        else:
            await self._server.set_serving(not self._draining)
        self._join_fleet()

    async def _host_without_engine(self) -> None:
        """Find out which ControlNets an engine could host, join the fleet and report the others."""
        self._on_demand = True
        began = time.monotonic()
        for name, folder in self._catalogue.folders.items():
            self._server.extend_start(f"reading ControlNet {name}", within_s=MAX_HOSTING_S)
            try:
                facts = await asyncio.to_thread(read_controlnet_facts, name, folder, dtype=self._config.engine.dtype)
            except BottegaError as error:
                self._refuse(name, folder, error)
                continue
            hosted = Hosted(kind=kinds.CONTROLNET, name=name, digest=facts.digest, base=facts.base)
            hosted.size_bytes, hosted.control_modes, hosted.state = facts.size_bytes, facts.modes, HOSTED_STATE_ON_DISK
            self._hosts_now(hosted)
        self._start_s = min(time.monotonic() - began, rules.MAX_START_S)
        self._join_fleet()

    def _refuse(self, name: str, folder: Path, error: BottegaError) -> None:
        facts = {"controlnet": name, "folder": str(folder), "text": error.message}
        _log.error("a ControlNet cannot be hosted; the reason follows", extra=facts)
        self._refused[name] = error.message

    def _join_fleet(self) -> None:
        if self._config.gateway and self._membership is None:
            self._membership = FleetMembership(
                self._config.gateway,
                registration_of(self._server, kind=kinds.CONTROLNET, name=self.name, device=self._device),
                load=self.load,
                channels=self._server.channels,
            )
            self._membership.start()

    async def _host(self, name: str, folder: Path) -> Hosted:
        """Host a ControlNet. If a caller added it, a process with limits checks it first."""
        root = self._catalogue.root_of(name)
        if root is not None:
            await self._inspector.inspect(name, folder, root)
        return await self._engine.host(name, folder, root)

    async def _leave(self) -> None:
        if self._membership:
            membership, self._membership = self._membership, None
            await membership.stop()

    def _hosts_now(self, net: Hosted) -> None:
        """Publish a hosted ControlNet at once. The engine's next heartbeat also contains it."""
        nets = {hosted.name: hosted for hosted in [*self._beat.controlnets, net]}
        beat = ControlNetEngineBeat()
        beat.CopyFrom(self._beat)
        del beat.controlnets[:]
        beat.controlnets.extend(nets[name] for name in sorted(nets))
        self._beat, self._hosted = beat, self._with_profiles(beat)
        self._report()

    def _with_profiles(self, beat: ControlNetEngineBeat) -> list[Hosted]:
        for net in beat.controlnets:
            del net.profiles[:]
            net.profiles.extend(self._profiles.of(net.digest))
            net.copied = self._copies.update(net)
        return list(beat.controlnets)

    def _report(self) -> None:
        if self._membership:
            self._membership.report_soon()

    def _pids(self) -> list[int]:
        return [os.getpid(), *filter(None, [self._engine.pid]), *self._inspector.pids]
