"""The papers' table: pictures with m ControlNets and n LoRAs (mC/nL), stock Diffusers against the suite.

Both have the same two cores, one client and the same model, and take turns; medians. LoRAs are cold each time, come to
both from equally far away, and are taken out again; ControlNets are warm, and in one more row cold. The ideal on equal
cores is Diffusers' time less what its LoRAs take, plus what the suite's take: ControlNets on a server of their own move
work, they do not remove it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from diffusers import ControlNetModel, UNet2DConditionModel
from PIL import Image

from bottega.client import ControlNet, Picture
from load.bench.addon_reference import CONTROL_SCALE, GUIDANCE_SCALE, PROMPT, AddonReference, Answer, Ask
from load.bench.bench_model import BenchShape, write_bench_model
from load.bench.lora_files import TRANSFORMERS, LoraFiles, random_lora
from load.bench.lora_suite import Cast, LoraSuite, cold_cast, processor_s, suite
from load.bench.report import report
from load.bench.scratch import scratch

# SDXL's levels and depths, and so its number of layers, at a width at which Diffusers' loading has its largest share on
# processors; the LoRAs' way from the store is as long as it takes to have production's.
SHAPE = BenchShape(
    block_out_channels=(32, 64, 128), transformer_layers=(2, 10), sample_size=8, head_channels=32, norm_groups=16
)
BASE = "bench"
THREADS = 2
RANK = 16
# Of the measured rows, how many ControlNets and LoRAs. Those with LoRAs follow each other, and each has other ones than
# the one before: it takes out again what that one left in the weights.
ROWS = ((0, 0), (1, 0), (3, 0), (0, 1), (1, 1), (2, 2), (3, 2))
SETS, OF_SET = 2, 2
WANTED_PLAIN, WANTED_LORAS, WANTED_SPEEDUP, LOADING_SHARE = 0.95, 0.9, 1.35, 0.37


@dataclass(frozen=True, slots=True, kw_only=True)
class Props:
    """What is drawn with. nets: folders, the last one for the cold row alone; images: one for each."""

    model: Path
    nets: tuple[Path, ...]
    images: tuple[Path, ...]
    loras: tuple[LoraFiles, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One picture, for both sides. nets, loras: places in the props."""

    nets: Sequence[int]
    loras: Sequence[int]
    seed: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for all rows. fuse: whether Diffusers fuses LoRAs. fetch_s: of each LoRA's way from the store."""

    fuse: bool
    fetch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One picture of the suite. lora_s: for which its request could not go on for want of LoRAs, or patched."""

    seconds: float
    lora_s: float
    processor_s: float


@dataclass(slots=True, kw_only=True)
class Row:
    """A row of the table, an entry for each round."""

    theirs: list[Answer] = field(default_factory=list)
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
        """Of Diffusers' time, what its LoRAs take."""
        return median(each.lora_s / each.seconds for each in self.theirs)

    @property
    def of_ideal(self) -> float:
        """The ideal's seconds over the suite's."""
        without_s = median(each.seconds - each.lora_s for each in self.theirs)
        return (without_s + median(each.lora_s for each in self.ours)) / median(each.seconds for each in self.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Both:
    """The two sides, ready to draw."""

    reference: AddonReference
    running: LoraSuite
    props: Props
    terms: Terms

    def draw(self, row: Row, play: Play, *, cold: bool = False) -> None:
        """A picture by each, for a row. cold: whether Diffusers loads the ControlNets for it."""
        row.theirs.append(self.reference.draw(_ask(self.props, play, self.terms, cold=cold)))
        row.ours.append(ours(self.running, self.props, play))


def measure(props: Props, folder: Path, options: argparse.Namespace) -> tuple[dict[str, Row], Row, Terms]:
    """All rows by name, the one with a cold ControlNet, and the terms."""
    rows, cold = {_name(nets, loras): Row() for nets, loras in ROWS}, Row()
    with AddonReference(props.model, THREADS) as reference:
        terms = _terms(reference, props, options.steps)
        with suite(_cast(props, folder, terms)) as running:
            for number, lora in enumerate(props.loras):
                running.client.add_lora(_lora(number), lora.theirs)
            ours(running, props, _play(3, 0, seed=0, steps=2))
            both = Both(reference=reference, running=running, props=props, terms=terms)
            for seed in range(1, options.rounds + 1):
                _round(both, rows, seed, options.steps)
            ours(running, props, _play(0, 0, seed=0, steps=2))
            both.draw(cold, Play(nets=[len(props.nets) - 1], loras=[], seed=1, steps=options.steps), cold=True)
    return rows, cold, terms


def _round(both: Both, rows: Mapping[str, Row], seed: int, steps: int) -> None:
    for place, (nets, loras) in enumerate(ROWS):
        if (nets, loras) == (0, 0):  # the weights are as they were, as before every row without LoRAs
            ours(both.running, both.props, _play(0, 0, seed=0, steps=2))
        elif (nets, loras) == (0, 1):  # other LoRAs are in the weights, as before every row with some
            ours(both.running, both.props, _play(0, 1, seed=0, steps=steps, of_set=place - 1))
        both.draw(rows[_name(nets, loras)], _play(nets, loras, seed=seed, steps=steps, of_set=place))


def ours(running: LoraSuite, props: Props, play: Play) -> Drawn:
    """One picture of the suite."""
    before_s, began_s = processor_s(), time.perf_counter()
    picture = running.client.generate(
        PROMPT,
        seed=play.seed,
        num_inference_steps=play.steps,
        guidance_scale=GUIDANCE_SCALE,
        controlnets=[
            ControlNet(_net(number), props.images[number], controlnet_conditioning_scale=CONTROL_SCALE)
            for number in play.nets
        ],
        lora=[_lora(number) for number in play.loras],
    )
    seconds = time.perf_counter() - began_s
    return Drawn(seconds=seconds, lora_s=lora_s(picture), processor_s=processor_s() - before_s)


def lora_s(picture: Picture) -> float:
    """Seconds that its LoRAs cost a request beside its steps: waiting for them, and changing weights."""
    used = picture.provenance.loras
    return used[0].wait_s + used[0].patch_s if used else 0.0


def prepare(folder: Path) -> Props:
    """Writes model, ControlNets, images and LoRAs."""
    model = folder / "model"
    write_bench_model(model, SHAPE)
    (folder / "loras").mkdir()
    nets = tuple(_write_net(model, folder / f"net{number}", seed=number) for number in range(4))
    return Props(
        model=model,
        nets=nets,
        images=tuple(_write_image(folder / f"image{number}.png", number) for number in range(len(nets))),
        loras=tuple(
            random_lora(model, folder / "loras", seed=seed, rank=RANK, targets=TRANSFORMERS)
            for seed in range(SETS * OF_SET)
        ),
    )


def _write_net(model: Path, folder: Path, *, seed: int) -> Path:
    unet = UNet2DConditionModel.from_pretrained(model / "unet", use_safetensors=True)
    torch.manual_seed(seed)
    net = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(16, 32, 64, 128))
    for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
        torch.nn.init.normal_(convolution.weight, std=0.01)
    net.half().save_pretrained(folder, safe_serialization=True)
    return folder


def _write_image(file: Path, number: int) -> Path:
    side = SHAPE.sample_size * SHAPE.latent_scale
    image = Image.linear_gradient("L").resize((side, side)).convert("RGB")
    image.rotate(90 * number).save(file)
    return file


def _terms(reference: AddonReference, props: Props, steps: int) -> Terms:
    """Diffusers is given the better of its two ways, each warm; the LoRAs' way makes up what its loading lacks."""
    taken = {}
    for fuse in (True, False):
        ask = _ask(props, _play(1, 1, seed=0, steps=steps), Terms(fuse=fuse, fetch_s=0.0))
        reference.draw(ask)
        taken[fuse] = reference.draw(ask)
    fuse = taken[True].seconds < taken[False].seconds
    lacks_s = LOADING_SHARE * taken[fuse].seconds - taken[fuse].lora_s
    terms = Terms(fuse=fuse, fetch_s=max(0.0, lacks_s / (1 - LOADING_SHARE)))
    reference.draw(_ask(props, _play(3, 2, seed=0, steps=2), terms))
    return terms


def _play(nets: int, loras: int, *, seed: int, steps: int, of_set: int = 0) -> Play:
    """The first ones of each kind, of LoRAs those of a set."""
    first = of_set % SETS * OF_SET
    return Play(nets=range(nets), loras=range(first, first + loras), seed=seed, steps=steps)


def _ask(props: Props, play: Play, terms: Terms, *, cold: bool = False) -> Ask:
    return Ask(
        seed=play.seed,
        steps=play.steps,
        nets=[str(props.nets[number]) for number in play.nets],
        images=[str(props.images[number]) for number in play.nets],
        loras=[str(props.loras[number].theirs) for number in play.loras],
        fetch_s=terms.fetch_s * len(play.loras),
        fuse=terms.fuse,
        cold=cold,
    )


def _cast(props: Props, folder: Path, terms: Terms) -> Cast:
    pace = {"bytes_per_s": max(1, round(props.loras[0].size_bytes / terms.fetch_s))} if terms.fetch_s else {}
    controlnets = {_net(number): str(net) for number, net in enumerate(props.nets)}
    return cold_cast(folder, props.model, base=BASE, threads=THREADS, links=pace, controlnets=controlnets)


def _net(number: int) -> str:
    return f"net{number}"


def _lora(number: int) -> str:
    return f"lora{number}"


def _name(nets: int, loras: int) -> str:
    return f"{nets}C{loras}L"


def _report(rows: Mapping[str, Row], cold: Row, terms: Terms) -> None:
    table: list[tuple[str, str, str]] = []
    values: dict[str, float] = {}
    for name, row in rows.items():
        least = WANTED_PLAIN if name.endswith("0L") else WANTED_LORAS
        table += [
            (f"{name}: Diffusers, suite", _seconds(row), ""),
            ("    latency, Diffusers over suite", f"{row.speedup:.2f}", _wanted_speedup(name)),
            ("    pictures per core-minute, suite over Diffusers", f"{row.per_core:.2f}", ""),
            ("    of the ideal", f"{row.of_ideal:.3f}", f"at least {least:g}"),
        ]
        values |= {f"speedup_{name}": row.speedup, f"per_core_{name}": row.per_core, f"of_ideal_{name}": row.of_ideal}
    table += [
        ("1C0L, the ControlNet cold: Diffusers, suite", _seconds(cold), ""),
        ("    latency, Diffusers over suite", f"{cold.speedup:.2f}", ""),
        ("Diffusers' LoRAs, share of 1C1L", f"{rows['1C1L'].loading_share:.2f}", f"about {LOADING_SHARE:g}"),
        ("    of that, fetching it", f"{terms.fetch_s:.2f} s", ""),
        ("Diffusers fuses LoRAs", "yes" if terms.fuse else "no", "its faster way"),
    ]
    values |= {
        "speedup_1C0L_cold": cold.speedup,
        "loading_share": rows["1C1L"].loading_share,
        "fetch_s": terms.fetch_s,
        "of_ideal_min": min(row.of_ideal for row in rows.values()),
        "of_ideal_min_plain": min(row.of_ideal for name, row in rows.items() if name.endswith("0L")),
        "of_ideal_min_loras": min(row.of_ideal for name, row in rows.items() if not name.endswith("0L")),
    }
    report("addons", table, values)


def _seconds(row: Row) -> str:
    taken: Sequence[Sequence[Answer | Drawn]] = (row.theirs, row.ours)
    said = [f"{median(each.seconds for each in side):.2f} s" for side in taken]
    return ", ".join(
        f"{seconds} ({median(each.lora_s for each in side):.2f} s for LoRAs)" if side[0].lora_s else seconds
        for seconds, side in zip(said, taken, strict=True)
    )


def _wanted_speedup(name: str) -> str:
    return f"at least {WANTED_SPEEDUP:g}" if name == "1C1L" else ""


def main() -> None:
    """Prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(prog="make bench-addons", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of all rows, on each side (default: 3)")
    parser.add_argument("--steps", type=int, default=30, help="of a picture (default: 30)")
    options = parser.parse_args()
    with scratch() as folder:
        rows, cold, terms = measure(prepare(folder), folder / "suite", options)
    _report(rows, cold, terms)


if __name__ == "__main__":
    main()
