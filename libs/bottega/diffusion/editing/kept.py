"""What keep_for_editing keeps of a picture, as bytes: the latents of its steps, for edits to put back.

Safetensors with a JSON header. Does not know where they are kept, nor who may have them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from bottega.diffusion.editing.edit import Trajectory
from bottega.diffusion.model.model import Model
from bottega.rules import MAX_KEPT_LATENTS_BYTES

VERSION = 2

_HEADER = "bottega"
_TENSOR = "latents"


class KeptLatentsMismatch(ValueError):
    """They are of another model, another size or another version, or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptLatents:
    """The latents of one picture.

    latents: [steps + 1, channels, height, width]: before each step, and the finished one; divided by the sampler's
    signal, so that edits with other samplers may put them back. timesteps: of those steps, from high to low; of some
    samplers two may be equal.
    seed: of the picture. template: 32 hex digits, which recordings of it are found by.
    """

    latents: Tensor
    timesteps: tuple[float, ...]
    seed: int
    template: str

    @property
    def image_latent(self) -> Tensor:
        """The finished one, [1, channels, height, width]."""
        return self.latents[-1:]

    def trajectory(self, timesteps: Sequence[float], begin: int) -> Trajectory | None:
        """The latents before an edit's steps; None where one of them is not among those of the picture.

        timesteps: of its steps from `begin` on, from high to low. An edit makes a picture's last steps: what has equal
        timesteps is matched from the end.
        """
        trajectory: dict[int, Tensor] = {}
        places = iter(reversed(range(len(self.timesteps))))
        for step in reversed(range(len(timesteps))):
            place = next((place for place in places if self.timesteps[place] == timesteps[step]), None)
            if place is None:
                return None
            trajectory[begin + step] = self.latents[place][None]
        return trajectory


def write_kept(model: Model, kept: KeptLatents) -> bytes | None:
    """As bytes, in the model's element type, or in float16 where that is too much; None where that is, too."""
    header = {
        "version": VERSION,
        "model_hash": model.digest,
        "dtype": model.dtype_name,
        "timesteps": kept.timesteps,
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
        latents = safetensors.torch.load(data)[_TENSOR]
        kept = KeptLatents(
            latents=latents.to(model.device, model.dtype),
            timesteps=tuple(float(timestep) for timestep in header["timesteps"]),
            seed=int(header["seed"]),
            template=str(header["template"]),
        )
        said = {"version": VERSION, "model_hash": model.digest, "dtype": model.dtype_name}
        for name, value in said.items():
            if header[name] != value:
                raise KeptLatentsMismatch(f"their {name} is {header[name]!r}, not {value!r}")
    except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, KeptLatentsMismatch):
            raise
        raise KeptLatentsMismatch(f"they are damaged: {type(error).__name__}") from None
    if tuple(latents.shape) != (len(kept.timesteps) + 1, *shape) or not torch.isfinite(kept.latents).all():
        raise KeptLatentsMismatch(f"they are {tuple(latents.shape)}, which does not fit")
    return kept


def _header(data: bytes) -> dict[str, Any]:
    """What was written beside the latents. Raises KeyError, TypeError and ValueError for anything else."""
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_HEADER])
    return header
