"""Runs parts one after the other, and goes on where an earlier run was cut off.

Each may have a process of its own, which ends after so long at the latest, whatever hangs in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from load.gpu_report.parts import Part
from load.gpu_report.results import Outcome, Results

# Of one part, so that a machine that is lent for ten minutes at a time gets through all.
LONGEST_S = 480.0
# That a part has to stop what it started.
GRACE_S = 20.0

Run = Callable[[Part], Outcome]


def run_parts(
    parts: Sequence[Part],
    results: Results,
    run: Run,
    *,
    until_s: float = float("inf"),
    told: Callable[[str], None] = print,
) -> None:
    """Runs those that have not been measured or left out in this setting.

    until_s: on the monotonic clock, from when on none is begun any more. told: hears a line for each.
    """
    for part in parts:
        known = results.get(part.name)
        if known is not None and known.status != "failed":
            told(f"{part.name}: {known.status} before")
            continue
        if time.monotonic() >= until_s:
            told(f"{part.name}: not begun; the next run goes on here")
            continue
        told(f"{part.name}: {part.question}")
        outcome = run(part)
        results.put(outcome)
        told(f"{part.name}: {outcome.status} after {outcome.seconds:.0f} s{_last_line(outcome.why)}")


class PartProcesses:
    """A Run in processes. command: of a part's process, which puts its outcome into the results. environment: added."""

    def __init__(
        self,
        results: Results,
        command: Callable[[Part], Sequence[str]],
        *,
        environment: Mapping[str, str] | None = None,
        longest_s: float = LONGEST_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self._results = results
        self._command = command
        self._environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **(environment or {})}
        self._longest_s = longest_s
        self._grace_s = grace_s

    def __call__(self, part: Part) -> Outcome:
        """Its outcome, also where its process says none. What an earlier run said of it is not taken for it."""
        self._results.forget(part.name)
        began_s = time.monotonic()
        process = subprocess.Popen(self._command(part), env=self._environment, start_new_session=True)
        try:
            why = f"its process ended with {process.wait(self._longest_s)} and said nothing"
        except subprocess.TimeoutExpired:
            why = f"it was ended after {self._longest_s:g} s"
        finally:
            self._end(process)
        seconds = time.monotonic() - began_s
        said = self._results.get(part.name)
        return said or Outcome(part=part.name, status="failed", seconds=seconds, setting=self._results.setting, why=why)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Asks all processes of its group to end, and ends them after a while. Harmless where there are none."""
        if process.poll() is None:
            process.terminate()  # it stops what it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(self._grace_s)


def _last_line(why: str) -> str:
    lines = why.strip().splitlines()
    return f": {lines[-1]}" if lines else ""
