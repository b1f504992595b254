"""ControlNets that a process loads and runs: a server's, or those of a worker where no server hosts them.

A session is the use of one ControlNet by one request. A forward pass computes rows of any of a ControlNet's sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from time import perf_counter

import PIL.Image
import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor

from bottega.adapter_rules import refused_mode
from bottega.addons.controlnets.engine.network import ControlNetSource, LoadedControlNet, UnionImages, load_controlnet
from bottega.addons.controlnets.engine.provider import ControlInput, ControlRecord
from bottega.caching.load_cache import Lease, LoadCache
from bottega.caching.load_plan import Popularity
from bottega.device.device import Span, SpanSum
from bottega.device.devices import open_device
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, ControlNetNotFound, ControlNetUnusable
from bottega.model.backbone import Inputs
from bottega.model.rows import Embeds, Half, Row


class ControlSession:
    """A request's use of one ControlNet.

    `scales` has the factor for each residual. `halves` are the halves of guidance that it controls. `share` is the
    tenant of the request, and its share of a server. `modes` has the control mode of each image of a union.

    Args:
        images: The images of the request's sessions by what they depend on, to which new ones are added.

    Raises:
        ControlNetUnusable: The ControlNet is a union and has no such mode, or is none.
    """

    def __init__(
        self, net: LoadedControlNet, control: ControlInput, images: dict[Hashable, ControlImages] | None = None
    ) -> None:
        for mode in control.modes or (None,):
            if why := refused_mode(control.name, mode, net.modes):
                raise ControlNetUnusable(why)
        self.net = net
        self.share = control.share
        self.modes = control.modes
        self.image_scales = control.image_scales or (1.0,) * len(control.modes)
        self.halves = {half: _on(net, embeds) for half, embeds in control.halves.items()}
        self.scales = _scales(net, control)
        known = {} if images is None else images
        key = net, control.height, control.width, *map(id, control.images)
        if key not in known:
            known[key] = ControlImages(net, control)
        self._images = known[key]

    @property
    def batch_key(self) -> Hashable:
        """Key that the sessions of one forward pass share: the network, and the scales of a union's images."""
        return self.net, self.image_scales

    def embedded(self, rows: int) -> list[Tensor]:
        """Return the embedded control images for a batch of `rows` rows: [channels, latent height, latent width]."""
        return self._images.embedded(rows)


class ControlImages:
    """The control images of one or several sessions of a request, processed and embedded for one ControlNet."""

    def __init__(self, net: LoadedControlNet, control: ControlInput) -> None:
        self._net = net
        size = control.height, control.width
        self._processed = [process_image(image, *size, net.layout.latent_scale) for image in control.images]
        self._embedded: dict[bool, list[Tensor]] = {}

    def embedded(self, rows: int) -> list[Tensor]:
        """Return the embedded images for a batch of `rows` rows: [channels, latent height, latent width]."""
        alone = rows == 1
        if alone not in self._embedded:
            self._embedded[alone] = [self._net.embed(image, rows=rows) for image in self._processed]
        return self._embedded[alone]


def process_image(pixels: Tensor, height: int, width: int, latent_scale: int) -> Tensor:
    """Return a control image as Diffusers' ControlNet pipelines process it: float32, [3, height, width], 0 to 1.

    Args:
        pixels: uint8, [height, width, 3] in the image's own size.
    """
    processor = VaeImageProcessor(vae_scale_factor=latent_scale, do_convert_rgb=True, do_normalize=False)
    image = PIL.Image.fromarray(pixels.cpu().numpy())
    processed: Tensor = processor.preprocess(image, height=height, width=width)[0]
    return processed.to(torch.float32)


def _scales(net: LoadedControlNet, control: ControlInput) -> list[float | Tensor]:
    points = len(net.layout.points)
    if not control.guess_mode:
        return [control.scale] * points
    # As in Diffusers: .1 at the first point to 1 at the middle, as tensors, so that half precision rounds alike.
    return list(torch.logspace(-1, 0, points, device=net.device) * control.scale)


def _on(net: LoadedControlNet, embeds: Embeds) -> Embeds:
    """Return the conditions on the network's device. Only the prompt is converted: the network converts the others."""
    here = embeds.map(open_device(net.device).to_device)
    return replace(here, prompt=here.prompt.to(net.dtype))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ControlRow:
    """A batch row: the conditional or the unconditional half of a session at one step."""

    session: ControlSession
    half: Half
    sample: Tensor
    """The scaled latent, [channels, height, width]."""
    timestep: Tensor
    """The timestep, a scalar."""


@torch.inference_mode()
def run_group(rows: Sequence[ControlRow], *, fixed_rows: int = 0) -> list[Tensor]:
    """Return the residuals of rows that share `batch_key`, shape and number of tokens, at scale 1.

    Args:
        fixed_rows: Pads the batch to this many rows, so that results are the same in every batch; 0 for no padding.

    Returns:
        One tensor for each residual of the ControlNet, [rows, channels, height, width], including the padding.
    """
    net = rows[0].session.net
    group = [*rows, *[rows[-1]] * (fixed_rows - len(rows))]
    embeds = Embeds.stack([row.session.halves[row.half] for row in group])
    to_device = open_device(net.device).to_device
    inputs = Inputs(
        sample=to_device(torch.stack([row.sample for row in group]), net.dtype),
        timestep=to_device(torch.stack([row.timestep.float() for row in group])),
        prompt_embeds=embeds.prompt,
        added=embeds.added,
    )
    by_row = [row.session.embedded(len(group)) for row in group]
    embedded = [torch.stack(images) for images in zip(*by_row, strict=True)]
    return net.residuals(inputs, embedded, _union_images([row.session for row in group]))


def _union_images(sessions: Sequence[ControlSession]) -> UnionImages | None:
    """Return the modes and scales of the images in rows of these sessions; None if the network is not a union."""
    first = sessions[0]
    if not first.modes:
        return None
    modes = torch.tensor([session.modes for session in sessions])
    return UnionImages(modes=open_device(first.net.device).to_device(modes), scales=first.image_scales)


def computes_one_session(rows: Sequence[ControlRow]) -> bool:
    """Return whether the batch has exactly the rows of one session at one step, as in stock Diffusers.

    Otherwise sums are rounded differently in half precision.
    """
    session = rows[0].session
    return len(rows) == len(session.halves) and {(row.session, row.half) for row in rows} == {
        (session, half) for half in session.halves
    }


@torch.inference_mode()
def write_residuals(
    residuals: Sequence[Tensor], rows: Sequence[ControlRow], slots: Sequence[Sequence[Tensor]]
) -> Iterator[int]:
    """Scale the results of run_group into `slots`. Yield each residual's index when all rows have it, deepest first.

    Args:
        slots: Targets by row and residual, [channels, height, width], on the ControlNet's device.
    """
    for point in reversed(range(len(residuals))):
        for index, row in enumerate(rows):
            torch.mul(residuals[point][index], row.session.scales[point], out=slots[index][point])
        yield point


ControlNetLease = Lease[LoadedControlNet]
_Load = Callable[[ControlNetSource, torch.device], LoadedControlNet]


class ControlNetCache(LoadCache[LoadedControlNet]):
    """A cache that loads ControlNets within `budget_bytes`, and evicts unused ones.

    Args:
        sources: Where to load each ControlNet from, by name; more may be added while the cache is open.
        popularity: Determines the order of eviction.
        load: Loads a ControlNet from a source, in the cache's own thread. Raises BottegaError.
    """

    def __init__(
        self,
        sources: Mapping[str, ControlNetSource],
        *,
        budget_bytes: int,
        device: torch.device,
        popularity: Popularity | None = None,
        load: _Load = load_controlnet,
    ) -> None:
        super().__init__(_ControlNetLoader(sources, device, load), budget_bytes=budget_bytes, popularity=popularity)


class _ControlNetLoader:
    """Sizes and loads ControlNets for the cache."""

    what = "ControlNet"

    def __init__(self, sources: Mapping[str, ControlNetSource], device: torch.device, load: _Load) -> None:
        self._sources = sources
        self._device = device
        self._load = load

    def size_bytes(self, name: str) -> int:
        """Return the size of the ControlNet's weights. Raise ControlNetNotFound if there is none of this name."""
        return self._source(name).size_bytes

    def load(self, name: str) -> LoadedControlNet:
        """Return the ControlNet with its weights on the device. Raise BottegaError if it cannot be loaded."""
        try:
            return self._load(self._source(name), self._device)
        except BottegaError:
            raise
        except Exception as error:  # errors of torch
            raise to_job_failure(error) from error

    def _source(self, name: str) -> ControlNetSource:
        source = self._sources.get(name)
        if source is None:
            served = ", ".join(sorted(self._sources))
            raise ControlNetNotFound(f"this process has no ControlNet {name!r}", metadata={"served": served})
        return source


@dataclass(slots=True, kw_only=True, eq=False)
class _LocalSession:
    """A session of a request with one ControlNet in this process. It is its own handle."""

    control: ControlInput
    lease: ControlNetLease
    place: int
    """Index of the ControlNet among those that the request borrowed from the cache."""
    images: dict[Hashable, ControlImages]
    """Images that the sessions of the request share."""
    session: ControlSession | None = None
    waited_s: float = 0.0
    """Seconds that forward passes waited for the ControlNet to be loaded."""
    computed: SpanSum = field(default_factory=SpanSum)
    """Seconds of the ControlNet's forward passes."""

    @property
    def failed(self) -> bool:
        """Whether the ControlNet could not be loaded."""
        return self.lease.values.done() and self.lease.values.exception() is not None


class LocalControlNets:
    """A ControlNetProvider that runs the ControlNets of a cache in the calling thread.

    Args:
        digests: Digests of the ControlNets, by name.
        fixed_rows: Pads every batch to this many rows, so that images do not depend on what else is in the batch; 0 for
            no padding.
    """

    def __init__(
        self, cache: ControlNetCache, *, digests: Mapping[str, str] | None = None, fixed_rows: int = 0
    ) -> None:
        self.digests = dict(digests or {})
        self._cache = cache
        self._fixed_rows = fixed_rows
        self._rows: list[Row] = []
        self._answers: dict[tuple[Row, Hashable], list[Tensor]] = {}
        self._shared: set[Row] = set()

    def open(self, controls: Sequence[ControlInput]) -> tuple[Hashable, ...]:
        lease = self._cache.borrow([control.name for control in controls])
        images: dict[Hashable, ControlImages] = {}
        return tuple(
            _LocalSession(control=control, lease=lease, place=place, images=images)
            for place, control in enumerate(controls)
        )

    def opened(self, handles: Sequence[Hashable]) -> bool:
        return all(self._session(_local_session(handle)) is not None for handle in handles)

    def settle(self, handles: Sequence[Hashable], timeout_s: float) -> None:
        wait(_pending(handles), timeout_s, FIRST_COMPLETED)

    def close(self, handles: Sequence[Hashable]) -> tuple[ControlRecord, ...]:
        sessions = [_local_session(handle) for handle in handles]
        for local in sessions:
            self._cache.give_back(local.lease)
            local.session = None
            local.images.clear()
        # Otherwise they would keep a ControlNet that the cache evicts.
        self._rows, self._answers, self._shared = [], {}, set()
        return tuple(ControlRecord(waited_s=local.waited_s + local.computed.seconds) for local in sessions)

    def ask(self, rows: list[Row]) -> None:
        """Compute all residuals whose ControlNet is loaded before returning, because no other process computes them."""
        self._rows, self._answers, self._shared = rows, {}, set()
        self._compute()

    def ask_ahead(self, rows: list[Row]) -> None:
        """Do nothing: computing ahead in this process would only delay the engine."""

    def ready(self, row: Row, points: tuple[int, ...]) -> bool:
        return all((row, handle) in self._answers for handle in row.controls)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        began_s = perf_counter()
        missing = [handle for row in rows for handle in row.controls if (row, handle) not in self._answers]
        if not _pending(missing):
            self.opened(missing)  # raises, because none of them will ever be loaded
        self.settle(missing, timeout_s)
        for handle in dict.fromkeys(missing):
            _local_session(handle).waited_s += perf_counter() - began_s
        self._compute()

    def is_void(self, row: Row) -> bool:
        return False

    def take(self, row: Row, point: int) -> list[Tensor]:
        return [self._answers[row, handle][point] for handle in row.controls]

    def is_shared(self, row: Row) -> bool:
        return row in self._shared

    def _compute(self) -> None:
        """Compute the missing residuals whose ControlNet is loaded, in as few forward passes as possible."""
        groups: dict[Hashable, list[tuple[Row, _LocalSession, ControlSession]]] = {}
        for row in self._rows:
            for handle in row.controls:
                local = _local_session(handle)
                session = None if local.failed else self._session(local)
                if session is not None and (row, handle) not in self._answers:
                    key = (session.batch_key, row.sample.shape, row.embeds.prompt.shape, session if row.alone else None)
                    groups.setdefault(key, []).append((row, local, session))
        for group in groups.values():
            self._run(group)

    def _run(self, group: Sequence[tuple[Row, _LocalSession, ControlSession]]) -> None:
        device = open_device(group[0][0].sample.device)
        began = device.record()
        rows = [
            ControlRow(session=session, half=row.half, sample=row.sample, timestep=row.timestep)
            for row, _, session in group
        ]
        fixed_rows = 0 if group[0][0].alone else self._fixed_rows
        if not computes_one_session(rows) or len(rows) < fixed_rows:
            self._shared.update(row for row, _, _ in group)
        residuals = run_group(rows, fixed_rows=fixed_rows)
        # In place, because nothing else reads the residuals.
        slots = [[residual[index] for residual in residuals] for index in range(len(rows))]
        for _ in write_residuals(residuals, rows, slots):
            pass
        for (row, local, _), answer in zip(group, slots, strict=True):
            self._answers[row, local] = answer
        span = Span(begin=began, end=device.record())
        for local in {local for _, local, _ in group}:
            local.computed.add(span)

    def _session(self, local: _LocalSession) -> ControlSession | None:
        """Return the session, or None while its ControlNet is being loaded. Raise the BottegaError of a failed load."""
        if local.session is None and local.lease.values.done():
            net = local.lease.values.result()[local.place]
            local.session = ControlSession(net, local.control, local.images)
        return local.session


def _local_session(handle: Hashable) -> _LocalSession:
    assert isinstance(handle, _LocalSession), "every handle was made here"
    return handle


def _pending(handles: Sequence[Hashable]) -> set[Future[tuple[LoadedControlNet, ...]]]:
    """Return the futures of these sessions' loads that are not done."""
    holds = {_local_session(handle).lease.values for handle in handles}
    return {nets for nets in holds if not nets.done()}
