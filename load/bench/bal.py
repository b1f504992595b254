"""What does a slow LoRA store add to a request with one LoRA and with two, in time and quality?

Loading is bounded and asynchronous. The store is throttled so that loading takes as many steps as a LoRA may be late.
Latency is measured on a model whose steps are long, against the same request without LoRAs, and against Diffusers,
which loads first. Quality is measured on the embedded model, against pictures that have their LoRAs from the first
step. There the step is pinned in the requests: a LoRA that arrives at step K makes the very same picture.

A run takes 9 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import PIL.Image

from bottega.client import Client, Lora, Picture
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import Scene, caption, held_out_scenes
from load.bench import miniature
from load.bench.bench_model import DEFAULT, write_bench_model
from load.bench.framework import GUIDANCE_SCALE, PROMPT, Bench, Option, Sheet
from load.bench.lora_files import cold_services, random_lora
from load.bench.side_process import Side
from load.bench.stock import stock
from load.bench.suites import relayed, stage_s, suite
from load.bench.throttle import Throttle
from load.miniature.quality import Clip, load_miniature
from load.miniature.quality import measure as measure_quality

THREADS = 2
# As large as it takes for the header to be as small a part of the file as it is of a real LoRA.
RANK = 64
COUNTS = {0: "none", 1: "one", 2: "two"}
WANTED_RATIO, WANTED_CLIP_DROP = 1.05, 0.1
WANTED_SSIM = {"one": 0.83, "two": 0.82}
# How late LoRAs may be, as a share of the steps: what the gateway allows one without a profile, and Katz any.
BOUND_SHARE = 0.2
# Requests of the embedded model that are drawn together.
AT_ONCE = 8
BENCH = Bench(
    __file__,
    __doc__,
    Option("--rounds", 5, "of all requests, on each side", smallest=1),
    Option("--steps", 30, "of a picture", smallest=5),
    Option("--prompts", 50, "whose pictures are compared; 0 is none", smallest=2),
    Option("--late", [3, 10, 15], "further steps K to compare at", smallest=[3]),
    Option("--loras", [], "two files or folders for the embedded model; by default its own", kind=Path),
)


@dataclass(slots=True, kw_only=True)
class Timed:
    """Requests with a number of LoRAs, an entry for each round."""

    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)
    from_steps: list[float] = field(default_factory=list)
    """Steps at which the LoRAs went in."""
    waits_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The looks of pictures of one kind."""

    ssim: float
    """Mean similarity to the exact pictures, in -1 to 1."""
    clip: float
    """100 times a cosine."""
    right: float
    """Share that the oracle reads right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Pictures with one set of LoRAs."""

    exact: Seen
    by_late: Mapping[int, Seen]
    """By the step at which the LoRAs went in."""
    none: Seen
    """Without LoRAs."""

    def fill(self, sheet: Sheet, name: str, bound: int) -> None:
        """Add rows and values; those of the step `bound` have bars."""
        shown = {"exact": self.exact, **{f"from step {late}": seen for late, seen in self.by_late.items()}}
        for kind, seen in {**shown, "without": self.none}.items():
            sheet.row(f"{name}, {kind}", f"SSIM {seen.ssim:.3f}, CLIP {seen.clip:.2f}, oracle {seen.right:.2f}")
        judged = self.by_late[bound]
        bar = f"at least {WANTED_SSIM[name]:g}"
        sheet.figure(f"  SSIM at step {bound}", judged.ssim, "{:.3f}", key=f"ssim_{name}", bar=bar)
        drop, bar = self.exact.clip - judged.clip, f"at most {WANTED_CLIP_DROP:g}"
        sheet.figure("  CLIP score lost", drop, key=f"clip_drop_{name}", bar=bar)
        sheet.values |= {f"oracle_{name}": judged.right, f"oracle_exact_{name}": self.exact.right}
        sheet.values |= {f"ssim_none_{name}": self.none.ssim}
        sheet.values |= {f"ssim_{name}_from_{late}": seen.ssim for late, seen in self.by_late.items()}


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Measure latency, then quality."""
    bound = int(options.steps * BOUND_SHARE)
    timed = _latency(folder, options, bound)
    sheet.values["bound"] = bound
    none = timed["none"]
    for name, each in timed.items():
        sheet.row(f"{name}: suite, Diffusers", f"{median(each.ours_s):.2f} s, {median(each.theirs_s):.2f} s")
        if name == "none":
            continue
        late = f"{median(each.from_steps):g} of {options.steps}, {1000 * median(each.waits_s):.0f} ms"
        sheet.row("    went in at step, waited for", late, f"step {bound} at the latest")
        ratio, theirs = median(each.ours_s) / median(none.ours_s), median(each.theirs_s) / median(none.theirs_s)
        bar = f"at most {WANTED_RATIO:g}"
        sheet.figure("    over none, suite", ratio, "{:.3f}", key=f"ratio_{name}", bar=bar)
        sheet.figure("    over none, Diffusers", theirs, "{:.3f}", key=f"diffusers_ratio_{name}")
        sheet.values |= {f"from_step_{name}": median(each.from_steps), f"wait_s_{name}": median(each.waits_s)}
    if options.prompts:
        for name, quality in _compare(folder / "quality", options, sorted({bound, *options.late})).items():
            quality.fill(sheet, name, bound)


def _latency(folder: Path, options: argparse.Namespace, bound: int) -> dict[str, Timed]:
    """Draw with the suite and Diffusers in turns."""
    model = folder / "model"
    write_bench_model(model, DEFAULT.for_run(smallest=options.smallest))
    loras = [random_lora(model, folder / "files", seed=seed, rank=RANK) for seed in range(2)]
    timed, step_s = {name: Timed() for name in COUNTS.values()}, 0.0
    with (
        Throttle() as throttle,
        suite(folder / "suite", cold_services(model, THREADS, links=relayed(throttle))) as running,
        Side(stock, threads=THREADS, model=model) as reference,
    ):
        sizes = [running.client.add_lora(f"lora{n}", lora.theirs).size_bytes for n, lora in enumerate(loras)]
        for seed in range(options.rounds + 1):
            for count, name in COUNTS.items():
                # Loading of all takes as long as the steps that they may miss.
                fetch_s = bound * step_s if count else 0.0
                throttle.bytes_per_s = sum(sizes[:count]) / fetch_s if fetch_s else 1e9
                picture, seconds = running.draw(
                    PROMPT,
                    seed=seed,
                    num_inference_steps=options.steps,
                    guidance_scale=GUIDANCE_SCALE,
                    lora=[Lora(f"lora{number}", max_step=bound) for number in range(count)],
                    bounded_lora_loading=True,
                )
                files = [str(lora.theirs) for lora in loras[:count]]
                answer = reference.ask(
                    prompts=[PROMPT], seeds=[seed], steps=options.steps, loras=files, fetch_s=fetch_s
                )
                if count == 0:
                    step_s = stage_s(picture, "denoise") / options.steps
                if seed:  # the first round pays for what is made once
                    timed[name].ours_s.append(seconds)
                    timed[name].theirs_s.append(answer["seconds"])
                    timed[name].from_steps += [use.from_step for use in picture.provenance.loras[:1]]
                    timed[name].waits_s += [use.wait_s for use in picture.provenance.loras[:1]]
    return timed


def _compare(folder: Path, options: argparse.Namespace, lates: Sequence[int]) -> dict[str, Quality]:
    """Draw every prompt in every way; half of the prompts name one thing."""
    each = max(options.prompts // 2, 1)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    clip = load_miniature(WEIGHTS)
    services: Mapping[str, Mapping[str, object]] = {
        "loras": {"bases": {"miniature": "miniature"}},
        "worker": {"engine": {"model": "miniature", "threads": THREADS}},
    }
    found = {}
    with suite(folder, services) as running:
        for number, path in enumerate(options.loras or _styles(folder)):
            running.client.add_lora(f"style{number}", path)
        plain = _draw(running.client, scenes, [], options.steps)
        for name, count in (("one", 1), ("two", 2)):

            def drawn(step: int, count: int = count) -> list[PIL.Image.Image]:
                loras = [Lora(f"style{number}", from_step=step) for number in range(count)]
                return _draw(running.client, scenes, loras, options.steps)

            exact = drawn(0)
            found[name] = Quality(
                exact=_see(clip, scenes, exact, exact),
                by_late={step: _see(clip, scenes, drawn(step), exact) for step in lates},
                none=_see(clip, scenes, plain, exact),
            )
    return found


def _draw(client: Client, scenes: Sequence[Scene], loras: Sequence[Lora], steps: int) -> list[PIL.Image.Image]:
    """Draw scene i with seed i."""

    def one(seed: int, scene: Scene) -> PIL.Image.Image:
        picture: Picture = client.generate(
            caption(scene), seed=seed, num_inference_steps=steps, guidance_scale=miniature.GUIDANCE, lora=loras
        )
        return picture.pil().convert("RGB")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(scenes)), scenes))


def _see(
    clip: Clip, scenes: Sequence[Scene], pictures: Sequence[PIL.Image.Image], exact: Sequence[PIL.Image.Image]
) -> Seen:
    quality = measure_quality(clip, pictures, [caption(scene) for scene in scenes], exact)
    assert quality.ssim is not None, "it has references"
    drawn = [miniature.Drawn(scene=scene, picture=one) for scene, one in zip(scenes, pictures, strict=True)]
    return Seen(ssim=quality.ssim, clip=quality.clip_score, right=mean(one.right for one in drawn))


def _styles(folder: Path) -> list[Path]:
    """Return two LoRAs of the embedded model: its own, else random ones."""
    trained = sorted((WEIGHTS / "loras").glob("*"))[:2]
    return trained if len(trained) == 2 else [random_lora(WEIGHTS, folder, seed=seed, rank=8).theirs for seed in (0, 1)]


if __name__ == "__main__":
    sys.exit(BENCH.command())
