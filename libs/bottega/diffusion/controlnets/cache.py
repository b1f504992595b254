"""The ControlNets that are loaded: the loader of a LoadCache, beside whose loads sessions run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from bottega.caching import Lease, LoadCache, Popularity
from bottega.diffusion.controlnets.network import ControlNetSource, LoadedControlNet, load_controlnet
from bottega.diffusion.errors import to_job_failure
from bottega.errors import BottegaError, ControlNetNotFound

ControlNetLease = Lease[LoadedControlNet]
_Load = Callable[[ControlNetSource, torch.device], LoadedControlNet]


class ControlNetCache(LoadCache[LoadedControlNet]):
    """Loads ControlNets within `budget_bytes` and lets them go.

    sources: by name; may grow while the cache is open. popularity: in what order they are let go.
    load: makes a ControlNet of a source, in the cache's own thread; raises BottegaError saying why not.
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
    """Sizes and weights of ControlNets by name."""

    what = "ControlNet"

    def __init__(self, sources: Mapping[str, ControlNetSource], device: torch.device, load: _Load) -> None:
        self._sources = sources
        self._device = device
        self._load = load

    def size_bytes(self, name: str) -> int:
        """Of its weights. Raises ControlNetNotFound."""
        return self._source(name).size_bytes

    def load(self, name: str) -> LoadedControlNet:
        """Its weights, on the device. Raises BottegaError."""
        try:
            return self._load(self._source(name), self._device)
        except BottegaError:
            raise
        except Exception as error:  # what torch raises
            raise to_job_failure(error) from error

    def _source(self, name: str) -> ControlNetSource:
        source = self._sources.get(name)
        if source is None:
            served = ", ".join(sorted(self._sources))
            raise ControlNetNotFound(f"there is no ControlNet {name!r} here", metadata={"served": served})
        return source
