"""What keep_for_editing keeps of a picture, as bytes: the latents of its steps, for edits to put back.

Safetensors with a JSON header. Does not know where they are kept, nor who may have them.
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

from bottega.diffusion.editing.edit import Trajectory
from bottega.diffusion.model.model import Model
from bottega.diffusion.model.samplers import same_noise
from bottega.diffusion.spec import ResolvedSpec
from bottega.rules import MAX_KEPT_LATENTS_BYTES

VERSION = 3

_HEADER = "bottega"
_TENSOR = "latents"
_NAME = re.compile("[0-9a-f]{32}")


class KeptLatentsMismatch(ValueError):
    """They are of another model, another size or another version, or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptLatents:
    """The latents of one picture.

    latents: [steps + 1, channels, height, width]: before each step, and the finished one; divided by the sampler's
    signal, so that edits with other samplers may put them back. noise_levels: see Sampler; of those steps, from high to
    low.
    seed: of the picture. template: 32 hex digits, which recordings of it are found by.
    """

    latents: Tensor
    noise_levels: tuple[float, ...]
    seed: int
    template: str

    @property
    def image_latent(self) -> Tensor:
        """The finished one, [1, channels, height, width]."""
        return self.latents[-1:]

    def trajectory(self, noise_levels: Sequence[float], begin: int) -> Trajectory | None:
        """The latents before an edit's steps; None where one of them is not among those of the picture.

        noise_levels: of its steps from `begin` on, from high to low.
        """
        trajectory: dict[int, Tensor] = {}
        places = iter(enumerate(self.noise_levels))
        for step, level in enumerate(noise_levels, begin):
            place = next((place for place, kept in places if same_noise(kept, level)), None)
            if place is None:
                return None
            trajectory[step] = self.latents[place][None]
        return trajectory


def are_too_large(model: Model, spec: ResolvedSpec) -> bool:
    """Whether no latents of a spec's pictures can be kept, in float16 neither."""
    height, width = spec.height // model.latent_scale, spec.width // model.latent_scale
    elements = (spec.steps + 1) * model.latent_channels * height * width
    return elements * torch.float16.itemsize > MAX_KEPT_LATENTS_BYTES


def write_kept(model: Model, kept: KeptLatents) -> bytes | None:
    """As bytes, in the model's element type, or in float16 where that is too much; None where that is, too."""
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
        if len(data) <= MAX_KEPT_LATENTS_BYTES:
            return data
    return None


def template_of(data: bytes) -> str:
    """The template of what was written; empty where it cannot be read."""
    try:
        return str(_header(data)["template"])
    except (KeyError, TypeError, ValueError):
        return ""


def read_kept(data: bytes, model: Model, shape: tuple[int, ...]) -> KeptLatents:
    """What was written, on the model's device and in its element type. shape: [channels, height, width] that fits.

    Raises KeptLatentsMismatch.
    """
    try:
        header = _header(data)
        said = {"version": VERSION, "model_hash": model.digest, "dtype": model.dtype_name}
        for name, value in said.items():
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
    """What was written beside the latents. Raises KeyError, TypeError and ValueError for anything else."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    return header
