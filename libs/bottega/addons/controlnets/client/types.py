"""ControlNets as the SDK describes them: which services host which version, and measurements of them."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.client.types.fleet import Readiness, ResidualProfile
from bottega.client.types.inputs import ImageSource
from bottega.errors import BottegaError


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetHost:
    """A service that has a ControlNet."""

    name: str
    address: str
    server: bool
    """Whether the host is a ControlNet server; else it is a worker that has the weights itself."""
    readiness: Readiness
    popularity: int
    """Sessions that used the ControlNet, of the newest sessions that the host remembers."""
    sessions: int
    """Sessions that use it now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedControlNet:
    """A version of a ControlNet. All versions of one name for one base model should be the same."""

    name: str
    digest: str
    """Hash of its weights and configuration, hex."""
    base: str
    """Base model that it was made for."""
    models: tuple[str, ...]
    """Names of the served models that it can be used with."""
    size_bytes: int
    """Bytes of its weights in memory."""
    hosts: tuple[ControlNetHost, ...]
    profiles: tuple[ResidualProfile, ...] = ()
    """Measurements of it, one for each base model."""

    @property
    def popularity(self) -> int:
        """Sum of its hosts' popularities."""
        return sum(host.popularity for host in self.hosts)

    @property
    def loaded_at(self) -> tuple[str, ...]:
        """Names of the hosts that have it in memory."""
        return tuple(host.name for host in self.hosts if host.readiness is Readiness.LOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedControlNet:
    """The response of a server to the request to host a ControlNet."""

    server: str
    size_bytes: int = 0
    """Bytes of its weights in memory; 0 after an error."""
    error: BottegaError | None = None
    """Why the server does not host it; None if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """A picture to measure with: its prompt and its control image."""

    prompt: str
    image: ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """The measured profile of a ControlNet."""

    digest: str
    """Hash of the version that was measured, hex."""
    profile: ResidualProfile
    pictures: tuple[float, ...]
    """Mean cosine between adjacent steps, for each picture."""
    servers: tuple[str, ...] = ()
    """Names of the servers that keep the profile."""
