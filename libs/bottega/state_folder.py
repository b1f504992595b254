"""Where Bottega keeps what outlives its processes: services, the command and the trainings all look there.

Light, so that a command that only lists something need not read what configuration needs.
"""

from __future__ import annotations

import os
from pathlib import Path

STATE_VARIABLE = "BOTTEGA_STATE"


def state_folder() -> Path:
    """$BOTTEGA_STATE, else bottega in $XDG_STATE_HOME or ~/.local/state."""
    if chosen := os.environ.get(STATE_VARIABLE):
        return Path(chosen)
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "bottega"
