"""A ControlNet: found in a folder in Diffusers' layout, checked, measured before it is loaded, loaded, run.

Only safetensors are opened. Knows no sessions and nobody's budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import ControlNetModel
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from bottega.diffusion.backbone import Inputs
from bottega.diffusion.controlnets.layout import ControlLayout, controlnet_layout
from bottega.diffusion.model import files_digest
from bottega.diffusion.pulse import beat_in
from bottega.errors import ControlNetUnusable

_WEIGHTS = "diffusion_pytorch_model"
# Bytes of a config.json; real ones have two thousand.
_MAX_CONFIG_BYTES = 1 << 20
# What a served ControlNet says of these, by what it would mean otherwise.
_FIXED: dict[str, tuple[object, str]] = {
    "_class_name": ("ControlNetModel", "another kind of network"),
    "conditioning_channels": (3, "its control images are not RGB"),
    "class_embed_type": (None, "it needs class labels"),
    "encoder_hid_dim_type": (None, "it projects prompt embeddings"),
    "global_pool_conditions": (False, "it averages its residuals over the picture"),
}
_DEFAULTS: dict[str, object] = {"conditioning_channels": 3, "global_pool_conditions": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlNetSource:
    """A ControlNet on the disk that fits the base model. size_bytes: of its weights once loaded."""

    name: str
    folder: Path
    dtype: torch.dtype
    size_bytes: int
    layout: ControlLayout


class ControlNet:
    """A loaded ControlNet; to be run in inference mode.

    network: Diffusers' own, but for `embedding`, that of the control image, which is the same at every step and is
    computed once, by `embed`.
    """

    def __init__(self, source: ControlNetSource, network: ControlNetModel) -> None:
        self.name = source.name
        self.layout = source.layout
        self.device = network.device
        self.dtype = source.dtype
        self.network = network
        self.embedding = network.controlnet_cond_embedding
        self._flipped = network.config.controlnet_conditioning_channel_order == "bgr"
        network.controlnet_cond_embedding = nn.Identity()
        # Else the forward would flip the embedding as if it were the image.
        network.register_to_config(controlnet_conditioning_channel_order="rgb")

    def tell_alive(self, alive: Callable[[], None]) -> None:
        """Calls `alive` often from inside a forward, however long it takes; it must be quick."""
        beat_in((self.network,), alive)

    @torch.inference_mode()
    def embed(self, image: Tensor, *, rows: int) -> Tensor:
        """The embedding of a control image, as a forward of so many rows would compute it.

        image: [3, height, width], 0 to 1. Returns [channels, latent height, latent width].
        """
        # Measured on the CPU: the last bit for one row is another one than for several, and the same for 2, 3, 4, 5,
        # 6 and 8, whatever the others are.
        batch = image.to(self.device, self.dtype).expand(min(rows, 2), *image.shape).contiguous()
        if self._flipped:
            batch = batch.flip(1)
        embedded: Tensor = self.embedding(batch)[0]
        return embedded

    @torch.inference_mode()
    def residuals(self, inputs: Inputs, embedded: Tensor) -> list[Tensor]:
        """The residuals by point, at scale 1: [rows, channels, height, width] each; the middle is the last.

        embedded: [rows, channels, latent height, latent width], see embed.
        """
        skips, middle = self.network(
            inputs.sample,
            inputs.timestep,
            encoder_hidden_states=inputs.prompt_embeds,
            controlnet_cond=embedded,
            added_cond_kwargs={"text_embeds": inputs.pooled_embeds, "time_ids": inputs.time_ids},
            return_dict=False,
        )
        return [*skips, middle]


def find_controlnet(name: str, folder: Path, *, base: ControlLayout | None, dtype: torch.dtype) -> ControlNetSource:
    """Reads configuration and headers, no weights. base: what it must fit; None where that is not known yet.

    Raises ControlNetUnusable, naming what, where it is no ControlNet that can be served or does not fit the base.
    """
    config = _config(name, folder)
    for key, (wanted, otherwise) in _FIXED.items():
        if (value := config.get(key, _DEFAULTS.get(key))) != wanted:
            raise ControlNetUnusable(f"ControlNet {name} cannot be served: {otherwise} ({key} is {value!r})")
    try:
        layout = controlnet_layout(config)
    except (KeyError, TypeError, ValueError) as error:
        raise ControlNetUnusable(
            f"ControlNet {name} cannot be used: {folder / 'config.json'} is not a ControlNet's: {error!r}"
        ) from error
    if base is not None and (misfits := list(layout.misfits(base))):
        raise ControlNetUnusable(f"ControlNet {name} does not fit the model: {'; '.join(misfits)}")
    return ControlNetSource(
        name=name, folder=folder, dtype=dtype, size_bytes=_size_bytes(name, folder, dtype), layout=layout
    )


def controlnet_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of a ControlNet's files, hex. Raises OSError where they cannot be read."""
    return files_digest(folder, [folder / "config.json", *folder.rglob("*.safetensors")])


def load_controlnet(source: ControlNetSource, device: torch.device) -> ControlNet:
    """Loads the weights. May run in any thread beside forwards of other networks.

    Raises ControlNetUnusable where the files are not what they were, or not whole.
    """
    # Not from_pretrained: for another element type than float32 it sets the default one of the whole process while
    # it loads, and other threads' tensors would come out in it. The meta device is this thread's alone.
    try:
        with torch.device("meta"):
            network = ControlNetModel.from_config(_config(source.name, source.folder))
        # A copy in memory: mapped weights would change with the file.
        state = {
            key: tensor.to(device, source.dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
            for key, tensor in _tensors(source.name, source.folder)
        }
        network.load_state_dict(state, strict=True, assign=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ControlNetUnusable(f"ControlNet {source.name} cannot be loaded: {error}") from error
    return ControlNet(source, network.eval())


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError) as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be used: {path}: {error}") from error
    if not isinstance(config, dict):
        raise ControlNetUnusable(f"ControlNet {name} cannot be used: {path} is no configuration")
    return config


def _size_bytes(name: str, folder: Path, dtype: torch.dtype) -> int:
    """Of all weights in the element type that they are loaded in, from the files' headers."""
    total = 0
    for path in _weights(name, folder):
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is no mapping
                    count = 1
                    for extent in file.get_slice(key).get_shape():
                        count *= extent
                    total += count * dtype.itemsize
        except (OSError, SafetensorError) as error:
            raise ControlNetUnusable(f"ControlNet {name} cannot be used: {path}: {error}") from error
    return total


def _tensors(name: str, folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _weights(name, folder):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                yield key, file.get_tensor(key)


def _weights(name: str, folder: Path) -> list[Path]:
    """One file, or all of the parts that a large one was split into."""
    whole = folder / f"{_WEIGHTS}.safetensors"
    if whole.is_file():
        return [whole]
    parts = sorted(folder.glob(f"{_WEIGHTS}-*-of-*.safetensors"))
    if not parts:
        raise ControlNetUnusable(
            f"ControlNet {name} cannot be used: {folder} has no {whole.name}; weights are read as safetensors only"
        )
    return parts
