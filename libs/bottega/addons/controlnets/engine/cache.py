"""A memory cache of loaded ControlNets, whose loads run beside sessions of other ControlNets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bottega.addons.controlnets.engine.network import ControlNetSource, LoadedControlNet, load_controlnet
from bottega.caching import Lease, LoadCache, Popularity
from bottega.engine.errors import to_job_failure
from bottega.errors import BottegaError, ControlNetNotFound

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
