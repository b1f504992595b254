"""The ControlNets that the engine hosts: found in their folders, identified by digest, loaded when they are leased."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bottega import kinds, rules
from bottega.addons.controlnets.engine import (
    ControlLayout,
    ControlNetCache,
    ControlNetLease,
    ControlNetSource,
    LoadedControlNet,
    find_controlnet,
    load_controlnet,
)
from bottega.device.heartbeat import call_after_blocks
from bottega.errors import ControlNetNotFound, ControlNetUnusable
from bottega.model.weights import DTYPES, dtype_name
from bottega.model_files.digest import controlnet_digest
from bottega.planning import StepTimes
from bottega.process import open_files
from bottega.v1 import hosted_pb2
from bottega.v1.hosted_pb2 import ForwardTime, Hosted, HostedState

# The limit in hosted.proto.
_MAX_FORWARD_TIMES = 64
# Number of characters of a digest that distinguish two versions of a name.
_VERSION_CHARACTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetReference:
    """A ControlNet that a session asks for."""

    name: str
    digest: str
    """Digest of the requested version; "" means any version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegisteredModel:
    source: ControlNetSource
    """How to load it, in the configured data type, else in that of its files. Its name is unique for each version."""
    digest: str

    def key(self, dtype: torch.dtype) -> str:
        """Return the ControlNet's cache key for a data type. Workers may use several data types."""
        return f"{self.source.name} in {dtype_name(dtype)}"

    def in_dtype(self, dtype: torch.dtype) -> ControlNetSource:
        """Return the ControlNet's source in a data type, with its cache key as name."""
        size_bytes = self.source.size_bytes // self.source.dtype.itemsize * dtype.itemsize
        return replace(self.source, name=self.key(dtype), dtype=dtype, size_bytes=size_bytes)


class ModelRegistry:
    """The ControlNets that the engine hosts. Any thread may call it; only `add` waits for the disk.

    Args:
        device: Device onto which they are loaded.
        dtype: The data type of all workers; None if each may have its own.
        alive: Called often during the forward passes of its ControlNets; must be fast.
    """

    def __init__(
        self, *, budget_bytes: int, device: torch.device, dtype: torch.dtype | None, alive: Callable[[], None]
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._last_dtype: torch.dtype | None = None
        self._alive = alive
        self._sources: dict[str, ControlNetSource] = {}
        self._models: dict[str, _RegisteredModel] = {}
        self._lock = threading.Lock()
        self._pinned: frozenset[str] = frozenset()
        self.cache = ControlNetCache(self._sources, budget_bytes=budget_bytes, device=device, load=self._load)

    def add(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        """Host the ControlNet in the folder under that name.

        Raises InvalidRequest, ControlNetUnusable, TooManyOpenFiles.

        Args:
            root: Folder that must contain all its files; None allows any place.
        """
        found = find_controlnet(name, folder, base=None, dtype=self._dtype, root=root)
        try:
            with open_files.translated():
                found_digest = controlnet_digest(folder, root)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ControlNetUnusable(f"ControlNet {name} cannot be read: {why}") from None
        version = f"{name}@{found_digest[:_VERSION_CHARACTERS]}"
        with self._lock:
            before = self._models.get(name)
            model = self._models[name] = _RegisteredModel(source=replace(found, name=version), digest=found_digest)
            for dtype in DTYPES.values():
                if before is not None and before.source.name != version:
                    self._sources.pop(before.key(dtype), None)
                if dtype == self._dtype or self._dtype is None:
                    self._sources[model.key(dtype)] = model.in_dtype(dtype)
        self._pin()
        return self._reported(name, model, {}, {})

    def borrow(
        self, wanted: Sequence[ControlNetReference], *, base: ControlLayout, dtype: torch.dtype
    ) -> ControlNetLease:
        """Lease ControlNets together, for a worker's model with the layout `base` and a data type.

        Raises ControlNetNotFound if one is not hosted in the requested version, ControlNetUnusable if one does not fit
        the model, and the errors of ControlNetCache.borrow.
        """
        if self._dtype is not None and dtype != self._dtype:
            raise ControlNetUnusable(
                f"this server computes in {dtype_name(self._dtype)} and the worker in {dtype_name(dtype)}: pictures "
                "would not be those of one process; give both the same dtype, or the server dtype auto"
            )
        self._last_dtype = dtype
        versions = []
        for reference in wanted:
            model = self._models.get(reference.name)
            if model is None or reference.digest not in ("", model.digest):
                served = ", ".join(sorted(self._models))
                which = f" with the digest {reference.digest[:_VERSION_CHARACTERS]}" if model is not None else ""
                raise ControlNetNotFound(f"{reference.name}{which} is not hosted here", metadata={"served": served})
            if misfits := list(model.source.layout.misfits(base)):
                raise ControlNetUnusable(f"ControlNet {reference.name} does not fit the model: {'; '.join(misfits)}")
            versions.append(model.key(dtype))
        return self.cache.borrow(versions)

    def prefetch(self, names: Sequence[str], *, retry: bool = False) -> None:
        """Load ControlNets now, because sessions will need them soon.

        Args:
            names: The most wanted ones first.
            retry: Whether those whose last load failed are loaded again.
        """
        models = [model for name in names if (model := self._models.get(name))]
        self.cache.expect([model.key(self._expected_dtype(model)) for model in models], retry=retry)

    def drop(self, names: Sequence[str]) -> None:
        """Evict ControlNets that are neither used nor pinned, because no session will need them soon."""
        models = [model for name in names if (model := self._models.get(name))]
        self.cache.drop([model.key(dtype) for model in models for dtype in DTYPES.values()])

    def pin(self, names: Sequence[str]) -> None:
        """Keep these ControlNets, and no others, in memory. Names that are not hosted yet are pinned when they are."""
        self._pinned = frozenset(names)
        self._pin()

    def report(self, sessions: dict[str, int], times: Mapping[str, StepTimes] | None = None) -> list[Hosted]:
        """Return the state of all ControlNets, sorted by name.

        Args:
            sessions: Number of open sessions, by name.
            times: Measured forward passes, by cache key.
        """
        states = dict.fromkeys(self.cache.coming, hosted_pb2.HOSTED_STATE_LOADING)
        states |= dict.fromkeys(self.cache.loaded, hosted_pb2.HOSTED_STATE_LOADED)
        popularity = self.cache.popularity
        with self._lock:
            models = sorted(self._models.items())
        reports = [self._reported(name, model, popularity, states) for name, model in models]
        for report, (name, model) in zip(reports, models, strict=True):
            report.sessions = sessions.get(name, 0)
            measured = (times or {}).get(model.key(self._expected_dtype(model)))
            report.forward_times.extend(_forward_times(measured) if measured is not None else ())
        return reports

    def _pin(self) -> None:
        """Pin the hosted ones of the pinned names in the data type that sessions probably need."""
        with self._lock:
            models = [model for name, model in self._models.items() if name in self._pinned]
        self.cache.pin([model.key(self._expected_dtype(model)) for model in models])

    def _load(self, source: ControlNetSource, device: torch.device) -> LoadedControlNet:
        net = load_controlnet(source, device)
        call_after_blocks((net.network,), self._alive)
        return net

    def _reported(
        self,
        name: str,
        model: _RegisteredModel,
        popularity: Mapping[str, int],
        states: Mapping[str, HostedState.ValueType],
    ) -> Hosted:
        keys = [model.key(dtype) for dtype in DTYPES.values()]
        found = [states[key] for key in keys if key in states]
        return Hosted(
            kind=kinds.CONTROLNET,
            name=name,
            digest=model.digest,
            base=model.source.layout.base,
            size_bytes=model.in_dtype(self._expected_dtype(model)).size_bytes,
            state=_best(found),
            popularity=sum(popularity.get(key, 0) for key in keys),
            control_modes=model.source.modes,
            load_s=float(f"{self.cache.load_s(model.key(self._expected_dtype(model))):.2g}"),
            pinned=name in self._pinned,
            load_error=next(filter(None, map(self.cache.load_error, keys)), "")[: rules.MAX_REASON_CHARACTERS],
            failed_loads=sum(map(self.cache.failed_loads, keys)),
        )

    def _expected_dtype(self, model: _RegisteredModel) -> torch.dtype:
        """Return the data type that the next session probably needs: that of the last session, else the default."""
        of_files = model.source.dtype
        if of_files == torch.float16 and self._device.type == "cpu":
            of_files = torch.bfloat16
        return self._dtype or self._last_dtype or of_files


def _forward_times(times: StepTimes) -> Iterator[ForwardTime]:
    """Yield the measurements of the newest sizes, rounded, so that the report of an unchanged load stays the same."""
    entries = list(times.entries())[-_MAX_FORWARD_TIMES:]
    for (height, width), rows, seconds in entries:
        if seconds > 0:
            yield ForwardTime(latent_height=height, latent_width=width, rows=rows, seconds=float(f"{seconds:.2g}"))


def _best(states: Sequence[HostedState.ValueType]) -> HostedState.ValueType:
    """Return the state of a ControlNet from its states in several data types."""
    for state in (hosted_pb2.HOSTED_STATE_LOADED, hosted_pb2.HOSTED_STATE_LOADING):
        if state in states:
            return state
    return hosted_pb2.HOSTED_STATE_ON_DISK
