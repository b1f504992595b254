"""The engine's interface to ControlNets: the input of a session, the provider of sessions, and what is measured.

`read_hosts` reads where the gateway says that a job's ControlNets are.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

import torch
from google.protobuf.message import DecodeError
from pydantic import Field
from torch import Tensor

from bottega import kinds, rules
from bottega.adapter_rules import MAX_MODES
from bottega.device_links.tensor_messages import DTYPES
from bottega.engine.forward import ResidualProvider
from bottega.errors import InvalidRequest, Violation
from bottega.fair_order import Share
from bottega.model.rows import Embeds, Half, Row
from bottega.v1.controlnet_pb2 import ControlNetHosts, ControlNetPlacements

ControlModes = Annotated[tuple[Annotated[int, Field(ge=0, lt=MAX_MODES)], ...], Field(max_length=rules.MAX_ADAPTERS)]
ImageScales = Annotated[tuple[Annotated[float, Field(allow_inf_nan=False)], ...], Field(max_length=rules.MAX_ADAPTERS)]

_Finite = Annotated[float, Field(allow_inf_nan=False)]
LatentScaling = tuple[_Finite, _Finite] | None


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
    pair_server: str = ""
    """Name of the server for rows that the other worker of a pair computes; empty for the first one."""
    similarity: float | None = None
    """Cosine between residuals of adjacent steps in such a job, from the ControlNet's profile; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlInput:
    """The input with which a session begins. Latents and timesteps follow step by step."""

    name: str
    images: tuple[Tensor, ...]
    """The control image, uint8, [height, width, 3], in its own size; a union may have several.

    ControlNets for transformers read latents of the image: the mean of the VAE's distribution, or a sample of it (see
    `ModelFamily.draws_control_latents`), in the VAE's scale, [channels, latent height, latent width]. The worker
    encodes it, because only the worker has the VAE.

    Sessions of a request that have identical tensor objects share the transfer and the computations of these tensors.
    """
    height: int
    """Height of the picture to draw, in pixels."""
    width: int
    """Width of the picture to draw, in pixels."""
    halves: Mapping[Half, Embeds]
    """Prompt embeddings by half (conditional or not), for the halves whose residuals the session computes."""
    modes: tuple[int, ...] = ()
    """The control mode of each image of a union; empty for other ControlNets."""
    image_scales: tuple[float, ...] = ()
    """Factor of each image inside a union; empty if the union has one image, whose factor is `scale`."""
    scale: float = 1.0
    """Factor of the residuals."""
    guess_mode: bool = False
    latent_scaling: LatentScaling = None
    """Shift and factor from the VAE's scale to the model's, if `images` are latents; None if they are pixels."""
    hosts: ControlHosts = ControlHosts()
    """The servers that can run the session; this process may be able to, as well."""
    may_be_stale: bool = False
    """Whether a step may use the residuals of the step before."""
    measured: bool = False
    """Whether to measure how similar the residuals of adjacent steps are."""
    share: Share = field(default_factory=Share)
    """Tenant of the request, and its share of a server."""


def half_of_residuals(control: ControlInput, row: Row) -> Half:
    """Return the half (conditional or not) whose residuals a row uses: its own half, or the only computed half."""
    return row.half if row.half in control.halves else Half.CONDITIONAL


def check_images(images: int, modes: ControlModes, image_scales: ImageScales) -> None:
    """Raise ValueError if the modes and scales of a session's images do not fit their number."""
    if len(modes) not in (images, 0) or (images > 1 and not modes):
        raise ValueError("a session with several images needs a mode for each")
    if len(image_scales) not in (images, 0):
        raise ValueError("a session needs as many scales of images as images, or none")


def check_pixels_or_latent(name: str, image: Tensor | None, scaling: LatentScaling) -> Tensor:
    """Return a control image that was received. Raise ValueError if it is neither pixels nor a latent, as announced."""
    if image is None or image.dim() != 3:
        raise ValueError(f"control image {name} is missing, or has not three dimensions")
    if scaling is None and (image.dtype != torch.uint8 or image.shape[2] != 3):
        raise ValueError(f"control image {name} is not uint8 [height, width, 3]")
    if scaling is not None and image.dtype not in DTYPES:
        raise ValueError(f"control image {name} is no latent in {', '.join(map(str, DTYPES))}")
    return image


def shared_images(controls: Sequence[ControlInput]) -> list[int | None]:
    """Return for each control the index of the first one with the very same image tensors; None if it is the first."""
    keys = [tuple(id(image) for image in control.images) for control in controls]
    return [first if (first := keys.index(key)) < place else None for place, key in enumerate(keys)]


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
            pair_server=hosts.pair_server,
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
    if hosts.pair_server and hosts.pair_server not in {server.name for server in hosts.servers}:
        yield Violation(field=f"{path}.pair_server", description="must be the name of one of the servers, or empty")
    if not rules.is_cosine(hosts.similarity):
        yield Violation(field=f"{path}.similarity", description="must be a cosine, -1 to 1")


# An image and one of its halves.
_Half = tuple[Hashable, Half]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """Inner products of one residual at two adjacent steps: with each other, and each with itself.

    They are scalars on the device, and are read only when the session has ended.
    """

    between: Tensor
    before: Tensor
    after: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class SimilarityMeter:
    """Measures the residuals of one session. A step that is repeated counts once, with its last values."""

    _products: dict[tuple[_Half, int], dict[int, _Product]] = field(default_factory=dict)
    _newest: dict[_Half, dict[int, dict[int, Tensor]]] = field(default_factory=dict)

    @property
    def cosines(self) -> list[float]:
        """Cosines between adjacent steps over all residuals, one for each half of guidance of each image."""
        return [_cosine(products) for products in self._products.values()]

    @property
    def similarity(self) -> float | None:
        """The mean of the cosines; None if there are no two steps to compare."""
        cosines = self.cosines
        return math.fsum(cosines) / len(cosines) if cosines else None

    def observe(self, row: Row, point: int, residual: Tensor) -> None:
        """Record the residual that a forward pass read for a row. `point` is the residual's index."""
        half = (row.owner, row.half)
        steps = self._newest.setdefault(half, {})
        for step in [step for step in steps if step < row.step - 1]:
            del steps[step]
        now = residual.detach().float().flatten().clone()  # a copy: the server reuses the memory after the step
        steps.setdefault(row.step, {})[point] = now
        before = steps.get(row.step - 1, {}).get(point)
        if before is not None:
            self._products.setdefault((half, row.step), {})[point] = _Product(
                between=before @ now, before=before @ before, after=now @ now
            )


class MeasuredControlNets:
    """A ControlNetProvider around another one, which adds measured similarities to the records."""

    def __init__(self, controlnets: ControlNetProvider) -> None:
        self._controlnets = controlnets
        self._meters: dict[Hashable, SimilarityMeter] = {}

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        handles = self._controlnets.open(controls)
        for handle, control in zip(handles, controls, strict=True):
            if control.measured:
                self._meters[handle] = SimilarityMeter()
        return handles

    def opened(self, handles: Sequence[Hashable]) -> bool:
        return self._controlnets.opened(handles)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        self._controlnets.settle(handles, timeout_s)

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        records = self._controlnets.close(handles)
        meters = [self._meters.pop(handle, None) for handle in handles]
        return tuple(
            record if meter is None else replace(record, similarity=meter.similarity)
            for record, meter in zip(records, meters, strict=True)
        )

    def ask(self, rows: list[Row]) -> None:
        self._controlnets.ask(rows)

    def ask_ahead(self, rows: list[Row]) -> None:
        self._controlnets.ask_ahead(rows)

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return self._controlnets.ready(row, points)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        self._controlnets.wait(rows, points, timeout_s)

    def is_void(self, row: Row) -> bool:
        return self._controlnets.is_void(row)

    def is_shared(self, row: Row) -> bool:
        return self._controlnets.is_shared(row)

    def take(self, row: Row, point: int) -> Sequence[Tensor | None]:
        addends = self._controlnets.take(row, point)
        if self._meters:
            for handle, addend in zip(row.controls, addends, strict=True):
                if handle in self._meters and addend is not None:
                    self._meters[handle].observe(row, point, addend)
        return addends


def _cosine(products: Mapping[int, _Product]) -> float:
    """Return the cosine of all residuals as one vector; 0 if a step has none."""
    between = math.fsum(float(product.between) for product in products.values())
    lengths = math.prod(
        math.sqrt(math.fsum(float(getattr(product, name)) for product in products.values()))
        for name in ("before", "after")
    )
    return max(-1.0, min(1.0, between / lengths)) if lengths > 0 else 0.0
