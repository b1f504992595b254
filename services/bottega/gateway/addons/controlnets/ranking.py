"""Which of several servers runs a ControlNet for a job: a function of what they report, the same for the same facts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from bottega.v1 import hosted_pb2
from bottega.v1.hosted_pb2 import HostedState

_READINESS = MappingProxyType({hosted_pb2.HOSTED_STATE_LOADED: 0, hosted_pb2.HOSTED_STATE_LOADING: 1})
_NOT_READY = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCandidate:
    """A server that hosts the ControlNet. sessions: that are open there or on their way, with whatever ControlNet."""

    server: str
    digest: str
    state: HostedState.ValueType
    sessions: int


def best_first(
    candidates: Sequence[ServerCandidate], *, name: str, job_id: str, digest: str = ""
) -> list[ServerCandidate]:
    """Servers that may run a ControlNet for a job, the best first; all have it in one version.

    One that has it loaded, then one that loads it; of equals the least loaded; of equals jobs spread over those that
    are ready, while all of them agree on one where it is still to be loaded, so that not every server loads all.
    digest: the version that the job has begun with; another one only where nobody has that.
    """

    def rank(candidate: ServerCandidate) -> tuple[bool, int, int, bytes]:
        readiness = _READINESS.get(candidate.state, _NOT_READY)
        spread = _spread(name, candidate.server, "" if readiness == _NOT_READY else job_id)
        return candidate.digest != digest, readiness, candidate.sessions, spread

    ranked = sorted(candidates, key=rank)
    return [candidate for candidate in ranked if candidate.digest == ranked[0].digest]


def _spread(*facts: str) -> bytes:
    return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).digest()
