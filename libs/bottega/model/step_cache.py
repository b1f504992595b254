"""What the blocks of a row computed at an earlier step, which is reused while its first block changes little.

This is an approximation. The first block runs at every step. If its residual, output less input, is near that of the
last step that ran in full, the residual of all other blocks is reused from there. Each row decides for itself, so that
it does not depend on the rows that it shares forward passes with.

Diffusers' hooks and the library cache-dit have one state and one decision for all rows of a forward pass. So they do
not fit batches whose requests come and go and are at different steps.

Source: First Block Cache of ParaAttention and Diffusers, after TeaCache (arXiv 2411.19108).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

THRESHOLD = 0.05
"""Largest mean change of the first block's residual, relative to its mean, with which a step is reused.

It is the default of Diffusers.
"""


class StepCache:
    """The residuals of one row at the last step that ran in full. It takes memory for two tensors of tokens."""

    __slots__ = ("first", "rest")

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


class StepCaches:
    """The step caches of the rows of a request, by the name of their half of guidance.

    Args:
        enabled: Whether its rows may reuse steps.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._caches: dict[str, StepCache] = {}

    def of(self, half: str) -> StepCache | None:
        """Return the cache of a half; None if its rows may not reuse steps."""
        return self._caches.setdefault(half, StepCache()) if self._enabled else None

    def clear(self) -> None:
        """Forget all steps."""
        self._caches.clear()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name. Later steps do not change them."""
        for half, cache in self._caches.items():
            if cache.first is not None and cache.rest is not None:
                yield from ((f"{half}.first", cache.first), (f"{half}.rest", cache.rest))

    def restore(self, tensors: Mapping[str, Tensor], to_device: Callable[[Tensor], Tensor]) -> None:
        """Continue with the tensors of `state`."""
        for name, tensor in tensors.items():
            half, _, residual = name.partition(".")
            if (cache := self.of(half)) is not None and residual in StepCache.__slots__:
                setattr(cache, residual, to_device(tensor))
