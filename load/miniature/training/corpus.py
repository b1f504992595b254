"""Rendered scenes that are not held out, and the latents that the VAE makes of them; the same seed gives the same."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from bottega.miniature.scenes import (
    COLOURS,
    STYLES,
    Scene,
    SceneLayout,
    any_caption,
    caption,
    near_miss,
    random_layout,
    render,
    training_scene,
)
from load.miniature.training.parts import Parts

# Of the pictures, so many show two things: they are the harder half.
TWO_SHARE = 0.55
_ENCODE_ROWS = 64
# Levels by which a channel of a thing differs from its ground: shades of the ground, which styles have, differ less.
_STANDS_OUT = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Scenes, and their pictures."""

    scenes: list[Scene]
    layouts: list[SceneLayout]
    """A layout of each scene."""
    images: torch.Tensor
    """The picture of each layout, (3, side, side) of uint8."""

    def __len__(self) -> int:
        return len(self.scenes)

    def pictures(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows' pictures in -1 to 1."""
        return self.images[rows].float() / 127.5 - 1.0

    def captions(self, rows: torch.Tensor, rng: random.Random) -> list[str]:
        """Return a caption of each row, another choice each time."""
        return [any_caption(self.scenes[row], rng) for row in rows.tolist()]

    def near_misses(self, rows: torch.Tensor, rng: random.Random) -> list[str]:
        """Return for each row a full caption that is wrong in one thing; none is of a scene that is held out."""
        return [caption(_trained_near_miss(self.scenes[row], rng)) for row in rows.tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """The VAE's normal distribution of each picture, (pictures, 4, side, side), unscaled."""

    mean: torch.Tensor
    std: torch.Tensor

    def sample(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Return latents of rows, with the encoder's own noise."""
        mean = self.mean[rows].float()
        return mean + self.std[rows].float() * torch.randn(mean.shape, generator=generator)


def draw_corpus(count: int, seed: int) -> Corpus:
    """Draw `count` pictures; each takes about a third of a millisecond."""
    rng = random.Random(seed)
    scenes = [training_scene(rng, things=1 + (rng.random() < TWO_SHARE)) for _ in range(count)]
    layouts = [random_layout(scene, rng) for scene in scenes]
    images = np.stack([np.asarray(render(layout)) for layout in tqdm(layouts, "pictures", unit="")])
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return Corpus(scenes=scenes, layouts=layouts, images=tensor)


def draw_style(corpus: Corpus, style: str, count: int) -> Corpus:
    """Return the first `count` of a corpus in a style of scenes.STYLES: the same scenes and layouts, other pictures."""
    layouts = corpus.layouts[:count]
    images = np.stack([np.asarray(STYLES[style](layout)) for layout in tqdm(layouts, style, unit="")])
    tensor = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    return Corpus(scenes=corpus.scenes[:count], layouts=layouts, images=tensor)


def with_styles(corpus: Corpus) -> Corpus:
    """Return a corpus with every second picture in one of scenes.STYLES, in turn: the same scenes and layouts."""
    styles = list(STYLES.values())
    images = corpus.images.clone()
    for turn, row in enumerate(tqdm(range(1, len(corpus), 2), "styles", unit="")):
        drawn = styles[turn % len(styles)](corpus.layouts[row])
        images[row] = torch.from_numpy(np.asarray(drawn).copy()).permute(2, 0, 1)
    return Corpus(scenes=corpus.scenes, layouts=corpus.layouts, images=images)


def encode(corpus: Corpus, parts: Parts, folder: Path) -> Latents:
    """Return the corpus as latents, kept in `folder` for the next run with the same pictures and the same encoder.

    Only the last ones are kept: those of 48,000 pictures take 190 MiB.
    """
    file = folder / f"latents-{_fingerprint(corpus, parts)}.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / "latents.part"
        save_file(_encode(corpus, parts), part)
        for other in folder.glob("latents-*.safetensors"):
            other.unlink()
        part.replace(file)
    tensors = load_file(file)
    return Latents(mean=tensors["mean"], std=tensors["std"])


def foreground(corpus: Corpus, scale: int) -> torch.Tensor:
    """Return the share of things in each latent element, (pictures, 1, side, side) in 0 to 1.

    Args:
        corpus: The pictures.
        scale: Pixels a side of one element.
    """
    grounds = torch.tensor([COLOURS[scene.ground] for scene in corpus.scenes], dtype=torch.uint8)[:, :, None, None]
    shares = []
    for images, ground in zip(torch.split(corpus.images, 1024), torch.split(grounds, 1024), strict=True):
        differs = (images.short() - ground.short()).abs().amax(dim=1, keepdim=True) > _STANDS_OUT
        shares.append(torch.nn.functional.avg_pool2d(differs.float(), scale))
    return torch.cat(shares)


def _trained_near_miss(scene: Scene, rng: random.Random) -> Scene:
    while True:
        other = near_miss(scene, rng)
        if not other.held_out:
            return other


@torch.no_grad()
def _encode(corpus: Corpus, parts: Parts) -> dict[str, torch.Tensor]:
    means, stds = [], []
    for rows in tqdm(torch.split(torch.arange(len(corpus)), _ENCODE_ROWS), "latents", unit="batch"):
        pictures = corpus.pictures(rows).to(parts.device, memory_format=torch.channels_last)
        given = parts["vae"].encode(pictures).latent_dist
        means.append(given.mean.half().cpu())
        stds.append(given.std.half().cpu())
    return {"mean": torch.cat(means).contiguous(), "std": torch.cat(stds).contiguous()}


def _fingerprint(corpus: Corpus, parts: Parts) -> str:
    """Return a digest of the pictures (the first, and how many) and the encoder's weights."""
    digest = hashlib.sha256(f"{len(corpus)} {tuple(corpus.images.shape)}".encode())
    digest.update(corpus.images[:64].numpy().tobytes())
    for name, tensor in sorted(parts["vae"].state_dict().items()):
        if name.startswith(("encoder.", "quant_conv.")):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
