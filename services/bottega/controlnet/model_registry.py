"""The ControlNets that the engine hosts: found in their folders, told apart by digest, loaded when they are leased."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bottega import kinds
from bottega.diffusion.controlnets import (
    ControlLayout,
    ControlNetCache,
    ControlNetLease,
    ControlNetSource,
    LoadedControlNet,
    find_controlnet,
    load_controlnet,
)
from bottega.diffusion.heartbeat import call_after_blocks
from bottega.diffusion.model.dtype import DTYPES, dtype_name
from bottega.errors import ControlNetNotFound, ControlNetUnusable
from bottega.model_files.digest import controlnet_digest
from bottega.process import open_files
from bottega.v1 import hosted_pb2
from bottega.v1.hosted_pb2 import Hosted, HostedState

# Characters of a digest that tell two versions of a name apart in the cache.
_VERSION_CHARACTERS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetReference:
    """A ControlNet that somebody asks for. digest: of the one meant; empty is whatever has the name."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegisteredModel:
    """A ControlNet that is hosted."""

    source: ControlNetSource
    """In the configured element type, else in that of its files. Its name is unique per version."""
    digest: str

    def key(self, dtype: torch.dtype) -> str:
        """Return its key in the cache: an element type each, as workers of several may come."""
        return f"{self.source.name} in {dtype_name(dtype)}"

    def in_dtype(self, dtype: torch.dtype) -> ControlNetSource:
        """Return its source in an element type, by its key."""
        size_bytes = self.source.size_bytes // self.source.dtype.itemsize * dtype.itemsize
        return replace(self.source, name=self.key(dtype), dtype=dtype, size_bytes=size_bytes)


class ModelRegistry:
    """The ControlNets that the engine hosts. Any thread may call it; only `add` waits for the disk.

    Args:
        budget_bytes: For weights.
        device: That they are loaded onto.
        dtype: The element type of all workers; None where each may have its own.
        alive: Called often from inside the forwards of its ControlNets; must be quick.
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
        self.cache = ControlNetCache(self._sources, budget_bytes=budget_bytes, device=device, load=self._load)

    def add(self, name: str, folder: Path, root: Path | None = None) -> Hosted:
        """Hosts what is in the folder under that name, from now on. root: outside of which no file of it may be.

        Raises InvalidRequest, ControlNetUnusable, TooManyOpenFiles.
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
        return self._reported(name, model, {}, {})

    def borrow(
        self, wanted: Sequence[ControlNetReference], *, base: ControlLayout, dtype: torch.dtype
    ) -> ControlNetLease:
        """Borrows these together, for a worker's model of that layout and element type.

        Raises ControlNetNotFound where one is not hosted in the version meant, ControlNetUnusable where one does not
        fit, and as ControlNetCache.borrow does.
        """
        if self._dtype is not None and dtype != self._dtype:
            raise ControlNetUnusable(
                f"this server computes in {dtype_name(self._dtype)} and the worker in {dtype_name(dtype)}: pictures "
                "would not be those of one process; give both the same dtype, or the server dtype auto"
            )
        self._last_dtype = dtype
        versions = []
        for each in wanted:
            model = self._models.get(each.name)
            if model is None or each.digest not in ("", model.digest):
                served = ", ".join(sorted(self._models))
                which = f" with the digest {each.digest[:_VERSION_CHARACTERS]}" if model is not None else ""
                raise ControlNetNotFound(f"{each.name}{which} is not hosted here", metadata={"served": served})
            if misfits := list(model.source.layout.misfits(base)):
                raise ControlNetUnusable(f"ControlNet {each.name} does not fit the model: {'; '.join(misfits)}")
            versions.append(model.key(dtype))
        return self.cache.borrow(versions)

    def prefetch(self, names: Sequence[str]) -> None:
        """Sessions with these will come."""
        models = [model for name in names if (model := self._models.get(name))]
        self.cache.expect([model.key(self._expected_dtype(model)) for model in models])

    def report(self, sessions: dict[str, int]) -> list[Hosted]:
        """All of them, by name. sessions: that are open, by name."""
        states = dict.fromkeys(self.cache.coming, hosted_pb2.HOSTED_STATE_LOADING)
        states |= dict.fromkeys(self.cache.loaded, hosted_pb2.HOSTED_STATE_LOADED)
        popularity = self.cache.popularity
        with self._lock:
            models = sorted(self._models.items())
        reports = [self._reported(name, model, popularity, states) for name, model in models]
        for report in reports:
            report.sessions = sessions.get(report.name, 0)
        return reports

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
        )

    def _expected_dtype(self, model: _RegisteredModel) -> torch.dtype:
        """Return the element type that the next session will want: that of the last one, else as workers choose it."""
        of_files = model.source.dtype
        if of_files == torch.float16 and self._device.type == "cpu":
            of_files = torch.bfloat16
        return self._dtype or self._last_dtype or of_files


def _best(states: Sequence[HostedState.ValueType]) -> HostedState.ValueType:
    """Return the state of what is there in several element types, or in none."""
    for state in (hosted_pb2.HOSTED_STATE_LOADED, hosted_pb2.HOSTED_STATE_LOADING):
        if state in states:
            return state
    return hosted_pb2.HOSTED_STATE_ON_DISK
