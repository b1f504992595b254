"""Edits and pictures at once, in images per second: the engine with masked blocks against Diffusers, one by one.

Half of the requests are edits of templates that were edited before, with masks of several sizes; the others are plain.
A bench model of SDXL's topology. Each side is a process of its own; they take turns, medians.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE
from load.bench.edit_sides import Side
from load.bench.report import report
from load.bench.scratch import scratch

# Shares of the tokens that edits compute at the finest level of attention; 0 is a plain picture.
MIX = (0.05, 0.0, 0.11, 0.0, 0.19, 0.0, 0.35, 0.0)
THREADS = 2
WANTED = 1.5


@dataclass(slots=True, kw_only=True)
class Measured:
    """Seconds for all requests of a kind, one for each round. reused: shares of the edits' blocks."""

    diffusers: list[float] = field(default_factory=list)
    mixed: list[float] = field(default_factory=list)
    edits: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)

    @property
    def mix_ratio(self) -> float:
        """How many times as many images per second as Diffusers."""
        return median(self.diffusers) / median(self.mixed)

    @property
    def vs_apart(self) -> float:
        """The same, over the edits together and then the plain ones together."""
        return (median(self.edits) + median(self.plain)) / median(self.mixed)


def measure(model: Path, options: argparse.Namespace) -> Measured:
    """Draws in turns, the first round not counted."""
    measured = Measured()
    edits, plain = [share for share in MIX if share], [share for share in MIX if not share]
    with Side("diffusers", model, options.threads) as theirs, Side("suite", model, options.threads) as ours:
        for number in range(options.rounds + 1):
            into = measured if number else Measured()
            into.diffusers.append(theirs.draw(MIX, steps=options.steps)["seconds"])
            mixed = ours.draw(MIX, steps=options.steps)
            into.mixed.append(mixed["seconds"])
            into.reused.append(mixed["reused_share"])
            into.edits.append(ours.draw(edits, steps=options.steps)["seconds"])
            into.plain.append(ours.draw(plain, steps=options.steps)["seconds"])
    return measured


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    with scratch() as folder:
        write_bench_model(folder / "model", EDIT_SHAPE)
        measured = measure(folder / "model", options)
    one_by_one, at_once, reused = (median(each) for each in (measured.diffusers, measured.mixed, measured.reused))
    rows = [
        (f"{len(MIX)} requests one by one, Diffusers", f"{one_by_one:.2f} s", ""),
        ("    at once", f"{at_once:.2f} s", ""),
        ("times as many images per second (mix_ratio)", f"{measured.mix_ratio:.2f}", f"at least {WANTED:g}"),
        ("edits together, then plain ones together, over all at once (vs_apart)", f"{measured.vs_apart:.2f}", ""),
        ("blocks of the edits whose unmasked tokens were reused", f"{reused:.2f}", ""),
    ]
    values = {
        "mix_ratio": measured.mix_ratio,
        "vs_apart": measured.vs_apart,
        "blocks_reused_share": reused,
        "diffusers_s": one_by_one,
        "mixed_s": at_once,
    }
    report("edit_mix", rows, values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edit-mix", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="of all requests, on each side (default: 5)")
    parser.add_argument("--steps", type=int, default=8, help="of each request (default: 8)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of each side (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
