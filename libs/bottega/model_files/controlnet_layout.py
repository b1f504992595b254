"""The layout that a ControlNet and its base model must share, read from their configurations."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

from bottega.model_files.controlnet_config import TEXT_TIME, NetworkConfig
from bottega.model_files.unet_rules import TIME_IDS

# Limit of the contract.
_MAX_BASE_CHARACTERS = 128
# The configuration fields that determine each value of a layout.
_FIELDS: Mapping[str, str] = {
    "latent_channels": "in_channels",
    "context_width": "cross_attention_dim",
    "pooled_width": "addition_embed_type, addition_time_embed_dim and projection_class_embeddings_input_dim",
    "latent_scale": "conditioning_embedding_out_channels",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLayout:
    """The shapes of the tensors that a ControlNet and a base model exchange."""

    latent_channels: int
    context_width: int
    """Width of the prompt embeddings."""
    pooled_width: int
    """Width of the pooled prompt embeddings; 0 if the conditions are not SDXL's."""
    latent_scale: int
    """Pixels per element of the latent, along a side."""
    points: tuple[tuple[int, int], ...]
    """Channels and number of halvings of each residual point; the middle block is the last."""

    @property
    def condition_widths(self) -> dict[str, int]:
        """Width of each condition that the ControlNet reads, by name: of the prompt, and those of `Embeds.added`."""
        added = {"text_embeds": self.pooled_width, "time_ids": TIME_IDS} if self.pooled_width else {}
        return {"prompt": self.context_width, **added}

    @property
    def base(self) -> str:
        """Name that a base model and its fitting ControlNets share, of at most 128 characters."""
        points = " ".join(f"{len(list(same))}x{point}" for point, same in groupby(_point_texts(self.points)))
        name = f"{self.latent_channels}/{self.latent_scale} {self.context_width}+{self.pooled_width} {points}"
        if len(name) <= _MAX_BASE_CHARACTERS:
            return name
        return hashlib.sha256(name.encode()).hexdigest()

    def misfits(self, base: ControlLayout) -> Iterator[str]:
        """Yield each difference between a ControlNet of this layout and a base model, with the fields that cause it."""
        for name, field in _FIELDS.items():
            ours, theirs = getattr(self, name), getattr(base, name)
            if ours != theirs:
                yield f"its {name} is {ours}, the model's {theirs} ({field})"
        if self.points != base.points:
            ours, theirs = (" ".join(_point_texts(points)) for points in (self.points, base.points))
            yield f"its residual points are {ours}, the model's {theirs} (block_out_channels, layers_per_block)"

    def shapes(self, height: int, width: int) -> list[tuple[int, int, int]]:
        """Return [channels, height, width] of the residual at every point, for a latent of this height and width."""
        return [(channels, _halved(height, halvings), _halved(width, halvings)) for channels, halvings in self.points]


def base_layout(unet: Mapping[str, Any], latent_scale: int) -> ControlLayout:
    """Return a base model's layout.

    Args:
        unet: Configuration of its UNet.
        latent_scale: Pixels per element of its VAE's latent, along a side.
    """
    return _layout(unet, latent_scale)


def read_base_layout(folder: Path) -> ControlLayout:
    """Return the layout of a base model from the configurations in its folder.

    Raises:
        OSError, KeyError, ValueError: The folder is no base model.
    """
    unet, vae = (json.loads((folder / part / "config.json").read_text()) for part in ("unet", "vae"))
    return base_layout(unet, 2 ** (len(vae["block_out_channels"]) - 1))


def controlnet_layout(config: NetworkConfig) -> ControlLayout:
    """Return a ControlNet's layout."""
    # The control image's embedding halves it between each two of its widths.
    return _layout(config.fields, 2 ** (len(config.conditioning_embedding_out_channels) - 1))


def _layout(config: Mapping[str, Any], latent_scale: int) -> ControlLayout:
    pooled = 0
    if config.get("addition_embed_type") == TEXT_TIME:
        pooled = config["projection_class_embeddings_input_dim"] - TIME_IDS * config["addition_time_embed_dim"]
    return ControlLayout(
        # A base model may read a mask and an image besides the latent, which its ControlNets do not.
        latent_channels=config.get("out_channels", config["in_channels"]),
        context_width=config["cross_attention_dim"],
        pooled_width=pooled,
        latent_scale=latent_scale,
        points=tuple(_points(config)),
    )


def _points(config: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the residual points in the encoder's order: its input, every layer, every halving, and the middle."""
    widths, layers = config["block_out_channels"], config["layers_per_block"]
    counts = [layers] * len(widths) if isinstance(layers, int) else layers
    yield widths[0], 0
    for level, (width, count) in enumerate(zip(widths, counts, strict=True)):
        yield from repeat((width, level), count)
        if level < len(widths) - 1:
            yield width, level + 1
    yield widths[-1], len(widths) - 1


def _halved(side: int, times: int) -> int:
    for _ in range(times):
        side = (side + 1) // 2  # a convolution of stride 2 and padding 1
    return side


def _point_texts(points: tuple[tuple[int, int], ...]) -> list[str]:
    return [f"{channels}/{2**halvings}" for channels, halvings in points]
