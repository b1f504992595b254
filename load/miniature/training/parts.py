"""The miniature's networks in float32, as training holds them: loaded from and saved to Diffusers' folder layout."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKL, ConfigMixin, UNet2DConditionModel
from transformers import AutoTokenizer, CLIPTextModel, CLIPTextModelWithProjection, CLIPVisionModelWithProjection

# Loaded and saved in this order; each is a folder of the model.
NETWORKS: dict[str, Any] = {
    "vae": AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
    "clip_vision": CLIPVisionModelWithProjection,
    "unet": UNet2DConditionModel,
}

CPU = torch.device("cpu")


class Files(Protocol):
    """Something of the model that writes its own files."""

    def save(self, folder: Path) -> None:
        """folder: its own, which may hold those of an earlier one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """networks: by folder, in float32, all on one device; a stage may add its own. tokenizer: of both text encoders.

    folder: where they came from. loras: that a stage adds, by folder.
    """

    networks: dict[str, Any]
    tokenizer: Any
    folder: Path
    device: torch.device
    loras: dict[str, Files] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.networks[name]

    def tokens(self, captions: list[str]) -> torch.Tensor:
        """Ids (captions, 24) on the device, padded and cut as the pipeline does."""
        ids: torch.Tensor = self.tokenizer(
            captions, padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        return ids.to(self.device)


def load_parts(folder: Path, *, fresh: tuple[str, ...] = (), device: torch.device = CPU) -> Parts:
    """All networks of a folder.

    fresh: names of those that begin with random weights, in the folder's sizes.
    """
    networks = {name: _load(kind, folder / name, fresh=name in fresh).to(device) for name, kind in NETWORKS.items()}
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    return Parts(networks=networks, tokenizer=tokenizer, folder=folder, device=device)


def save_parts(parts: Parts, folder: Path) -> None:
    """Writes a whole model in float16, with the files around the networks (tokenizers, scheduler) as they were."""
    for source in parts.folder.iterdir():
        if source.is_dir() and source.name not in NETWORKS:
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
    """Another one of its kind and sizes, that does not remember a folder."""
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
