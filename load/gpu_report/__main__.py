"""Measure what a GPU does (`make gpu-report`): what is not measured yet; then print the report and draw its bars."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from load.gpu_report.bars import draw_bars
from load.gpu_report.environment import setting_of
from load.gpu_report.parts import PARTS, Part
from load.gpu_report.report import Results, all_figures, json_of, table_of
from load.gpu_report.rig import FULL, SMALL_SIZE, Rig, Size
from load.gpu_report.runner import LONGEST_S, PartProcesses, Run, run_part, run_parts

BARS = "bars.png"


def main(arguments: Sequence[str]) -> int:
    """Return 1 where a part failed or was not run; a figure that misses its bar is a result, and no failure."""
    options = _options(arguments)
    size: Size = SMALL_SIZE if options.small else FULL
    device = options.device or ("cpu" if options.small else "cuda:0")
    rig = Rig(size=size, device=device, folder=options.folder.resolve())
    results = Results(rig.folder, setting_of(size, device))
    chosen = [part for part in PARTS if not options.parts or part.name in options.parts]
    for name in options.again:
        results.forget(name)
    until_s = time.monotonic() + options.begin_s if options.begin_s else float("inf")
    run_parts(chosen, results, _run(rig, results, small=options.small), until_s=until_s, told=_tell)
    found = {part.name: results.get(part.name) for part in chosen}
    for line in table_of(chosen, found, results.setting):
        print(line)
    where = results.setting["gpu"] if rig.on_gpu else results.setting["machine"]
    draw_bars("What the device does", where, all_figures(chosen, found)).save(rig.folder / BARS)
    print(f"\nbars: {rig.folder / BARS}")
    print(json_of(chosen, found, results.setting), flush=True)
    return 0 if all(outcome is not None and outcome.status != "failed" for outcome in found.values()) else 1


def _run(rig: Rig, results: Results, *, small: bool) -> Run:
    """Return how parts run: small ones here, as a process of their own takes longer to start."""
    if small:
        return lambda part: run_part(part, rig, results.setting)
    options = ("--size", rig.size.name, "--device", rig.device, "--folder", str(rig.folder))
    # What a part that was ended has compiled is there for the next run.
    caches = {
        "TORCHINDUCTOR_CACHE_DIR": str(rig.folder / "inductor"),
        "TRITON_CACHE_DIR": str(rig.folder / "triton"),
    }

    def command(part: Part) -> Sequence[str]:
        return [sys.executable, "-m", "load.gpu_report.runner", part.name, *options]

    return PartProcesses(results, command, environment=caches, longest_s=LONGEST_S)


def _tell(line: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {line}", flush=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="make gpu-report", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*names, []], metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--small", action="store_true", help="on a CPU, and as little as shows that it works")
    parser.add_argument("--device", default="", help="cuda:N, or cpu (default: cuda:0; with --small, cpu)")
    parser.add_argument(
        "--folder", type=Path, default=Path("out/gpu-report"), help="of what was found (default: %(default)s)"
    )
    parser.add_argument("--again", nargs="*", choices=names, default=[], metavar="PART", help="measure these once more")
    parser.add_argument("--begin-s", type=float, default=0.0, help="begin no part after so many seconds (0: any)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
