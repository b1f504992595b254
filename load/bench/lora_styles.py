"""Do the miniature's LoRAs draw their styles and keep the scenes?

Stock Diffusers with PEFT, held-out scenes. Half of the prompts name one thing, half two. A picture counts when the
oracle reads all of its scene. A style is seen where, in the features of the vision tower's layers, a picture is nearer
to its own scene rendered in that style than to it plain or in another one.

A run takes 5 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import PIL.Image
import torch

from bottega.client.types.models import EMBEDDED_MODEL
from bottega.miniature.scenes import STYLES, Placed, SceneLayout, Thing, caption, held_out_scenes, render
from bottega.model_files.folder_check import folder_of
from bottega.quality import oracle
from load import stock_loras
from load.bench.controlnet_follow import by_last_word
from load.bench.framework import CORES, Bench, Option, Sheet
from load.bench.miniature import Drawn, draw_stock, guidance_of, load_towers, shares, write_sheet
from load.bench.stock import stock_pipeline
from load.miniature.quality import Clip, perceptual_distances

WANTED = 0.85
PLAIN = "plain"
_ROWS = 20
# Pictures of one thing, and of two, on the sheet of each style.
_SHOWN = 4
BENCH = Bench(
    __file__,
    __doc__,
    Option("--prompts", 100, "of each style, half of them with one thing", smallest=2),
    Option("--styles", list(STYLES), "of the LoRAs, of those that there are", choices=tuple(STYLES)),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a trained folder"),
    Option("--loras", None, "folder of the LoRAs; by default the model's own", kind=Path),
    Option("--threads", CORES, "of torch"),
    Option("--sheet", Path("out/lora_styles.png"), "contact sheet to write", kind=Path),
)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw, read and report."""
    torch.set_num_threads(options.threads)
    each, model = max(options.prompts // 2, 1), folder_of(options.model)
    sheet.name_model(options.model)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    pipeline = stock_pipeline(model)
    loras = by_last_word(options.loras or model / "loras")
    styles = [style for style in options.styles if style in loras][: 1 if options.smallest else None]
    for style in styles:
        stock_loras.load(pipeline, loras[style], style)
    found: dict[str, list[Drawn]] = {}
    guidance = guidance_of(model)
    for name in (PLAIN, *styles):
        use(pipeline, {} if name == PLAIN else {name: 1.0})
        pictures = draw_stock(pipeline, [caption(scene) for scene in scenes], _ROWS, guidance_scale=guidance)
        found[name] = [Drawn(scene=scene, picture=one) for scene, one in zip(scenes, pictures, strict=True)]
    shown = [one for drawn in found.values() for one in (*drawn[:_SHOWN], *drawn[-_SHOWN:])]
    write_sheet(shown, 2 * _SHOWN, options.sheet)
    clip = load_towers(options.model)
    use(pipeline, {})
    for name, drawn in found.items():
        wanted = "" if name == PLAIN else f">= {WANTED:.2f}"
        seen = _seen(clip, pipeline, drawn, found[PLAIN])
        right, kept = mean(one.right for one in drawn), _kept(drawn, found[PLAIN])
        sheet.values |= {name: right, f"{name}_kept": kept, f"{name}_seen": seen[name]}
        sheet.row(f"{name}: read right", f"{right:.2f}", wanted)
        for part, share in _shares(drawn, each).items():
            sheet.row(f"    {part}", f"{share:.2f}")
        sheet.row("    of those that plain has right", f"{kept:.2f}", wanted)
        for way, share in seen.items():
            sheet.row(f"    looks {way}", f"{share:.2f}")


def use(pipeline: Any, scales: Mapping[str, float]) -> None:
    """Switch to these LoRAs; without any, to the base alone."""
    if not scales:
        pipeline.disable_lora()
        return
    pipeline.enable_lora()
    pipeline.set_adapters(list(scales), list(scales.values()))


def look(clip: Clip, pipeline: Any, pictures: Sequence[PIL.Image.Image], layouts: Sequence[SceneLayout]) -> list[str]:
    """Return the style of each picture: that of its layout's nearest rendering, one of STYLES or plain."""
    ways = {PLAIN: render, **STYLES}
    distances = [
        perceptual_distances(clip, pictures, _drawable(pipeline, [way(layout) for layout in layouts]))
        for way in ways.values()
    ]
    return [list(ways)[number] for number in torch.stack(distances).argmin(dim=0).tolist()]


def layout_of(picture: PIL.Image.Image, plain: PIL.Image.Image, ground: str) -> SceneLayout:
    """Return a layout with the places of a picture, and the radii of the same scene without a LoRA.

    Both are read right, and so show the same things in one order. A style may change sizes.
    """
    both = zip(oracle.read(picture).things, oracle.read(plain).things, strict=True)
    placed = tuple(
        Placed(thing=Thing(shape=seen.shape, colour=seen.colour), x=seen.x, y=seen.y, radius=other.radius)
        for seen, other in both
    )
    return SceneLayout(placed=placed, ground=ground)


def _seen(clip: Clip, pipeline: Any, drawn: Sequence[Drawn], plain: Sequence[Drawn]) -> dict[str, float]:
    """Return the share of pictures that are nearest to each style, of those that are right with and without it."""
    pairs = [(one, without) for one, without in zip(drawn, plain, strict=True) if one.right and without.right]
    layouts = [layout_of(one.picture, without.picture, one.scene.ground) for one, without in pairs]
    nearest = look(clip, pipeline, [one.picture for one, _ in pairs], layouts) if pairs else []
    return {way: nearest.count(way) / max(len(nearest), 1) for way in (PLAIN, *STYLES)}


def _kept(drawn: Sequence[Drawn], plain: Sequence[Drawn]) -> float:
    """Return the share of right pictures, of the scenes that are right without the LoRA."""
    kept = [one.right for one, without in zip(drawn, plain, strict=True) if without.right]
    return mean(kept) if kept else 0.0


@torch.no_grad()
def _drawable(pipeline: Any, pictures: Sequence[PIL.Image.Image]) -> list[PIL.Image.Image]:
    """Return the pictures after an encoding and a decoding by the VAE."""
    pixels = pipeline.image_processor.preprocess(list(pictures))
    back = [pipeline.vae.decode(pipeline.vae.encode(rows).latent_dist.mode()).sample for rows in pixels.split(_ROWS)]
    found: list[PIL.Image.Image] = pipeline.image_processor.postprocess(torch.cat(back), output_type="pil")
    return found


def _shares(drawn: Sequence[Drawn], each: int) -> dict[str, float]:
    """Return the share of right parts, of one thing and of two; parts that are always right are left out."""
    groups = {"one thing": drawn[:each], "two things": drawn[each:]}
    return {
        f"{name}, {part}": share
        for name, group in groups.items()
        for part, share in {"all": mean(one.right for one in group), **shares(group)}.items()
        if share < 1.0
    }


if __name__ == "__main__":
    sys.exit(BENCH.command())
