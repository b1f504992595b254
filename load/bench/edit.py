"""What masked blocks and sparse convolutions gain an edit, by the share of tokens that its mask leaves to compute.

The suite's engine, with and without sparse convolutions, against stock Diffusers' inpainting: a process each, equal
threads, taking turns, medians. The model has SDXL's topology; recordings are in memory, and masks are squares. First an
exact edit is compared with Diffusers', so that what is timed is known to draw the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from load.bench.bench_model import write_bench_model
from load.bench.edit_model import EDIT_SHAPE, RATIOS
from load.bench.edit_network import ForwardAsk, Network
from load.bench.edit_steps import LATENT, SIDES, EditAsk, Edited, Side
from load.bench.report import report
from load.bench.scratch import scratch

THREADS = 2
WANTED = {"speedup_19": 2.2, "speedup_19_sparse": 3.0, "speedup_05_sparse": 4.0}
WANTED_SHARE = 0.8
# Of fp32 latents.
TOLERANCE = 1e-4
_CACHINGS = {"plain": ForwardAsk(), "outputs": ForwardAsk(), "keys_values": ForwardAsk(caching="keys_values")}


@dataclass(slots=True, kw_only=True)
class Measured:
    """What rounds took.

    edits: by share and side, one for each round. forwards: seconds, by share and what is recorded, "plain" of nothing.
    transformer_shares: of plain forwards. off: the largest difference of an exact edit's latent.
    """

    edits: dict[float, dict[str, list[Edited]]] = field(default_factory=dict)
    forwards: dict[float, dict[str, list[float]]] = field(default_factory=dict)
    transformer_shares: list[float] = field(default_factory=list)
    off: float = 0.0

    def speedup(self, share: float, side: str, *, whole: bool = False) -> float:
        """Over Diffusers, of the steps; whole: of the call."""
        return self._seconds(share, "diffusers", whole=whole) / self._seconds(share, side, whole=whole)

    def forward_speedup(self, share: float, caching: str) -> float:
        """Over the plain network."""
        return median(self.forwards[share]["plain"]) / median(self.forwards[share][caching])

    def _seconds(self, share: float, side: str, *, whole: bool) -> float:
        return median(each.seconds if whole else each.denoise_s for each in self.edits[share][side])


def measure(model: Path, folder: Path, options: argparse.Namespace) -> Measured:
    """Checks, records, and draws in turns."""
    measured = Measured()
    with ExitStack() as stack:
        sides = {name: stack.enter_context(Side(name, model, options.threads)) for name in SIDES}
        measured.off = _exact(sides, folder, options.steps)
        for side in sides.values():
            # Of the least mask: what is recorded is then the template, all but that.
            side.edit(EditAsk(share=min(options.shares), steps=options.steps))
        for number in range(options.rounds + 1):
            for share in options.shares:
                drawn = _round(sides, EditAsk(share=share, steps=options.steps, seed=number), turned=number % 2 == 1)
                if number:  # the first one completes recordings, and pays for what is made once
                    for name, edited in drawn.items():
                        measured.edits.setdefault(share, {}).setdefault(name, []).append(edited)
    with Network(model, options.threads) as network:
        for number in range(options.rounds + 1):
            shares = network.transformer_share()
            if number:
                measured.transformer_shares.append(shares)
            for share in options.shares:
                for name, ask in _CACHINGS.items():
                    of_share = 1.0 if name == "plain" else share
                    seconds = network.forward_s(ForwardAsk(share=of_share, caching=ask.caching))
                    if number:
                        measured.forwards.setdefault(share, {}).setdefault(name, []).append(seconds)
    return measured


def _round(sides: Mapping[str, Side], ask: EditAsk, *, turned: bool) -> dict[str, Edited]:
    """One edit on each side; by turns forwards and backwards, as the machine's speed drifts."""
    return {name: sides[name].edit(ask) for name in list(sides)[:: -1 if turned else 1]}


def _exact(sides: Mapping[str, Side], folder: Path, steps: int) -> float:
    """The largest difference of the suite's latents from Diffusers', all computed."""
    from safetensors.torch import load_file

    latents = {}
    for name, side in sides.items():
        file = folder / f"{name}.safetensors"
        side.edit(EditAsk(share=0.19, steps=steps, exact=True, latent=str(file)))
        latents[name] = load_file(file)[LATENT]
    theirs = latents.pop("diffusers")
    return max(float((ours - theirs).abs().max()) for ours in latents.values())


def values_of(measured: Measured) -> dict[str, float]:
    """What the line of JSON says."""
    values = {"transformer_share": median(measured.transformer_shares), "exact_off": measured.off}
    for share, by_side in measured.edits.items():
        name = f"{share * 100:02.0f}"
        values[f"speedup_{name}"] = measured.speedup(share, "suite")
        values[f"speedup_{name}_sparse"] = measured.speedup(share, "suite-sparse")
        values[f"speedup_{name}_sparse_whole"] = measured.speedup(share, "suite-sparse", whole=True)
        values[f"computed_share_{name}"] = by_side["suite-sparse"][0].computed_share
        values[f"reused_{name}"] = min(each.reused for side in SIDES[1:] for each in by_side[side])
        values[f"forward_{name}_outputs"] = measured.forward_speedup(share, "outputs")
        values[f"forward_{name}_keys_values"] = measured.forward_speedup(share, "keys_values")
    return values


def table_of(values: Mapping[str, float], shares: Sequence[float]) -> list[tuple[str, str, str]]:
    """What people read."""
    rows = [
        ("an exact edit's latent off by", f"{values['exact_off']:.1e}", f"at most {TOLERANCE:g}"),
        ("transformers' share of a step", f"{values['transformer_share']:.2f}", f"at least {WANTED_SHARE:g}"),
    ]
    for share in shares:
        name = f"{share * 100:02.0f}"
        rows.append((f"mask {share:g}: tokens computed", f"{values[f'computed_share_{name}']:.3f}", ""))
        for what, key in (
            ("steps, convolutions in full", f"speedup_{name}"),
            ("steps, sparse convolutions", f"speedup_{name}_sparse"),
            ("the whole edit, sparse convolutions", f"speedup_{name}_sparse_whole"),
            ("one forward, sparse, outputs recorded", f"forward_{name}_outputs"),
            ("one forward, sparse, keys and values recorded", f"forward_{name}_keys_values"),
        ):
            wanted = f"at least {WANTED[key]:g}" if key in WANTED else ""
            rows.append((f"    {what} ({key})", f"{values[key]:.2f} x", wanted))
    return rows


def main() -> int:
    """Prints the table and the line of JSON; 1 where an exact edit is another one than Diffusers'."""
    options = _options()
    with scratch() as folder:
        write_bench_model(folder / "model", EDIT_SHAPE)
        measured = measure(folder / "model", folder, options)
    values = values_of(measured)
    report("edit", table_of(values, options.shares), values)
    if measured.off > TOLERANCE:
        print(f"an exact edit is off by {measured.off:.1e}: nothing of the above counts", file=sys.stderr)
        return 1
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edit", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all shares, on each side (default: 3)")
    parser.add_argument("--steps", type=int, default=11, help="of each edit; one less runs (default: 11)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of each side (default: 2)")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=list(RATIOS), choices=RATIOS, metavar="SHARE", help="of RATIOS"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
