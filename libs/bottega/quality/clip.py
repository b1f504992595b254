"""CLIP models that embed pictures and texts: the embedded model's own, or any in transformers' folder layout; torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from torch.nn.functional import cosine_similarity
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
)

from bottega.miniature import WEIGHTS

# Rows of one forward, few to keep a large vision tower's activations small.
_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """A CLIP model, whose two towers are one module or two."""

    vision: Any
    """A module with vision_model and visual_projection."""
    text: Any
    """A module with text_model and text_projection."""
    tokenizer: Any
    mean: tuple[float, ...]
    """Mean of red, green and blue by which pictures are normalised, each in 0 to 1."""
    std: tuple[float, ...]
    """Standard deviation of red, green and blue by which pictures are normalised."""

    @torch.no_grad()
    def embed_pictures(self, pictures: Sequence[PIL.Image.Image]) -> torch.Tensor:
        """Return the projected features, [pictures, width]."""
        pooled = [self._look(pixels).pooler_output for pixels in self._batches(pictures)]
        found: torch.Tensor = self.vision.visual_projection(torch.cat(pooled))
        return found

    @torch.no_grad()
    def embed_texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Return the projected features, [texts, width]."""
        tokens = self.tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
        found: torch.Tensor = self.text.text_projection(self.text.text_model(**tokens).pooler_output)
        return found

    @torch.no_grad()
    def layers(self, pictures: Sequence[PIL.Image.Image]) -> list[torch.Tensor]:
        """Return the output of each layer, [pictures, patches, width]."""
        batches = [self._look(pixels).hidden_states[1:] for pixels in self._batches(pictures)]
        return [torch.cat(layer)[:, 1:] for layer in zip(*batches, strict=True)]

    def _look(self, pixels: torch.Tensor) -> Any:
        return self.vision.vision_model(pixel_values=pixels, output_hidden_states=True)

    def _batches(self, pictures: Sequence[PIL.Image.Image]) -> list[torch.Tensor]:
        pixels = torch.stack([self._pixels(picture) for picture in pictures])
        return list(torch.split(pixels, _ROWS))

    def _pixels(self, picture: PIL.Image.Image) -> torch.Tensor:
        """Return a picture as input tensor, [3, side, side].

        A picture that is not square is stretched, never cropped, so that all of it counts.
        """
        side = self.vision.vision_model.config.image_size
        sized = picture.convert("RGB")
        if sized.size != (side, side):
            sized = sized.resize((side, side), PIL.Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.array(sized, dtype=np.float32) / 255.0)
        return ((values - torch.tensor(self.mean)) / torch.tensor(self.std)).permute(2, 0, 1)


def load_miniature(folder: Path = WEIGHTS) -> Clip:
    """Return the embedded model's CLIP: the vision tower kept from training, with the second text encoder."""
    return Clip(
        vision=_load(CLIPVisionModelWithProjection, folder / "clip_vision"),
        text=_load(CLIPTextModelWithProjection, folder / "text_encoder_2"),
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer_2"),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def load_clip(folder: Path) -> Clip:
    """Load a CLIP model from a folder in transformers' layout: both towers, tokenizer, preprocessor_config.json.

    Only safetensors files are read.
    """
    both = _load(CLIPModel, folder)
    images = CLIPImageProcessorPil.from_pretrained(folder)
    return Clip(
        vision=both,
        text=both,
        tokenizer=AutoTokenizer.from_pretrained(folder),
        mean=tuple(images.image_mean),
        std=tuple(images.image_std),
    )


def clip_scores(clip: Clip, pictures: Sequence[PIL.Image.Image], texts: Sequence[str]) -> torch.Tensor:
    """Return how well each picture fits its text: 100 times the cosine of their features, at least 0.

    With the embedded model's towers the score does not reflect which thing has which colour: see
    load.miniature.quality.
    Source: CLIPScore (Hessel et al., 2021), with the factor 100 of torchmetrics.
    """
    cosines = cosine_similarity(clip.embed_pictures(pictures), clip.embed_texts(texts), dim=-1)
    return 100.0 * cosines.clamp(min=0.0)


def _load(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, use_safetensors=True).float().eval()
