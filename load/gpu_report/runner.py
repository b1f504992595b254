"""Runs parts one after the other, and goes on where an earlier run was cut off.

Each may have a process of its own (`python -m load.gpu_report.runner PART ...`), which is ended after so long, whatever
hangs in it. The process that runs them imports no torch.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from load.gpu_report.environment import setting_of
from load.gpu_report.parts import PARTS, Part
from load.gpu_report.report import Outcome, Results
from load.gpu_report.rig import SIZES, LeftOutError, Rig

# Of one part, so that a machine that is lent for ten minutes at a time gets through all.
LONGEST_S = 480.0
# That a part has to stop what it started.
GRACE_S = 20.0
# Of an error's text: enough for the reason, and for where.
_MOST_CHARACTERS = 2000

Run = Callable[[Part], Outcome]


def run_parts(
    parts: Sequence[Part],
    results: Results,
    run: Run,
    *,
    until_s: float = float("inf"),
    told: Callable[[str], None] = print,
) -> None:
    """Run the parts that have not been measured or left out in this setting.

    Args:
        until_s: Monotonic time from which on none is begun any more.
        told: Is called with a line for each.
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
        why = f": {outcome.reason}" if outcome.why else ""
        told(f"{part.name}: {outcome.status} after {outcome.seconds:.0f} s{why}")


class PartProcesses:
    """A Run in processes.

    Args:
        command: Of a part's process, which puts its outcome into the results.
        environment: Added to this process's.
    """

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
        """Return the part's outcome, also where its process puts none; an earlier run's does not count."""
        self._results.forget(part.name)
        began_s = time.monotonic()
        process = subprocess.Popen(self._command(part), env=self._environment, start_new_session=True)
        try:
            why = f"its process ended with {process.wait(self._longest_s)} and without an outcome"
        except subprocess.TimeoutExpired:
            why = f"it was ended after {self._longest_s:g} s"
        finally:
            self._end(process)
        setting, seconds = self._results.setting, time.monotonic() - began_s
        failed = Outcome(part=part.name, status="failed", seconds=seconds, setting=setting, why=why)
        return self._results.get(part.name) or failed

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Ask all processes of a group to end, and end them after a while."""
        if process.poll() is None:
            process.terminate()  # it stops what it started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(self._grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(self._grace_s)


def run_part(part: Part, rig: Rig, setting: Mapping[str, str]) -> Outcome:
    """Measure in this process; an error is the part's outcome."""
    import torch

    from bottega.device.devices import use_device

    began_s = time.perf_counter()

    def ended(status: str, **fields: object) -> Outcome:
        seconds = 0.0 if status == "left out" else round(time.perf_counter() - began_s, 1)
        return Outcome(part=part.name, status=status, seconds=seconds, setting=setting, **fields)  # type: ignore[arg-type]

    try:
        use_device(torch.device(rig.device))
        return ended("measured", figures=tuple(part.load()(rig)))
    except LeftOutError as reason:
        return ended("left out", why=str(reason))
    except Exception as error:  # noqa: BLE001 - the boundary of a part: the others go on
        return ended("failed", why="".join(traceback.format_exception(error))[-_MOST_CHARACTERS:])


def main() -> int:
    """Run one part; return 1 where it failed."""
    parser = argparse.ArgumentParser(prog="python -m load.gpu_report.runner", description=__doc__)
    parser.add_argument("part", choices=[part.name for part in PARTS])
    parser.add_argument("--size", choices=list(SIZES), required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    # The services that a part has started are stopped on its way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    rig = Rig(size=SIZES[options.size], device=options.device, folder=options.folder.resolve())
    results = Results(rig.folder, setting_of(rig.size, rig.device))
    (part,) = (part for part in PARTS if part.name == options.part)
    outcome = run_part(part, rig, results.setting)
    results.put(outcome)
    return 1 if outcome.status == "failed" else 0


if __name__ == "__main__":
    sys.exit(main())
