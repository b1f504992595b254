"""What pictures lose that start from latents of similar prompts: the embedded model, with and without cache.

In this process, with the engine, the store, its selector and the profile that the suite has. Prompts are refined as
people do; those that find a latent are drawn in every way that is compared: from it, from noise, from noise with as few
steps as it took, with another seed, and not at all (the nearest prompt's picture instead).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import PIL.Image
import torch
import transformers
from google.protobuf import json_format

from bottega.cache.store.settings import StoreSettings
from bottega.miniature import WEIGHTS
from bottega.quality.clip import Clip, clip_scores
from bottega.v1.cache_pb2 import CacheProfile
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_FAST
from load.bench.cache_diversity import ROW, Diversity, figures, measure_diversity
from load.bench.cache_engine import STEPS, CachedEngine, cached_engine
from load.bench.cache_pairs import CachedSet, LoraSet, accuracy, accuracy_of, draw_loras, draw_pairs
from load.bench.kept_pictures import PictureFolder
from load.bench.report import report
from load.bench.scratch import scratch
from load.miniature.quality import frechet_distance, load_miniature

PROFILE = WEIGHTS / "cache_profile.json"
PAIRS, LORA_PAIRS, DIVERSE = 800, 100, 20
THREADS = 2
# Those of the embedded model's that leave the text encoders alone: the others are served by their own entries only.
LORAS = ("checked", "striped")
# As the gateway bounds a LoRA that nobody has measured.
LORA_BOUND = STEPS // 5
FIDELITIES = {"balanced": FIDELITY_BALANCED, "fast": FIDELITY_FAST}
WANTED_DROP, WANTED_CLIP_DROP = 3.0, 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Pictures of one way. right: share that the oracle reads right; clip: 100 times a cosine; features: of each."""

    right: float
    clip: float
    features: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """loras: by name, shares of pictures that are right: exact, and from latents recorded without."""

    pairs: CachedSet
    ways: Mapping[str, Seen]
    loras: Mapping[str, tuple[float, float, int]]
    diversity: Diversity


def measure(engine: CachedEngine, clip: Clip, options: argparse.Namespace) -> Measured:
    """Draws all, and looks at it."""
    fidelity = FIDELITIES[options.fidelity]
    pairs = draw_pairs(engine, options.pairs, lambda said: print(f"  {said}", flush=True), fidelity=fidelity)
    ways = {
        "cached": [each.picture for each in pairs.cached],
        "uncached": [each.picture for each in pairs.uncached],
        "fewer": [each.picture for each in pairs.fewer],
        "other": [each.picture for each in pairs.other],
        "nearest": list(pairs.nearest),
    }
    asks = [replace(each.ask, fidelity=FIDELITY_BALANCED) for each in pairs.cached[: options.lora_pairs]]
    loras = {name: _lora_accuracy(draw_loras(engine, asks, name, LORA_BOUND)) for name in LORAS if asks}
    diversity = measure_diversity(engine, pairs.prompts[-options.diverse :])
    return Measured(
        pairs=pairs,
        ways={name: _see(clip, pictures, pairs.prompts) for name, pictures in ways.items()},
        loras=loras,
        diversity=diversity,
    )


def main() -> None:
    """Prints the table and the line of JSON."""
    options = _options()
    profile = json_format.Parse(options.profile.read_text(encoding="utf-8"), CacheProfile())
    torch.set_num_threads(options.threads)
    transformers.logging.disable_progress_bar()
    with ExitStack() as stack:
        folder, kept = options.folder, None
        if folder is None:
            folder = stack.enter_context(scratch())
        else:
            kept = PictureFolder(folder / "pictures")
        settings = StoreSettings(
            folder=folder / "store", budget_bytes=1 << 30, exploration=0.0, predictor=False, plain_for_loras=True
        )
        engine = stack.enter_context(cached_engine(folder, settings, kept))
        if profile.model_hash != engine.model_hash:
            raise SystemExit(f"{options.profile} is of another model: bottega cache profile measures this one")
        engine.store.set_profile(profile)
        measured = measure(engine, load_miniature(WEIGHTS), options)
    _report(measured)


def _see(clip: Clip, pictures: Sequence[PIL.Image.Image], prompts: Sequence[str]) -> Seen:
    return Seen(
        right=accuracy_of(pictures, prompts),
        clip=float(clip_scores(clip, pictures, prompts).mean()),
        features=clip.embed_pictures(pictures),
    )


def _lora_accuracy(drawn: LoraSet) -> tuple[float, float, int]:
    return accuracy(drawn.exact), accuracy(drawn.cached), len(drawn.cached)


def _report(measured: Measured) -> None:
    ways, pairs, diversity = measured.ways, measured.pairs, measured.diversity
    drop = 100 * (ways["uncached"].right - ways["cached"].right)
    clip_drop = ways["uncached"].clip - ways["cached"].clip
    gain = 100 * (ways["cached"].right - ways["fewer"].right)
    distance = frechet_distance(ways["cached"].features, ways["uncached"].features)
    other = frechet_distance(ways["other"].features, ways["uncached"].features)
    lora_drops = {name: 100 * (exact - cached) for name, (exact, cached, _) in measured.loras.items()}
    diverse_rows, diverse_values = figures(diversity)
    said = {
        "cached": "from a latent",
        "uncached": "from noise",
        "fewer": "from noise, as few steps",
        "other": "from noise, another seed",
        "nearest": "plain retrieval of the nearest prompt's picture",
    }
    rows = [(f"prompts, of them with a latent ({len(pairs.cached)} compared)", f"{pairs.tried}", "")]
    rows += [(f"{said[name]}: right, CLIP", f"{way.right:.3f}, {way.clip:.2f}", "") for name, way in ways.items()]
    rows += [
        ("steps that latents stand for (steps_saved)", f"{pairs.steps_saved:.2f} of all", ""),
        ("lost against noise (accuracy_drop_points)", f"{drop:.1f} points", f"at most {WANTED_DROP:g}"),
        ("    in CLIP score (clip_drop)", f"{clip_drop:.2f}", f"at most {WANTED_CLIP_DROP:g}"),
        ("gained over as few steps (vs_fewer_steps_points)", f"{gain:.1f} points", "at least 0"),
        ("Fréchet distance to noise (frechet)", f"{distance:.4f}", "below the next"),
        ("    of two sets from noise (frechet_other_seeds)", f"{other:.4f}", ""),
        *diverse_rows,
    ]
    for name, (exact, cached, count) in measured.loras.items():
        rows.append((f"LoRA {name}, from latents without it ({count}): right", f"{exact:.3f}, {cached:.3f}", ""))
    values = {
        "pairs": len(pairs.cached),
        "tried": pairs.tried,
        "steps_saved": pairs.steps_saved,
        "accuracy_drop_points": drop,
        "clip_drop": clip_drop,
        "vs_fewer_steps_points": gain,
        "frechet": distance,
        "frechet_other_seeds": other,
        **diverse_values,
        **{f"right_{name}": way.right for name, way in ways.items()},
        **{f"lora_drop_{name}": drop for name, drop in lora_drops.items()},
    }
    if lora_drops:
        worst = max(lora_drops.values())
        rows.append(
            ("    lost at worst (lora_accuracy_drop_points)", f"{worst:.1f} points", f"{WANTED_DROP:g} to serve")
        )
        values["lora_accuracy_drop_points"] = worst
    report("cache_quality", rows, values)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-cache-quality", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"prompts with a latent (default: {PAIRS})")
    parser.add_argument("--lora-pairs", type=int, default=LORA_PAIRS, help="of them with each LoRA (default: 100)")
    parser.add_argument("--diverse", type=int, default=DIVERSE, help=f"prompts with rows of {ROW} (default: 20)")
    parser.add_argument(
        "--fidelity", choices=FIDELITIES, default="balanced", help="under which pictures start from latents"
    )
    parser.add_argument("--profile", type=Path, default=PROFILE, help="(default: the embedded model's own)")
    parser.add_argument("--folder", type=Path, help="keeps what was drawn, and goes on from it (default: none is kept)")
    parser.add_argument("--threads", type=int, default=THREADS, help="of torch (default: 2)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
