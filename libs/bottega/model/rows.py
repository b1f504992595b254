"""The rows of a forward pass, and the key that the rows of one group have in common.

A row is the conditional or the unconditional half of one request at its current step. It contains everything that a
turn needs to know about the request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bottega.device_links.tensor_messages import DTYPES
from bottega.model.step_cache import StepCache

SetKey = tuple[tuple[str, float], ...]
"""Digests and scales of LoRAs, in the order in which their products are summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """The share of one LoRA in the factors of a module."""

    rank: int
    scale: float
    """Strength times alpha / rank."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factors:
    """The low-rank factors that the LoRAs of one request add to a module's weight: up @ down."""

    down: Tensor
    """[rank, in] or, for a convolution, [rank, in, kernel, kernel]."""
    up: Tensor
    """[out, rank]."""
    terms: tuple[Term, ...] = ()
    """LoRAs whose products are computed one by one, in this order; `up` does not contain their scales.

    Empty: `up` contains all scales, and the factors are one product.
    """

    @property
    def rank(self) -> int:
        """Rank of the product."""
        return int(self.up.shape[1])

    @property
    def size_bytes(self) -> int:
        """Bytes of both factors."""
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class Difference:
    """The sum that LoRAs of one request add to a module's parameters beside low-rank factors, with all scales."""

    weight: Tensor | None
    """In the shape of the module's weight; None if the weight does not change."""
    bias: Tensor | None
    """[out]; None if the bias does not change."""

    @property
    def size_bytes(self) -> int:
        """Bytes of both tensors."""
        return sum(tensor.nbytes for tensor in (self.weight, self.bias) if tensor is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class LoraSet:
    """The LoRAs of a request, on the model's device and in its data type."""

    key: SetKey
    components: Mapping[str, Mapping[str, Factors]] = field(repr=False)
    """Factors by component and module path; the set owns the tensors."""
    differences: Mapping[str, Mapping[str, Difference]] = field(default_factory=dict, repr=False)
    """Changes without a low-rank form, by component and module path. A module may have factors and a difference."""
    changes_norms: bool = False
    """Whether it changes normalisation layers. Its rows then run in groups of their own."""

    def of(self, component: str) -> Mapping[str, Factors]:
        """Return the factors of one component by module path; empty if no LoRA touches it."""
        return self.components.get(component, {})

    def differences_of(self, component: str) -> Mapping[str, Difference]:
        """Return the changes of one component without a low-rank form, by module path."""
        return self.differences.get(component, {})

    def changes(self, component: str) -> bool:
        """Return whether the set changes a component."""
        return bool(self.of(component) or self.differences_of(component))


class Half(Enum):
    """The two halves of classifier-free guidance, in the order in which Diffusers stacks them."""

    UNCONDITIONAL = 0
    CONDITIONAL = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Embeds:
    """The conditions of one half. Each model family adds its own ones to the prompt."""

    prompt: Tensor
    """[tokens, features]."""
    added: Mapping[str, Tensor] = field(default_factory=dict)
    """Further conditions by their names in Diffusers, such as SDXL's text_embeds, [features], and time_ids, [6]."""
    any_length: bool = False
    """Whether rows of one forward pass may have prompts of different lengths; the network then reads padded prompts."""

    @property
    def tokens(self) -> int:
        """Length that all prompts of one forward pass must have; 0 for any length."""
        return 0 if self.any_length else len(self.prompt)

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The conditions by name; that of the prompt is `prompt`."""
        return {"prompt": self.prompt, **self.added}

    def map(self, change: Callable[[Tensor], Tensor]) -> Embeds:
        """Return the same conditions with `change` applied to each tensor."""
        added = {name: change(tensor) for name, tensor in self.added.items()}
        return replace(self, prompt=change(self.prompt), added=added)

    @staticmethod
    def stack(embeds: Sequence[Embeds]) -> Embeds:
        """Return the conditions of several rows, with a first dimension of rows in each tensor.

        Prompts that may differ in length (`any_length`) are padded with zeros to the longest one.

        Raises:
            ValueError: The rows have different conditions.
        """
        names = embeds[0].added.keys()
        if any(row.added.keys() != names for row in embeds):
            raise ValueError("rows of one forward must have the same conditions")
        prompts = [row.prompt for row in embeds]
        return Embeds(
            prompt=pad_sequence(prompts, batch_first=True) if embeds[0].any_length else torch.stack(prompts),
            added={name: torch.stack([row.added[name] for row in embeds]) for name in names},
            any_length=embeds[0].any_length,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKey:
    """The properties that rows must share to run in one forward, but for their size where a network takes several."""

    shape: tuple[int, int, int]
    """Shape of the latent, [channels, height, width]."""
    tokens: int
    """Length of the prompt embeddings; 0 if rows may differ in it."""
    dtype: torch.dtype
    weights: SetKey = ()
    """The LoRA set that is patched into the weights; empty for unchanged weights. Rows whose LoRAs are applied beside
    the weights need unchanged ones, so that they share groups with rows without LoRAs.
    """

    @property
    def without_size(self) -> Hashable:
        """The properties that rows of several sizes share."""
        return self.shape[0], self.dtype, self.weights


class RowActivations(Protocol):
    """The activations that an add-on's backbone reads and writes for a row."""

    @property
    def reads(self) -> bool:
        """Whether the row reuses activations, so that only a share of it is computed."""
        ...

    @property
    def share(self) -> float:
        """Share of the row's tokens that are computed."""
        ...

    @property
    def waited_s(self) -> float:
        """Seconds for which the thread has waited for activations of the row."""
        ...


class ImageActivations(Protocol):
    """Reads or writes the recorded activations of one image."""

    def row(self, half: Half) -> RowActivations | None:
        """Return the activations for a row of the next step, or None to compute the row in full.

        A step that is retried may call this again.
        """

    @property
    def next_share(self) -> float:
        """Fraction of its rows' tokens that the next step computes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """A half of one request in one evaluation of the network."""

    owner: Hashable
    """The request that the row belongs to. Rows of one owner stay together."""
    step: int
    """Index of the evaluation in the request's schedule; for ControlNets every evaluation is a step."""
    half: Half
    sample: Tensor
    """Scaled latent, [channels, height, width]."""
    timestep: Tensor
    """A scalar."""
    embeds: Embeds
    image: Tensor | None = None
    """The mask and the masked image's latent, [channels, height, width]; None if the network reads none."""
    controls: tuple[Hashable, ...] = ()
    """Handles of the ControlNets that control this half at this step, in the request's order."""
    loras: LoraSet | None = None
    """Its LoRAs, whether they are patched into the weights or applied beside them."""
    activations: RowActivations | None = None
    """None for a row that is computed in full and not recorded."""
    step_cache: StepCache | None = None
    """What it may reuse of an earlier step; None if it computes every step."""
    alone: bool = False
    """Whether only rows of its owner may be in its forwards, all of them, without padding."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Height and width of its latent, and `Embeds.tokens` of its prompt. Rows of one size can be stacked."""
        _, height, width = self.sample.shape
        return height, width, self.embeds.tokens

    @property
    def network_input(self) -> Tensor:
        """The sample as the network reads it."""
        return self.sample if self.image is None else torch.cat([self.sample, self.image])


def arranged(rows: Sequence[Row]) -> list[Row]:
    """Group the rows by LoRA set, the set with most rows first, and within a set by size."""
    counts = Counter(row.loras.key for row in rows if row.loras is not None)
    sizes = {size: index for index, size in enumerate(dict.fromkeys(row.size for row in rows))}

    def sort_key(row: Row) -> tuple[int, SetKey, int]:
        key, count = ((), 1) if row.loras is None else (row.loras.key, -counts[row.loras.key])
        return count, key, sizes[row.size]

    return sorted(rows, key=sort_key)


_CONDITION = "condition."
_PROMPT = "prompt"
# Name of the message part with the number of tokens of each half's prompt, int64 [halves]. Only if these may differ.
_LENGTHS = "prompt_lengths"
# The model families have up to three.
_MAX_CONDITIONS = 8


def condition_parts(embeds: Sequence[Embeds]) -> dict[str, Tensor]:
    """Return the tensors of a message that hold these conditions, [halves, ...] each."""
    parts = {f"{_CONDITION}{name}": tensor for name, tensor in Embeds.stack(embeds).tensors.items()}
    if embeds[0].any_length:
        parts[_LENGTHS] = torch.tensor([len(half.prompt) for half in embeds])
    return parts


def read_conditions(parts: Mapping[str, Tensor], halves: Sequence[Half]) -> dict[Half, Embeds]:
    """Return the conditions of each half of guidance, with copies of a message's tensors.

    Raises:
        ValueError: A condition is malformed, or the prompt's is missing.
    """
    found = {name.removeprefix(_CONDITION): tensor for name, tensor in parts.items() if name.startswith(_CONDITION)}
    if _PROMPT not in found or len(found) > _MAX_CONDITIONS:
        raise ValueError(f"a message must have up to {_MAX_CONDITIONS} conditions, and {_PROMPT} among them")
    for name, tensor in found.items():
        dimensions = 3 if name == _PROMPT else 2
        if tensor.dim() != dimensions or len(tensor) != len(halves) or tensor.dtype not in DTYPES:
            raise ValueError(f"a message must have the condition {name} for each half, of {dimensions} dimensions")
    copies = {name: tensor.clone() for name, tensor in found.items()}
    prompt = copies.pop(_PROMPT)
    lengths = _read_lengths(parts.get(_LENGTHS), prompt)
    return {
        half: Embeds(
            prompt=prompt[place, : lengths[place]],
            added={name: tensor[place] for name, tensor in copies.items()},
            any_length=_LENGTHS in parts,
        )
        for place, half in enumerate(halves)
    }


def _read_lengths(lengths: Tensor | None, prompt: Tensor) -> list[int]:
    """Return the number of tokens of each half's prompt. `prompt` is [halves, tokens, features].

    Raises ValueError if the lengths do not fit the prompts.
    """
    count, most = prompt.shape[:2]
    if lengths is None:
        return [most] * count
    if lengths.dtype != torch.int64 or lengths.shape != (count,) or not bool(((lengths > 0) & (lengths <= most)).all()):
        raise ValueError(f"a message must have {_LENGTHS} of 1 to {most} tokens for each half")
    return [int(length) for length in lengths]
