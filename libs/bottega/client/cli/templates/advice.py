"""What to do about errors that recorded activations cause, in a person's words."""

from __future__ import annotations

from bottega.errors import BottegaError


def advice_for(error: BottegaError) -> str | None:
    """None: what is not recorded is computed, and workers have advice of their own."""
    return None
