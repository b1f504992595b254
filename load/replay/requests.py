"""A request as it was planned, before anybody knows who answers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["draw", "edit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One picture that somebody wants. at_s: when it is sent, from the beginning of the run on.

    steps: denoising steps that it asks for. template: of an edit, the rank of the image that it edits, from 0, the most
    popular one; mask_ratio: the share of that image that is redrawn, above 0 and below 1. Both are None for a draw.
    controlnets, loras: names, all of them different. session: of its user; the requests of one follow from each other.
    """

    at_s: float
    kind: Kind
    prompt: str
    seed: int
    steps: int
    template: int | None
    mask_ratio: float | None
    controlnets: tuple[str, ...]
    loras: tuple[str, ...]
    session: int
