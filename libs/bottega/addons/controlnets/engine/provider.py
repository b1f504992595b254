"""The engine's interface to ControlNets: the input of a session, the provider of sessions, and their results."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from bottega.engine.residuals import ResidualProvider
from bottega.fair_order import Share
from bottega.model.rows import Embeds, Half


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlServer:
    """A ControlNet server."""

    name: str
    """Name in the fleet."""
    address: str
    """host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHosts:
    """The servers of a ControlNet."""

    digest: str = ""
    """Digest of the requested version, in hex; "" means any."""
    servers: tuple[ControlServer, ...] = ()
    """The best first."""
    similarity: float | None = None
    """Cosine of its residuals between adjacent steps of such a job, from its profile; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlInput:
    """The input with which a session begins. Latents and timesteps follow step by step."""

    name: str
    image: Tensor
    """The control image, uint8, [its height, its width, 3]."""
    height: int
    """Height of the drawn picture in pixels."""
    width: int
    """Width of the drawn picture in pixels."""
    halves: Mapping[Half, Embeds]
    """The halves that it controls, with their conditions. Guess mode does not control the unconditional half."""
    scale: float = 1.0
    guess_mode: bool = False
    hosts: ControlHosts = ControlHosts()
    """Its servers, besides this process."""
    may_be_stale: bool = False
    """Whether its residuals may be one step old."""
    measured: bool = False
    """Whether its record contains the similarity of its residuals."""
    share: Share = field(default_factory=Share)
    """The tenant whose request it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """A step that a server computed."""

    server: str
    step: int
    began_s: float
    """Time on CLOCK_MONOTONIC."""
    seconds: float
    """Seconds until all residuals had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """The result of a session."""

    waited_s: float = 0.0
    """Seconds that forwards waited for it."""
    stale_steps: int = 0
    """Number of steps that used residuals one step old."""
    pipelined: bool = False
    """Whether the session was allowed to use residuals of the step before."""
    servers: tuple[str, ...] = ()
    """Servers that ran it, in order; "" is this process."""
    similarity: float | None = None
    """Mean cosine of its residuals between adjacent steps, if measured."""
    calls: tuple[ControlCall, ...] = ()
    """Answered calls of servers."""


class ControlNetProvider(ResidualProvider, Protocol):
    """Opens and closes the ControlNet sessions of requests. All calls come from the engine's thread."""

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        """Begin the sessions of one request, and return their handles at once; slow parts run in the background.

        Raises BottegaError if that can never succeed; then none of them is begun.
        """
        ...

    def opened(self, handles: Sequence[Hashable]) -> bool:
        """Return whether all of these sessions are open. Raises the BottegaError of a failed one."""
        ...

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        """Wait until one of these, not all of which are open, has opened or failed, or until the timeout."""
        ...

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        """End sessions, open or not, and return their records."""
        ...
