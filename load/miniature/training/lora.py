"""The stage of a LoRA: it learns to draw every scene in one style, while the networks below it stay as they are."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from load.miniature.training.attention import PlainAttention
from load.miniature.training.corpus import Corpus, Latents
from load.miniature.training.descent import Descent, Learner
from load.miniature.training.device import half_precision
from load.miniature.training.lora_files import LoraFiles
from load.miniature.training.noise import NoiseLessons, scheduler_signal
from load.miniature.training.parts import Parts

# A network's modules by the ends of their names.
_LINEAR = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2")
# Attention sees elements of eight pixels only: what is finer takes convolutions.
_CONVOLUTIONS = ("conv1", "conv2", "conv_out")
_TEXT = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """rank and alpha of a LoRA in one kind of module."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRecipe:
    """How a LoRA is trained. style: of scenes.STYLES. form: it is saved in, of lora_files.FORMS.

    reach: by network, then by the end of a module's name. rows: of a batch. empty_share: of rows without a prompt.
    """

    style: str
    form: str
    reach: Mapping[str, Mapping[str, Reach]]
    rows: int = 32
    rate: float = 2e-3
    empty_share: float = 0.1
    decay: float = 0.98
    seed: int = 0


# One of each form that people have. Mixed alphas, convolutions and text encoders are what importers get wrong.
LORAS = {
    recipe.style: recipe
    for recipe in (
        LoraRecipe(
            style="striped",
            form="diffusers",
            reach={"unet": dict.fromkeys((*_LINEAR, *_CONVOLUTIONS), Reach(rank=16, alpha=16.0))},
        ),
        LoraRecipe(
            style="checked",
            form="peft",
            reach={"unet": dict.fromkeys((*_LINEAR, *_CONVOLUTIONS), Reach(rank=8, alpha=16.0))},
        ),
        LoraRecipe(
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
    )
}


class LoraStage:
    """Stage of training.loop."""

    def __init__(self, parts: Parts, corpus: Corpus, latents: Latents, recipe: LoraRecipe) -> None:
        """corpus, latents: of pictures in the style."""
        self.name = recipe.style
        self._corpus, self._recipe = corpus, recipe
        nets = {name: _fresh_lora(parts[name], reach) for name, reach in recipe.reach.items()}
        # Copies: the model's own networks are kept as they came.
        self._parts = replace(parts, networks={**parts.networks, **nets})
        parts.loras[lora_folder(recipe.style)] = LoraFiles(style=recipe.style, form=recipe.form, networks=nets)
        self._parts["unet"].get_base_model().set_attn_processor(PlainAttention())
        self._parameters = [kept for net in nets.values() for kept in net.parameters() if kept.requires_grad]
        self._descent = Descent(
            [Learner(parameters=self._parameters, rate=recipe.rate)],
            decay=recipe.decay,
            seed=recipe.seed,
            betas=(0.9, 0.98),
        )
        self._lessons = NoiseLessons(self._parts, corpus, latents, scheduler_signal(parts))

    def step(self, number: int, rate: float) -> float:
        """One batch: noise, prediction, weighted squared error."""
        return self._descent.step(number, rate, self._loss)

    def finish(self) -> None:
        """Leaves the averaged weights in the LoRA."""
        self._descent.finish()

    def state(self) -> dict[str, Any]:
        """Weights, their average, and the optimizer's moments."""
        return {"weights": [parameter.detach() for parameter in self._parameters], **self._descent.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """The reverse."""
        with torch.no_grad():
            for parameter, kept in zip(self._parameters, state["weights"], strict=True):
                parameter.copy_(kept)
        self._descent.load_state(state)

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        recipe, device = self._recipe, self._parts.device
        batch = self._lessons.draw(recipe.rows, generator)
        said = (torch.rand(recipe.rows, generator=generator) >= recipe.empty_share).float().to(device)
        with half_precision(device):
            told = self._lessons.told(self._corpus.captions(batch.rows, rng), said)
            (guess,) = self._parts["unet"](batch.noisy, batch.times, **told, return_dict=False)
            return self._lessons.loss(batch, guess)


def lora_folder(style: str) -> str:
    """Where the LoRA of that style is in the model's folder."""
    return f"loras/{style}"


def _fresh_lora(network: Any, reach: Mapping[str, Reach]) -> Any:
    """A copy of the network, frozen, with a LoRA that changes nothing yet."""
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
