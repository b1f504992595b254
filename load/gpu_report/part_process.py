"""One part, in a process of its own (`python -m load.gpu_report.part_process PART ...`) or in this one."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch

from bottega.diffusion.device.pick import use_device
from load.gpu_report.environment import setting_of
from load.gpu_report.parts import PARTS, Part
from load.gpu_report.results import Outcome, Results
from load.gpu_report.rig import LeftOutError, Rig
from load.gpu_report.size import SIZES

# Of an error's text: enough for the reason, and for where.
_MOST_CHARACTERS = 2000


def run_part(part: Part, rig: Rig, setting: Mapping[str, str]) -> Outcome:
    """Measures; what goes wrong is its outcome."""
    began_s = time.perf_counter()
    try:
        use_device(torch.device(rig.device))
        figures = tuple(part.load()(rig))
    except LeftOutError as reason:
        return Outcome(part=part.name, status="left out", seconds=0.0, setting=setting, why=str(reason))
    except Exception as error:  # noqa: BLE001 - the boundary of a part: the others go on
        where = "".join(traceback.format_exception(error))[-_MOST_CHARACTERS:]
        seconds = time.perf_counter() - began_s
        return Outcome(part=part.name, status="failed", seconds=seconds, setting=setting, why=where)
    seconds = time.perf_counter() - began_s
    return Outcome(part=part.name, status="measured", seconds=seconds, setting=setting, figures=figures)


def main() -> int:
    """1 where the part failed."""
    parser = argparse.ArgumentParser(prog="python -m load.gpu_report.part_process", description=__doc__)
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
