"""Orders the servers of a ControlNet by how long a job is expected to take with each."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from bottega.planning import Shape
from bottega.v1 import hosted_pb2
from bottega.v1.hosted_pb2 import Hosted, HostedState

MAX_SERVERS = 8
"""Servers of one ControlNet in an attempt's order. An attempt that fails at eight servers would fail at more."""
SESSION_ROWS = 2
"""Batch rows assumed for a session of another job: those of one guided image."""

# Estimated speed of loading weights from a disk, until a server has measured it.
_LOADED_BYTES_PER_S = 1e9
# Least seconds of a load, to which opening files and a first forward pass belong.
_LEAST_LOAD_S = 1.0
# Bounds on what a server reports. A value beyond them is a measurement error.
_MAX_LOAD_S, _LEAST_FORWARD_S, _MAX_FORWARD_S = 600.0, 1e-4, 60.0
# A load counts this many times, because it takes memory and disk that other ControlNets need.
_LOAD_WEIGHT = 3.0
# Seconds of a forward pass of one row that no server has measured.
_UNMEASURED_ROW_S = 0.05
# A turn of a worker whose time is unknown, in forward passes of the ControlNet. With SDXL it takes 2.5 times as long.
_TURN_FORWARDS = 3.0
# Share of the other sessions' forward passes that a step waits for, even where all fit into a turn.
_COLLISIONS = 0.25
# Cached hashes: those of a job's ControlNet at equally good servers are needed twice, for both halves of its guidance.
_MAX_TIES = 1024


def seconds_to_load(net: Hosted) -> float:
    """Return the seconds until a ControlNet is in memory, as measured, else estimated from its size."""
    if net.state == hosted_pb2.HOSTED_STATE_LOADED:
        return 0.0
    seconds = min(net.load_s or net.size_bytes / _LOADED_BYTES_PER_S, _MAX_LOAD_S)
    return seconds / 2 if net.state == hosted_pb2.HOSTED_STATE_LOADING else seconds


def forward_s(hosts: Sequence[Hosted], shape: Shape, rows: int) -> float:
    """Return the seconds of a forward pass, from the measurement that is most like it.

    Args:
        hosts: The ControlNet as its servers report it, first the server in question; the others are asked next.
        shape: Height and width of the latents; (0, 0) if unknown.
        rows: Its batch rows.
    """
    area = shape[0] * shape[1]
    for net in hosts:
        if not net.forward_times:
            continue
        nearest = min(
            net.forward_times,
            key=lambda time: (abs(time.latent_height * time.latent_width - area), abs(time.rows - rows)),
        )
        measured = nearest.latent_height * nearest.latent_width
        seconds = nearest.seconds * (area / measured if area and measured else 1.0) * rows / nearest.rows
        return float(max(_LEAST_FORWARD_S, min(seconds, _MAX_FORWARD_S)))
    return rows * _UNMEASURED_ROW_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCandidate:
    """A server that hosts a ControlNet, for choosing the best one."""

    server: str
    digest: str
    state: HostedState.ValueType
    load_s: float = 0.0
    """Seconds until the ControlNet is in memory; inf if it has no room for it."""
    own_s: float = SESSION_ROWS * _UNMEASURED_ROW_S
    """Seconds of the job's own forward pass in each step."""
    others_s: float = 0.0
    """Seconds of the forward passes in each step of all other sessions at the server, with any ControlNet."""
    ahead_s: float = 0.0
    """Seconds of the forward passes in each step of the same job's earlier ControlNets at the server."""
    queued_s: float = 0.0
    """Seconds of the forward passes that wait at the server now."""
    profiles: tuple[tuple[str, int, float], ...] = ()
    """Model hash, number of steps and similarity of each of the ControlNet's profiles."""

    @property
    def facts(self) -> Hashable:
        """Key of the candidate's group: jobs wait as long at all servers with equal facts."""
        return self.digest, self.state, self.load_s, self.own_s, self.others_s, self.queued_s, self.profiles

    def answer_s(self, turn_s: float | None, share: float = 1.0) -> float:
        """Return the seconds from a step's request to its residuals.

        Each session asks once in a turn of its worker, so what exceeds a turn waits. Below that, a step waits for a
        part of the others.

        Source: Denning and Buzen, The Operational Analysis of Queueing Network Models (1978), asymptotic bounds.

        Args:
            turn_s: Seconds of a worker's turn; None if unknown.
            share: Share of the job's rows that ask there.
        """
        own_s = self.own_s * share
        turn = _TURN_FORWARDS * own_s if turn_s is None else turn_s
        return self.ahead_s + max(own_s, own_s + self.others_s - turn) + _COLLISIONS * self.others_s

    def expected_s(self, steps: int, turn_s: float | None, share: float = 1.0) -> float:
        """Return the seconds that a job of so many steps is expected to wait for the ControlNet there.

        A load that some job waits for already counts once, one that this job would begin counts more.

        Args:
            steps: Steps of the job.
            turn_s: See answer_s.
            share: See answer_s.
        """
        load_s = 0.0
        if self.state == hosted_pb2.HOSTED_STATE_LOADING:
            load_s = max(_LEAST_LOAD_S / 2, self.load_s)
        elif self.state != hosted_pb2.HOSTED_STATE_LOADED:
            load_s = _LOAD_WEIGHT * max(_LEAST_LOAD_S, self.load_s)
        return load_s + self.queued_s + steps * self.answer_s(turn_s, share)


Group = Collection[ServerCandidate]
"""Candidates that differ only in their server; never empty."""


def first_of(group: Group) -> ServerCandidate:
    """Return one candidate of a group."""
    return next(iter(group))


def accepts_all(_: ServerCandidate) -> bool:
    """Return True for every server."""
    return True


def best_first(
    groups: Sequence[Group],
    *,
    name: str,
    job_id: str,
    digest: str = "",
    steps: int = 1,
    turn_s: float | None = None,
    accepts: Callable[[ServerCandidate], bool] = accepts_all,
) -> list[ServerCandidate]:
    """Return the best servers for a job's ControlNet, best first, all with the same version.

    A server with the least expected wait comes first. A hash breaks ties: jobs spread over servers that have loaded it,
    but all jobs choose the same server to load it, so that not every server loads every ControlNet.

    Args:
        groups: The servers that host it.
        name: Name of the ControlNet.
        job_id: ID of the job.
        digest: Version with which the job has begun. Another one is chosen only if no server has it.
        steps: Steps of the job.
        turn_s: Seconds of a turn of its worker; None if unknown.
        accepts: Returns whether a server accepts sessions now. It is asked for the best servers only.
    """
    firsts = [first_of(group) for group in groups]
    ranks = [(candidate.digest != digest, candidate.expected_s(steps, turn_s)) for candidate in firsts]
    order = sorted(range(len(groups)), key=ranks.__getitem__)
    ranked = list[ServerCandidate]()
    for _, places in itertools.groupby(order, key=ranks.__getitem__):
        accepting = [candidate for place in places for candidate in groups[place] if accepts(candidate)]
        equal = sorted(accepting, key=lambda candidate: _tie(candidate, name, job_id))
        ranked += [candidate for candidate in equal if candidate.digest == (ranked or equal)[0].digest]
        if len(ranked) >= MAX_SERVERS:
            break
    return ranked[:MAX_SERVERS]


def pair_server(
    first: ServerCandidate,
    groups: Sequence[Group],
    *,
    name: str,
    job_id: str,
    steps: int = 1,
    turn_s: float | None = None,
    accepts: Callable[[ServerCandidate], bool] = accepts_all,
) -> str:
    """Return the server for the second half of a guided pair, if another one answers both halves sooner; else "".

    Args:
        first: The best of the candidates, which computes the first half.
        groups: See best_first, as for the other arguments.
    """
    with_half = replace(first, ahead_s=first.ahead_s + first.own_s / 2)
    soonest_s, best = with_half.expected_s(steps, turn_s, 0.5), [first]
    for group in groups:
        one = first_of(group)
        if one.digest == first.digest and (expected_s := one.expected_s(steps, turn_s, 0.5)) <= soonest_s:
            others = [candidate for candidate in group if candidate is not first and accepts(candidate)]
            if others:
                best = others if expected_s < soonest_s else best + others
                soonest_s = expected_s
    second = min(best, key=lambda candidate: _tie(candidate, name, job_id))
    other = second is not first and second.state == hosted_pb2.HOSTED_STATE_LOADED
    return second.server if other else ""


def _tie(candidate: ServerCandidate, name: str, job_id: str) -> bytes:
    """Return the order of servers that are equally good."""
    on_disk = candidate.state == hosted_pb2.HOSTED_STATE_ON_DISK
    return _tie_hash(f"{name}\0{candidate.server}\0{'' if on_disk else job_id}")


@functools.lru_cache(_MAX_TIES)
def _tie_hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
