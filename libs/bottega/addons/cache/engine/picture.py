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
    """The latent that the picture must start from, and waits for before its first step; None if any latent will do."""
    hit: tuple[CacheStart, Tensor] | None = None
    """A latent that has arrived and that the picture may start from; None without one."""
    started: CachedStart | None = None
    """The latent that the picture has started from; None for noise."""

    @property
    def blocked(self) -> bool:
        """Whether the picture waits for the latent that it must start from."""
        return self.pinned is not None and self.started is None

    def first_step(self, start: CacheStart) -> int:
        """Return the first step that the picture computes if it starts from this latent."""
        return self.request.first_step_from(start.step)

    def is_beyond(self, start: CacheStart) -> bool:
        """Return whether the picture has already made the steps that the latent would save."""
        return self.request.step >= self.first_step(start)

    def mark_started(self, start: CacheStart, made_steps: int) -> None:
        """Record that the picture continues from this latent, in this attempt or since an earlier one.

        Args:
            made_steps: Steps that the picture had made from noise before.
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
        """Start from `hit` if that is possible now, and return the outcome.

        Returns:
            "hits" if it started; "late_hits" or "unfit_hits" if it dropped `hit`; "held" if `hit` may be used later.

        Raises:
            InvalidRequest: The picture must start from `hit`, but its LoRAs are applied too late for that.
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
        """Minimum number of steps that a latent must save.

        It is 2 if residuals of a step may be used in the next step: they may have been requested already, but do not
        fit the first step after the latent.
        """
        return 2 if self.request.spec.stale_residuals and self.request.controls else 1
