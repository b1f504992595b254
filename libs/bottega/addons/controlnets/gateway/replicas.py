"""Decides when another server loads a hot ControlNet, and when it gives the memory back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bottega import kinds
from bottega.addons.controlnets.gateway.server_loads import Copy, ServerLoads
from bottega.addons.interface.gateway_addon import FleetView
from bottega.addons.interface.prefetch import ServicePrefetcher
from bottega.addons.interface.views import Member
from bottega.clocks import Clock
from bottega.planning import Shape

_log = logging.getLogger(__name__)
# Seconds between two looks, and until the first one after a job has begun.
_LOOK_S, _SOON_S = 1.0, 0.1
# Seconds of excess after which another server loads the ControlNet. A burst that is shorter ends before the load does.
_EXCESS_S = 3.0
# Seconds without a session after which a copy is given up. Twenty times as long, so that copies do not come and go.
_IDLE_S = 60.0
# A ControlNet is in excess if at every server that has loaded it a step waits for so many times its own forward pass.
_EXCESS_ANSWERS = 2.0
# A ControlNet in excess gets one more server for so many that have it, at least one. With one alone, a fleet of a
# thousand workers needs minutes to spread a ControlNet to the hundred servers that it needs (make bench-goodput).
_COPIES_A_COPY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChange:
    """A server that is asked to load a ControlNet, or to evict it."""

    server: str
    name: str
    load: bool


class ReplicaPolicy:
    """The copies of ControlNets that were made because of their load.

    A ControlNet whose steps wait long at all its servers for `_EXCESS_S` gets one more server that has memory for it,
    or a quarter more if many have it. Such a copy is given up after `_IDLE_S` without a session, also if the scheduler
    before this one has made it: the servers report which ones they are. Copies that jobs or operators have made, or
    asked for since, are left alone.
    """

    def __init__(self) -> None:
        self._excess_since: dict[str, float] = {}
        self._idle_since: dict[tuple[str, str], float] = {}  # by server and name, of copies that were made here

    @property
    def pending(self) -> bool:
        """Whether something may have to be decided although nothing else happens."""
        return bool(self._excess_since or self._idle_since)

    @property
    def copied(self) -> set[str]:
        """Names of the ControlNets of which copies were made."""
        return {name for _, name in self._idle_since}

    def forget(self, server: str) -> None:
        """Drop the copies of a lost server."""
        self._idle_since = {key: since for key, since in self._idle_since.items() if key[0] != server}

    def decide(self, nets: Mapping[str, Sequence[Copy]], turn_s: float | None, now: float) -> Iterable[ReplicaChange]:
        """Return what servers have to load or evict now.

        Args:
            nets: Copies by ControlNet: those that are loaded or used anywhere.
            turn_s: Seconds of a worker's turn; None if unknown.
            now: Time on the monotonic clock.
        """
        changes = []
        for name in self._excess_since.keys() - nets.keys():
            del self._excess_since[name]
        for name, copies in nets.items():
            loaded = [copy for copy in copies if copy.loaded]
            answers = [copy.candidate.answer_s(turn_s) / copy.candidate.own_s for copy in loaded]
            if not answers or min(answers) <= _EXCESS_ANSWERS:
                self._excess_since.pop(name, None)
            elif now - self._excess_since.setdefault(name, now) >= _EXCESS_S:
                free = [copy for copy in copies if not copy.loaded and copy.fits]
                free.sort(key=lambda copy: (copy.candidate.others_s, copy.candidate.server))
                for best in free[: max(1, len(loaded) // _COPIES_A_COPY)]:
                    changes.append(ReplicaChange(server=best.candidate.server, name=name, load=True))
                    self._idle_since[best.candidate.server, name] = now
                self._excess_since[name] = now  # the next copies have to be needed as long again
            changes += self._given_up(name, copies, now)
        return changes

    def _given_up(self, name: str, copies: Sequence[Copy], now: float) -> Iterable[ReplicaChange]:
        for copy in copies:
            key = copy.candidate.server, name
            if copy.copied and copy.loaded and not copy.pinned and sum(other.loaded for other in copies) > 1:
                self._idle_since.setdefault(key, now)
            since = self._idle_since.get(key)
            if since is None:
                continue
            if copy.pinned or (copy.loaded and not copy.copied):
                del self._idle_since[key]
            elif copy.sessions:
                self._idle_since[key] = now
            elif now - since >= _IDLE_S:
                del self._idle_since[key]
                if copy.loaded and sum(other.loaded for other in copies) > 1:
                    yield ReplicaChange(server=copy.candidate.server, name=name, load=False)


class Replicas:
    """Makes servers load hot ControlNets, and evict copies that are needed no more.

    Args:
        fleet: The connected services.
        loads: Loads of the servers.
        copier: Asks servers to load a copy.
        evictor: Asks servers to evict what is neither used nor pinned.
        clock: The clock.
    """

    def __init__(
        self,
        fleet: FleetView,
        loads: ServerLoads,
        *,
        copier: ServicePrefetcher,
        evictor: ServicePrefetcher,
        clock: Clock,
    ) -> None:
        self._fleet = fleet
        self._loads = loads
        self._copier = copier
        self._evictor = evictor
        self._clock = clock
        self._policy = ReplicaPolicy()
        self._shape: Shape = (0, 0)
        self._turn_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._started = False

    def start(self) -> None:
        """Look at the copies of an earlier scheduler, now and when their servers join."""
        self._started = True
        self._look_after(_SOON_S)

    def member_changed(self, member: Member) -> None:
        """Look at the copies soon if a service reports some."""
        if self._started and self._timer is None and any(net.copied for net in member.load.hosted):
            self._look_after(_LOOK_S)

    def attempt_begins(self, shape: Shape, turn_s: float | None) -> None:
        """Look at the copies soon, because a job with ControlNets has got a worker.

        Args:
            shape: Height and width of its latents.
            turn_s: Seconds of a turn of its worker; None if unknown.
        """
        self._shape, self._turn_s = shape, turn_s
        self._look_after(_SOON_S)

    def forget(self, server: str) -> None:
        """Drop the copies of a lost server."""
        self._policy.forget(server)

    def close(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()

    def look(self) -> None:
        """Let servers load and evict what the policy decides, and look again while that may change."""
        self._timer = None
        now = self._clock.monotonic()
        servers = {
            server.name: server
            for server in self._fleet.services(kinds.CONTROLNET)
            if not server.load.draining and server.backed_off_until <= now
        }
        copies = self._loads.copies(list(servers.values()), self._shape, self._policy.copied)
        for change in self._policy.decide(copies, self._turn_s, now):
            text = "load a replica of a hot ControlNet" if change.load else "evict a replica of a ControlNet"
            _log.info("asking a server to %s", text, extra={"member": change.server, "controlnet": change.name})
            (self._copier if change.load else self._evictor).request(servers[change.server], [change.name])
        if self._policy.pending or self._loads.assigned:
            self._look_after(_LOOK_S)

    def _look_after(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self.look)
