"""Conversion between a request's conditions and the named tensors of a message to another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from bottega.device_links.tensor_messages import DTYPES
from bottega.model.rows import Embeds, Half

_PREFIX = "condition."
_PROMPT = "prompt"
# The model families have up to three.
_MAX_CONDITIONS = 8


def condition_parts(embeds: Sequence[Embeds]) -> dict[str, Tensor]:
    """Return the tensors of a message that hold these conditions, [halves, ...] each."""
    return {f"{_PREFIX}{name}": tensor for name, tensor in Embeds.stack(embeds).tensors.items()}


def read_conditions(parts: Mapping[str, Tensor], halves: Sequence[Half]) -> dict[Half, Embeds]:
    """Return the conditions of each half of guidance, with copies of a message's tensors.

    Raises:
        ValueError: A condition is malformed, or the prompt's is missing.
    """
    found = {name.removeprefix(_PREFIX): tensor for name, tensor in parts.items() if name.startswith(_PREFIX)}
    if _PROMPT not in found or len(found) > _MAX_CONDITIONS:
        raise ValueError(f"a message must have up to {_MAX_CONDITIONS} conditions, and {_PROMPT} among them")
    for name, tensor in found.items():
        dimensions = 3 if name == _PROMPT else 2
        if tensor.dim() != dimensions or len(tensor) != len(halves) or tensor.dtype not in DTYPES:
            raise ValueError(f"a message must have the condition {name} for each half, of {dimensions} dimensions")
    copies = {name: tensor.clone() for name, tensor in found.items()}
    prompt = copies.pop(_PROMPT)
    return {
        half: Embeds(prompt=prompt[place], added={name: tensor[place] for name, tensor in copies.items()})
        for place, half in enumerate(halves)
    }
