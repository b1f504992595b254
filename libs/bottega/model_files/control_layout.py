"""The layout that a ControlNet and its base model share: the shapes of the tensors that they exchange."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

from bottega.model_files.controlnet_config import TEXT_TIME, AnyNetworkConfig, NetworkConfig
from bottega.model_files.family_names import FLUX, SD3, TITLES, TRANSFORMER, UNET, Z_IMAGE
from bottega.model_files.transformer_rules import FLUX_PATCH
from bottega.model_files.unet_rules import TIME_IDS

# Limit of the contract.
_MAX_BASE_CHARACTERS = 128
# The configuration fields that determine each value of a layout, for UNets and for transformers.
_FIELDS: Mapping[str, str] = {
    "latent_channels": "in_channels",
    "context_width": "cross_attention_dim",
    "pooled_width": "addition_embed_type, addition_time_embed_dim and projection_class_embeddings_input_dim",
    "latent_scale": "conditioning_embedding_out_channels",
}
_TOKEN_FIELDS: Mapping[str, str] = {
    "latent_channels": "in_channels",
    "context_width": "joint_attention_dim",
    "pooled_width": "pooled_projection_dim",
    "patch": "patch_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLayout:
    """The shapes of the tensors that a ControlNet and a base model exchange."""

    latent_channels: int
    context_width: int
    """Width of the prompt embeddings; 0 for a ControlNet that does not read them."""
    pooled_width: int
    """Width of the pooled prompt embeddings; 0 if the network reads none."""
    latent_scale: int
    """Pixels per element of the latent, along a side; 0 for a ControlNet that reads latents of its image."""
    points: tuple[tuple[int, int], ...]
    """Channels and number of halvings of each residual point; the middle block is the last.

    For a transformer, width of the tokens and 0, for each block of the model or of the ControlNet.
    """
    singles: int = 0
    """Number of points that belong to single blocks (Flux.1). They come last in `points`."""
    patch: int = 0
    """Side of the patches of the latent that are a transformer's tokens; 0 for a UNet."""
    transformer: str = ""
    """Family of the models that have this transformer, such as `flux`; empty for a UNet."""

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a layout must have a residual point")
        if not 0 <= self.singles <= len(self.points):
            raise ValueError("a layout has more points of single blocks than points")

    @property
    def doubles(self) -> int:
        """Number of points that do not belong to single blocks."""
        return len(self.points) - self.singles

    @property
    def condition_widths(self) -> dict[str, int]:
        """Width of each condition that the ControlNet reads, by name: of the prompt, and those of `Embeds.added`."""
        if self.patch:
            guidance = {"guidance": 1} if self.transformer == FLUX else {}
            return {"prompt": self.context_width, "pooled_projections": self.pooled_width, **guidance}
        added = {"text_embeds": self.pooled_width, "time_ids": TIME_IDS} if self.pooled_width else {}
        return {"prompt": self.context_width, **added}

    @property
    def base(self) -> str:
        """Name that a base model and its fitting ControlNets share, of at most 128 characters.

        ControlNets for a transformer may have fewer blocks, and need not read the prompt.
        """
        if self.patch:
            tokens = "tokens" if self.transformer == SD3 else f"tokens of {self.transformer}"
            pooled = f"+{self.pooled_width}" if self.pooled_width else ""
            return f"{self.latent_channels}/{self.patch}x{self.patch} {tokens} {self.points[0][0]}{pooled}"
        points = " ".join(f"{len(list(same))}x{point}" for point, same in groupby(_point_texts(self.points)))
        name = f"{self.latent_channels}/{self.latent_scale} {self.context_width}+{self.pooled_width} {points}"
        if len(name) <= _MAX_BASE_CHARACTERS:
            return name
        return hashlib.sha256(name.encode()).hexdigest()

    def misfits(self, base: ControlLayout) -> Iterator[str]:
        """Yield each difference between a ControlNet of this layout and a base model, with the fields that cause it."""
        if self.transformer != base.transformer:
            ours, theirs = (
                f"a transformer of {TITLES.get(kind, kind)}" if kind else "a UNet"
                for kind in (self.transformer, base.transformer)
            )
            yield f"it is made for {ours}, and the model is {theirs} (_class_name)"
            return
        for name, field in (_TOKEN_FIELDS if self.patch else _FIELDS).items():
            ours, theirs = getattr(self, name), getattr(base, name)
            if ours != theirs and not (self.patch and name == "context_width" and ours == 0):
                yield f"its {name} is {ours}, the model's {theirs} ({field})"
        if self.patch:
            yield from self._misfitting_tokens(base)
        elif self.points != base.points:
            ours, theirs = (" ".join(_point_texts(points)) for points in (self.points, base.points))
            yield f"its residual points are {ours}, the model's {theirs} (block_out_channels, layers_per_block)"

    def _misfitting_tokens(self, base: ControlLayout) -> Iterator[str]:
        ours, theirs = self.points[0][0], base.points[0][0]
        if ours != theirs:
            yield f"its tokens are {ours} wide, the model's {theirs} (attention_head_dim, num_attention_heads)"
        if self.doubles > base.doubles:
            yield f"it has {self.doubles} residuals, the model {base.doubles} blocks (num_layers)"
        if self.singles > base.singles:
            what = f"it has {self.singles} residuals of single blocks, the model {base.singles} of these blocks"
            yield f"{what} (num_single_layers)"

    def shapes(self, height: int, width: int) -> list[tuple[int, ...]]:
        """Return the shape of the residual at every point, for a latent of this height and width.

        It is [channels, height, width] for a UNet, and [tokens, width] for a transformer.
        """
        if self.patch:
            return [((height // self.patch) * (width // self.patch), channels) for channels, _ in self.points]
        return [(channels, _halved(height, halvings), _halved(width, halvings)) for channels, halvings in self.points]


def base_layout(network: Mapping[str, Any], latent_scale: int) -> ControlLayout:
    """Return a base model's layout.

    Args:
        network: Configuration of its UNet or transformer.
        latent_scale: Pixels per element of its VAE's latent, along a side.
    """
    return _layout(network, latent_scale)


def read_base_layout(folder: Path) -> ControlLayout:
    """Return the layout of a base model from the configurations in its folder.

    Raises:
        OSError, KeyError, ValueError: The folder is no base model.
    """
    denoiser = TRANSFORMER if (folder / TRANSFORMER).is_dir() else UNET
    network, vae = (json.loads((folder / part / "config.json").read_text()) for part in (denoiser, "vae"))
    return base_layout(network, 2 ** (len(vae["block_out_channels"]) - 1))


def controlnet_layout(config: AnyNetworkConfig) -> ControlLayout:
    """Return a ControlNet's layout."""
    if not isinstance(config, NetworkConfig):
        return _layout(config.fields, 0)
    # The control image's embedding halves it between each two of its widths.
    return _layout(config.fields, 2 ** (len(config.conditioning_embedding_out_channels) - 1))


def _layout(config: Mapping[str, Any], latent_scale: int) -> ControlLayout:
    if "cap_feat_dim" in config:  # Z-Image's transformer
        return ControlLayout(
            latent_channels=config["in_channels"],
            context_width=config["cap_feat_dim"],
            pooled_width=0,
            latent_scale=latent_scale,
            points=((config["dim"], 0),) * config["n_layers"],
            patch=config["all_patch_size"][0],
            transformer=Z_IMAGE,
        )
    if "joint_attention_dim" in config:  # a transformer
        width, singles = config["attention_head_dim"] * config["num_attention_heads"], config.get("num_single_layers")
        of_flux = singles is not None
        # Flux Fill's transformer also reads a mask and an image, so only its output has the channels of latents.
        channels = (config.get("out_channels") or config["in_channels"]) // FLUX_PATCH**2
        return ControlLayout(
            latent_channels=channels if of_flux else config["in_channels"],
            context_width=config["joint_attention_dim"] or 0,
            pooled_width=config["pooled_projection_dim"],
            latent_scale=latent_scale,
            points=((width, 0),) * (config["num_layers"] + (singles or 0)),
            singles=singles or 0,
            patch=FLUX_PATCH if of_flux else config["patch_size"],
            transformer=FLUX if of_flux else SD3,
        )
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
