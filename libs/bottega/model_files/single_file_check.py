"""Checks a single file by its header: whether it can be converted, and whether workers can serve it. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from bottega.errors import InvalidRequest
from bottega.model_files.configuration_rules import check_configurations, filled_config
from bottega.model_files.controlnet_config import read_network_config
from bottega.model_files.family_names import FAMILIES
from bottega.model_files.original_names import (
    OriginalName,
    Shape,
    controlnet_name,
    open_clip_name,
    open_clip_shape,
    unet_name,
    vae_name,
)
from bottega.model_files.single_file import (
    DIFFUSERS_HINT,
    OTHER_VERSION,
    FileKind,
    SingleFile,
    read_single_file,
)
from bottega.model_files.single_file_config import Config, derive_configurations, misfit, shapes_of
from bottega.model_files.single_file_folder import index_of, scheduler_config, tokenizer_configs
from bottega.model_files.tensor_check import EXPECTED_TENSORS, Tensors, controlnet_tensors
from bottega.model_files.vae_rules import check_vae_config
from bottega.plain_text import excerpt
from bottega.safetensors_header import MAX_TENSORS

_SHOWN_CHARACTERS = 80
# Parts that draw with each of their tensors. Others have some that the converters leave out.
_WHOLE = ("unet", "controlnet")
_NAMES: Mapping[str, OriginalName] = {"unet": unet_name, "controlnet": controlnet_name, "vae": vae_name}


def refusal_of(path: Path, prediction_type: str = "", vae: Path | None = None) -> str:
    """Return a sentence, with the file's name, on why workers cannot serve a single file; empty if they can.

    Args:
        prediction_type: See `read_single_file`.
        vae: See `read_single_file`.
    """
    try:
        source = read_single_file(path, prediction_type=prediction_type, vae=vae)
        if source.kind is not FileKind.MODEL and not source.problem:
            raise ValueError(f"it is {source.kind.value}, and not a whole model")
        check_header(source)
    except ValueError as error:
        return f"the model {path} cannot be served: {error}"
    return ""


def vae_refusal(path: Path, family: str) -> str:
    """Return a sentence, with the file's name, on why a file is no VAE for models of a family; empty if it is one."""
    try:
        source = read_single_file(path, family)
        if source.kind is not FileKind.VAE and not source.problem:
            raise ValueError(f"it is {source.kind.value}, and not a VAE")
        check_header(source)
    except ValueError as error:
        return f"the VAE {path} cannot be served: {error}"
    return ""


def check_header(source: SingleFile) -> dict[str, Config]:
    """Return the configurations of a file's parts, after comparing names and shapes of its tensors with them.

    Raises:
        ValueError: The file cannot be converted, or not be served. The text is a sentence.
    """
    configs = configurations_of(source)
    for part, config in configs.items():
        wanted = dict(islice(_wanted(source, part, config), MAX_TENSORS + 1))
        if len(wanted) > MAX_TENSORS:
            raise ValueError(f"{misfit(part, source)}: it would need over {MAX_TENSORS} tensors; {OTHER_VERSION}")
        found = shapes_of(source, part)
        for name, shape in wanted.items():
            if name not in found:
                raise ValueError(f"{misfit(part, source)}: it lacks {name}; {OTHER_VERSION}")
            if _significant(found[name]) != _significant(shape):
                what = f"{name} has the shape {list(found[name])} instead of {list(shape)}"
                raise ValueError(f"{misfit(part, source)}: {what}; {OTHER_VERSION}")
        if part in _WHOLE and (unused := next((name for name in found if name not in wanted), "")):
            shown = excerpt(unused, _SHOWN_CHARACTERS)
            raise ValueError(f"{misfit(part, source)}: nothing takes {shown}; {OTHER_VERSION}")
    return configs


def expected_tensors(part: str, config: Config) -> Tensors:
    """Yield the names and shapes that a part's tensors have in Diffusers and transformers.

    Raises:
        ValueError: The part is a ControlNet whose configuration is not served.
    """
    if part == "controlnet":
        try:
            return controlnet_tensors(read_network_config(json.dumps(config).encode()).fields)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
    return EXPECTED_TENSORS[part](filled_config(part, config))


def configurations_of(source: SingleFile) -> dict[str, Config]:
    """Return the configuration of each part of a file that has weights, checked by the rules for folders.

    Raises:
        ValueError: The file cannot be converted, or not be served. The text is a sentence.
    """
    if source.problem:
        raise ValueError(source.problem)
    configs = derive_configurations(source)
    if source.kind is FileKind.VAE and (problem := next(check_vae_config(configs["vae"]), "")):
        raise ValueError(f"its vae cannot be served: {problem}")
    if source.kind is FileKind.CONTROLNET:
        expected_tensors("controlnet", configs["controlnet"])
    if source.kind is not FileKind.MODEL:
        return configs
    tokenizers = {
        part: tokenizer_configs(source.family, part)["tokenizer_config.json"]
        for part in ("tokenizer", "tokenizer_2")
        if part.replace("tokenizer", "text_encoder") in configs
    }
    together = {**configs, **tokenizers, "scheduler": scheduler_config(source)}
    if problems := check_configurations(index_of(source, configs), together, family=source.family):
        raise ValueError(f"its parts do not fit each other: {problems[0]}")
    return configs


def _wanted(source: SingleFile, part: str, config: Config) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes that a part's tensors must have in the file."""
    is_diffusers = part == "controlnet" and DIFFUSERS_HINT in shapes_of(source, part)
    is_open_clip = part in FAMILIES[source.family].open_clip
    for name, shape in expected_tensors(part, config):
        if is_open_clip:
            original = open_clip_name(name, config)
            yield original, open_clip_shape(original, shape)
        elif part in _NAMES and not is_diffusers:
            yield _NAMES[part](name, config), shape
        else:
            yield name, shape


def _significant(shape: Shape) -> Shape:
    """Return a shape without ones at its end: converters make linear layers of convolutions of one pixel."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
