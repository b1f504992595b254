"""One picture of a job and the cached latent that it starts from: what it waits for, and when it takes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from bottega.diffusion.engine.events import CachedStart
from bottega.diffusion.engine.request import Request
from bottega.errors import InvalidRequest
from bottega.latents import format_start
from bottega.v1.cache_pb2 import CacheStart


@dataclass(slots=True, kw_only=True, eq=False)
class StartingPicture:
    """pinned: what it has to start from, which is waited for before its first step; None where any hit will do.

    hit: a latent that it may start from, which has come. started: what it has started from.
    """

    request: Request
    pinned: CacheStart | None = None
    hit: tuple[CacheStart, Tensor] | None = None
    started: CachedStart | None = None

    @property
    def blocked(self) -> bool:
        """Whether it waits for what it has to start from."""
        return self.pinned is not None and self.started is None

    def first_step(self, start: CacheStart) -> int:
        """Return the first step that it makes after this start."""
        return self.request.first_step_from(start.step)

    def is_beyond(self, start: CacheStart) -> bool:
        """Whether it has made that step, or comes to it next, so that the start saves nothing."""
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
        """Starts from its hit where that can be done now. What became of the hit; "held": it is taken later, or never.

        Raises InvalidRequest for a pinned one that its LoRAs are too late for.
        """
        assert self.hit is not None, "there is one"
        start, latent = self.hit
        request, first = self.request, self.first_step(start)
        if self.pinned is None and request.step + self._least_saved > first:
            self.hit = None
            return "late_hits"
        if request.spec.loras and not start.without_loras:
            # Its entry was drawn with them from its first step on: what follows it has to have them as well.
            if request.loras_from is None:
                return "held"
            if request.loras_from > first:
                self.hit = None
                if self.pinned is not None:
                    raise InvalidRequest(
                        f"the LoRAs go in at step {request.loras_from}, after step {first}, the first one after "
                        f"{format_start(start.entry, start.step)}"
                    )
                return "unfit_hits"
        # An earlier attempt that was lost may have made more steps in vain before it started from the same latent.
        made_steps = max(request.step, self.pinned.made_steps if self.pinned is not None else 0)
        request.start_from(latent, start.step)
        self.mark_started(start, made_steps)
        return "hits"

    @property
    def _least_saved(self) -> int:
        """Steps that a hit has to save at least.

        Residuals of the step that comes next may have been asked for already; where those of one step may be used in
        the step after it, they must not be in the one that a picture starts with.
        """
        return 2 if self.request.spec.stale_residuals and self.request.controls else 1
