"""What do pictures with m ControlNets and n LoRAs (mC/nL) take, stock Diffusers against the suite?

Both have the same two cores, one client and the same model, and take turns; medians are compared. LoRAs are cold each
time, come to both from equally far away, and are taken out again; ControlNets are warm, and in one more row cold. The
ideal on equal cores is Diffusers' time less what its LoRAs take, plus what the suite's take: ControlNets on a server of
their own move work, they do not remove it.

A run takes 9 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from bottega.client import ControlNet
from load.bench.bench_model import BenchShape, write_bench_controlnet, write_bench_model, write_gradient
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet
from load.bench.lora_files import TRANSFORMERS, LoraFiles, cold_services, random_lora
from load.bench.side_process import Side
from load.bench.stock import stock
from load.bench.suites import Suite, children_processor_s, suite

# SDXL's levels and depths, and so its number of layers, at a width at which Diffusers' loading has its largest share on
# processors; the LoRAs' way from the store is as long as it takes to have production's.
SHAPE = BenchShape(
    block_out_channels=(32, 64, 128), transformer_layers=(2, 10), sample_size=8, head_channels=32, norm_groups=16
)
THREADS, RANK, NETS, CONTROL_SCALE = 2, 16, 4, 0.8
# ControlNets and LoRAs of the measured rows. Those with LoRAs follow each other, and each has other ones than the one
# before: it takes out what that one left in the weights.
ROWS = ((0, 0), (1, 0), (3, 0), (0, 1), (1, 1), (2, 2), (3, 2))
SETS, OF_SET = 2, 2
WANTED_PLAIN, WANTED_LORAS, WANTED_SPEEDUP, LOADING_SHARE = 0.95, 0.9, 1.35, 0.37
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 3, "of all rows, on each side", smallest=1),
    Option("--steps", 30, "of a picture", smallest=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A picture of one side."""

    seconds: float
    lora_s: float
    """Seconds that its LoRAs took beside its steps."""
    processor_s: float


@dataclass(slots=True, kw_only=True)
class Row:
    """The pictures of a row, one of each side for each round."""

    theirs: list[Drawn] = field(default_factory=list)
    ours: list[Drawn] = field(default_factory=list)

    @property
    def speedup(self) -> float:
        """Diffusers' seconds over the suite's."""
        return median(each.seconds for each in self.theirs) / median(each.seconds for each in self.ours)

    @property
    def per_core(self) -> float:
        """The suite's pictures per minute of processor time over Diffusers'."""
        return median(each.processor_s for each in self.theirs) / median(each.processor_s for each in self.ours)

    @property
    def loading_share(self) -> float:
        """The share of Diffusers' time that its LoRAs take."""
        return median(each.lora_s / each.seconds for each in self.theirs)

    @property
    def of_ideal(self) -> float:
        """The ideal's seconds over the suite's."""
        without_s = median(each.seconds - each.lora_s for each in self.theirs)
        return (without_s + median(each.lora_s for each in self.ours)) / median(each.seconds for each in self.ours)

    @property
    def seconds(self) -> str:
        """The seconds of both sides, for people."""
        shown = []
        for side in (self.theirs, self.ours):
            text = f"{median(each.seconds for each in side):.2f} s"
            lora_s = median(each.lora_s for each in side)
            shown.append(f"{text} ({lora_s:.2f} s for LoRAs)" if lora_s else text)
        return ", ".join(shown)


@dataclass(slots=True, kw_only=True)
class Sides:
    """The sides, and what they draw with."""

    reference: Side
    steps: int
    nets: Sequence[Path]
    images: Sequence[Path]
    loras: Sequence[LoraFiles]
    fuse: bool = True
    """Whether Diffusers fuses LoRAs."""
    fetch_s: float = 0.0
    """Seconds of each LoRA's way from the store."""

    def theirs(
        self, nets: Sequence[int], loras: Sequence[int], *, seed: int, steps: int = 0, cold: bool = False
    ) -> Drawn:
        """Draw with Diffusers; `nets` and `loras` are places in the lists."""
        answer = self.reference.ask(
            prompts=[PROMPT],
            seeds=[seed],
            steps=steps or self.steps,
            nets=[str(self.nets[number]) for number in nets],
            images=[[str(self.images[number])] for number in nets],
            net_scale=CONTROL_SCALE,
            cold=cold,
            loras=[str(self.loras[number].theirs) for number in loras],
            fetch_s=self.fetch_s * len(loras),
            fuse=self.fuse,
        )
        return Drawn(seconds=answer["seconds"], lora_s=answer["lora_s"], processor_s=answer["processor_s"])

    def ours(self, running: Suite, nets: Sequence[int], loras: Sequence[int], *, seed: int, steps: int = 0) -> Drawn:
        """Draw the same with the suite."""
        before_s = children_processor_s()
        picture, seconds = running.draw(
            PROMPT,
            seed=seed,
            num_inference_steps=steps or self.steps,
            guidance_scale=GUIDANCE_SCALE,
            controlnets=[
                ControlNet(f"net{number}", self.images[number], controlnet_conditioning_scale=CONTROL_SCALE)
                for number in nets
            ],
            lora=[f"lora{number}" for number in loras],
        )
        used = picture.provenance.loras
        lora_s = used[0].wait_s + used[0].patch_s if used else 0.0
        return Drawn(seconds=seconds, lora_s=lora_s, processor_s=children_processor_s() - before_s)

    def choose_terms(self) -> None:
        """Give Diffusers the faster of its two ways for LoRAs, and the LoRAs the way that its loading lacks."""
        taken = {}
        for self.fuse in (True, False):
            self.theirs([0], [0], seed=0)
            taken[self.fuse] = self.theirs([0], [0], seed=0)
        self.fuse = taken[True].seconds < taken[False].seconds
        chosen = taken[self.fuse]
        lacks_s = LOADING_SHARE * chosen.seconds - chosen.lora_s
        self.fetch_s = max(0.0, lacks_s / (1 - LOADING_SHARE))
        self.theirs(range(3), range(2), seed=0, steps=2)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw all rows, and the one with a cold ControlNet."""
    shape, model = SHAPE.for_run(smallest=options.smallest), folder / "model"
    write_bench_model(model, shape)
    loras = [
        random_lora(model, folder / "files", seed=seed, rank=RANK, targets=TRANSFORMERS)
        for seed in range(SETS * OF_SET)
    ]
    with Side(stock, threads=THREADS, model=model) as reference:
        sides = Sides(
            reference=reference,
            steps=options.steps,
            nets=[write_bench_controlnet(model, folder / f"net{number}", shape, seed=number) for number in range(NETS)],
            images=[write_gradient(folder / f"{number}.png", shape.side, turns=number) for number in range(NETS)],
            loras=loras,
        )
        sides.choose_terms()
        pace = {"bytes_per_s": max(1, round(loras[0].size_bytes / sides.fetch_s))} if sides.fetch_s else {}
        nets = {f"net{number}": str(net) for number, net in enumerate(sides.nets)}
        services = {
            **cold_services(model, THREADS, links=pace),
            "controlnet": {"engine": {"threads": THREADS}, "controlnets": nets},
        }
        with suite(folder / "suite", services) as running:
            for number, lora in enumerate(loras):
                running.client.add_lora(f"lora{number}", lora.theirs)
            rows, cold = _draw_rows(sides, running, options.rounds)
    _fill(sheet, rows, cold, sides)


def _draw_rows(sides: Sides, running: Suite, rounds: int) -> tuple[dict[str, Row], Row]:
    rows, cold = {f"{nets}C{loras}L": Row() for nets, loras in ROWS}, Row()
    sides.ours(running, range(3), [], seed=0, steps=2)
    for seed in range(1, rounds + 1):
        for place, (nets, loras) in enumerate(ROWS):
            if (nets, loras) == (0, 0):  # the weights are as they were, as before every row without LoRAs
                sides.ours(running, [], [], seed=0, steps=2)
            elif (nets, loras) == (0, 1):  # other LoRAs are in the weights, as before every row with some
                sides.ours(running, [], _set(1, place - 1), seed=0)
            row = rows[f"{nets}C{loras}L"]
            row.theirs.append(sides.theirs(range(nets), _set(loras, place), seed=seed))
            row.ours.append(sides.ours(running, range(nets), _set(loras, place), seed=seed))
    sides.ours(running, [], [], seed=0, steps=2)
    cold.theirs.append(sides.theirs([NETS - 1], [], seed=1, cold=True))
    cold.ours.append(sides.ours(running, [NETS - 1], [], seed=1))
    return rows, cold


def _set(loras: int, place: int) -> range:
    """Return so many LoRAs of the set whose turn it is."""
    first = place % SETS * OF_SET
    return range(first, first + loras)


def _fill(sheet: Sheet, rows: Mapping[str, Row], cold: Row, sides: Sides) -> None:
    for name, row in rows.items():
        least = WANTED_PLAIN if name.endswith("0L") else WANTED_LORAS
        sheet.row(f"{name}: Diffusers, suite", row.seconds)
        bar = f"at least {WANTED_SPEEDUP:g}" if name == "1C1L" else ""
        sheet.figure("    latency, Diffusers over suite", row.speedup, key=f"speedup_{name}", bar=bar)
        sheet.figure("    pictures per core-minute, suite over Diffusers", row.per_core, key=f"per_core_{name}")
        sheet.figure("    of the ideal", row.of_ideal, "{:.3f}", key=f"of_ideal_{name}", bar=f"at least {least:g}")
    sheet.row("1C0L, the ControlNet cold: Diffusers, suite", cold.seconds)
    sheet.figure("    latency, Diffusers over suite", cold.speedup, key="speedup_1C0L_cold")
    about = f"about {LOADING_SHARE:g}"
    sheet.figure("Diffusers' LoRAs, share of 1C1L", rows["1C1L"].loading_share, key="loading_share", bar=about)
    sheet.figure("    of that, fetching it", sides.fetch_s, "{:.2f} s", key="fetch_s")
    sheet.row("Diffusers fuses LoRAs", "yes" if sides.fuse else "no", "its faster way")
    plain = [row.of_ideal for name, row in rows.items() if name.endswith("0L")]
    with_loras = [row.of_ideal for name, row in rows.items() if not name.endswith("0L")]
    sheet.values |= {
        "of_ideal_min": min(plain + with_loras),
        "of_ideal_min_plain": min(plain),
        "of_ideal_min_loras": min(with_loras),
    }


if __name__ == "__main__":
    sys.exit(BENCH.command())
