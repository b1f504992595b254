"""The text stage: text encoders and the vision tower learn which picture a caption belongs to, and its parts.

Contrastive as CLIP is, with near misses (captions that are wrong in one thing), and with readings: linear heads that
name shapes, colours, places and relation from the embeddings, which teaches binding far quicker than contrast alone.
The heads are left behind.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy, normalize

from bottega.miniature.scenes import COLOURS, PLACES, RELATIONS, SHAPES, SIZES, Scene
from load.miniature.training.corpus import Corpus
from load.miniature.training.descent import Descent, DescentStage, Learner
from load.miniature.training.parts import Parts

TRAINED = ("text_encoder", "text_encoder_2", "clip_vision")
# What a reading says, field by field; the last answer of each is "none".
FIELDS: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": tuple(COLOURS),
    "other_shape": SHAPES,
    "other_colour": tuple(COLOURS),
    "ground": tuple(COLOURS),
    "size": SIZES,
    "place": PLACES,
    "relation": RELATIONS,
}
_LOGITS = sum(len(values) + 1 for values in FIELDS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRecipe:
    """Settings of the training."""

    rows: int = 128
    """Captions and pictures of a batch."""
    rate: float = 1e-3
    reading_weight: float = 0.5
    """Weight of the readings' loss beside the contrastive one."""
    vision_only: bool = False
    """Whether only the vision tower and the readings learn, and the text encoders stay as they are."""
    seed: int = 0


class TextStage(DescentStage):
    """The stage of the text encoders and the vision tower."""

    def __init__(self, parts: Parts, corpus: Corpus, recipe: TextRecipe) -> None:
        self._parts, self._corpus, self._recipe = parts, corpus, recipe
        self._heads = _heads(parts).to(parts.device)
        frozen = TRAINED[:2] if recipe.vision_only else ()
        for name in TRAINED:
            parts[name].requires_grad_(name not in frozen).train()
        self._trained = tuple(name for name in TRAINED if name not in frozen)
        modules = [parts[name] for name in self._trained] + [self._heads]
        learner = Learner(parameters=[p for module in modules for p in module.parameters()], rate=recipe.rate)
        name = "vision" if recipe.vision_only else "text"
        super().__init__(name, Descent([learner], decay=None, seed=recipe.seed))
        self._targets = torch.tensor([_answers(scene) for scene in corpus.scenes])

    def _weights(self) -> dict[str, Any]:
        networks = {name: self._parts[name].state_dict() for name in self._trained}
        return {"networks": networks, "heads": self._heads.state_dict()}

    def _load_weights(self, state: dict[str, Any]) -> None:
        for name in self._trained:  # never a frozen one: it may have been trained on elsewhere since
            self._parts[name].load_state_dict(state["networks"][name])
        self._heads.load_state_dict(state["heads"])

    def _loss(self, generator: torch.Generator, rng: random.Random) -> torch.Tensor:
        rows = torch.randint(len(self._corpus), (self._recipe.rows,), generator=generator)
        # One for each row, then one near miss for each, to which no picture belongs.
        captions = self._corpus.captions(rows, rng) + self._corpus.near_misses(rows, rng)
        count, device = len(rows), self._parts.device
        ids = self._parts.tokens(captions)
        first = self._parts["text_encoder"](ids, output_hidden_states=True)
        second = self._parts["text_encoder_2"](ids, output_hidden_states=True)
        seen = self._parts["clip_vision"](pixel_values=self._corpus.pictures(rows).to(device)).image_embeds
        heads = self._heads
        scale = heads["scale"](torch.ones(1, device=device)).exp().clamp(max=100.0)
        texts = (second.text_embeds, heads["project"](first.pooler_output))
        # Two rows of a batch may show the same: a caption then belongs to both, and is told apart by neither.
        targets = self._targets[rows].to(device)
        same = (targets[:, None] == targets[None]).all(dim=-1) & ~torch.eye(count, dtype=torch.bool, device=device)
        loss = torch.stack([_contrast(text, seen, scale, same) for text in texts]).sum()
        last = torch.cat([output.hidden_states[-2][:, -1] for output in (first, second)], dim=-1)
        readings = [heads["seen"](seen), heads["said"](second.text_embeds[:count]), heads["both"](last[:count])]
        read = torch.stack([_reading_loss(logits, targets) for logits in readings]).sum()
        return loss + self._recipe.reading_weight * read


def _heads(parts: Parts) -> torch.nn.ModuleDict:
    width = parts["text_encoder_2"].config.projection_dim
    hidden = [parts[name].config.hidden_size for name in TRAINED[:2]]
    scale = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(scale.weight, 2.7)  # of the logarithm: CLIP begins with 1 / .07
    heads = {
        "scale": scale,
        "project": torch.nn.Linear(hidden[0], width),
        "seen": torch.nn.Linear(width, _LOGITS),
        "said": torch.nn.Linear(width, _LOGITS),
        "both": torch.nn.Linear(sum(hidden), _LOGITS),
    }
    return torch.nn.ModuleDict(heads)


def _contrast(text: torch.Tensor, seen: torch.Tensor, scale: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """Return the contrastive loss.

    Args:
        text: (captions and near misses, width).
        seen: The pictures' embeddings.
        scale: Of the logits.
        same: Pairs of rows that are left out.
    """
    logits = scale * normalize(seen, dim=-1) @ normalize(text, dim=-1).T
    count = len(logits)
    misses = torch.zeros(count, len(text) - count, dtype=torch.bool, device=logits.device)
    logits = logits.masked_fill(torch.cat([same, misses], dim=1), float("-inf"))
    right = torch.arange(count, device=logits.device)
    return (cross_entropy(logits, right) + cross_entropy(logits[:, :count].T, right)) / 2


def _reading_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    parts = torch.split(logits, [len(values) + 1 for values in FIELDS.values()], dim=-1)
    losses = [cross_entropy(part, targets[:, field]) for field, part in enumerate(parts)]
    return torch.stack(losses).mean()


def _answers(scene: Scene) -> list[int]:
    """Return the right answers, in the order of FIELDS."""
    other = scene.things[1] if len(scene.things) > 1 else None
    answers = {
        "shape": scene.things[0].shape,
        "colour": scene.things[0].colour,
        "other_shape": other.shape if other else "",
        "other_colour": other.colour if other else "",
        "ground": scene.ground,
        "size": scene.size,
        "place": scene.place,
        "relation": scene.relation,
    }
    return [values.index(answers[field]) if answers[field] else len(values) for field, values in FIELDS.items()]
