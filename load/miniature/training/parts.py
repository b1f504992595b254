"""The miniature's networks in float32, as training holds them: loaded from and saved to Diffusers' folder layout.

The model in a training folder is made when a training begins, and replaced as a whole when a stage ends.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKL, ConfigMixin, SD3Transformer2DModel, UNet2DConditionModel
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionModelWithProjection

# Loaded and saved in this order; each is a folder of the model.
NETWORKS: dict[str, Any] = {
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
    "clip_vision": CLIPVisionModelWithProjection,
    "unet": UNet2DConditionModel,
}

# The same of a model of SD3's topology, whose text encoders both have a projection.
TRANSFORMER_NETWORKS: dict[str, Any] = {
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModelWithProjection,
    "text_encoder_2": CLIPTextModelWithProjection,
    "transformer": SD3Transformer2DModel,
}

CPU = torch.device("cpu")
_SEED = 0


class Files(Protocol):
    """A part of the model that writes its own files."""

    def save(self, folder: Path) -> None:
        """Write to a folder of its own, which may hold the files of an earlier one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The networks of a model."""

    networks: dict[str, Any]
    """By folder, in float32, all on one device; a stage may add its own."""
    tokenizer: Any
    """Of both text encoders."""
    folder: Path
    """Where they came from."""
    device: torch.device
    loras: dict[str, Files] = field(default_factory=dict)
    """LoRAs that a stage adds, by folder."""

    def __getitem__(self, name: str) -> Any:
        return self.networks[name]

    @property
    def denoiser(self) -> str:
        """Name of the network that draws."""
        return "transformer" if "transformer" in self.networks else "unet"

    def tokens(self, captions: list[str]) -> torch.Tensor:
        """Return ids (captions, 24) on the device, padded and cut as the pipeline does."""
        ids: torch.Tensor = self.tokenizer(
            captions, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        return ids.to(self.device)


def networks_of(folder: Path) -> dict[str, Any]:
    """Return the classes of the networks of a model's folder: one with a UNet, or one with a transformer."""
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    return TRANSFORMER_NETWORKS if "transformer" in index else NETWORKS


def load_parts(folder: Path, *, fresh: tuple[str, ...] = (), device: torch.device = CPU) -> Parts:
    """Load all networks of a folder.

    Args:
        folder: The model's.
        fresh: Names of networks that begin with random weights, in the folder's sizes.
        device: For the networks.
    """
    kinds = networks_of(folder)
    networks = {name: _load(kind, folder / name, fresh=name in fresh).to(device) for name, kind in kinds.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return Parts(networks=networks, tokenizer=tokenizer, folder=folder, device=device)


def save_parts(parts: Parts, folder: Path) -> None:
    """Write a whole model in float16, with the files around the networks (tokenizers, scheduler) as they were."""
    for source in parts.folder.iterdir():
        if source.is_dir() and source.name not in parts.networks:
            shutil.copytree(source, folder / source.name, dirs_exist_ok=True)
        elif source.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / source.name)
    for name, network in parts.networks.items():
        half = _like(network)
        half.load_state_dict(network.state_dict())
        half.half().save_pretrained(folder / name, safe_serialization=True)
    for name, lora in parts.loras.items():
        lora.save(folder / name)


def _like(network: Any) -> Any:
    """Return another network of its kind and sizes, without the memory of a folder."""
    kind = type(network)
    if not isinstance(network, ConfigMixin):
        return kind(network.config)
    return kind.from_config({key: value for key, value in network.config.items() if key != "_name_or_path"})


def _load(kind: Any, folder: Path, *, fresh: bool) -> Any:
    if not fresh:
        return kind.from_pretrained(folder, use_safetensors=True).float()
    if kind.__module__.startswith("diffusers"):
        return kind.from_config(kind.load_config(folder))
    return kind(kind.config_class.from_pretrained(folder)).float()


def begin_model(folder: Path, start: Path, fresh: tuple[str, ...] = ()) -> None:
    """Make the training folder's model, from that of the folder `start` where there is none yet.

    Args:
        folder: The training's.
        start: A model's.
        fresh: Names of networks that get random weights.
    """
    model, old = folder / "model", folder / "model.old"
    if not model.exists() and old.exists():  # the power went while it was replaced
        old.rename(model)
    if fresh or not model.exists():
        torch.manual_seed(_SEED)
        replace_model(load_parts(model if model.exists() else start, fresh=fresh), folder)


def replace_model(parts: Parts, folder: Path) -> None:
    """Replace the model; at every moment the old or the new one is there whole."""
    model, part, old = (folder / name for name in ("model", "model.part", "model.old"))
    shutil.rmtree(part, ignore_errors=True)
    save_parts(parts, part)
    shutil.rmtree(old, ignore_errors=True)
    if model.exists():
        model.rename(old)
    part.rename(model)
    shutil.rmtree(old, ignore_errors=True)
