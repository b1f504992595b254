"""The latents that `keep_for_editing` stores with a picture for later edits, and their file format.

The format is safetensors with a JSON header. This module does not know where the bytes are stored or who may read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bottega.engine.edit import Trajectory
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.samplers import same_noise
from bottega.rules import MAX_KEPT_BYTES

VERSION = 3
_MAX_BYTES = MAX_KEPT_BYTES - 256  # the rest is for the message around them

_HEADER = "bottega"
_TENSOR = "latents"
_NAME = re.compile("[0-9a-f]{32}")


class KeptLatentsMismatch(ValueError):
    """The error that kept latents are damaged, or of another model, size or format version."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptLatents:
    """The latents of all steps of one picture."""

    latents: Tensor
    """The latent before each step, then the finished one, [steps + 1, channels, height, width]. They are divided by the
    sampler's signal, so that edits with other samplers can use them."""
    noise_levels: tuple[float, ...]
    """Noise level of each step, descending; see `Sampler`."""
    seed: int
    template: str
    """Name under which the picture's activations are recorded, 32 hex digits."""

    @property
    def image_latent(self) -> Tensor:
        """The finished latent, [1, channels, height, width]."""
        return self.latents[-1:]

    def trajectory(self, noise_levels: Sequence[float], begin: int) -> Trajectory | None:
        """Return the latents before an edit's steps from `begin` on; None if the picture lacks a noise level."""
        trajectory: dict[int, Tensor] = {}
        places = iter(enumerate(self.noise_levels))
        for step, level in enumerate(noise_levels, begin):
            place = next((place for place, kept in places if same_noise(kept, level)), None)
            if place is None:
                return None
            trajectory[step] = self.latents[place][None]
        return trajectory


def are_too_large(model: Model, spec: ResolvedSpec) -> bool:
    """Return whether the latents of a spec's pictures are too large to keep, even in float16."""
    height, width = spec.height // model.latent_scale, spec.width // model.latent_scale
    elements = (spec.steps + 1) * model.latent_channels * height * width
    return elements * torch.float16.itemsize > _MAX_BYTES


def write_kept(model: Model, kept: KeptLatents) -> bytes | None:
    """Serialize latents in the model's dtype, or in float16 if that is too large. Return None if both are too large."""
    header = {
        "version": VERSION,
        "model_hash": model.digest,
        "dtype": model.dtype_name,
        "noise_levels": kept.noise_levels,
        "seed": kept.seed,
        "template": kept.template,
    }
    for dtype in (model.dtype, torch.float16):
        latents = kept.latents.to("cpu", dtype).contiguous()
        data = safetensors.torch.save({_TENSOR: latents}, metadata={_HEADER: json.dumps(header)})
        if len(data) <= _MAX_BYTES:
            return data
    return None


def template_of(data: bytes) -> str:
    """Return the template's name from serialized latents; empty if they cannot be read."""
    try:
        return str(_header(data)["template"])
    except (KeyError, TypeError, ValueError):
        return ""


def read_kept(data: bytes, model: Model, shape: tuple[int, ...]) -> KeptLatents:
    """Deserialize latents to the model's device and dtype. `shape` is the expected [channels, height, width].

    Raise KeptLatentsMismatch if they are damaged, or do not fit the model, its dtype or the shape.
    """
    try:
        header = _header(data)
        expected = {"version": VERSION, "model_hash": model.digest, "dtype": model.dtype_name}
        for name, value in expected.items():
            if header[name] != value:
                raise KeptLatentsMismatch(f"their {name} is {header[name]!r}, not {value!r}")
        latents = safetensors.torch.load(data)[_TENSOR]
        kept = KeptLatents(
            latents=latents.to(model.device, model.dtype),
            noise_levels=tuple(float(level) for level in header["noise_levels"]),
            seed=int(header["seed"]),
            template=str(header["template"]),
        )
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, KeptLatentsMismatch):
            raise
        raise KeptLatentsMismatch(f"they are damaged: {type(error).__name__}") from None
    if not _NAME.fullmatch(kept.template):
        raise KeptLatentsMismatch("their name is not 32 hex digits")
    if tuple(latents.shape) != (len(kept.noise_levels) + 1, *shape) or not torch.isfinite(kept.latents).all():
        raise KeptLatentsMismatch(f"they are {tuple(latents.shape)}, which does not fit")
    return kept


def _header(data: bytes) -> dict[str, Any]:
    """Return the JSON header. Raise KeyError, TypeError or ValueError if there is none."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    return header
