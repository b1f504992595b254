"""What the blocks of a row computed at an earlier step, which is reused while its first block changes little.

This is an approximation. The first block runs at every step. If its residual, output less input, is near that of the
last step that ran in full, the residual of all other blocks is reused from there. Each row decides for itself, so that
it does not depend on the rows that it shares forward passes with.

Diffusers' hooks and the library cache-dit have one state and one decision for all rows of a forward pass. So they do
not fit batches whose requests come and go and are at different steps.

Source: First Block Cache of ParaAttention and Diffusers, after TeaCache (arXiv 2411.19108).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from bottega.device.memory_plan import MemoryPlan

THRESHOLD = 0.05
"""Largest mean change of the first block's residual, relative to its mean, with which a step is reused.

It is the default of Diffusers.
"""

_HOLDER = "step caches"
# Bound on the caches of an engine, and their share of the memory that is left: 42 guided pictures of SD3 at 1024x1024.
_MOST_BYTES = 2 << 30
_SHARE = 8


class StepCache:
    """The residuals of one row at the last step that ran in full. It takes memory for two tensors of tokens."""

    __slots__ = ("__weakref__", "first", "rest")

    def __init__(self) -> None:
        self.first: Tensor | None = None
        """Residual of the first block, [tokens, features]; None before the first step."""
        self.rest: Tensor | None = None
        """Residual of all other blocks, likewise."""

    def reused(self, first: Tensor) -> Tensor | None:
        """Return the other blocks' residual for a step with this one of the first block; None if it must run in full.

        Waits for the device.
        """
        if self.first is None or self.rest is None or not self.first.shape == self.rest.shape == first.shape:
            return None
        change = (first - self.first).abs().mean() / self.first.abs().mean()
        return self.rest if bool(change <= THRESHOLD) else None

    def keep(self, first: Tensor, rest: Tensor) -> None:
        """Replace the residuals by those of a step that ran in full."""
        self.first, self.rest = first, rest

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.first, self.rest) if tensor is not None)

    def clear(self) -> None:
        """Forget the step."""
        self.first = self.rest = None


class StepCacheMemory:
    """The memory of all step caches of an engine. A row for which none is left computes all of its steps in full."""

    def __init__(self, plan: MemoryPlan | None = None) -> None:
        self._plan = plan or MemoryPlan()
        self._caches: weakref.WeakSet[StepCache] = weakref.WeakSet()
        self._counted_bytes = 0

    def count(self, caches: Iterable[StepCache | None] = ()) -> None:
        """Reserve what all caches take now, with those that are new."""
        self._caches.update(cache for cache in caches if cache is not None)
        used_bytes = sum(cache.size_bytes for cache in self._caches)
        if used_bytes != self._counted_bytes:
            self._plan.reserve_up_to(_HOLDER, used_bytes, share=1.0)
            self._counted_bytes = used_bytes

    def keep(self, cache: StepCache, first: Tensor, rest: Tensor) -> None:
        """Let a cache keep a step that ran in full, or nothing if it does not fit beside the others."""
        cache.clear()
        self.count([cache])
        left_bytes = self._plan.left_bytes
        most_bytes = _MOST_BYTES
        if left_bytes is not None:
            most_bytes = min(most_bytes, (left_bytes + self._counted_bytes) // _SHARE)
        if self._counted_bytes + first.nbytes + rest.nbytes <= most_bytes:
            cache.keep(first, rest)
            self.count()


class StepCaches:
    """The step caches of the rows of a request, by the name of their half of guidance.

    Args:
        enabled: Whether its rows may reuse steps.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._caches: dict[str, StepCache] = {}
        self._loras: object = None
        self._restored = False

    def enter(self, loras: object, *, controlled: bool, continued: bool) -> None:
        """Begin an evaluation. Forget all steps if it is computed with other LoRAs, or with ControlNets.

        Args:
            loras: The LoRAs of the evaluation; None for none.
            controlled: Whether a ControlNet is active.
            continued: Whether the evaluation before, perhaps of another engine, had LoRAs.
        """
        if controlled or (loras is not self._loras and not (self._restored and continued)):
            self.clear()
        self._loras, self._restored = loras, False

    def of(self, half: str) -> StepCache | None:
        """Return the cache of a half; None if its rows may not reuse steps."""
        return self._caches.setdefault(half, StepCache()) if self._enabled else None

    def clear(self) -> None:
        """Forget all steps."""
        for cache in self._caches.values():
            cache.clear()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name. Later steps do not change them."""
        for half, cache in self._caches.items():
            if cache.first is not None and cache.rest is not None:
                yield from ((f"{half}.first", cache.first), (f"{half}.rest", cache.rest))

    def restore(self, tensors: Mapping[str, Tensor], to_device: Callable[[Tensor], Tensor]) -> None:
        """Continue with the tensors of `state`."""
        self._restored = True
        for name, tensor in tensors.items():
            half, _, residual = name.partition(".")
            if (cache := self.of(half)) is not None and residual in ("first", "rest"):
                setattr(cache, residual, to_device(tensor))
