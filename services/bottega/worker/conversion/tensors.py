"""Renames the tensors of a part as Diffusers does, and writes them one after the other.

Diffusers' own converters (diffusers.loaders.single_file_utils) decide on names and slices, so that the result is the
one of `from_single_file`. They run twice: on tensors without data, to refuse a file before anything is written, and
on the weights.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from diffusers.loaders import single_file_utils as stock
from safetensors import safe_open
from torch import Tensor

from bottega.model_files.family_names import (
    CLIP_G_SD3,
    CLIP_L_SD3,
    FAMILIES,
    FLUX,
    OPEN_CLIP,
    OPEN_CLIP_SDXL,
    SD3,
    TRANSFORMER,
    with_article,
)
from bottega.model_files.single_file import OTHER_VERSION, SingleFile
from bottega.model_files.single_file_check import expected_tensors
from bottega.model_files.single_file_kind import CONTROLNET, DIFFUSERS_HINT
from bottega.plain_text import excerpt
from bottega.safetensors_header import MAX_TENSORS

State = dict[str, Tensor]

_TEXT_PREFIX = "text_model."
_PROJECTION = "text_projection.weight"
_POSITIONS = "embeddings.position_ids"
_SHOWN_CHARACTERS = 80
# Queries, keys, values and the feed-forward layer of a block of Flux.1, 3,072 wide.
_FLUX_FUSED_ROWS = 7 * 3072
# Parts of which every tensor is drawn with, under one name.
_WHOLE = ("unet", TRANSFORMER, "controlnet")
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"}


def check_part(source: SingleFile, part: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError, with a sentence, if a part's tensors are not those of a configuration. Reads no weights."""
    empty = {entry.name: torch.empty(entry.shape, device="meta") for entry in source.parts[part]}
    _converted(source, part, config, empty)


def convert_part(source: SingleFile, part: str, config: Mapping[str, Any], target: Path) -> None:
    """Write a part's tensors, under the names of Diffusers and transformers, to a new safetensors file.

    Raises:
        ValueError: A tensor has values that are not finite. The text is a sentence.
        OSError: The file cannot be written.
    """
    # Whole tensors are read instead of mapped: the file may change, and a mapped page that is gone ends the process.
    with safe_open(source.file_of(part), framework="pt", backend="pread") as reader:
        names = {entry.name for entry in source.parts[part]}
        state = {name: reader.get_tensor(name) for name in reader.offset_keys() if name in names}
    converted = _converted(source, part, config, state)
    state.clear()  # so that a tensor is freed when it has been written
    _write(target, part, converted)


def _converted(source: SingleFile, part: str, config: Mapping[str, Any], state: State) -> State:
    """Return a part's tensors under the names that its network has, without any other."""
    wanted = dict(islice(expected_tensors(part, dict(config), source.family), MAX_TENSORS + 1))
    if len(wanted) > MAX_TENSORS:
        raise ValueError(_misfit(source, part, f"it would need over {MAX_TENSORS} tensors"))
    try:
        found = _CONVERT[part](source, config, state)
    except (KeyError, IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(_misfit(source, part, f"{type(error).__name__}: {error}")) from None
    # transformers' converters keep the prefix that published files have.
    by_name = {name.removeprefix(_TEXT_PREFIX): name for name in found if found[name] is not None}
    for name, shape in wanted.items():
        if name not in by_name:
            raise ValueError(_misfit(source, part, f"it lacks {name}"))
        if (actual := tuple(found[by_name[name]].shape)) != shape:
            raise ValueError(_misfit(source, part, f"{name} has the shape {list(actual)} instead of {list(shape)}"))
    # As in a folder, tensors outside the network's modules are ignored. Inside one, the network differs.
    modules = {name.split(".")[0] for name in wanted}
    unused = [name for name in by_name if name not in wanted and name.split(".")[0] in modules and name != _POSITIONS]
    if unused:
        raise ValueError(_misfit(source, part, f"nothing takes {unused[0]}"))
    # The converter of transformers removes what it takes.
    if part in _WHOLE and (lost := next(iter(state), "") if part == TRANSFORMER else _lost(state, found)):
        raise ValueError(_misfit(source, part, f"nothing takes {lost}"))
    return {by_name[name]: found[by_name[name]] for name in wanted}


def _lost(state: State, found: State) -> str:
    """Return the name of a tensor that a converter has left out, such as one of an LCM or a motion module."""
    taken = {id(tensor) for tensor in found.values()}
    return next((name for name, tensor in state.items() if id(tensor) not in taken), "")


def _misfit(source: SingleFile, part: str, what: str) -> str:
    shown = excerpt(what, 2 * _SHOWN_CHARACTERS)
    return f"its {part} is not that of {with_article(source.title)} model: {shown}; {OTHER_VERSION}"


def _unet(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    converted: State = stock.convert_ldm_unet_checkpoint(state, config)
    return converted


def _transformer(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    if source.family == SD3:
        converted: State = stock.convert_sd3_transformer_checkpoint_to_diffusers(state)
        return converted
    # The converter cuts these layers for the width of published models alone. Others are cut here.
    fused = {name: tensor for name, tensor in state.items() if ".linear1." in name}
    state |= {name: tensor.new_empty(_FLUX_FUSED_ROWS, 0) for name, tensor in fused.items()}
    converted = stock.convert_flux_transformer_checkpoint_to_diffusers(state)
    width = config["attention_head_dim"] * config["num_attention_heads"]
    for name, tensor in fused.items():
        number, _, end = name.rpartition("single_blocks.")[2].split(".")
        layers = ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
        cut = tensor.split_with_sizes((width, width, width, 4 * width))
        converted |= {
            f"single_transformer_blocks.{number}.{layer}.{end}": rows for layer, rows in zip(layers, cut, strict=True)
        }
    return converted


def _controlnet(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    bare = {name.removeprefix(CONTROLNET): tensor for name, tensor in state.items()}
    converted: State = stock.convert_controlnet_checkpoint(bare, config)
    if config.get("addition_embed_type") is not None and DIFFUSERS_HINT not in bare:  # the converter leaves these out
        for name, original in stock.DIFFUSERS_TO_LDM_MAPPING["controlnet"]["addition_embed_type"].items():
            converted[name] = bare[original]
    return converted


def _vae(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    converted: State = stock.convert_ldm_vae_checkpoint(state, config)
    return converted


def _text_encoder(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    if "text_encoder" in FAMILIES[source.family].original_names:
        return _open_clip(state, config, OPEN_CLIP)
    converted = _transformers_clip(state, CLIP_L_SD3)
    if source.family == SD3:
        dtype = next(tensor.dtype for tensor in state.values() if tensor.is_floating_point())
        # from_single_file takes the identity, whatever a file has.
        converted[_PROJECTION] = torch.eye(config["hidden_size"], dtype=dtype)
    return converted


def _transformers_clip(state: State, prefix: str) -> State:
    """Return the tensors of an encoder with transformers' names, below this prefix or those of other families."""
    converted: State = stock.convert_ldm_clip_checkpoint(state, prefix)
    # Some files lack the prefix that published folders have.
    return {
        name if name == _PROJECTION else f"{_TEXT_PREFIX}{name.removeprefix(_TEXT_PREFIX)}": tensor
        for name, tensor in converted.items()
    }


def _text_encoder_2(source: SingleFile, config: Mapping[str, Any], state: State) -> State:
    if source.family == FLUX:
        made: State = stock.convert_sd3_t5_checkpoint_to_diffusers(state)
        made.pop("encoder.embed_tokens.weight", None)  # The same as `shared`.
        return made
    if source.family == SD3:
        return _transformers_clip(state, CLIP_G_SD3)
    return _open_clip(state, config, OPEN_CLIP_SDXL)


def _open_clip(state: State, config: Mapping[str, Any], prefix: str) -> State:
    # The converter reads nothing of the network but its width.
    network = SimpleNamespace(config=SimpleNamespace(hidden_size=config["hidden_size"]))
    converted: State = stock.convert_open_clip_checkpoint(network, state, prefix=prefix)
    return converted


def _write(path: Path, part: str, state: State) -> None:
    """Write tensors to a new safetensors file, and forget each as soon as it is written.

    safetensors' own `save_file` copies all of them first.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in state.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in list(state):
            tensor = state.pop(name).contiguous()
            _check_finite(part, name, tensor)
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def _check_finite(part: str, name: str, tensor: Tensor) -> None:
    # The sum is quick, and is finite for all weights but those of a broken file or of a magnitude that nobody trains.
    if not tensor.sum(dtype=torch.float64).isfinite() and not tensor.isfinite().all():
        raise ValueError(
            f"the tensor {excerpt(name, _SHOWN_CHARACTERS)} of its {part} has values that are no finite numbers; "
            "download the file again, or another version of the model"
        )


_CONVERT: Mapping[str, Callable[[SingleFile, Mapping[str, Any], State], State]] = {
    "unet": _unet,
    TRANSFORMER: _transformer,
    "controlnet": _controlnet,
    "vae": _vae,
    "text_encoder": _text_encoder,
    "text_encoder_2": _text_encoder_2,
}
