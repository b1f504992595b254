"""Which servers and workers host which ControlNets, according to their reports, or hosted them a moment ago."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from bottega import kinds
from bottega.addons.interface.views import Access, Member
from bottega.clocks import Clock
from bottega.errors import ControlNetNotFound, ControlNetUnusable, NoControlNet
from bottega.v1 import image_pb2
from bottega.v1.hosted_pb2 import Hosted, HostedState

# A server comes back, or another one joins, within some seconds.
_RETRY_AFTER_S = 3.0
# Names, and base models of each, that are remembered when nobody hosts them any more.
_MAX_SEEN = 4096
_MAX_BASES = 8
# Maximum length of the names in an error, which must fit into a gRPC trailer.
_LISTED_CHARACTERS = 2000


class ControlNetHosts:
    """The services that host each ControlNet.

    Args:
        grace_s: Returns how many seconds jobs wait for a ControlNet that a member has stopped hosting.
        clock: The clock.
    """

    def __init__(self, *, grace_s: Callable[[Member], float], clock: Clock) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._hosts: dict[str, dict[Member, Hosted]] = {}
        self._nets: dict[Member, tuple[Hosted, ...]] = {}
        self._sessions: dict[Member, dict[str, int]] = {}
        self._expected_until: dict[str, dict[str, float]] = {}  # by name and base

    def update(self, member: Member) -> None:
        """Update the ControlNets of a member after a report, or after a disconnection that may be short."""
        if not member.connected:
            self.remove(member)
        elif member.is_worker or member.kind == kinds.CONTROLNET:
            nets = member.hosts(kinds.CONTROLNET).items
            names = {net.name for net in nets}
            self._forget_nets(member, [net for net in self._nets.get(member, ()) if net.name not in names])
            for net in nets:
                self._hosts.setdefault(net.name, {})[member] = net
            self._nets[member] = nets
            self._sessions[member] = {net.name: net.sessions for net in nets if net.sessions}

    def remove(self, member: Member) -> None:
        """Remove a lost member. Do nothing if it is unknown."""
        self._forget_nets(member, self._nets.pop(member, ()))
        self._sessions.pop(member, None)

    def hosts(self, name: str, base: str) -> Iterator[tuple[Member, Hosted]]:
        """Yield the services that host a ControlNet of this name for a base model."""
        for member, net in self._hosts.get(name, {}).items():
            if fits_base(net.base, base):
                yield member, net

    def version(self, name: str, model: image_pb2.Model) -> str:
        """Return the digest of a ControlNet for jobs of a model; empty if no service hosts it, or versions differ."""
        digests = {net.digest for net in self._hosted_for(name, model.name) if fits_base(net.base, model.base)}
        return digests.pop() if len(digests) == 1 else ""

    def modes(self, name: str, model: image_pb2.Model) -> int | None:
        """Return a ControlNet's number of control modes, 0 if it is no union; None if unknown or versions differ."""
        modes = {net.control_modes for net in self._hosted_for(name, model.name) if fits_base(net.base, model.base)}
        return modes.pop() if len(modes) == 1 else None

    def modes_of(self, name: str, digest: str) -> int:
        """Return the number of control modes of a version of a ControlNet, 0 if it is no union or unknown."""
        hosted = self._hosts.get(name, {}).values()
        return next((net.control_modes for net in hosted if net.digest == digest), 0)

    def names(self) -> list[str]:
        """Return the names of all hosted ControlNets."""
        return list(self._hosts)

    def versions(self, name: str, models: Sequence[image_pb2.Model]) -> dict[str, list[str]]:
        """Return the models that can use each version of a ControlNet, by the version's digest."""
        found: dict[str, list[str]] = {net.digest: [] for net in self._hosts.get(name, {}).values()}
        for model in models:
            fitting = {net.digest for net in self._hosted_for(name, model.name) if fits_base(net.base, model.base)}
            for digest in fitting:
                found[digest].append(model.name)
        return found

    def sessions(self, member: Member) -> Mapping[str, int]:
        """Return the numbers of sessions that a member has reported, by ControlNet, without those of 0."""
        return self._sessions.get(member, {})

    def hosted_by(self, member: Member) -> tuple[Hosted, ...]:
        """Return the ControlNets that a member hosts."""
        return self._nets.get(member, ())

    def at(self, member: Member, name: str) -> Hosted | None:
        """Return the ControlNet of that name as a member hosts it; None if it does not."""
        return self._hosts.get(name, {}).get(member)

    def named(self, name: str) -> Mapping[Member, Hosted]:
        """Return the ControlNets of that name, by the member that hosts it."""
        return self._hosts.get(name, {})

    def expected(self, name: str, model: str, base: str) -> bool:
        """Return whether a ControlNet is hosted for jobs of a model, or was hosted within the grace period."""
        if any(fits_base(net.base, base) for net in self._hosted_for(name, model)):
            return True
        now, bases = self._clock.monotonic(), self._expected_until.get(name, {})
        return any(until > now and fits_base(made_for, base) for made_for, until in bases.items())

    def is_there(self, name: str) -> bool:
        """Return whether a ControlNet is hosted for any model, or was hosted within the grace period."""
        now = self._clock.monotonic()
        return name in self._hosts or any(until > now for until in self._expected_until.get(name, {}).values())

    def check(self, names: Iterable[str], model: image_pb2.Model, access: Access) -> None:
        """Raise if one of a job's ControlNets is not available, and is not expected to be soon.

        Args:
            names: The ControlNets.
            model: The job's model.
            access: What the caller may name. Other ControlNets are treated as missing.

        Raises:
            ControlNetNotFound: There is no such ControlNet.
            ControlNetUnusable: It was made for another base model.
            NoControlNet: No member hosts it now, or hosted it within the grace period.
        """
        lacking = [name for name in dict.fromkeys(names) if not self._expected_by(access, name, model)]
        if not lacking:
            return
        unknown = [name for name in lacking if not (access.has_controlnet(name) and self._known(name, model.name))]
        if unknown and any(map(access.has_controlnet, itertools.chain(self._hosts, self._expected_until))):
            raise self._not_found(unknown, model, access)
        for name in filter(access.has_controlnet, lacking):
            self._refuse_misfit(name, model)
        raise nobody_hosts(lacking)

    def count(self, state: HostedState.ValueType) -> int:
        """Return how many ControlNets are in a state. A ControlNet counts once for each server that hosts it."""
        servers = (nets for member, nets in self._nets.items() if member.kind == kinds.CONTROLNET)
        return sum(net.state == state for nets in servers for net in nets)

    def _known(self, name: str, model: str) -> bool:
        return name in self._expected_until or any(True for _ in self._hosted_for(name, model))

    def _hosted_for(self, name: str, model: str) -> Iterator[Hosted]:
        """Yield the ControlNets of a name for any base model. A worker's own serve only jobs of its models."""
        for member, net in self._hosts.get(name, {}).items():
            if not member.is_worker or member.serves(model):
                yield net

    def _expected_by(self, access: Access, name: str, model: image_pb2.Model) -> bool:
        return access.has_controlnet(name) and self.expected(name, model.name, model.base)

    def _not_found(self, unknown: list[str], model: image_pb2.Model, access: Access) -> ControlNetNotFound:
        served = sorted(name for name in self._hosts if self._expected_by(access, name, model))
        listed = _listed(served)
        return ControlNetNotFound(
            f"no such ControlNet: {_listed(unknown)}; hosted for {model.name}: {listed or 'none'}",
            metadata={"served": listed.replace(" ", "")},
        )

    def _refuse_misfit(self, name: str, model: image_pb2.Model) -> None:
        for net in self._hosted_for(name, model.name):
            if not fits_base(net.base, model.base):
                raise ControlNetUnusable(
                    f"{name} was made for the base model {net.base}, and {model.name} is {model.base}",
                    metadata={"controlnet": name, "made_for": net.base, "model": model.name, "base": model.base},
                )

    def _forget_nets(self, member: Member, nets: Iterable[Hosted]) -> None:
        until = self._clock.monotonic() + self._grace_s(member)
        for net in nets:
            hosts = self._hosts.get(net.name, {})
            hosts.pop(member, None)
            if not hosts:
                self._hosts.pop(net.name, None)
            bases = self._expected_until[net.name] = self._expected_until.pop(net.name, {})  # moved to the end
            bases[net.base] = max(until, bases.pop(net.base, until))  # another host's grace may be longer
            if len(bases) > _MAX_BASES:
                del bases[next(iter(bases))]
        while len(self._expected_until) > _MAX_SEEN:
            del self._expected_until[next(iter(self._expected_until))]


def nobody_hosts(names: Iterable[str]) -> NoControlNet:
    """Return the error for ControlNets that no service hosts."""
    listed = _listed(names)
    return NoControlNet(
        f"nobody hosts {listed} now", metadata={"controlnets": listed.replace(" ", "")}, retry_after_s=_RETRY_AFTER_S
    )


def fits_base(made_for: str, base: str) -> bool:
    """Return whether a ControlNet may fit a base model.

    True if either is unknown: the check is repeated when it is loaded.
    """
    return not made_for or not base or made_for == base


def _listed(names: Iterable[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= _LISTED_CHARACTERS else f"{text[:_LISTED_CHARACTERS].rpartition(', ')[0]}, ..."
