"""What pictures lose when LoRAs come late: the embedded model through the suite, LoRAs in from step K on, by K.

The step is pinned in the requests: a LoRA that arrives at step K makes the very same picture. Pictures are compared
with those that have their LoRAs from the first step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import PIL.Image
import transformers

from bottega.client import Client, Lora
from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import Scene, caption, held_out_scenes
from load.bench.lora_files import random_lora
from load.bench.lora_suite import Cast, suite
from load.bench.miniature import GUIDANCE_SCALE, Drawn
from load.miniature.quality import Clip, load_miniature, measure

MODEL = "miniature"
THREADS = 2
# How many requests are drawn together.
AT_ONCE = 8
NAMES = {"one": ("style0",), "two": ("style0", "style1")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Pictures of one kind. ssim: with the exact ones, in -1 to 1; clip: 100 times a cosine; right: share, by the
    oracle."""

    ssim: float
    clip: float
    right: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one set of LoRAs. by_late: by the step at which they went in; none: without them."""

    exact: Seen
    by_late: Mapping[int, Seen]
    none: Seen

    def reported(
        self, name: str, bound: int, wanted_ssim: float, wanted_drop: float
    ) -> tuple[list[tuple[str, str, str]], dict[str, float]]:
        """Rows of the table, and values; those of the step `bound` are judged."""
        rows = []
        values: dict[str, float] = {}
        kinds = {"exact": self.exact, **{f"from step {late}": seen for late, seen in self.by_late.items()}}
        for kind, seen in {**kinds, "without": self.none}.items():
            said = f"SSIM {seen.ssim:.3f}, CLIP {seen.clip:.2f}, oracle {seen.right:.2f}"
            rows.append((f"{name}, {kind}", said, ""))
        judged = self.by_late[bound]
        drop = self.exact.clip - judged.clip
        rows += [
            (f"  SSIM at step {bound} (ssim_{name})", f"{judged.ssim:.3f}", f"at least {wanted_ssim:g}"),
            (f"  CLIP score lost (clip_drop_{name})", f"{drop:.2f}", f"at most {wanted_drop:g}"),
        ]
        values |= {f"ssim_{name}": judged.ssim, f"clip_drop_{name}": drop, f"oracle_{name}": judged.right}
        values |= {f"oracle_exact_{name}": self.exact.right, f"ssim_none_{name}": self.none.ssim}
        values |= {f"ssim_{name}_from_{late}": seen.ssim for late, seen in self.by_late.items()}
        return rows, values


def compare(folder: Path, options: argparse.Namespace, lates: Sequence[int]) -> dict[str, Quality]:
    """Draws every prompt in every way; half of the prompts name one thing."""
    folder.mkdir()
    transformers.logging.disable_progress_bar()
    each = max(options.prompts // 2, 1)
    scenes = held_out_scenes(each, things=1) + held_out_scenes(each, things=2)
    clip = load_miniature(WEIGHTS)
    cast = Cast(folder=folder / "suite", model=MODEL, base=MODEL, engine={"threads": THREADS}, store={}, controlnets={})
    found = {}
    with suite(cast) as running:
        for number, path in enumerate(options.loras or _styles(folder)):
            running.client.add_lora(f"style{number}", path)
        plain = _draw(running.client, scenes, (), options.steps)
        for name, loras in NAMES.items():
            exact = _draw(running.client, scenes, [Lora(lora, from_step=0) for lora in loras], options.steps)
            late = {
                step: _draw(running.client, scenes, [Lora(lora, from_step=step) for lora in loras], options.steps)
                for step in lates
            }
            found[name] = Quality(
                exact=_see(clip, scenes, exact, exact),
                by_late={step: _see(clip, scenes, pictures, exact) for step, pictures in late.items()},
                none=_see(clip, scenes, plain, exact),
            )
    return found


def _draw(client: Client, scenes: Sequence[Scene], loras: Sequence[Lora], steps: int) -> list[PIL.Image.Image]:
    """Scene i with seed i."""

    def one(seed: int, scene: Scene) -> PIL.Image.Image:
        picture = client.generate(
            caption(scene), seed=seed, num_inference_steps=steps, guidance_scale=GUIDANCE_SCALE, lora=loras
        )
        return picture.pil().convert("RGB")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(one, range(len(scenes)), scenes))


def _see(
    clip: Clip, scenes: Sequence[Scene], pictures: Sequence[PIL.Image.Image], exact: Sequence[PIL.Image.Image]
) -> Seen:
    quality = measure(clip, pictures, [caption(scene) for scene in scenes], exact)
    assert quality.ssim is not None, "it has references"
    right = mean(Drawn(scene=scene, picture=one).right for scene, one in zip(scenes, pictures, strict=True))
    return Seen(ssim=quality.ssim, clip=quality.clip_score, right=right)


def _styles(folder: Path) -> list[Path]:
    """Two LoRAs of the embedded model: those that it has, else random ones."""
    trained = sorted((WEIGHTS / "loras").glob("*"))[:2]
    return trained if len(trained) == 2 else [random_lora(WEIGHTS, folder, seed=seed, rank=8).theirs for seed in (0, 1)]
