"""A ControlNet: found in a folder in Diffusers' layout, checked, measured before it is loaded, loaded, run.

Only safetensors are opened. A stranger may have written the folder: nothing is built from its configuration before its
numbers have been checked, and no weights are read before they are those that it builds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import ControlNetModel
from torch import Tensor, nn

from bottega.diffusion.controlnets.configuration import NetworkConfig, read_fields, read_network_config
from bottega.diffusion.controlnets.folder import WeightsFile, opened_weights, read_config, weights_bytes
from bottega.diffusion.controlnets.layout import ControlLayout, controlnet_layout
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.model.backbone import Inputs
from bottega.errors import ControlNetUnusable, InvalidRequest
from bottega.plain_text import excerpt

_SHOWN_CHARACTERS = 60
_LISTED = 3
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
    """A ControlNet on the disk that fits the base model. size_bytes: of its weights once loaded.

    root: outside of which no file of it may be, links followed; None: its operator put it there, wherever it is.
    """

    name: str
    folder: Path
    root: Path | None
    dtype: torch.dtype
    size_bytes: int
    layout: ControlLayout


class LoadedControlNet:
    """A loaded ControlNet, to be run in inference mode.

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

    @torch.inference_mode()
    def embed(self, image: Tensor, *, rows: int) -> Tensor:
        """The embedding of a control image, as a forward of so many rows would compute it.

        image: [3, height, width], 0 to 1, on the CPU. Returns [channels, latent height, latent width].
        """
        # Measured on the CPU: the last bit for one row is another one than for several, and the same for 2, 3, 4, 5,
        # 6 and 8, whatever the others are.
        there = open_device(self.device).to_device(image, self.dtype)
        batch = there.expand(min(rows, 2), *image.shape).contiguous()
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


def find_controlnet(
    name: str, folder: Path, *, base: ControlLayout | None, dtype: torch.dtype, root: Path | None = None
) -> ControlNetSource:
    """Reads configuration and headers, no weights. base: what it must fit; None where that is not known yet.

    root: see ControlNetSource. Raises InvalidRequest naming what of its configuration is out of bounds, and
    ControlNetUnusable, naming what, where it is no ControlNet that can be served or does not fit the base.
    """
    with _naming(name, "used"):
        config = _config(name, folder, root)
        layout = controlnet_layout(config)
        if base is not None and (misfits := list(layout.misfits(base))):
            raise ControlNetUnusable(f"ControlNet {name} does not fit the model: {'; '.join(misfits)}")
        with opened_weights(folder, root) as files:
            size_bytes = weights_bytes(files, dtype)
    return ControlNetSource(name=name, folder=folder, root=root, dtype=dtype, size_bytes=size_bytes, layout=layout)


def check_weights(source: ControlNetSource) -> None:
    """Compares names and shapes of what its configuration builds with its files' headers; reads no weights.

    Raises ControlNetUnusable saying what differs, InvalidRequest as find_controlnet.
    """
    with _naming(source.name, "used"), opened_weights(source.folder, source.root) as files:
        _check_same(_built(_config(source.name, source.folder, source.root)), files)


def load_controlnet(source: ControlNetSource, device: torch.device) -> LoadedControlNet:
    """Loads the weights. May run in any thread beside forwards of other networks.

    Raises ControlNetUnusable where the files are not what they were, or not whole.
    """
    # Not from_pretrained: for another element type than float32 it sets the default one of the whole process while
    # it loads, and other threads' tensors would come out in it.
    try:
        with _naming(source.name, "loaded"), opened_weights(source.folder, source.root) as files:
            config = _config(source.name, source.folder, source.root)
            if (controlnet_layout(config), weights_bytes(files, source.dtype)) != (source.layout, source.size_bytes):
                raise ValueError("its files have changed since it was found; add it again")
            network = _built(config)
            _check_same(network, files)
            state = {
                entry.name: each.tensor(entry).to(device, source.dtype)
                for each in files
                for entry in each.header.tensors
            }
            network.load_state_dict(state, strict=True, assign=True)
    except InvalidRequest as error:
        raise ControlNetUnusable(error.message) from None
    return LoadedControlNet(source, network.eval())


def _config(name: str, folder: Path, root: Path | None) -> NetworkConfig:
    """Its configuration, checked. Raises InvalidRequest, ControlNetUnusable for a kind that is not served."""
    text = read_config(folder, root)
    try:
        _check_kind(name, read_fields(text))
        return read_network_config(text)
    except InvalidRequest as error:
        message = f"ControlNet {name} cannot be used: {error.message}"
        raise InvalidRequest(message, violations=error.violations) from None


def _check_kind(name: str, fields: Mapping[str, object]) -> None:
    for key, (wanted, otherwise) in _FIXED.items():
        if (value := fields.get(key, _DEFAULTS.get(key))) != wanted:
            said = excerpt(repr(value), _SHOWN_CHARACTERS)
            raise ControlNetUnusable(f"ControlNet {name} cannot be served: {otherwise} ({key} is {said})")


def _built(config: NetworkConfig) -> ControlNetModel:
    """The network without its weights, for which no memory is taken. The meta device is this thread's alone."""
    with torch.device("meta"):
        return ControlNetModel.from_config(config.fields)


def _check_same(network: ControlNetModel, files: Sequence[WeightsFile]) -> None:
    """Raises ValueError where the files have other tensors than the network, or others' shapes."""
    wanted = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    entries = [entry for each in files for entry in each.header.tensors]
    found = {entry.name: entry.shape for entry in entries}
    if len(found) < len(entries):
        raise ValueError("two of its files have a tensor of the same name")
    wrong = [*_misshapen(wanted, found)]
    if wrong:
        more = f" and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise ValueError(f"its weights are not those of its config.json: {'; '.join(wrong[:_LISTED])}{more}")


def _misshapen(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name in sorted(wanted.keys() - found.keys()):
        yield f"{name} is not there"
    for name, shape in found.items():
        if name not in wanted:
            yield f"nothing takes {excerpt(name, _SHOWN_CHARACTERS)}"
        elif shape != wanted[name]:
            yield f"{name} is {list(shape)} and should be {list(wanted[name])}"


@contextmanager
def _naming(name: str, what: str) -> Iterator[None]:
    """What fails in the block is the fault of this ControlNet's files."""
    try:
        yield
    except OSError as error:
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {_of_file(error)}") from error
    except (ValueError, RuntimeError, ArithmeticError, TypeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ControlNetUnusable(f"ControlNet {name} cannot be {what}: {error}") from error


def _of_file(error: OSError) -> str:
    """Without the folder, which is nobody's business but its operator's; its server's log names it."""
    where = f"{Path(error.filename).name}: " if isinstance(error.filename, str) else ""
    return f"{where}{error.strerror or 'the disk fails'}"
