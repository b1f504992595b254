"""A file with the last reading of a steady clock, from which the next process continues."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from pathlib import Path

from bottega.clocks import ClockMark, SteadyClock


def resume(clock: SteadyClock, path: Path) -> bool:
    """Let the clock continue from the file. Return False if there is no file, or its content is invalid."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        mark = ClockMark(boot=str(content["boot"]), ahead_s=float(content["ahead_s"]), steady=float(content["steady"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if not (math.isfinite(mark.ahead_s) and math.isfinite(mark.steady)):
        return False
    clock.resume(mark)
    return True


def note(clock: SteadyClock, path: Path) -> None:
    """Write the reading of the clock. If the disk cannot be written, the old file stays."""
    temporary = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(dataclasses.asdict(clock.mark())), encoding="utf-8")
        temporary.replace(path)
