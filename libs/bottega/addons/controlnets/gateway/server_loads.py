"""What ControlNet servers have to do: the sessions that they report, and those that the gateway has assigned."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bottega.addons.controlnets.gateway.hosts import ControlNetHosts, fits_base
from bottega.addons.controlnets.gateway.ranking import SESSION_ROWS, Group, ServerCandidate, forward_s, seconds_to_load
from bottega.addons.interface.views import Member
from bottega.planning import Shape
from bottega.v1 import fleet_pb2, hosted_pb2
from bottega.v1.hosted_pb2 import Hosted

# Cached values of a server, about; callers choose shapes.
_MAX_CACHED = 4096
# Lineups that are kept.
_MAX_LINEUPS = 256
_NOTHING = (None, None)
_IN_MEMORY = frozenset({hosted_pb2.HOSTED_STATE_LOADED, hosted_pb2.HOSTED_STATE_LOADING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A ControlNet at a server, as the next job would find it."""

    candidate: ServerCandidate
    loaded: bool
    """Whether it is in memory, or on its way there."""
    fits: bool
    """Whether the server has memory for it without evicting another ControlNet."""
    sessions: int
    pinned: bool
    copied: bool = False
    """Whether it was loaded because of its load at other servers."""


class Lineup:
    """The servers that host one ControlNet, grouped by what a job of some shape would find there.

    Attributes:
        members: The servers, by name.
        seen: Number of the last change of a server that it contains.
    """

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.seen = 0
        self._groups: dict[Hashable, dict[str, ServerCandidate]] = {}
        self._facts: dict[str, Hashable] = {}  # by server

    def groups(self, ahead_s: Mapping[str, float]) -> list[Group]:
        """Return the groups as a job finds them.

        Args:
            ahead_s: By server, the seconds in each step of the job's earlier ControlNets; see ServerCandidate.
        """
        found: list[Group] = []
        for group in self._groups.values():
            if ahead_s.keys().isdisjoint(group.keys()):
                found.append(group.values())
                continue
            found += [[replace(group[server], ahead_s=ahead_s[server])] for server in ahead_s.keys() & group.keys()]
            if others := [candidate for server, candidate in group.items() if server not in ahead_s]:
                found.append(others)
        return found

    def put(self, member: Member, candidate: ServerCandidate | None) -> None:
        """Replace a server's candidate; None removes the server."""
        name = member.name
        if self.members.pop(name, None) is not None:
            facts = self._facts.pop(name)
            del self._groups[facts][name]
            if not self._groups[facts]:
                del self._groups[facts]
        if candidate is not None:
            facts = self._facts[name] = candidate.facts
            self._groups.setdefault(facts, {})[name] = candidate
            self.members[name] = member


class ServerLoads:
    """The loads of ControlNet servers.

    A report may lag behind the assigned sessions, and may include jobs of other gateways, so the larger number of both
    counts.

    Attributes:
        assigned: Number of sessions of running attempts, by server and ControlNet.
    """

    def __init__(self, hosts: ControlNetHosts) -> None:
        self._hosts = hosts
        self.assigned: Counter[tuple[str, str]] = Counter()
        self._at: dict[str, Counter[str]] = {}
        self._cached: dict[str, _CachedLoad] = {}  # by server
        self._servers: dict[str, tuple[Member, fleet_pb2.Load, tuple[Hosted, ...]]] = {}  # with the last report
        self._changes: dict[str, int] = {}  # by server, numbers of their last changes, the newest last
        self._count = 0
        self._lineups: dict[_LineupKey, Lineup] = {}

    def assign(self, sessions: Iterable[tuple[str, str]]) -> None:
        """Count the sessions of an attempt, given by server and ControlNet."""
        for server, name in sessions:
            self.assigned[server, name] += 1
            self._at.setdefault(server, Counter())[name] += 1
            self._sessions_changed(server)

    def release(self, sessions: Iterable[tuple[str, str]]) -> None:
        """Count the sessions of an attempt no more."""
        for server, name in sessions:
            self.assigned[server, name] -= 1
            self._at[server][name] -= 1
            if not self.assigned[server, name]:
                del self.assigned[server, name], self._at[server][name]
            if not self._at[server]:
                del self._at[server]
            self._sessions_changed(server)

    def note_report(self, member: Member) -> None:
        """Note that a server has reported, or has disconnected. Its ControlNets are updated already."""
        nets, known = self._hosts.hosted_by(member), self._servers.get(member.name)
        if known is None or known[0] is not member or known[1] is not member.load or known[2] is not nets:
            self._servers[member.name] = member, member.load, nets
            self._note_change(member.name)

    def lineup(self, name: str, base: str, *, shape: Shape, rows: int) -> Lineup:
        """Return the servers that host a ControlNet. Only those that have changed since the last call are looked at.

        Args:
            name: Name of the ControlNet.
            base: The job's base model.
            shape: Height and width of the job's latents.
            rows: Batch rows of the job.
        """
        key = name, base, shape, rows
        lineup = self._lineups.pop(key, None) or Lineup()
        self._lineups[key] = lineup  # the last one used is last
        if len(self._lineups) > _MAX_LINEUPS:
            del self._lineups[next(iter(self._lineups))]
        seen, number = lineup.seen, self._changes.__getitem__
        for server in itertools.takewhile(lambda server: number(server) > seen, reversed(self._changes)):
            member = self._servers[server][0]
            net = self._hosts.at(member, name)
            fits = net is not None and fits_base(net.base, base)
            lineup.put(member, self.candidate(member, net, shape=shape, rows=rows) if net and fits else None)
        lineup.seen = self._count
        return lineup

    def candidate(
        self, member: Member, net: Hosted, *, shape: Shape, rows: int, ahead_s: float = 0.0
    ) -> ServerCandidate:
        """Return a server as a job finds it.

        Args:
            member: The server.
            net: The job's ControlNet, as the server reports it.
            shape: Height and width of the job's latents.
            rows: Batch rows of the job.
            ahead_s: See ServerCandidate.
        """
        cached, key = self._cached.get(member.name), (net.name, shape, rows)
        reported, candidate = _NOTHING if cached is None else cached.candidates.get(key, _NOTHING)
        if candidate is None or reported is not net or cached is None or cached.load is not member.load:
            cached = self._cached_load(member)
            if len(cached.candidates) + len(cached.forward_s) > _MAX_CACHED:
                del self._cached[member.name]
            candidate = self._new_candidate(member, net, shape, rows)
            self._cached_load(member).candidates[key] = net, candidate
        return replace(candidate, ahead_s=ahead_s) if ahead_s else candidate

    def sessions(self, member: Member) -> Mapping[str, int]:
        """Return the numbers of sessions at a server, by ControlNet."""
        reported, assigned = self._hosts.sessions(member), self._at.get(member.name)
        if not assigned:
            return reported
        return {name: max(reported.get(name, 0), assigned[name]) for name in reported.keys() | assigned.keys()}

    def forget(self, member: Member) -> None:
        """Drop what is cached of a lost server."""
        self._cached.pop(member.name, None)
        if self._servers.pop(member.name, None) is not None:
            self._changes.pop(member.name)
            self._lineups.clear()

    def copies(self, servers: Sequence[Member], shape: Shape, more: Iterable[str] = ()) -> dict[str, list[Copy]]:
        """Return the copies of each ControlNet that a session uses or that was copied, of the version in memory.

        Args:
            servers: The servers to look at.
            shape: Height and width of latents.
            more: Names of further ControlNets.
        """
        names = {name for server in servers for name in self.sessions(server)}.union(more)
        names.update(net.name for server in servers for net in self._hosts.hosted_by(server) if net.copied)
        free_bytes = {server.name: self._free_bytes(server) for server in servers}
        return {name: self._copies_of(name, servers, shape, free_bytes) for name in names}

    def _copies_of(
        self, name: str, servers: Sequence[Member], shape: Shape, free_bytes: Mapping[str, int]
    ) -> list[Copy]:
        found = [(server, net) for server in servers if (net := self._hosts.at(server, name)) is not None]
        digest = next((net.digest for _, net in found if net.state in _IN_MEMORY), "")
        return [
            Copy(
                candidate=self.candidate(server, net, shape=shape, rows=SESSION_ROWS),
                loaded=net.state in _IN_MEMORY,
                fits=net.size_bytes <= free_bytes[server.name],
                sessions=self.sessions(server).get(name, 0),
                pinned=net.pinned,
                copied=net.copied,
            )
            for server, net in found
            if net.digest == digest
        ]

    def _free_bytes(self, server: Member) -> int:
        """Return the bytes that a server can load without evicting anything; 0 if it does not report its budget."""
        used = sum(net.size_bytes for net in self._hosts.hosted_by(server) if net.state in _IN_MEMORY)
        return max(0, server.load.budget_bytes - used)

    def _new_candidate(self, member: Member, net: Hosted, shape: Shape, rows: int) -> ServerCandidate:
        own_s = self._forward_s(member, net.name, shape, rows)
        if net.state == hosted_pb2.HOSTED_STATE_ON_DISK and self.assigned.get((member.name, net.name)):
            net = _loading(net)  # the assigned session will load it in a moment
        return ServerCandidate(
            server=member.name,
            digest=net.digest,
            state=net.state,
            load_s=seconds_to_load(net) if _may_fit(member, net) else math.inf,
            own_s=own_s,
            others_s=self._others_s(member, shape),
            queued_s=member.load.queued_rows * own_s / rows,
            profiles=tuple((each.model_hash, each.num_inference_steps, each.similarity) for each in net.profiles),
        )

    def _others_s(self, member: Member, shape: Shape) -> float:
        """Return the seconds of the forward passes of all sessions at a server in each step."""
        others_s = self._cached_load(member).others_s
        if shape not in others_s:
            others_s[shape] = sum(
                count * self._forward_s(member, name, shape, SESSION_ROWS)
                for name, count in self.sessions(member).items()
            )
        return others_s[shape]

    def _forward_s(self, member: Member, name: str, shape: Shape, rows: int) -> float:
        """Return the seconds of a forward pass, which are computed once for each report."""
        cached, key = self._cached_load(member).forward_s, (name, shape, rows)
        if key not in cached:
            own = self._hosts.at(member, name)
            others = (net for host, net in self._hosts.named(name).items() if host is not member)
            cached[key] = forward_s([*([own] if own is not None else []), *others], shape, rows)
        return cached[key]

    def _cached_load(self, member: Member) -> _CachedLoad:
        cached, nets = self._cached.get(member.name), self._hosts.hosted_by(member)
        if cached is None or cached.load is not member.load or cached.nets is not nets:
            cached = self._cached[member.name] = _CachedLoad(load=member.load, nets=nets)
        return cached

    def _sessions_changed(self, server: str) -> None:
        cached = self._cached.get(server)
        if cached is not None:
            cached.candidates.clear()
            cached.others_s.clear()
        if server in self._servers:
            self._note_change(server)

    def _note_change(self, server: str) -> None:
        self._count += 1
        self._changes.pop(server, None)
        self._changes[server] = self._count


_LineupKey = tuple[str, str, Shape, int]
"""A ControlNet, a base model, and the shape and rows of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _CachedLoad:
    """Values computed from a report of a server, because a decision may look at hundreds of servers."""

    load: fleet_pb2.Load
    nets: tuple[Hosted, ...]
    forward_s: dict[tuple[str, Shape, int], float] = field(default_factory=dict)
    """Seconds of forward passes, by ControlNet, shape and rows."""
    candidates: dict[tuple[str, Shape, int], tuple[Hosted, ServerCandidate]] = field(default_factory=dict)
    """The server as jobs find it, by ControlNet, shape and rows, until its sessions change."""
    others_s: dict[Shape, float] = field(default_factory=dict)
    """Seconds of the forward passes of its sessions in each step, by shape, until they change."""


def _may_fit(member: Member, net: Hosted) -> bool:
    """Return whether a server's budget is large enough for a ControlNet, or unknown."""
    return net.size_bytes <= (member.load.budget_bytes or net.size_bytes)


def _loading(net: Hosted) -> Hosted:
    loading = Hosted()
    loading.CopyFrom(net)
    loading.state = hosted_pb2.HOSTED_STATE_LOADING
    return loading
