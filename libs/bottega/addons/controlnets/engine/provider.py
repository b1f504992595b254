"""The engine's interface to ControlNets: the input of a session, the provider of sessions, and their records.

`read_hosts` reads where the gateway says that a job's ControlNets are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Protocol

from google.protobuf.message import DecodeError
from pydantic import Field
from torch import Tensor

from bottega import kinds, rules
from bottega.control_modes import MAX_MODES
from bottega.engine.residuals import ResidualProvider
from bottega.errors import InvalidRequest, Violation
from bottega.fair_order import Share
from bottega.model.rows import Embeds, Half
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetPlacements

ControlModes = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_MODES)], ...], Field(max_length=rules.MAX_ADAPTERS)]
ImageScales = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(max_length=rules.MAX_ADAPTERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlServer:
    """Name and address of a ControlNet server."""

    name: str
    """Name of the server in the fleet."""
    address: str
    """host:port of the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlHosts:
    """The servers that host a ControlNet."""

    digest: str = ""
    """Digest of the requested version, in hex; "" means any version."""
    servers: tuple[ControlServer, ...] = ()
    """The servers, the best first; empty if only the worker itself has the ControlNet."""
    similarity: float | None = None
    """Cosine between residuals of adjacent steps in such a job, from the ControlNet's profile; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlInput:
    """The input with which a session begins. Latents and timesteps follow step by step."""

    name: str
    images: tuple[Tensor, ...]
    """The control image, uint8, [height, width, 3] in its own size; of a union maybe several."""
    height: int
    """Height of the picture to draw, in pixels."""
    width: int
    """Width of the picture to draw, in pixels."""
    halves: Mapping[Half, Embeds]
    """Prompt embeddings of the halves of guidance that the session controls; in guess mode only the conditional one."""
    modes: tuple[int, ...] = ()
    """The control mode of each image of a union; empty for other ControlNets."""
    image_scales: tuple[float, ...] = ()
    """Factor of each image inside a union; empty if the union has one image, whose factor is `scale`."""
    scale: float = 1.0
    """Factor of the residuals."""
    guess_mode: bool = False
    hosts: ControlHosts = ControlHosts()
    """The servers that can run the session; this process may be able to, as well."""
    may_be_stale: bool = False
    """Whether a step may use the residuals of the step before."""
    measured: bool = False
    """Whether to measure how similar the residuals of adjacent steps are."""
    share: Share = field(default_factory=Share)
    """Tenant of the request, and its share of a server."""


def check_images(images: int, modes: ControlModes, image_scales: ImageScales) -> None:
    """Raise ValueError if the modes and scales of a session's images do not fit their number."""
    if len(modes) not in (images, 0) or (images > 1 and not modes):
        raise ValueError("a session with several images needs a mode for each")
    if len(image_scales) not in (images, 0):
        raise ValueError("a session needs as many scales of images as images, or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCall:
    """A step that a server has computed."""

    server: str
    step: int
    began_s: float
    """Time of the request, on CLOCK_MONOTONIC."""
    seconds: float
    """Seconds until all residuals had arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRecord:
    """Waits, steps and servers of a session, for the provenance."""

    waited_s: float = 0.0
    """Seconds that forward passes waited for the session's residuals."""
    stale_steps: int = 0
    """Number of steps that used residuals of the step before."""
    pipelined: bool = False
    """Whether steps were allowed to use residuals of the step before."""
    servers: tuple[str, ...] = ()
    """Names of the servers that ran the session, in order; "" is this process."""
    similarity: float | None = None
    """Mean cosine between residuals of adjacent steps; None if it was not measured."""
    calls: tuple[ControlCall, ...] = ()
    """Steps that servers computed."""


class ControlNetProvider(ResidualProvider, Protocol):
    """Opens the ControlNet sessions of requests, and provides residuals. All calls come from the engine's thread."""

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        """Begin the sessions of one request, and return their handles at once; slow parts run in the background.

        Raises BottegaError if one of them can never be opened; then none of them is begun.
        """
        ...

    def opened(self, handles: Sequence[Hashable]) -> bool:
        """Return whether all of these sessions are open. Raise the BottegaError of a failed one."""
        ...

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        """Wait until another of these sessions has opened or failed, or until the time-out."""
        ...

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        """End sessions, whether they have opened or not, and return their records."""
        ...


HOSTS_FIELD = f"addons[{kinds.CONTROLNET}].hosts"

_MAX_DIGEST_CHARACTERS = 128
_MAX_NAME_CHARACTERS = 128
_MAX_ADDRESS_CHARACTERS = 300
# Maximum number of servers for one ControlNet of a job.
_MAX_SERVERS = 64


def read_hosts(data: bytes) -> tuple[ControlHosts, ...]:
    """Return the servers of each ControlNet in the spec. Raise InvalidRequest with all violations.

    Args:
        data: Serialized ControlNetPlacements; empty if the gateway sent none.
    """
    try:
        placements = ControlNetPlacements.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"addons[{kinds.CONTROLNET}] is no ControlNetPlacements") from None
    rules.refuse([wrong for index, hosts in enumerate(placements.hosts) for wrong in _check(index, hosts)])
    return tuple(
        ControlHosts(
            digest=hosts.digest,
            servers=tuple(ControlServer(name=server.name, address=server.address) for server in hosts.servers),
            similarity=hosts.similarity if hosts.HasField("similarity") else None,
        )
        for hosts in placements.hosts
    )


def _check(index: int, hosts: ControlNetHosts) -> Iterator[Violation]:
    path = f"{HOSTS_FIELD}[{index}]"
    if len(hosts.digest) > _MAX_DIGEST_CHARACTERS:
        yield Violation(field=f"{path}.digest", description=f"must be at most {_MAX_DIGEST_CHARACTERS} characters")
    if len(hosts.servers) > _MAX_SERVERS or any(
        not 0 < len(server.name) <= _MAX_NAME_CHARACTERS or not 0 < len(server.address) <= _MAX_ADDRESS_CHARACTERS
        for server in hosts.servers
    ):
        rule = f"must be at most {_MAX_SERVERS}, each with a name and an address"
        yield Violation(field=f"{path}.servers", description=rule)
    if not rules.is_cosine(hosts.similarity):
        yield Violation(field=f"{path}.similarity", description="must be a cosine, -1 to 1")
