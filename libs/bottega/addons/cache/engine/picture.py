"""One picture of a job and the cached latent that it starts from."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bottega.addons.cache.wire import format_start
from bottega.engine.events import CachedStart
from bottega.engine.request import Request
from bottega.errors import InvalidRequest
from bottega.v1.cache_pb2 import CacheStart


@dataclass(slots=True, kw_only=True, eq=False)
class StartingPicture:
    """A picture that may start from a cached latent."""

    request: Request
    pinned: CacheStart | None = None
    """The latent that it must start from, and waits for before its first step; None if any hit will do."""
    hit: tuple[CacheStart, Tensor] | None = None
    """A latent that has arrived and that it may start from."""
    started: CachedStart | None = None
    """The start that it made."""

    @property
    def blocked(self) -> bool:
        """Whether it waits for the latent that it must start from."""
        return self.pinned is not None and self.started is None

    def first_step(self, start: CacheStart) -> int:
        """Return the first step that it makes after this start."""
        return self.request.first_step_from(start.step)

    def is_beyond(self, start: CacheStart) -> bool:
        """Return whether the picture is at the start's step or beyond it, so that the start would save nothing."""
        return self.request.step >= self.first_step(start)

    def mark_started(self, start: CacheStart, made_steps: int) -> None:
        """Note that the picture continues from this start, in this attempt or since an earlier one.

        Args:
            made_steps: Steps that the picture had made from noise when it started.
        """
        self.hit = None
        first = self.first_step(start)
        self.started = CachedStart(
            image=self.request.index,
            entry=start.entry,
            step=start.step,
            from_step=first,
            skipped_steps=max(0, first - made_steps),
            similarity=start.similarity,
            without_loras=start.without_loras,
        )

    def take_hit(self) -> str:
        """Start from the hit if that is possible now, and return the outcome.

        Returns:
            "hits", "late_hits", "unfit_hits", or "held" if the hit may be used later.

        Raises:
            InvalidRequest: The picture must start from the hit, but its LoRAs are applied too late for that.
        """
        assert self.hit is not None, "checked by the caller"
        start, latent = self.hit
        request, first = self.request, self.first_step(start)
        if self.pinned is None and request.step + self._least_saved > first:
            self.hit = None
            return "late_hits"
        if request.spec.loras and not start.without_loras:
            # The entry was drawn with the LoRAs from its first step on, so that all steps after it need them as well.
            if request.loras_from is None:
                return "held"
            if request.loras_from > first:
                self.hit = None
                if self.pinned is not None:
                    raise InvalidRequest(
                        f"the LoRAs are applied at step {request.loras_from}, after step {first}, the first one after "
                        f"{format_start(start.entry, start.step)}"
                    )
                return "unfit_hits"
        # An earlier attempt that was lost may have made more wasted steps before it started from the same latent.
        made_steps = max(request.step, self.pinned.made_steps if self.pinned is not None else 0)
        request.start_from(latent, start.step)
        self.mark_started(start, made_steps)
        return "hits"

    @property
    def _least_saved(self) -> int:
        """Number of steps that a hit must save at least.

        Residuals of the next step may have been requested already. If residuals of one step may be used in the next
        one, those must not be used in the first step after a start.
        """
        return 2 if self.request.spec.stale_residuals and self.request.controls else 1
