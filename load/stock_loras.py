"""The miniature's LoRAs for stock Diffusers: any of their three forms as one dict that `load_lora_weights` takes.

Diffusers ignores mixed alphas in kohya's files and knows no folders of PEFT's, so each layer's alpha is multiplied in
here: delta = scale * up @ down with scale = alpha / rank, and a dict without alphas has a scale of 1.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

# Of kohya's names, and of PEFT's.
_KOHYA = {"lora_unet_": "unet", "lora_te1_": "text_encoder", "lora_te2_": "text_encoder_2"}
_WRAPPED = "base_model.model."
_PEFT_FILE = "adapter_model.safetensors"


def load_layers(folder: Path, pipeline: Any) -> dict[str, torch.Tensor]:
    """Return tensors named as "unet.PATH.lora_A.weight", in float32.

    Args:
        folder: Of the LoRA.
        pipeline: Whose modules they are for.

    Raises ValueError for a layer that the pipeline does not have.
    """
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
    if file.name == _PEFT_FILE:
        return _from_peft(tensors, json.loads((folder / "adapter_config.json").read_text()))
    if any(name.startswith(tuple(_KOHYA)) for name in tensors):
        return _from_kohya(tensors, pipeline)
    return tensors


def load(pipeline: Any, folder: Path, name: str) -> None:
    """Put the folder's LoRA into a stock pipeline as the adapter `name`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Already found a `peft_config`")  # PEFT: several are meant
        pipeline.load_lora_weights(load_layers(folder, pipeline), adapter_name=name)


def _from_peft(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the layers of a folder with one rank and one alpha, as the miniature's is."""
    scale = config["lora_alpha"] / config["r"]
    return {
        f"unet.{name.removeprefix(_WRAPPED)}": tensor * scale if ".lora_B." in name else tensor
        for name, tensor in tensors.items()
    }


def _from_kohya(tensors: dict[str, torch.Tensor], pipeline: Any) -> dict[str, torch.Tensor]:
    paths = _kohya_paths(pipeline)
    found = {}
    for name in [name.removesuffix(".alpha") for name in tensors if name.endswith(".alpha")]:
        if name not in paths:
            raise ValueError(f"no layer of the pipeline is called {name}")
        down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        found[f"{paths[name]}.lora_A.weight"] = down
        found[f"{paths[name]}.lora_B.weight"] = up * (float(tensors[f"{name}.alpha"]) / down.shape[0])
    return found


def _kohya_paths(pipeline: Any) -> dict[str, str]:
    """Return layers' places by kohya's name: its underlines may have been dots, so each module is tried."""
    paths = {}
    for prefix, network in _KOHYA.items():
        for module, _ in getattr(pipeline, network).named_modules():
            text = "text_model_" if network != "unet" and not module.startswith("text_model.") else ""
            paths[f"{prefix}{text}{module.replace('.', '_')}"] = f"{network}.{module}"
    return paths
