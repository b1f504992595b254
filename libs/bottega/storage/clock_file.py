"""A file that says where a steady clock was, for the process that goes on with it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

from bottega.clocks import ClockMark, SteadyClock


def resume(clock: SteadyClock, path: Path) -> bool:
    """Let the clock go on from the file. Return False where there is none, or what is in it makes no sense."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        mark = ClockMark(boot=str(said["boot"]), ahead_s=float(said["ahead_s"]), steady=float(said["steady"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not (math.isfinite(mark.ahead_s) and math.isfinite(mark.steady)):
        return False
    clock.resume(mark)
    return True


def note(clock: SteadyClock, path: Path) -> None:
    """Write where the clock is. A disk that cannot be written keeps what it has."""
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(dataclasses.asdict(clock.mark())), encoding="utf-8")
        temporary.replace(path)
