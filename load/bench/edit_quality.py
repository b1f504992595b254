"""What do pictures lose of which only the masked part is computed?

Edits of an embedded model against the full computation, in this process, with the engine and its recordings, and the
codec's pixels. Each template is edited once, which is recorded; the BALANCED edits after it are measured, each prompt
with two seeds. The full computation is stock Diffusers' inpainting under the same composed noise: the recording's
outside the mask, the request's inside. An exact edit has its own noise everywhere.

A run takes 30 to 60 minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import numpy.typing as npt
import PIL.Image
import torch

from bottega.addons.edits.engine.addon import EngineEdits
from bottega.addons.edits.engine.masked import tokens
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.client.types.models import EMBEDDED_MODEL
from bottega.codec import edits
from bottega.codec.pixels import MaskOrder, Overlay
from bottega.engine.engine import Engine
from bottega.engine.events import ImageDrawn, JobFailed, JobFinished
from bottega.engine.limits import EngineLimits
from bottega.miniature.scenes import random_scene
from bottega.model.model import Model
from bottega.model_files.folder_check import folder_of
from bottega.quality import oracle
from bottega.v1.generation_pb2 import Provenance
from load.bench.bench_model import write_bench_model
from load.bench.edit_cases import EditCase, StockEdits, Template, edits_of, templates
from load.bench.edit_model import EDIT_SHAPE, SD3_EDIT_SHAPE, square_mask, template
from load.bench.engine_runs import edit_order, load_bench_model
from load.bench.framework import CORES, Bench, Option, Sheet
from load.bench.transformer_model import write_transformer_model
from load.miniature.quality import ssim_within
from load.sheets import compose

# After the first one, which records.
EDITS_OF_A_TEMPLATE = 5
PROMPTS_OF_A_TEMPLATE = 3
FEATHER, MARGIN_TOKENS = 8, 1
# Of half a window of SSIM.
_EDGE = 5
# Edits on the contact sheet.
_SHOWN = 12
_WHITE = 128
_RECORDINGS_BYTES = 512 << 20
WANTED_INSIDE, WANTED_OUTSIDE, WANTED_DROP = 0.95, 0.999, 3.0
WANTED_REUSE = 0.5
BENCH = Bench(
    __file__,
    __doc__,
    Option("--edits", 200, "that are measured", smallest=5),
    Option("--steps", 30, "of each", smallest=6),
    Option("--rounds", 8, "of timing", smallest=1),
    Option("--bench-steps", 4, "of the large model", smallest=3),
    Option("--model", EMBEDDED_MODEL, "an embedded model, or a trained folder"),
    Option("--full-convolutions", False, "without sparse ones"),
    Option("--threads", CORES, "of torch"),
    Option("--sheet", Path("out/edit_quality.png"), "contact sheet to write", kind=Path),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Edited:
    """An edit that the engine has drawn."""

    case: EditCase
    picture: PIL.Image.Image
    """As Diffusers gives it, without the image's own pixels."""
    record: Provenance
    """Empty of an exact edit."""
    denoise_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Compared:
    """An edit in every way."""

    edited: Edited
    full: PIL.Image.Image
    """Computed in full under composed noise."""
    fewer: PIL.Image.Image
    """The same with fewer steps, in as much time as the edit."""
    exact: PIL.Image.Image

    @property
    def case(self) -> EditCase:
        return self.edited.case


class EditEngine:
    """Draws edits with recordings in its memory, as a worker's engine does.

    Args:
        sparse: Whether convolutions are computed around masks alone.
    """

    def __init__(self, model: Model, *, sparse: bool = True) -> None:
        self.model = model
        addon = EngineEdits(model, MemoryActivations(_RECORDINGS_BYTES), sparse=sparse)
        self._engine = Engine(model, EngineLimits(progress_interval_s=0.0), addons=(addon,))

    def draw(self, case: EditCase, *, steps: int, masked: bool = True) -> Edited:
        """Draw an edit, exact unless it is masked."""
        order = edit_order(
            0,
            case.template.picture,
            np.asarray(case.template.mask),
            steps=steps,
            seed=case.seed,
            masked=masked,
            any_prompt=False,
            prompt=case.prompt,
            guidance_scale=self.model.defaults.guidance_scale,
            sampler=self.model.defaults.sampler,
        )
        self._engine.submit(order)
        while self._engine.busy:
            for event in self._engine.turn():
                match event:
                    case ImageDrawn():
                        picture = PIL.Image.fromarray(event.pixels.numpy())
                    case JobFinished():
                        record = event.record
                    case JobFailed():
                        raise event.error
        return Edited(case=case, picture=picture, record=record.provenance, denoise_s=record.seconds["denoise"])


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRatios:
    """Seconds of an edit with masked blocks over those of one in full."""

    again: float
    """With the prompt that was recorded."""
    other: float
    """With other prompts."""

    def steps(self, case: EditCase, steps: int) -> int:
        """Return how many steps the full computation makes in the time of a masked edit."""
        ratio = self.again if case.again else self.other
        return min(max(round(ratio * steps), 1), steps)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure times, draw every edit in every way, and compare."""
    torch.set_num_threads(options.threads)
    model, sparse = load_bench_model(folder_of(options.model)), not options.full_convolutions
    sheet.name_model(options.model)
    chosen = _templates(model, max(options.edits // EDITS_OF_A_TEMPLATE, 1))
    share = mean(float(dilated(model, each.mask).float().mean()) for each in chosen)
    if model.unet is None:
        write_transformer_model(folder / "model", SD3_EDIT_SHAPE.for_run(smallest=options.smallest))
    else:
        write_bench_model(folder / "model", EDIT_SHAPE.for_run(smallest=options.smallest))
    large = EditEngine(load_bench_model(folder / "model"), sparse=sparse)
    ratios = _time_ratios(large, _noise_template(share), steps=options.bench_steps, rounds=options.rounds)
    small = EditEngine(model, sparse=sparse)
    own = _time_ratios(small, chosen[0], steps=options.steps, rounds=options.rounds)
    print(f"masked blocks with a large model: {ratios}; with the embedded one: {own}", flush=True)
    engine, stock = EditEngine(model, sparse=sparse), StockEdits(folder_of(options.model))
    compared: list[Compared] = []
    for number, edited in enumerate(chosen):
        cases = list(edits_of(edited, number * (EDITS_OF_A_TEMPLATE + 1)))
        compared += _compare(engine, stock, cases, options.steps, ratios)
        print(f"  {len(compared)} edits", flush=True)
    _show(compared, options.sheet)
    _fill(sheet, model, compared)
    shown = f"{ratios.again:.2f}, {ratios.other:.2f}"
    sheet.row("time over that in full, a large model", shown)
    sheet.values |= {"time_again": ratios.again, "time_other": ratios.other}
    sheet.values |= {"time_again_miniature": own.again, "time_other_miniature": own.other}


def _templates(model: Model, count: int) -> list[Template]:
    """Return templates of which an edit leaves a part as it is. An edit that redraws everything is not recorded."""
    found = (each for each in templates(2 * count, PROMPTS_OF_A_TEMPLATE) if not bool(dilated(model, each.mask).all()))
    return list(itertools.islice(found, count))


def _noise_template(share: float) -> Template:
    """Return one of the bench model's size, whose mask has so large a share of the tokens."""
    wanted = tuple(random_scene(random.Random(seed), things=1) for seed in range(2))
    return Template(picture=template(), mask=PIL.Image.fromarray(square_mask(share)), wanted=wanted)


def _time_ratios(engine: EditEngine, edited: Template, *, steps: int, rounds: int) -> TimeRatios:
    """Measure medians of edits that are alone, in turns."""
    seconds: dict[str, list[float]] = {"again": [], "other": [], "full": []}
    cases = list(edits_of(edited, 0))
    for number in range(rounds + 2):
        other, again = cases[2 * (number % 2) :][:2]  # a prompt that was not the last one, and then once more
        for kind, case, masked in (("other", other, True), ("again", again, True), ("full", again, False)):
            drawn = engine.draw(case, steps=steps, masked=masked)
            if number > 1:  # the first one records, the second pays for what is made once
                seconds[kind].append(drawn.denoise_s)
    full = median(seconds["full"])
    return TimeRatios(again=median(seconds["again"]) / full, other=median(seconds["other"]) / full)


def _compare(
    engine: EditEngine, stock: StockEdits, cases: Sequence[EditCase], steps: int, ratios: TimeRatios
) -> list[Compared]:
    """Draw a first edit of a template, and then, with what was recorded, the others one after the other."""
    first, *later = cases
    recording = engine.draw(first, steps=steps)
    assert recording.record.mask.recorded, f"the first edit was not recorded: {recording.record}"
    masked = [engine.draw(case, steps=steps) for case in later]
    recorded = stock.draws(first)
    full, exact = stock.draw(later, steps, recorded), stock.draw(later, steps)
    return [
        Compared(
            edited=each,
            full=whole,
            fewer=stock.draw([each.case], ratios.steps(each.case, steps), recorded)[0],
            exact=own,
        )
        for each, whole, own in zip(masked, full, exact, strict=True)
    ]


def dilated(model: Model, mask: PIL.Image.Image) -> torch.Tensor:
    """Return the pixels of the tokens that masked blocks compute with this mask: bool [height, width]."""
    scale = model.latent_scale
    latent = torch.from_numpy(np.asarray(mask) >= _WHITE)[::scale, ::scale]
    computed = tokens.dilate(latent, MARGIN_TOKENS, tokens.finest_stride(model.backbone.network))
    return computed.repeat_interleave(scale, 0).repeat_interleave(scale, 1)


def pasted(drawn: PIL.Image.Image, case: EditCase) -> PIL.Image.Image:
    """Return the picture that people get: with the template's own pixels outside the mask, read back from its PNG."""
    overlay = Overlay(
        image=_png(case.template.picture),
        mask=_png(case.template.mask),
        order=MaskOrder(width=drawn.width, height=drawn.height, latent_scale=1),
        keep_unmasked=True,
        feather=FEATHER,
    )
    return PIL.Image.open(io.BytesIO(_png(edits.composed(drawn, overlay)))).convert("RGB")


def _likeness(
    model: Model, compared: Sequence[Compared], pictures: Sequence[PIL.Image.Image], *, keep_unmasked: bool = False
) -> tuple[float, float]:
    """Return the mean SSIM with the full computation, where windows' centres lie in the dilated mask, and outside.

    Args:
        pictures: One for each of the edits.
        keep_unmasked: Whether both have the image's own pixels outside masks.
    """
    inside, outside = [], []
    for each, drawn in zip(compared, pictures, strict=True):
        both = drawn, each.full
        ours, theirs = (pasted(one, each.case) for one in both) if keep_unmasked else both
        region = dilated(model, each.case.template.mask)
        inside.append(ssim_within(ours, theirs, region))
        if bool((~region)[_EDGE:-_EDGE, _EDGE:-_EDGE].any()):
            outside.append(ssim_within(ours, theirs, ~region))
    return mean(inside), mean(outside)


def _right(compared: Sequence[Compared], pictures: Sequence[PIL.Image.Image]) -> float:
    """Return the share of pictures in which the oracle reads all as it was asked for."""
    return mean(
        oracle.agrees(oracle.read(pasted(picture, each.case)), each.case.wanted)
        for each, picture in zip(compared, pictures, strict=True)
    )


def _equal_outside(each: Compared) -> bool:
    """Return whether an edit's PNG has the template's own bytes everywhere beyond the feather."""
    outside = _beyond_feather(each.case.template.mask)
    assert outside.any(), "there is something to keep"
    ours, theirs = pasted(each.edited.picture, each.case), each.case.template.picture
    return bool((np.asarray(ours)[outside] == np.asarray(theirs)[outside]).all())


def _beyond_feather(mask: PIL.Image.Image) -> npt.NDArray[np.bool_]:
    """Return the pixels farther outside the mask than the feather: bool [height, width]."""
    white = np.argwhere(np.asarray(mask) >= _WHITE)
    places = np.moveaxis(np.indices(np.asarray(mask).shape), 0, -1)
    squares = ((places[:, :, None] - white) ** 2).sum(axis=-1)
    return np.asarray(squares.min(axis=-1) > FEATHER**2)


def _show(compared: Sequence[Compared], file: Path) -> None:
    """Write the contact sheet: template, masked blocks, the full computation, an exact edit."""
    captions, pictures = [], []
    for each in compared[:: max(len(compared) // _SHOWN, 1)][:_SHOWN]:
        captions += ["template", f"masked: {each.case.prompt}", "in full, the same noise", "exact"]
        pictures += [each.case.template.picture]
        pictures += [pasted(picture, each.case) for picture in (each.edited.picture, each.full, each.exact)]
    file.parent.mkdir(parents=True, exist_ok=True)
    compose(captions, pictures, columns=8).save(file)
    print(f"contact sheet: {file}")


def require_reuse(share: float) -> None:
    """Raise SystemExit where edits have reused so few blocks that the comparison means nothing."""
    if share < WANTED_REUSE:
        raise SystemExit(f"the edits reused {share:.3f} of their blocks, of at least {WANTED_REUSE:g}: no result")


def _fill(sheet: Sheet, model: Model, compared: Sequence[Compared]) -> None:
    records = [each.edited.record for each in compared]
    reused = sum(each.blocks_reused for each in records) / sum(each.blocks_total for each in records)
    require_reuse(reused)
    drawn = [each.edited.picture for each in compared]
    inside, bare_outside = _likeness(model, compared, drawn)
    _, outside = _likeness(model, compared, drawn, keep_unmasked=True)
    fewer, _ = _likeness(model, compared, [each.fewer for each in compared])
    for again in (True, False):
        some = [each for each in compared if each.case.again is again]
        like, _ = _likeness(model, some, [each.edited.picture for each in some])
        sheet.values[f"ssim_inside_{'again' if again else 'other'}"] = like
    exact_right, full_right = (
        _right(compared, list(way)) for way in zip(*((e.exact, e.full) for e in compared), strict=True)
    )
    masked_right = _right(compared, drawn)
    sheet.values |= {
        "edits": len(compared),
        "ssim_fewer_steps": fewer,
        "vs_fewer_steps": inside - fewer,
        "right_exact": exact_right,
        "right_masked": masked_right,
        "right_full": full_right,
    }
    bar = f"at least {WANTED_REUSE:g}"
    what = "blocks that were computed for masked tokens alone"
    sheet.figure(what, reused, "{:.3f}", key="blocks_reused_share", bar=bar)
    computed = mean(each.mask.computed_share or 1.0 for each in records)
    sheet.figure("tokens that they computed", computed, key="computed_share")
    bar, what = f"at least {WANTED_INSIDE:g}", "SSIM with the full computation, in the dilated mask"
    sheet.figure(what, inside, "{:.4f}", key="ssim_inside", bar=bar)
    by_prompt = f"{sheet.values['ssim_inside_again']:.4f}, {sheet.values['ssim_inside_other']:.4f}"
    sheet.row("    of a prompt that was recorded, and of others", by_prompt)
    sheet.row("    of fewer steps in full, in as much time", f"{fewer:.4f}", "less than that of masked blocks")
    bar, what = f"at least {WANTED_OUTSIDE:g}", "outside, without the image's own pixels"
    sheet.figure(what, bare_outside, "{:.5f}", key="ssim_outside_unpasted", bar=bar)
    sheet.figure("    as people get it, pasted in both", outside, "{:.5f}", key="ssim_outside", bar=bar)
    equal = mean(map(_equal_outside, compared))
    sheet.figure("PNGs equal to the image beyond the feather", equal, "{:.3f}", key="outside_equal", bar="1")
    shown = f"{exact_right:.3f}, {full_right:.3f}, {masked_right:.3f}"
    sheet.row("right by the oracle: exact, in full, masked", shown)
    drop, bar = 100 * (exact_right - masked_right), f"at most {WANTED_DROP:g}"
    sheet.figure("    lost against exact edits", drop, "{:.1f} points", key="oracle_drop_points", bar=bar)


def _png(image: PIL.Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(BENCH.command())
