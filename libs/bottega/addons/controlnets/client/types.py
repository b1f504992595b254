"""ControlNets as the SDK describes them: the services that host each version, and measurements."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.client.types.fleet import Readiness, ResidualProfile
from bottega.client.types.inputs import ImageSource
from bottega.errors import BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetHost:
    """A service that hosts a ControlNet."""

    name: str
    address: str
    server: bool
    """Whether the service is a ControlNet server; else it is a worker that has the weights in its own memory."""
    readiness: Readiness
    popularity: int
    """How many of the newest sessions at this service used the ControlNet; it remembers a fixed number of sessions."""
    sessions: int
    """Number of sessions that use the ControlNet now."""
    pinned: bool = False
    """Whether the server keeps the ControlNet in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedControlNet:
    """A version of a ControlNet. A fleet should have only one version of a name for each base model."""

    name: str
    digest: str
    """Hash of the ControlNet's weights and configuration, hex."""
    base: str
    """Base model that the ControlNet was made for."""
    models: tuple[str, ...]
    """Names of the served models that the ControlNet can be used with."""
    size_bytes: int
    """Bytes of the weights in memory."""
    hosts: tuple[ControlNetHost, ...]
    profiles: tuple[ResidualProfile, ...] = ()
    """Measured similarities, one for each base model."""
    control_modes: int = 0
    """Number of control modes, which are numbered from 0; 0 if the ControlNet is not a union."""

    @property
    def popularity(self) -> int:
        return sum(host.popularity for host in self.hosts)

    @property
    def loaded_at(self) -> tuple[str, ...]:
        """Names of the services that have the ControlNet in memory."""
        return tuple(host.name for host in self.hosts if host.readiness is Readiness.LOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedControlNet:
    """The response of a server that was asked to host a ControlNet."""

    server: str
    size_bytes: int = 0
    """Bytes of the ControlNet's weights in memory; 0 after an error."""
    error: BottegaError | None = None
    """Why the server does not host the ControlNet; None if it does."""
    catalogue: str = ""
    """Name of the catalogue that the server shares: others with it host the ControlNet soon, too. Empty if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """A prompt and a control image with which a ControlNet is measured."""

    prompt: str
    image: ImageSource
    control_mode: str | int | None = None
    """What the image shows, if the ControlNet is a union; see ControlNet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """The measured profile of a ControlNet."""

    digest: str
    """Hash of the version that was measured, hex."""
    profile: ResidualProfile
    pictures: tuple[float, ...]
    """Mean cosine between residuals of adjacent steps, for each picture."""
    servers: tuple[str, ...] = ()
    """Names of the servers that stored the profile."""
