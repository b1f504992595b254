"""A request's ControlNets as the engine sees them: what a session needs, what holds sessions, and the result of one."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from bottega.diffusion.engine.residuals import ResidualProvider
from bottega.diffusion.rows import Embeds, Half


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlServer:
    """A ControlNet server. name: in the fleet; address: host:port."""

    name: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHosts:
    """Where a ControlNet is. digest: of the version meant, hex; empty is any. servers: the best first.

    similarity: cosine of its residuals between adjacent steps of such a job, from its profile; None is not known.
    """

    digest: str = ""
    servers: tuple[ControlServer, ...] = ()
    similarity: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlInput:
    """What a session with one ControlNet begins with; latents and timesteps follow step by step.

    image: the control image, uint8 [its height, its width, 3]. height, width: of the picture that is drawn, pixels.
    halves: those that it controls, with their conditions: guess mode leaves the unconditional one alone.
    hosts: where it is, beside here. may_be_stale: whether its residuals may be one step old. measured: whether its
    record shall say how similar they are from step to step.
    """

    name: str
    image: Tensor
    height: int
    width: int
    halves: Mapping[Half, Embeds]
    scale: float = 1.0
    guess_mode: bool = False
    hosts: ControlHosts = ControlHosts()
    may_be_stale: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """One step that a server was asked for. began_s: on CLOCK_MONOTONIC. seconds: until all residuals were here."""

    server: str
    step: int
    began_s: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """What a session came to.

    waited_s: seconds that forwards waited for it. stale_steps: that used residuals one step old. pipelined: whether
    it was meant to use such. servers: who ran it, in their order; an empty name is this process. similarity: mean
    cosine of its residuals between adjacent steps, where it was measured. calls: of servers, those that were answered.
    """

    waited_s: float = 0.0
    stale_steps: int = 0
    pipelined: bool = False
    servers: tuple[str, ...] = ()
    similarity: float | None = None
    calls: tuple[ControlCall, ...] = ()


class ControlNetProvider(ResidualProvider, Protocol):
    """Holds the sessions of requests with their ControlNets. All calls come from the engine's thread."""

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        """Begins the sessions of one request, and returns their handles at once: what takes time goes on meanwhile.

        Raises BottegaError where that can never succeed; then none of them is begun.
        """
        ...

    def opened(self, handles: Sequence[Hashable]) -> bool:
        """Whether all of these can be asked for residuals. Raises the BottegaError that one of them failed with."""
        ...

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        """Returns when one of these, not all of which are open, has opened or failed, or after the timeout."""
        ...

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        """Ends sessions, open or not."""
        ...
