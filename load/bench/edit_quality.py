"""What pictures lose whose masked part alone is computed: edits of the embedded model against the full computation.

In this process, with the engine and its recordings, and the codec's pixels. Each template is edited once, which is
recorded; the BALANCED edits after it are measured, each prompt with two seeds. The full computation is stock Diffusers'
inpainting under the same composed noise: the recording's outside the mask, the request's inside. An exact edit has its
own noise everywhere.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers import StableDiffusionXLInpaintPipeline

from bottega.diffusion.model.model import load_model
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import random_scene
from bottega.quality import oracle
from load.bench.bench_model import write_bench_model
from load.bench.edit_cases import EditCase, Template, edits_of, templates
from load.bench.edit_engine import (
    GUIDANCE_SCALE,
    STRENGTH,
    EditAsk,
    Edited,
    EditEngine,
    beyond_feather,
    computed_share,
    dilated,
    pasted,
    reused_share,
)
from load.bench.edit_model import EDIT_SHAPE, square_mask
from load.bench.report import report
from load.bench.scratch import scratch
from load.bench.side_process import stock_pipeline
from load.contact_sheet import compose
from load.miniature.quality import ssim_within
from tests.support.composed_noise import Draws, composed_noise, draws_of

EDITS = 200
# After the first one, which records.
EDITS_OF_A_TEMPLATE = 5
PROMPTS_OF_A_TEMPLATE = 3
STEPS = 30
# Rounds of timing.
TIMED = 8
# Of half a window of SSIM.
_EDGE = 5
# Edits on the contact sheet.
_SHOWN = 12
WANTED_INSIDE, WANTED_OUTSIDE, WANTED_DROP = 0.95, 0.999, 3.0
WANTED_REUSE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """One edit in every way. full, fewer: computed in full under composed noise, with all steps and with fewer."""

    edited: Edited
    full: PIL.Image.Image
    fewer: PIL.Image.Image
    exact: PIL.Image.Image

    @property
    def case(self) -> EditCase:
        return self.edited.ask.case


class StockEdits:
    """Stock Diffusers in this process."""

    def __init__(self) -> None:
        self._pipeline = stock_pipeline(WEIGHTS, StableDiffusionXLInpaintPipeline)

    def draws(self, case: EditCase) -> Draws:
        """What an edit draws from its generator."""
        width, height = case.template.picture.size
        return draws_of(self._pipeline, case.template.picture, seed=case.seed, width=width, height=height)

    def draw(self, cases: Sequence[EditCase], steps: int, recorded: Draws | None = None) -> list[PIL.Image.Image]:
        """Edits of one template, together. recorded: what is outside their masks; None is each one's own."""
        masks = [case.template.mask for case in cases]
        composed: Any = nullcontext()
        if recorded is not None:
            composed = composed_noise(self._pipeline, Draws.stack([recorded] * len(cases)), masks)
        width, height = cases[0].template.picture.size
        with composed:
            drawn: list[PIL.Image.Image] = self._pipeline(
                [case.prompt for case in cases],
                image=[case.template.picture for case in cases],
                mask_image=masks,
                num_inference_steps=steps,
                guidance_scale=GUIDANCE_SCALE,
                strength=STRENGTH,
                width=width,
                height=height,
                generator=[torch.Generator().manual_seed(case.seed) for case in cases],
            ).images
        return drawn


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatios:
    """Seconds of an edit with masked blocks over those of one in full. again: with the prompt that was recorded."""

    again: float
    other: float

    def steps(self, case: EditCase, steps: int) -> int:
        """How many the full computation makes in the time of a masked one."""
        ratio = self.again if case.again else self.other
        return min(max(round(ratio * steps), 1), steps)


def compare(
    engine: EditEngine, stock: StockEdits, template: Template, seed: int, *, steps: int, ratios: TimeRatios
) -> list[Compared]:
    """Edits a template once, and then, with what was recorded, as often as it has edits left, one after the other."""
    first, *later = edits_of(template, seed)
    (recording,) = engine.draw([EditAsk(case=first, steps=steps, masked=True)])
    assert recording.record.recorded, f"the first edit was not recorded: {recording.record}"
    edited = [engine.draw([EditAsk(case=case, steps=steps, masked=True)])[0] for case in later]
    recorded = stock.draws(first)
    full, exact = stock.draw(later, steps, recorded), stock.draw(later, steps)
    return [
        Compared(edited=each, full=whole, fewer=stock.draw([case], ratios.steps(case, steps), recorded)[0], exact=own)
        for each, case, whole, own in zip(edited, later, full, exact, strict=True)
    ]


def time_ratios(engine: EditEngine, template: Template, *, steps: int, rounds: int) -> TimeRatios:
    """Medians of edits that are alone, in turns, the first rounds not counted."""
    seconds: dict[str, list[float]] = {"again": [], "other": [], "full": []}
    cases = list(edits_of(template, 0))
    for number in range(rounds + 2):
        other, again = cases[2 * (number % 2) :][:2]  # a prompt that was not the last one, and then once more
        for kind, case, masked in (("other", other, True), ("again", again, True), ("full", again, False)):
            (drawn,) = engine.draw([EditAsk(case=case, steps=steps, masked=masked)])
            if number > 1:  # the first one records, the second pays for what is made once
                seconds[kind].append(drawn.denoise_s)
    full = median(seconds["full"])
    return TimeRatios(again=median(seconds["again"]) / full, other=median(seconds["other"]) / full)


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """Mean SSIM of pictures with the full computation, where windows' centres lie in the dilated mask, and outside."""

    inside: float
    outside: float


def likeness(
    engine: EditEngine,
    compared: Sequence[Compared],
    pictures: Sequence[PIL.Image.Image],
    *,
    keep_unmasked: bool = False,
) -> Likeness:
    """Of one picture for each of the edits. keep_unmasked: whether both have the image's own pixels outside masks."""
    inside, outside = [], []
    for each, drawn in zip(compared, pictures, strict=True):
        both = drawn, each.full
        ours, theirs = (pasted(one, each.case) for one in both) if keep_unmasked else both
        region = dilated(engine.model, each.case.template.mask)
        inside.append(ssim_within(ours, theirs, region))
        if bool((~region)[_EDGE:-_EDGE, _EDGE:-_EDGE].any()):
            outside.append(ssim_within(ours, theirs, ~region))
    return Likeness(inside=mean(inside), outside=mean(outside))


def right(compared: Sequence[Compared], pictures: Sequence[PIL.Image.Image]) -> float:
    """Share of pictures in which the oracle reads all as it was asked for."""
    return mean(
        oracle.agrees(oracle.read(pasted(picture, each.case)), each.case.wanted)
        for each, picture in zip(compared, pictures, strict=True)
    )


def outside_equal(compared: Sequence[Compared]) -> float:
    """Share of edits whose PNG has the template's own bytes everywhere beyond the feather."""
    return mean(_equal_outside(each) for each in compared)


def _equal_outside(each: Compared) -> bool:
    outside = beyond_feather(each.case.template.mask)
    assert outside.any(), "there is something to keep"
    ours, theirs = (
        np.asarray(picture) for picture in (pasted(each.edited.picture, each.case), each.case.template.picture)
    )
    return bool((ours[outside] == theirs[outside]).all())


def bench_model_ratios(folder: Path, share: float, *, sparse: bool, steps: int, rounds: int) -> TimeRatios:
    """Those of a model of SDXL's topology, whose masks have so large a share of the tokens."""
    write_bench_model(folder, EDIT_SHAPE)
    mask = PIL.Image.fromarray(square_mask(share))
    noise = np.random.default_rng(0).integers(0, 256, (mask.height, mask.width, 3), dtype=np.uint8)
    wanted = tuple(random_scene(random.Random(seed), things=1) for seed in range(2))
    template = Template(picture=PIL.Image.fromarray(noise), mask=mask, wanted=wanted)
    model = load_model(folder, name="bench", device=torch.device("cpu"), dtype=torch.float32)
    return time_ratios(EditEngine(model, sparse=sparse), template, steps=steps, rounds=rounds)


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    torch.set_num_threads(options.threads)
    chosen = templates(max(options.edits // EDITS_OF_A_TEMPLATE, 1), PROMPTS_OF_A_TEMPLATE)
    model = load_model(WEIGHTS, name="miniature", device=torch.device("cpu"), dtype=torch.float32)
    sparse = not options.full_convolutions
    engine = EditEngine(model, sparse=sparse)
    share = mean(float(dilated(engine.model, template.mask).float().mean()) for template in chosen)
    with scratch() as folder:
        ratios = bench_model_ratios(
            folder / "model", share, sparse=sparse, steps=options.bench_steps, rounds=options.rounds
        )
    own = time_ratios(EditEngine(model, sparse=sparse), chosen[0], steps=options.steps, rounds=options.rounds)
    print(f"masked blocks with a model of SDXL's topology: {ratios}; with the embedded one: {own}", flush=True)
    stock = StockEdits()
    compared: list[Compared] = []
    for number, template in enumerate(chosen):
        seed = number * (EDITS_OF_A_TEMPLATE + 1)
        compared += compare(engine, stock, template, seed, steps=options.steps, ratios=ratios)
        print(f"  {len(compared)} edits", flush=True)
    show(compared, options.sheet)
    print(f"contact sheet: {options.sheet}")
    times = {"time_again": ratios.again, "time_other": ratios.other}
    _report(engine, compared, {**times, "time_again_miniature": own.again, "time_other_miniature": own.other})


def show(compared: Sequence[Compared], file: Path) -> None:
    """Writes the contact sheet: template, masked blocks, the full computation, an exact edit."""
    captions, pictures = [], []
    for each in compared[:: max(len(compared) // _SHOWN, 1)][:_SHOWN]:
        captions += ["template", f"masked: {each.case.prompt}", "in full, the same noise", "exact"]
        pictures += [each.case.template.picture]
        pictures += [pasted(picture, each.case) for picture in (each.edited.picture, each.full, each.exact)]
    file.parent.mkdir(parents=True, exist_ok=True)
    compose(captions, pictures, columns=8).save(file)


def require_reuse(share: float) -> None:
    """Raises SystemExit where edits have reused so little that their likeness to the full computation says nothing.

    share: of their blocks, those that took from a recording.
    """
    if share < WANTED_REUSE:
        raise SystemExit(f"it says nothing: the edits reused {share:.3f} of their blocks, of at least {WANTED_REUSE:g}")


def _report(engine: EditEngine, compared: Sequence[Compared], times: Mapping[str, float]) -> None:
    edited = [each.edited for each in compared]
    require_reuse(reused_share(edited))
    drawn = [each.picture for each in edited]
    inside = likeness(engine, compared, drawn).inside
    outside = likeness(engine, compared, drawn, keep_unmasked=True).outside
    bare_outside = likeness(engine, compared, drawn).outside
    fewer = likeness(engine, compared, [each.fewer for each in compared]).inside
    again = [each for each in compared if each.case.again]
    other = [each for each in compared if not each.case.again]
    by_prompt = [likeness(engine, some, [each.edited.picture for each in some]).inside for some in (again, other)]
    exact_right, full_right = (right(compared, way) for way in zip(*((e.exact, e.full) for e in compared), strict=True))
    masked_right = right(compared, drawn)
    values = {
        "edits": len(compared),
        "blocks_reused_share": reused_share(edited),
        "computed_share": computed_share(edited),
        "ssim_inside": inside,
        "ssim_inside_again": by_prompt[0],
        "ssim_inside_other": by_prompt[1],
        "ssim_outside": outside,
        "ssim_outside_unpasted": bare_outside,
        "outside_equal": outside_equal(compared),
        "vs_fewer_steps": inside - fewer,
        "ssim_fewer_steps": fewer,
        "oracle_drop_points": 100 * (exact_right - masked_right),
        "right_exact": exact_right,
        "right_masked": masked_right,
        "right_full": full_right,
        **times,
    }
    rows = [
        (
            "blocks that were computed for masked tokens alone",
            f"{values['blocks_reused_share']:.3f}",
            f"at least {WANTED_REUSE:g}",
        ),
        ("tokens that they computed", f"{values['computed_share']:.2f}", ""),
        ("SSIM with the full computation, in the dilated mask", f"{inside:.4f}", f"at least {WANTED_INSIDE:g}"),
        ("    of a prompt that was recorded, and of others", f"{by_prompt[0]:.4f}, {by_prompt[1]:.4f}", ""),
        ("    of fewer steps in full, in as much time", f"{fewer:.4f}", "less than that of masked blocks"),
        ("outside, without the image's own pixels", f"{bare_outside:.5f}", f"at least {WANTED_OUTSIDE:g}"),
        ("    as people get it, pasted in both", f"{outside:.5f}", f"at least {WANTED_OUTSIDE:g}"),
        ("PNGs equal to the image beyond the feather", f"{values['outside_equal']:.3f}", "1"),
        ("right by the oracle: exact, in full, masked", f"{exact_right:.3f}, {full_right:.3f}, {masked_right:.3f}", ""),
        ("    lost against exact edits", f"{values['oracle_drop_points']:.1f} points", f"at most {WANTED_DROP:g}"),
        ("time over that in full, SDXL's topology", f"{times['time_again']:.2f}, {times['time_other']:.2f}", ""),
    ]
    report("edit_quality", rows, values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-edit-quality", description=__doc__)
    parser.add_argument("--edits", type=int, default=EDITS, help="that are measured (default: 200)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each (default: 30)")
    parser.add_argument("--rounds", type=int, default=TIMED, help=f"of timing (default: {TIMED})")
    parser.add_argument("--bench-steps", type=int, default=4, help="of the model of SDXL's topology (default: 4)")
    parser.add_argument("--full-convolutions", action="store_true", help="without sparse ones")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--sheet", type=Path, default=Path("out/edit_quality.png"), help="contact sheet to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
