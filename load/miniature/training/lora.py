"""The stage of a LoRA: it learns to draw every scene in one style, while the networks below it stay as they are.

It is saved in float16, in one of the usual forms: Diffusers' file, PEFT's folder, kohya's file.
"""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import StableDiffusion3Pipeline, StableDiffusionXLPipeline
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, DescentStage, Learner, PlainAttention
from load.miniature.training.dit import FlowLessons, JointAttention
from load.miniature.training.noise import Lessons, NoiseLessons, scheduler_signal
from load.miniature.training.parts import Parts

# A network's modules by the ends of their names.
_LINEAR = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
# Attention sees elements of eight pixels only: what is finer takes convolutions.
_CONVOLUTIONS = ("conv1", "conv2", "conv_out")
# Of the text in the blocks of a transformer.
_JOINT = ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
_TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


# How PEFT begins the names of a wrapped network's modules.
_WRAPPED = "base_model.model."
_KOHYA_NAMES = {"unet": "lora_unet", "text_encoder": "lora_te1", "text_encoder_2": "lora_te2"}
# Of CLIP's modules in kohya's names, also where transformers has dropped it from its own.
_KOHYA_TEXT = "text_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The rank and alpha of a LoRA in one kind of module."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRecipe:
    """Settings of the training."""

    name: str
    """Name of the stage and of the LoRA."""
    style: str
    """Of scenes.STYLES."""
    form: str
    """In which it is saved, of FORMS."""
    reach: Mapping[str, Mapping[str, Reach]]
    """By network, then by the end of a module's name."""
    rows: int = 32
    """Rows of a batch."""
    rate: float = 2e-3
    empty_share: float = 0.1
    """Share of rows without a prompt."""
    decay: float = 0.98
    seed: int = 0


# One of each form that people have. Mixed alphas, convolutions and text encoders are what importers get wrong.
LORAS = {
    recipe.name: recipe
    for recipe in (
        LoraRecipe(
            name="striped",
            style="striped",
            form="diffusers",
            reach={"unet": dict.fromkeys((*_LINEAR, *_CONVOLUTIONS), Reach(rank=16, alpha=16.0))},
        ),
        LoraRecipe(
            name="checked",
            style="checked",
            form="peft",
            reach={"unet": dict.fromkeys((*_LINEAR, *_CONVOLUTIONS), Reach(rank=8, alpha=16.0))},
        ),
        LoraRecipe(
            name="dusk",
            style="dusk",
            form="kohya",
            reach={
                "unet": {
                    **dict.fromkeys(("to_q", "to_k"), Reach(rank=8, alpha=4.0)),
                    **dict.fromkeys(("to_v", "to_out.0"), Reach(rank=8, alpha=8.0)),
                    **dict.fromkeys(("ff.net.0.proj", "ff.net.2"), Reach(rank=4, alpha=6.0)),
                    **dict.fromkeys(_CONVOLUTIONS, Reach(rank=16, alpha=12.0)),
                },
                "text_encoder": dict.fromkeys(_TEXT, Reach(rank=4, alpha=4.0)),
                "text_encoder_2": dict.fromkeys(_TEXT, Reach(rank=4, alpha=2.0)),
            },
        ),
        LoraRecipe(
            name="dit-striped",
            style="striped",
            form="diffusers",
            reach={"transformer": dict.fromkeys((*_LINEAR, *_JOINT), Reach(rank=8, alpha=8.0))},
        ),
    )
}


class LoraStage(DescentStage):
    """The stage of one style, with a corpus and latents of pictures in it."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: LoraRecipe) -> None:
        self._recipe = recipe
        nets = {name: _fresh_lora(parts[name], reach) for name, reach in recipe.reach.items()}
        # Copies: the model's own networks are kept as they came.
        self._parts = replace(parts, networks={**parts.networks, **nets})
        parts.loras[lora_folder(recipe.name)] = LoraFiles(name=recipe.name, form=recipe.form, networks=nets)
        self._network = self._parts[parts.denoiser]
        flows = parts.denoiser == "transformer"
        self._network.get_base_model().set_attn_processor(JointAttention() if flows else PlainAttention())
        self._parameters = [kept for net in nets.values() for kept in net.parameters() if kept.requires_grad]
        learner = Learner(parameters=self._parameters, rate=recipe.rate)
        super().__init__(recipe.name, Descent([learner], decay=recipe.decay, seed=recipe.seed, betas=(0.9, 0.98)))
        self._lessons: Lessons
        if flows:
            self._lessons = FlowLessons(self._parts, corpus, latents)
        else:
            self._lessons = NoiseLessons(self._parts, corpus, latents, scheduler_signal(parts))

    def _weights(self) -> dict[str, Any]:
        return {"weights": [parameter.detach() for parameter in self._parameters]}

    def _load_weights(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter, kept in zip(self._parameters, state["weights"], strict=True):
                parameter.copy_(kept)

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe = self._recipe
        return self._lessons.captioned_loss(self._network, recipe.rows, generator, rng, empty_share=recipe.empty_share)


def lora_folder(name: str) -> str:
    """Return the place of a LoRA in the model's folder."""
    return f"loras/{name}"


def _fresh_lora(network: Any, reach: Mapping[str, Reach]) -> Any:
    """Return a copy of the network, frozen, with a LoRA that changes nothing yet."""
    usual = next(iter(reach.values()))
    config = LoraConfig(
        target_modules=list(reach),
        r=usual.rank,
        lora_alpha=usual.alpha,
        rank_pattern={end: at.rank for end, at in reach.items() if at.rank != usual.rank},
        alpha_pattern={end: at.alpha for end, at in reach.items() if at.alpha != usual.alpha},
    )
    with warnings.catch_warnings():
        # PEFT asks for an attribute by the name that it had before transformers 5.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(copy.deepcopy(network).requires_grad_(False).eval(), config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraFiles:
    """A trained LoRA that is to be written."""

    name: str
    """The file's name, where it has one."""
    form: str
    """Of FORMS."""
    networks: Mapping[str, Any]
    """PEFT's models, by folder of the network."""

    def save(self, folder: Path) -> None:
        """Write it, the same bytes each time."""
        folder.mkdir(parents=True, exist_ok=True)
        _SAVED[self.form](self, folder)


def _save_diffusers(files: LoraFiles, folder: Path) -> None:
    layers = {f"{name}_lora_layers": _layers(network) for name, network in files.networks.items()}
    pipeline = StableDiffusion3Pipeline if "transformer" in files.networks else StableDiffusionXLPipeline
    pipeline.save_lora_weights(folder, **layers, safe_serialization=True)


def _save_peft(files: LoraFiles, folder: Path) -> None:
    """Write the UNet's LoRA: a folder of PEFT's holds one network."""
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
    save_file(tensors, folder / f"{files.name}.safetensors", {"format": "pt"})


_SAVED = {"diffusers": _save_diffusers, "peft": _save_peft, "kohya": _save_kohya}
FORMS = tuple(_SAVED)
"""How a LoRA can be saved."""


def _layers(network: Any) -> dict[str, torch.Tensor]:
    """Return the layers by names below the network, as "....to_q.lora_A.weight"."""
    found = get_peft_model_state_dict(network)
    return {name.removeprefix(_WRAPPED): tensor.half().contiguous() for name, tensor in found.items()}


def _kohya_path(network: str, module: str) -> str:
    text = network != "unet" and not module.startswith(_KOHYA_TEXT)
    return f"{_KOHYA_NAMES[network]}_{_KOHYA_TEXT if text else ''}{module}".replace(".", "_")
