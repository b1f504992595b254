"""How often does a picture follow its control image where the prompt says another place?

Stock Diffusers, held-out scenes. Prompt and control image agree in all but the place (or, of two things, the relation).
A picture counts when the oracle reads everything as the control image shows it.

A run takes 9 minutes on two cores.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import PIL.Image
import torch

from bottega.client.types.models import EMBEDDED_MODEL
from bottega.miniature.scenes import DRAWN, Scene, caption, elsewhere, held_out_scenes, random_layout
from bottega.model_files.folder_check import folder_of
from load.bench.framework import CORES, Bench, Option, Sheet
from load.bench.miniature import Drawn, draw_stock, guidance_of, shares
from load.bench.stock import control_argument, controlnet_classes, stock_pipeline
from load.sheets import compose

CASES = 100
WANTED = 0.90
# By the number of things: so many held-out scenes (of one thing there are about 720) have 100 and more among them that
# are held out elsewhere too.
_SCENES = {1: 600, 2: 1200}
# Cases of each kind on the sheet.
_SHOWN = 8
BENCH = Bench(
    __file__,
    __doc__,
    Option("--cases", CASES, "of each kind, and of one thing and of two; 100 at most", smallest=1),
    Option("--kinds", list(DRAWN), "of ControlNets, of those that there are", choices=tuple(DRAWN)),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a trained folder"),
    Option("--nets", None, "folder of the ControlNets; by default the model's own", kind=Path),
    Option("--threads", CORES, "of torch"),
    Option("--sheet", Path("out/controlnet_follow.png"), "contact sheet to write", kind=Path),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A prompt, and a control image that shows another place; both scenes are held out."""

    prompted: Scene
    shown: Scene
    control: PIL.Image.Image


def cases(kind: str, count: int, *, things: int) -> list[Case]:
    """Return at most `count` cases, the same ones every time."""
    rng = random.Random(0)
    found = []
    for shown in held_out_scenes(_SCENES[things], things=things):
        others = [other for other in elsewhere(shown) if other.held_out]
        if others:
            control = DRAWN[kind](random_layout(shown, rng))
            found.append(Case(prompted=rng.choice(others), shown=shown, control=control))
    return found[:count]


def _draw(pipeline: Any, asked: Sequence[Case], scale: float, guidance: float) -> list[Drawn]:
    """Draw case i with seed i; with a scale of 0 the prompt alone counts."""
    pictures = draw_stock(
        pipeline,
        [caption(case.prompted) for case in asked],
        guidance_scale=guidance,
        controlnet_conditioning_scale=scale,
        **{control_argument(pipeline): [case.control for case in asked]},
    )
    return [Drawn(scene=case.shown, picture=picture) for case, picture in zip(asked, pictures, strict=True)]


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw, read and report."""
    torch.set_num_threads(options.threads)
    found: dict[str, list[Drawn]] = {}
    shown: list[tuple[Case, Drawn]] = []
    model = folder_of(options.model)
    sheet.name_model(options.model)
    network, of_nets = controlnet_classes(stock_pipeline(model))
    nets = by_last_word(options.nets or model / "controlnets")
    kinds = [kind for kind in options.kinds if kind in nets][: 1 if options.smallest else None]
    if not kinds:
        raise SystemExit(f"the model has no ControlNet of these kinds: {', '.join(options.kinds)}")
    for kind in kinds:
        net = network.from_pretrained(nets[kind], use_safetensors=True, torch_dtype=torch.float32)
        pipeline = stock_pipeline(model, of_nets, controlnet=net)
        for things, name in ((1, kind), (2, f"{kind}_two_objects")):
            asked = cases(kind, options.cases, things=things)
            found[name] = _draw(pipeline, asked, 1.0, guidance_of(model))
            shown += list(zip(asked, found[name], strict=True))[:_SHOWN]
    found["prompt_alone"] = _draw(pipeline, cases(kind, options.cases, things=1), 0.0, guidance_of(model))
    _show(shown, options.sheet)
    sheet.values["cases"] = len(found["prompt_alone"])
    for name, drawn in found.items():
        right, bar = mean(one.right for one in drawn), f">= {WANTED:.2f}" if name in DRAWN else ""
        sheet.row(f"{name}: as shown, all of it", f"{right:.2f}", bar)
        sheet.values[name] = right
        for part, share in shares(drawn).items():
            sheet.row(f"    {part}", f"{share:.2f}")


def by_last_word(folder: Path) -> dict[str, Path]:
    """Return the folders in one by the last words of their names, such as layout of dit-layout."""
    return {path.name.rpartition("-")[2]: path for path in sorted(folder.glob("*"))}


def _show(answers: Sequence[tuple[Case, Drawn]], file: Path) -> None:
    """Write the contact sheet: control image, then picture; the prompts of pictures that do not follow are red."""
    captions = [text for case, _ in answers for text in ("", caption(case.prompted))]
    pictures = [picture for case, drawn in answers for picture in (case.control, drawn.picture)]
    colours = [colour for _, drawn in answers for colour in ("black", drawn.colour)]
    file.parent.mkdir(parents=True, exist_ok=True)
    compose(captions, pictures, columns=8, colours=colours).save(file)
    print(f"contact sheet: {file}")


if __name__ == "__main__":
    sys.exit(BENCH.command())
