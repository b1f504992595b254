"""ControlNets of a suite as the SDK describes them: who hosts which version, and what was measured of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from bottega.client.types.image_source import ImageSource
from bottega.errors import BottegaError


class Readiness(StrEnum):
    """Where the weights of a ControlNet are, on its host."""

    UNKNOWN = ""
    ON_DISK = "on disk"
    LOADING = "loading"
    LOADED = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetHost:
    """A service that has a ControlNet. server: whether it is a ControlNet server; else a worker that has the weights
    itself.

    popularity: sessions that used it, of the newest that the host remembers. sessions: open with it now.
    """

    name: str
    address: str
    server: bool
    readiness: Readiness
    popularity: int
    sessions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualProfile:
    """How similar residuals were from step to step, with one base model, in pictures of so many steps.

    similarity: cosine; from .99 on, requests that allow it may go on with the residuals of the step before.
    """

    model_hash: str
    num_inference_steps: int
    similarity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedControlNet:
    """A ControlNet in one version. Those of one name for one base model should be one.

    digest: hash of its weights and configuration, hex. base: what it was made for; models: those served now that it
    fits. size_bytes: of its weights in memory. profiles: what was measured of it.
    """

    name: str
    digest: str
    base: str
    models: tuple[str, ...]
    size_bytes: int
    hosts: tuple[ControlNetHost, ...]
    profiles: tuple[ResidualProfile, ...] = ()

    @property
    def popularity(self) -> int:
        """Over all its hosts."""
        return sum(host.popularity for host in self.hosts)

    @property
    def loaded_at(self) -> tuple[str, ...]:
        """Hosts that have it in memory."""
        return tuple(host.name for host in self.hosts if host.readiness is Readiness.LOADED)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedControlNet:
    """What a server made of a ControlNet that it was to add. error: why it did not; else size_bytes says how large."""

    server: str
    size_bytes: int = 0
    error: BottegaError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileCase:
    """One picture to measure with: what to draw, and the control image."""

    prompt: str
    image: ImageSource


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredProfile:
    """What was measured, of the ControlNet with that hash. pictures: of each, the mean cosine of its steps.

    servers: those that have noted it.
    """

    digest: str
    profile: ResidualProfile
    pictures: tuple[float, ...]
    servers: tuple[str, ...] = ()
