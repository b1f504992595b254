"""ControlNets that a process loads and runs: the cache of a server or worker, and the provider of a worker's own."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from bottega.addons.controlnets.engine.network import ControlNetSource, LoadedControlNet, load_controlnet
from bottega.addons.controlnets.engine.provider import ControlInput, ControlRecord, half_of_residuals
from bottega.addons.controlnets.engine.sessions import (
    ControlImages,
    ControlRow,
    ControlSession,
    computes_one_session,
    run_group,
)
from bottega.caching.load_cache import Lease, LoadCache
from bottega.caching.load_plan import Popularity
from bottega.device.device import Span, SpanSum
from bottega.device.devices import open_device
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, ControlNetNotFound
from bottega.model.backbones import MadeBackbone
from bottega.model.backbones.flux import FluxBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.rows import Half, Row


def residual_at(backbone: MadeBackbone | None, point: int, count: int, singles: int) -> int | None:
    """Return which of a ControlNet's residuals is added at a residual point, as an index; None if no residual is.

    Args:
        backbone: Backbone of the base model; None if every point has its own residual, as in a UNet.
        point: The residual point.
        count: Number of the ControlNet's residuals.
        singles: Number of residuals that belong to single blocks.
    """
    transformer = backbone if isinstance(backbone, Sd3Backbone | FluxBackbone) else None
    return point if transformer is None else transformer.residual_at(point, count, singles)


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
        backbone: The base model's; see `residual_at`.
    """

    def __init__(
        self,
        cache: ControlNetCache,
        *,
        digests: Mapping[str, str] | None = None,
        fixed_rows: int = 0,
        backbone: MadeBackbone | None = None,
    ) -> None:
        self.digests = dict(digests or {})
        self._backbone = backbone
        self._cache = cache
        self._fixed_rows = fixed_rows
        self._rows: list[Row] = []
        self._answers: dict[_RowKey, list[Tensor]] = {}
        self._shared: set[_RowKey] = set()

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
        return all(_key(row, handle) in self._answers for handle in row.controls)

    def wait(self, rows: list[Row], points: tuple[int, ...], timeout_s: float) -> None:
        began_s = perf_counter()
        missing = [handle for row in rows for handle in row.controls if _key(row, handle) not in self._answers]
        if not _pending(missing):
            self.opened(missing)  # raises, because none of them will ever be loaded
        self.settle(missing, timeout_s)
        for handle in dict.fromkeys(missing):
            _local_session(handle).waited_s += perf_counter() - began_s
        self._compute()

    def is_void(self, row: Row) -> bool:
        return False

    def take(self, row: Row, point: int) -> Sequence[Tensor | None]:
        return [self._addend(row, handle, point) for handle in row.controls]

    def is_shared(self, row: Row) -> bool:
        return any(_key(row, handle) in self._shared for handle in row.controls)

    def _addend(self, row: Row, handle: Hashable, point: int) -> Tensor | None:
        answer, session = self._answers[_key(row, handle)], _local_session(handle).session
        assert session is not None, "residuals are only computed for rows with a session"
        index = residual_at(self._backbone, point, len(answer), session.net.layout.singles)
        return None if index is None else answer[index]

    def _compute(self) -> None:
        """Compute the missing residuals whose ControlNet is loaded, in as few forward passes as possible."""
        groups: dict[Hashable, dict[_RowKey, tuple[Row, _LocalSession, ControlSession]]] = {}
        for row in self._rows:
            for handle in row.controls:
                local = _local_session(handle)
                session = None if local.failed else self._session(local)
                if session is not None and _key(row, handle) not in self._answers:
                    key = (session.batch_key, row.sample.shape, row.embeds.prompt.shape, session if row.alone else None)
                    groups.setdefault(key, {})[_key(row, handle)] = row, local, session
        for group in groups.values():
            self._run(list(group.values()))

    @torch.inference_mode()
    def _run(self, group: Sequence[tuple[Row, _LocalSession, ControlSession]]) -> None:
        device = open_device(group[0][0].sample.device)
        began = device.record()
        rows = [
            ControlRow(
                session=session,
                half=half_of_residuals(local.control, row),
                sample=self._sample(row, session),
                timestep=row.timestep,
            )
            for row, local, session in group
        ]
        fixed_rows = 0 if group[0][0].alone else self._fixed_rows
        if not computes_one_session(rows) or len(rows) < fixed_rows:
            self._shared.update(_key(row, local) for row, local, _ in group)
        residuals = run_group(rows, fixed_rows=fixed_rows)
        for index, (row, local, session) in enumerate(group):
            # In place, because nothing else reads the residuals.
            scaled = zip(residuals, session.scales, strict=True)
            self._answers[_key(row, local)] = [residual[index].mul_(scale) for residual, scale in scaled]
        span = Span(begin=began, end=device.record())
        for local in {local for _, local, _ in group}:
            local.computed.add(span)

    def _sample(self, row: Row, session: ControlSession) -> Tensor:
        if not session.net.reads_tokens:
            return row.sample
        assert isinstance(self._backbone, Sd3Backbone), "a ControlNet that reads tokens fits no other model"
        return self._backbone.tokens(row.sample[None])[0]

    def _session(self, local: _LocalSession) -> ControlSession | None:
        """Return the session, or None while its ControlNet is being loaded. Raise the BottegaError of a failed load."""
        if local.session is None and local.lease.values.done():
            net = local.lease.values.result()[local.place]
            local.session = ControlSession(net, local.control, local.images)
        return local.session


_RowKey = tuple[Hashable, Half, Hashable]
"""A row's owner, the half (conditional or not) whose residuals it uses, and the handle of the session."""


def _key(row: Row, handle: Hashable) -> _RowKey:
    return row.owner, half_of_residuals(_local_session(handle).control, row), handle


def _local_session(handle: Hashable) -> _LocalSession:
    assert isinstance(handle, _LocalSession), "every handle was made here"
    return handle


def _pending(handles: Sequence[Hashable]) -> set[Future[tuple[LoadedControlNet, ...]]]:
    """Return the futures of these sessions' loads that are not done."""
    holds = {_local_session(handle).lease.values for handle in handles}
    return {nets for nets in holds if not nets.done()}
