"""What do pictures lose that start from latents of similar prompts?

An embedded model, with and without cache, in this process, with the engine, the store, its selector and the profile
that the suite has. Prompts are refined as people do; those that find a latent are drawn in every way that is compared:
from it, from noise, from noise with as few steps as it took, with another seed, and not at all (the nearest prompt's
picture instead).

A run takes 30 to 60 minutes on two cores.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

import PIL.Image
import torch

from bottega.addons.cache.client.samples import PromptPair, miniature_pairs
from bottega.addons.cache.starts import parse_start
from bottega.cache.store.settings import StoreSettings
from bottega.client.types.models import EMBEDDED_MODEL
from bottega.miniature.scenes import Scene, read_caption
from bottega.model_files.folder_check import folder_of
from bottega.quality import oracle
from bottega.quality.clip import Clip, clip_scores
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_FAST, Fidelity
from load.bench.cache_diversity import PROFILE, ROW, fill, measure_diversity, read_profile
from load.bench.cache_engine import STEPS, Ask, CachedEngine, Drawn, PictureFolder, cached_engine
from load.bench.framework import PROMPT, Bench, Option, Sheet
from load.bench.miniature import load_towers
from load.miniature.quality import frechet_distance

# As the gateway bounds a LoRA that nobody has measured.
LORA_BOUND = STEPS // 5
FIDELITIES = {"balanced": FIDELITY_BALANCED, "fast": FIDELITY_FAST}
WANTED_DROP, WANTED_CLIP_DROP = 3.0, 1.5
# Pairs whose first prompts are drawn before any of their second ones.
_WAVE, _LEAST_WAVE = 100, 8
# So many times as many pairs are tried at most: others find nothing similar enough, and are the same picture anyhow.
_MOST_TRIED = 6
# None of them is one of those that the profile was measured with.
_SEED = 1
# Seeds of the second pictures, of the other set, and of the first ones.
_OTHER_SEEDS, _FIRST_SEEDS = 1_000_000, 2_000_000
BENCH = Bench(
    __file__,
    __doc__,
    Option("--pairs", 800, "prompts with a latent", smallest=2),
    Option("--lora-pairs", 100, "of them with each LoRA", smallest=1),
    Option("--diverse", 20, f"prompts with rows of {ROW}", smallest=1),
    Option("--fidelity", "balanced", "under which pictures start from latents", choices=tuple(FIDELITIES)),
    Option("--model", EMBEDDED_MODEL, "an embedded model"),
    Option("--profile", None, "by default the model's own", kind=Path),
    Option("--folder", None, "folder that keeps what was drawn; the bench goes on from it", kind=Path),
    Option("--threads", 2, "of torch"),
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedSet:
    """The pictures of every prompt that started from a latent, in one order."""

    cached: Sequence[Drawn]
    """From the latent."""
    uncached: Sequence[Drawn]
    """From noise, the same seed."""
    fewer: Sequence[Drawn]
    """From noise, with as many steps as `cached` made."""
    other: Sequence[Drawn]
    """From noise, another seed."""
    nearest: Sequence[PIL.Image.Image]
    """The pictures of the entries."""
    tried: int
    """Prompts that were drawn, of which these are those with a hit."""

    @property
    def prompts(self) -> list[str]:
        """The prompt of each picture."""
        return [each.ask.prompt for each in self.cached]

    @property
    def steps_saved(self) -> float:
        """The share of all steps that the hits did not make."""
        return mean(_skipped(each) / each.ask.steps for each in self.cached)


@BENCH.measure
def measure(options: argparse.Namespace, folder: Path, sheet: Sheet) -> None:
    """Draw all, and look at it."""
    model = folder_of(options.model)
    sheet.name_model(options.model)
    file = options.profile or model / PROFILE.name
    if not file.exists():
        raise SystemExit(f"{file} is missing: bottega cache profile measures it")
    profile = read_profile(file)
    torch.set_num_threads(options.threads)
    folder, kept = options.folder or folder, PictureFolder(options.folder / "pictures") if options.folder else None
    settings = StoreSettings(
        folder=folder / "store", budget_bytes=1 << 30, exploration=0.0, predictor=False, plain_for_loras=True
    )
    with cached_engine(folder, settings, kept, model=model) as engine:
        if profile.model_hash != engine.model_hash:
            raise SystemExit("the profile is of another model: bottega cache profile measures this one")
        engine.store.set_profile(profile)
        pairs = _draw_pairs(engine, options.pairs, FIDELITIES[options.fidelity])
        asks = [replace(each.ask, fidelity=FIDELITY_BALANCED) for each in pairs.cached[: options.lora_pairs]]
        loras = {name: _lora_accuracy(engine, asks, name) for name in engine.loras if asks}
        _fill_ways(sheet, load_towers(options.model), pairs)
        fill(sheet, measure_diversity(engine, pairs.prompts[-options.diverse :]))
    for name, (exact, cached, count) in loras.items():
        sheet.row(f"LoRA {name}, from latents without it ({count}): right", f"{exact:.3f}, {cached:.3f}")
        sheet.values[f"lora_drop_{name}"] = 100 * (exact - cached)
    if loras:
        worst, bar = max(100 * (exact - cached) for exact, cached, _ in loras.values()), f"{WANTED_DROP:g} to serve"
        sheet.figure("    lost at worst", worst, "{:.1f} points", key="lora_accuracy_drop_points", bar=bar)


def _draw_pairs(engine: CachedEngine, wanted: int, fidelity: Fidelity.ValueType) -> CachedSet:
    """Draw so many prompts with a hit, or fewer where too few of those that may be tried have one."""
    hits: list[Drawn] = []
    tried = 0
    pairs = miniature_pairs(_MOST_TRIED * wanted, seed=_SEED)
    # A key is recorded from its second question on, also of a store that was started again.
    engine.draw_now([Ask(prompt=PROMPT, seed=0, recorded=True)])
    while len(hits) < wanted and tried < len(pairs):
        wave = pairs[tried : tried + min(_WAVE, max(wanted, _LEAST_WAVE))]
        hits += [each for each in _draw_wave(engine, wave, tried, fidelity) if each.start is not None]
        tried += len(wave)
        print(f"  {tried} pairs drawn, {len(hits)} of them started from a latent", flush=True)
    cached = hits[:wanted]
    return CachedSet(
        cached=cached,
        uncached=engine.draw([replace(each.ask, cached=False) for each in cached]),
        fewer=engine.draw([replace(each.ask, cached=False, steps=each.ask.steps - _skipped(each)) for each in cached]),
        other=engine.draw([replace(each.ask, cached=False, seed=each.ask.seed + _OTHER_SEEDS) for each in cached]),
        nearest=[_entry_picture(engine, each) for each in cached],
        tried=tried,
    )


def _draw_wave(
    engine: CachedEngine, pairs: Sequence[PromptPair], first: int, fidelity: Fidelity.ValueType
) -> list[Drawn]:
    numbered = list(enumerate(pairs, start=first))
    engine.draw([Ask(prompt=pair.first, seed=_FIRST_SEEDS + number, recorded=True) for number, pair in numbered])
    return engine.draw(
        [Ask(prompt=pair.second, seed=number, cached=True, fidelity=fidelity) for number, pair in numbered]
    )


def _lora_accuracy(engine: CachedEngine, asks: Sequence[Ask], name: str) -> tuple[float, float, int]:
    """Return the accuracy of exact pictures with a LoRA, and of those from latents without it, and their number."""
    drawn = engine.draw([replace(ask, cached=True, loras=(name,), lora_bound=LORA_BOUND) for ask in asks])
    cached = [each for each in drawn if each.start is not None]
    assert all(each.start.without_loras for each in cached if each.start), "nothing was recorded with it"
    exact = engine.draw([replace(each.ask, cached=False, lora_bound=0) for each in cached])
    prompts = [each.ask.prompt for each in cached]
    accuracies = [accuracy([each.picture for each in way], prompts) for way in (exact, cached)]
    return accuracies[0], accuracies[1], len(cached)


def accuracy(pictures: Sequence[PIL.Image.Image], prompts: Sequence[str]) -> float:
    """Return the share of pictures in which the oracle reads all that the prompt says."""
    read = zip(pictures, prompts, strict=True)
    right = [oracle.agrees(oracle.read(picture), scene_of(prompt)) for picture, prompt in read]
    return mean(right) if right else 0.0


def scene_of(prompt: str) -> Scene:
    """Return what a sentence of the grammar says."""
    scene = read_caption(prompt)
    assert scene is not None, "all prompts are of the grammar"
    return scene


def _skipped(drawn: Drawn) -> int:
    assert drawn.start is not None, "it started from a latent"
    return drawn.start.skipped_steps


def _entry_picture(engine: CachedEngine, drawn: Drawn) -> PIL.Image.Image:
    """Return the picture of the most similar prompt, as plain retrieval would."""
    assert drawn.start is not None, "it started from a latent"
    details = engine.store.entry(parse_start(drawn.start.entry)[0])
    assert details is not None, "the store has room for all"
    assert details.picture is not None, "it is whole"
    return PIL.Image.fromarray(details.picture)


def _fill_ways(sheet: Sheet, clip: Clip, pairs: CachedSet) -> None:
    ways: Mapping[str, tuple[str, Sequence[PIL.Image.Image]]] = {
        "cached": ("from a latent", [each.picture for each in pairs.cached]),
        "uncached": ("from noise", [each.picture for each in pairs.uncached]),
        "fewer": ("from noise, as few steps", [each.picture for each in pairs.fewer]),
        "other": ("from noise, another seed", [each.picture for each in pairs.other]),
        "nearest": ("plain retrieval of the nearest prompt's picture", pairs.nearest),
    }
    right, score, features = dict[str, float](), dict[str, float](), dict[str, torch.Tensor]()
    sheet.row(f"prompts, of them with a latent ({len(pairs.cached)} compared)", f"{pairs.tried}")
    for name, (label, pictures) in ways.items():
        right[name] = sheet.values[f"right_{name}"] = accuracy(pictures, pairs.prompts)
        score[name] = float(clip_scores(clip, pictures, pairs.prompts).mean())
        features[name] = clip.embed_pictures(pictures)
        sheet.row(f"{label}: right, CLIP", f"{right[name]:.3f}, {score[name]:.2f}")
    sheet.values |= {"pairs": len(pairs.cached), "tried": pairs.tried}
    sheet.figure("steps that latents stand for", pairs.steps_saved, "{:.2f} of all", key="steps_saved")
    drop, bar = 100 * (right["uncached"] - right["cached"]), f"at most {WANTED_DROP:g}"
    sheet.figure("lost against noise", drop, "{:.1f} points", key="accuracy_drop_points", bar=bar)
    drop, bar = score["uncached"] - score["cached"], f"at most {WANTED_CLIP_DROP:g}"
    sheet.figure("    in CLIP score", drop, key="clip_drop", bar=bar)
    gain = 100 * (right["cached"] - right["fewer"])
    sheet.figure("gained over as few steps", gain, "{:.1f} points", key="vs_fewer_steps_points", bar="at least 0")
    distance = frechet_distance(features["cached"], features["uncached"])
    sheet.figure("Fréchet distance to noise", distance, "{:.4f}", key="frechet", bar="below the next")
    other = frechet_distance(features["other"], features["uncached"])
    sheet.figure("    of two sets from noise", other, "{:.4f}", key="frechet_other_seeds")


if __name__ == "__main__":
    sys.exit(BENCH.command())
