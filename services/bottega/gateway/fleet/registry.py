"""The registry of fleet members: the services that have joined, with their load and their models.

A member whose stream ends gets no new work. It is lost if it has not reconnected within its lease.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Protocol

from bottega import kinds, rules
from bottega.addons.interface.views import ANYTHING, Access, Member
from bottega.clocks import Clock
from bottega.errors import Draining, InvalidRequest, ModelNotFound, NoWorker, Unavailable, Violation
from bottega.gateway.fleet.join_limits import JoinBounds, JoinLimits, MemberKey
from bottega.gateway.fleet.models import OfferedModels, RefusedWorkers, SeenModels, check_models, merge_workers
from bottega.gateway.fleet.validation import check_load, check_registration, without_instance
from bottega.rpc.address import host_of
from bottega.v1 import fleet_pb2, image_pb2

# A worker of the miniature model was measured to restart in about 7 s on busy cores; half of that is a fair guess.
_RETRY_AFTER_S = 3.0
# Pause after a service has refused a job or session: the time between two reports of its load.
_BACK_OFF_S = 0.5
# Seconds after the end of a lease at which a service that waits for the name should join again.
_AFTER_LEASE_S = 0.05

# Longest time between two reports of a member while there are jobs, and the number of reports that fit into a lease.
_REPORT_S = 0.5
_REPORTS_PER_LEASE = 3
# Multiple of the lease, and of the time between two reports, while there are no jobs: 15 s and 5 s by default.
_AT_REST = 10.0
# Time without jobs after which the fleet rests.
_REST_AFTER_S = 10.0

_log = logging.getLogger(__name__)


class FleetObserver(Protocol):
    """Receives joins, changes and losses of members. Its methods run in the event loop and must not block."""

    def member_joined(self, member: Member) -> None:
        """Note that a member has joined, or has reconnected within its lease."""

    def member_changed(self, member: Member) -> None:
        """Note that a member has reported its load, or has disconnected and may still reconnect."""

    def member_lost(self, member: Member) -> None:
        """Note that a member's lease has ended. Its attempts are lost."""


class Fleet:
    """The registry of the members of a gateway's fleet.

    Args:
        lease_s: Seconds without a report after which a member is lost. While there are no jobs, the lease is longer;
            see `rest`.
        model_grace_s: Shortest time in seconds for which jobs wait for a model or other item that no member serves.
            They wait longer for services that are slow to start (`SeenModels`).
        bounds: Bounds on joins.
        clock: Clock of the gateway.

    Attributes:
        closed: Set when no service may join any more.
        refused: Workers that ended recently because they cannot serve their model.
    """

    def __init__(self, *, lease_s: float, model_grace_s: float, bounds: JoinBounds, clock: Clock) -> None:
        self.lease_s = lease_s
        self._at_rest = False
        self._woken_at = clock.monotonic()
        self._limits = JoinLimits(bounds, clock)
        self._clock = clock
        self._members: dict[MemberKey, Member] = {}
        self._seen = SeenModels(grace_s=model_grace_s, clock=clock)
        self._merged_models: dict[str, image_pb2.Model] = {}  # cleared when a member comes or goes
        self.refused = RefusedWorkers(clock)
        self._offered = OfferedModels(clock)
        self.closed = asyncio.Event()
        self._observers: list[FleetObserver] = []

    def subscribe(self, observer: FleetObserver) -> None:
        """Call an observer at every change from now on."""
        self._observers.append(observer)

    def join(self, registration: fleet_pb2.Registration, *, peer: str = "") -> Member:
        """Add a member, or give a member that reconnects its new stream. Reconnecting loses no attempt.

        A worker that joined while its engine was starting joins again once it has loaded its model.

        Args:
            registration: The service's description of itself.
            peer: Address of the service's connection, as gRPC formats it.

        Raises:
            InvalidRequest: If the registration is invalid or the name is in use.
            Unavailable: If the last member of that name may still reconnect.
            FleetFull: If there are too many members; with the time to retry.
            QueueFull: If services join too often; with the time to retry.
            ModelMismatch: If another worker serves the model with other weights or in another precision.
            Draining: If the gateway is stopping.
        """
        rules.refuse(list(check_registration(registration)))
        if self.closed.is_set():
            raise Draining("the gateway is stopping")
        now, host, instance = self._clock.monotonic(), host_of(peer), registration.instance
        key, public = (registration.kind, registration.name), without_instance(registration)
        member = self._members.get(key)
        is_same = member is not None and member.is_instance(instance)
        if member is not None and is_same and (member.registration == public or not member.is_starting):
            self._reconnect(member, public, host, now)
        else:
            known = self._limits.known(key, instance)
            if not (known or is_same):
                self._limits.check_rate(peer=peer, host=host, name=public.name)
            if member is not None and not is_same:
                self._check_name(member, now)
            others = [other for other in self._members.values() if other is not member]
            self._limits.check_room(host, (other.host for other in others), known=known or is_same)
            check_models(public, others)
            if member is not None:
                self._remove(member)
            member = self._members[key] = Member(
                registration=public,
                joined_at=now,
                heard_at=now,
                lease_until=now + self._lease_now_s,
                instance=instance,
                host=host,
            )
        self._note_presence(member, now)
        self.refused.forget(member)
        _log.info("member joined", extra={"member": member.name, "address": public.address})
        for observer in self._observers:
            observer.member_joined(member)
        return member

    def report(self, member: Member, load: fleet_pb2.Load) -> None:
        """Update a member with the load that it reports. Raises InvalidRequest."""
        repeated = member.has_reported and not load.running and load == member.load
        if not repeated:
            rules.refuse(list(check_load(load)))
            self._apply(member, load)
        self.report_unchanged(member)

    def report_unchanged(self, member: Member) -> None:
        """Renew a member's lease. Its load is the same as in its last report."""
        member.heard_at = self._clock.monotonic()
        member.lease_until = member.heard_at + self._lease_now_s
        for observer in self._observers:
            observer.member_changed(member)

    def leave(self, member: Member, stream: int) -> None:
        """Note that a member's stream has ended. Does nothing if a newer stream has replaced that stream."""
        if not member.connected or member.stream != stream:
            return
        now = self._clock.monotonic()
        member.connected, member.lease_until = False, min(member.lease_until, now + self.lease_s)
        self._note_presence(member, now)
        self.refused.note_left(member)
        _log.info("member left", extra={"member": member.name})
        for observer in self._observers:
            observer.member_changed(member)

    def expire(self) -> None:
        """Remove every member whose lease has ended."""
        now = self._clock.monotonic()
        for member in [member for member in self._members.values() if member.lease_until <= now]:
            _log.warning("member lost", extra={"member": member.name})
            self._remove(member)

    def shortest_lease_s(self) -> float:
        """Return the seconds until the first lease ends if no member reports; inf if there are no members."""
        until = min((member.lease_until for member in self._members.values()), default=math.inf)
        return until - self._clock.monotonic()

    def renew_leases(self) -> None:
        """Renew every lease, because this process was stalled and may have missed reports."""
        for member in self._members.values():
            member.heard_at = self._clock.monotonic()
            member.lease_until = member.heard_at + self._lease_now_s

    @property
    def report_every_s(self) -> float:
        """The longest time between two reports that members are asked to keep, in seconds."""
        every_s = min(_REPORT_S, self.lease_s / _REPORTS_PER_LEASE)
        return _AT_REST * every_s if self._at_rest else every_s

    def rest(self) -> None:
        """If there have been no jobs for a while, ask members for fewer reports and grant them longer leases.

        A process that freezes meanwhile is noticed later, but within `lease_s` of the next job.
        """
        now = self._clock.monotonic()
        if not self._at_rest and now - self._woken_at >= _REST_AFTER_S:
            self._at_rest = True
            for member in self._members.values():
                if member.connected:
                    member.lease_until = now + self._lease_now_s
                    member.wake.set()

    def wake_streams(self) -> None:
        """Send every member a response now, because another gateway has become the scheduler."""
        for member in self._members.values():
            member.wake.set()

    def wake_up(self) -> bool:
        """Return to frequent reports and short leases. Return whether members reported rarely until now.

        All members are asked to report at once. One that does not is lost after `lease_s`.
        """
        self._woken_at = self._clock.monotonic()
        if not self._at_rest:
            return False
        self._at_rest = False
        until = self._woken_at + self._lease_now_s
        for member in self._members.values():
            member.lease_until = min(member.lease_until, until)
            member.wake.set()
        return True

    @property
    def _lease_now_s(self) -> float:
        return _AT_REST * self.lease_s if self._at_rest else self.lease_s

    def close(self) -> None:
        """End every member's stream, and refuse all joins from now on."""
        self.closed.set()
        for member in list(self._members.values()):
            self._remove(member)

    def members(self) -> list[Member]:
        """Return the connected members, sorted by kind and name. Any thread may call this."""
        connected = (member for member in list(self._members.values()) if member.connected)
        return sorted(connected, key=lambda member: (member.kind, member.name))

    def services(self, kind: str) -> list[Member]:
        """Return the connected services of a kind, sorted by name."""
        here = (member for member in self._members.values() if member.connected and member.kind == kind)
        return sorted(here, key=lambda member: member.name)

    def serving(self, model: str) -> list[Member]:
        """Return the connected workers of a model."""
        return [member for member in self._members.values() if member.connected and member.serves(model)]

    def workers(self, model: str) -> list[Member]:
        """Return the connected workers of a model that accept new jobs."""
        now = self._clock.monotonic()
        return [
            member
            for member in self._members.values()
            if member.connected and model in member.served and member.backed_off_until <= now and not member.draining
        ]

    def back_off(self, name: str, *, kind: str = kinds.WORKER) -> None:
        """Assign no work to a service for a while, because it refused its last work."""
        member = self._members.get((kind, name))
        if member is not None:
            member.backed_off_until = self._clock.monotonic() + _BACK_OFF_S

    def models(self, access: Access = ANYTHING) -> list[image_pb2.Model]:
        """Return the served models that a caller may name, sorted by name. Each has the number of its workers."""
        names = {model.name for member in self.members() for model in member.models}
        names |= {name for name in self._offered if name in self._seen}
        return [self._merged_model(name) for name in sorted(names) if access.has_model(name)]

    def resolve(self, name: str | None, access: Access = ANYTHING) -> image_pb2.Model:
        """Return the model of that name. Do not change the returned message.

        Args:
            name: Name of the model; None stands for the only model that is served.
            access: The models that the caller may name. Other models count as not served.

        Raises:
            ModelNotFound: If there is no such model.
            NoWorker: If a worker served the model within its grace period, but none does now.
            InvalidRequest: If `name` is None and several models are served.
        """
        seen = [model for model in self._seen if access.has_model(model)]
        served = sorted(model for model in seen if self.expected(model))
        if name is None:
            if len(served) > 1:
                rule = f"several models are served; name one of them: {', '.join(served)}"
                raise InvalidRequest(f"model: {rule}", violations=[Violation(field="spec.model", description=rule)])
            name = served[0] if served else None
        if name in served:
            return self._merged_model(name)
        offered = [model for model in self._offered if access.has_model(model)]
        if name in offered or (name is None and len(offered) == 1):
            self._offered.ask(name or offered[0])
            raise NoWorker("the model's first worker is being started", retry_after_s=_RETRY_AFTER_S)
        if name is None or name in seen or not seen:
            raise NoWorker("no worker serves the model now", retry_after_s=_RETRY_AFTER_S)
        listed = ", ".join(served) or "none"
        raise ModelNotFound(f"no such model; served models: {listed}", metadata={"served": ",".join(served)})

    def mask_tokens(self, model: str) -> fleet_pb2.MaskTokens | None:
        """Return how masks become tokens in a model's network, as its workers report it; None if none reports it."""
        reported = (member.load.mask_tokens for member in self.serving(model))
        return next((tokens for tokens in reported if tokens.token_elements), None)

    def expected(self, model: str) -> bool:
        """Return whether a worker serves the model, did so within the model's grace period, or can be started."""
        is_expected = model in self._offered or bool(self.serving(model)) or self._seen.is_recent(model)
        return model in self._seen and is_expected

    def is_wanted(self, model: str) -> bool:
        """Return whether a caller asked lately for a model of which no worker has run yet, but one can be started."""
        return model not in self._seen and self._offered.is_asked(model)

    def start_s(self, model: str) -> float:
        """Return the median start time of the model's workers in seconds; 0 if none was measured."""
        return self._seen.start_s(model)

    def grace_s(self, member: Member) -> float:
        """Return for how many seconds jobs wait for items that a member hosted, after it has left or dropped them."""
        return self._seen.grace_s(member)

    def last_seen(self, model: str) -> image_pb2.Model:
        """Return the model as it was last registered, or an empty message if it never was. Do not change it."""
        return self._seen.get(model) or image_pb2.Model()

    def _apply(self, member: Member, load: fleet_pb2.Load) -> None:
        """Update a member with a new report, and call the observers."""
        has_started = load.start_s != member.load.start_s  # once for each instance
        has_pools = bool(load.pools or member.load.pools)
        member.note_load(load)
        if has_pools:
            self._offered.note(self.services(kinds.SCALE))
        if has_started:
            self._seen.note_start(member)

    def _reconnect(self, member: Member, registration: fleet_pb2.Registration, host: str, now: float) -> None:
        if member.registration != registration:
            rule = "a member that reconnects must send the same registration as before"
            raise InvalidRequest(
                f"registration: {rule}", violations=[Violation(field="registration", description=rule)]
            )
        member.connected, member.heard_at, member.host = True, now, host
        member.lease_until = now + self._lease_now_s
        member.stream += 1
        member.wake.set()
        member.wake = asyncio.Event()

    def _check_name(self, member: Member, now: float) -> None:
        """Raise an error if a service joins under the name of another process that may still be alive.

        Without this check, two services with the same name would replace each other forever, and any service could end
        another member's attempts.
        """
        self.wake_up()  # use the short lease, so that a frozen process loses its name soon
        left_s = member.lease_until - now
        if left_s <= 0:
            return
        retry_s = left_s + _AFTER_LEASE_S
        if not member.connected:
            raise Unavailable(
                f"another process named {member.name} has just disconnected; the name is free in {left_s:.1f} s",
                retry_after_s=retry_s,
            )
        rule = f"{member.name} is in use by a service at {member.registration.address}; choose another name"
        raise InvalidRequest(
            f"name: {rule}",
            violations=[Violation(field="registration.name", description=rule)],
            retry_after_s=retry_s,
        )

    def _merged_model(self, name: str) -> image_pb2.Model:
        """Return the model with the features of all its workers, or as it was when its last worker left."""
        whole = self._merged_models.get(name)
        if whole is None:
            served = [model for member in self.members() for model in member.models if model.name == name]
            decoders = [model for member in self.services(kinds.DECODE) for model in member.registration.models]
            whole = self._merged_models[name] = merge_workers(served or [self.last_seen(name)], decoders)
            whole.workers = len(served)
        return whole

    def _remove(self, member: Member) -> None:
        key = (member.registration.kind, member.name)
        del self._members[key]
        self._limits.remember(key, member.instance, stayed_s=member.heard_at - member.joined_at)
        if member.connected:
            self._note_presence(member, member.heard_at)
        member.connected = False
        member.stream += 1
        member.wake.set()
        for observer in self._observers:
            observer.member_lost(member)

    def _note_presence(self, member: Member, now: float) -> None:
        """Update the known models and wake the members that use this kind of service when a member joins or leaves."""
        self._merged_models.clear()
        if member.kind == kinds.SCALE:
            self._offered.note(self.services(kinds.SCALE))
        self._seen.note_presence(member, now)
        for user in self._members.values():
            if member.kind in user.registration.uses:
                user.wake.set()
