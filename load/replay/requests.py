"""A request as it was planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["draw", "edit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """A picture that is asked for."""

    at_s: float
    """Seconds from the beginning of the run at which it is sent."""
    kind: Kind
    prompt: str
    seed: int
    steps: int
    """Denoising steps."""
    template: int | None
    """Rank of the image that an edit edits, from 0, the most popular one; None for a draw."""
    mask_ratio: float | None
    """Share of that image that is redrawn, above 0 and below 1; None for a draw."""
    controlnets: tuple[str, ...]
    """Names, all of them different."""
    loras: tuple[str, ...]
    """Names, all of them different."""
    session: int
    """Number of its user's session, whose requests follow from each other."""
