"""Writes a trained LoRA in the forms that people have: Diffusers' file, PEFT's folder, kohya's file. In float16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusionXLPipeline
from peft import get_peft_model_state_dict
from safetensors.torch import save_file

# How PEFT begins the names of a wrapped network's modules.
_WRAPPED = "base_model.model."
_KOHYA_NAMES = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
# Of CLIP's modules in kohya's names, also where transformers has dropped it from its own.
_KOHYA_TEXT = "text_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFiles:
    """networks: PEFT's models, by folder of the network. form: of FORMS. style: the file's name, where it has one."""

    style: str
    form: str
    networks: Mapping[str, Any]

    def save(self, folder: Path) -> None:
        """The same bytes each time."""
        folder.mkdir(parents=True, exist_ok=True)
        _SAVED[self.form](self, folder)


def _save_diffusers(files: LoraFiles, folder: Path) -> None:
    layers = {f"{name}_lora_layers": _layers(network) for name, network in files.networks.items()}
    StableDiffusionXLPipeline.save_lora_weights(folder, **layers, safe_serialization=True)


def _save_peft(files: LoraFiles, folder: Path) -> None:
    """Of the UNet: a folder of PEFT's holds one network."""
    (unet,) = files.networks.values()
    half = {name: tensor.half() for name, tensor in unet.state_dict().items()}
    unet.save_pretrained(folder, state_dict=half, safe_serialization=True)
    (folder / "README.md").unlink()  # a model card without a word in it
    config = json.loads((folder / "adapter_config.json").read_text())
    # PEFT keeps the modules as a set, in another order each time, and where the base lay when it was trained.
    config |= {"target_modules": sorted(config["target_modules"]), "base_model_name_or_path": None}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _save_kohya(files: LoraFiles, folder: Path) -> None:
    tensors = {}
    for name, network in files.networks.items():
        for module, layer in network.get_base_model().named_modules():
            if hasattr(layer, "lora_A"):
                path = _kohya_path(name, module)
                tensors[f"{path}.lora_down.weight"] = layer.lora_A["default"].weight.detach().half().contiguous()
                tensors[f"{path}.lora_up.weight"] = layer.lora_B["default"].weight.detach().half().contiguous()
                tensors[f"{path}.alpha"] = torch.tensor(float(layer.lora_alpha["default"])).half()
    save_file(tensors, folder / f"{files.style}.safetensors", {"format": "pt"})


_SAVED = {"diffusers": _save_diffusers, "peft": _save_peft, "kohya": _save_kohya}
FORMS = tuple(_SAVED)
"""How a LoRA can be saved."""


def _layers(network: Any) -> dict[str, torch.Tensor]:
    """By names below the network: "....to_q.lora_A.weight"."""
    found = get_peft_model_state_dict(network)
    return {name.removeprefix(_WRAPPED): tensor.half().contiguous() for name, tensor in found.items()}


def _kohya_path(network: str, module: str) -> str:
    text = network != "unet" and not module.startswith(_KOHYA_TEXT)
    return f"{_KOHYA_NAMES[network]}_{_KOHYA_TEXT if text else ''}{module}".replace(".", "_")
