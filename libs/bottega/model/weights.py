"""Loads the networks of a model from safetensors files, with little memory besides their weights.

A file is read tensor by tensor, and each tensor is converted and copied to the device before the next one is read.
Weights are never in a mapped file: overwriting the file while a model runs would change its pictures, or kill its
process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKL, ModelMixin, UNet2DConditionModel
from diffusers.models.modeling_utils import no_init_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from bottega.model_files import PartReport

# Maximum number of names in a message; a network has hundreds.
_LISTED = 3

NetworkT = TypeVar("NetworkT", AutoencoderKL, UNet2DConditionModel)
TextEncoderT = TypeVar("TextEncoderT", CLIPTextModel, CLIPTextModelWithProjection)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Device and element type of loaded weights."""

    device: torch.device
    dtype: torch.dtype
    on_read: Callable[[int], None]
    """Called with the number of bytes that were read since the last call."""


def load_network(kind: type[NetworkT], part: PartReport, target: Placement) -> NetworkT:
    """Load a Diffusers network in evaluation mode, with the weights that its `from_pretrained` gives it.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has changed since it was checked.
    """
    folder = part.files[0].parent
    config = kind.load_config(folder, local_files_only=True)
    with no_init_weights(), init_empty_weights():
        network: NetworkT = kind.from_config(config)
    state: dict[str, Tensor] = {}
    for file in part.files:
        for name, tensor in _read(file, network, target.on_read):
            if kind is AutoencoderKL and not tensor.isfinite().all():
                raise ValueError(
                    f"{_short_path(file)}: the tensor {name} has values that are no finite numbers; download the file "
                    "again"
                )
            state[name] = tensor.to(target.device, target.dtype if tensor.is_floating_point() else tensor.dtype)
    _check_complete(folder, network.state_dict().keys() - state.keys())
    # Without requires_grad_(False), because PyTorch then uses other kernels, whose last bits differ from Diffusers'.
    # Nothing is kept for gradients, because every stage runs in inference mode.
    network.load_state_dict(state, strict=True, assign=True)
    return network.to(target.device).eval()


def load_text_encoder(kind: type[TextEncoderT], part: PartReport, target: Placement) -> TextEncoderT:
    """Load a text encoder in evaluation mode, as its `from_pretrained` does.

    transformers knows the names of weights in files. It maps the whole file, whose pages count as this process's memory
    until the weights have been copied.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file has changed since it was checked.
    """
    folder = part.files[0].parent
    with _naming(folder):
        encoder, found = kind.from_pretrained(
            folder,
            dtype=target.dtype,
            variant=part.variant or None,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    _check_complete(folder, found["missing_keys"])
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(target.device, copy=True)
        target.on_read(parameter.numel() * part.size_bytes // max(1, part.parameters))
    return encoder.to(target.device).eval()


def _read(file: Path, network: ModelMixin, on_read: Callable[[int], None]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file that the network needs, by the network's names, in the order of the file."""
    shapes = {name: tensor.shape for name, tensor in network.state_dict().items()}
    with _naming(file), safe_open(file, framework="pt", backend="pread") as reader:
        names = reader.offset_keys()
        current = _current_names(network, names)
        for name in names:
            tensor: Tensor = reader.get_tensor(name)
            on_read(tensor.nbytes)
            wanted = shapes.get(current[name])
            if wanted is None:
                continue  # Only training needs it.
            if tensor.shape != wanted:
                raise ValueError(f"{name} has the shape {list(tensor.shape)}, but its config.json says {list(wanted)}")
            yield current[name], tensor


def _current_names(network: ModelMixin, names: Iterable[str]) -> Mapping[str, str]:
    """Return the network's name of each tensor in a file, because attention layers of old VAEs had other names."""
    by_current = {name: name for name in names}
    network._fix_state_dict_keys_on_load(by_current)
    return {name: current for current, name in by_current.items()}


def _check_complete(folder: Path, missing: Iterable[str]) -> None:
    lacking = sorted(missing)
    if lacking:
        more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
        listed = ", ".join(lacking[:_LISTED])
        raise ValueError(f"the weights in {_short_path(folder)} lack {listed}{more}; download the folder again")


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file in errors of this context."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(f"{_short_path(path)} cannot be read as safetensors: {error}") from error
    except ValueError as error:
        raise ValueError(f"{_short_path(path)}: {error}") from error


def _short_path(path: Path) -> str:
    """Return the end of a path for a message: the part's folder, without the model's."""
    return "/".join(path.parts[-2:]) if path.suffix else path.name
