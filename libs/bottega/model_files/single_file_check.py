"""Checks a single file by its header: whether it can be converted, and whether workers can serve it. No torch.

It derives the configurations of the folder that is made from the file. It also knows the names that a network's tensors
have in single files, by their names in Diffusers and transformers. Diffusers' converters go the other way
(diffusers.loaders.single_file_utils). With these names a file can be checked without running them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bottega.errors import InvalidRequest
from bottega.model_files.configuration_rules import INDEX_FILE, check_configurations, config_file, filled_config
from bottega.model_files.controlnet_config import read_network_config
from bottega.model_files.families import describe_other, family_of
from bottega.model_files.family_names import FAMILIES, PARTS, SD3, TITLES, TRANSFORMER, class_of
from bottega.model_files.folder_check import check_contents, read_configs
from bottega.model_files.json_files import is_there, read_json_object
from bottega.model_files.single_file import OTHER_VERSION, SingleFile, completed, read_single_file
from bottega.model_files.single_file_config import Config, derive_configurations, misfit, shapes_of
from bottega.model_files.single_file_folder import index_of, scheduler_config, tokenizer_configs
from bottega.model_files.single_file_kind import DIFFUSERS_HINT, FileKind
from bottega.model_files.single_file_transformer import Shape, original_tensor
from bottega.model_files.tensor_check import EXPECTED_TENSORS, controlnet_tensors
from bottega.model_files.transformer_rules import Tensors
from bottega.model_files.vae_rules import check_vae_config
from bottega.plain_text import excerpt
from bottega.safetensors_header import MAX_TENSORS

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_EMBEDDING = {"linear_1": "0", "linear_2": "2"}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v"}
_CLIP = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "text_projection.weight": "text_projection",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a tensor of a UNet or a ControlNet.

    Args:
        config: Its configuration, all of whose levels have as many layers.
    """
    layers = config["layers_per_block"]
    match name.split("."):
        case ["conv_in", end]:
            return f"input_blocks.0.0.{end}"
        case ["conv_norm_out", end]:
            return f"out.0.{end}"
        case ["conv_out", end]:
            return f"out.2.{end}"
        case ["time_embedding", layer, end]:
            return f"time_embed.{_EMBEDDING.get(layer, layer)}.{end}"
        case ["add_embedding", layer, end]:
            return f"label_emb.0.{_EMBEDDING[layer]}.{end}"
        case ["mid_block", "attentions", _, *rest]:
            return f"middle_block.1.{'.'.join(rest)}"
        case ["mid_block", _, number, *rest]:
            return f"middle_block.{2 * int(number)}.{_resnet(rest)}"
        case ["down_blocks", level, "downsamplers", _, _, end]:
            return f"input_blocks.{(int(level) + 1) * (layers + 1)}.0.op.{end}"
        case ["down_blocks", level, kind, number, *rest]:
            return f"input_blocks.{int(level) * (layers + 1) + int(number) + 1}.{_layer(kind, rest)}"
        case ["up_blocks", level, "upsamplers", _, _, end]:
            place = 2 if config["up_block_types"][int(level)].startswith("CrossAttn") else 1
            return f"output_blocks.{int(level) * (layers + 1) + layers}.{place}.conv.{end}"
        case ["up_blocks", level, kind, number, *rest]:
            return f"output_blocks.{int(level) * (layers + 1) + int(number)}.{_layer(kind, rest)}"
    return name


def controlnet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a ControlNet's tensor."""
    match name.split("."):
        case ["controlnet_cond_embedding", "conv_in", end]:
            return f"input_hint_block.0.{end}"
        case ["controlnet_cond_embedding", "blocks", number, end]:
            return f"input_hint_block.{2 * (int(number) + 1)}.{end}"
        case ["controlnet_cond_embedding", _, end]:
            return f"input_hint_block.{4 * len(config['conditioning_embedding_out_channels']) - 2}.{end}"
        case ["controlnet_down_blocks", number, end]:
            return f"zero_convs.{number}.0.{end}"
        case ["controlnet_mid_block", end]:
            return f"middle_block_out.0.{end}"
    return unet_name(name, config)


def vae_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a VAE's tensor."""
    last = len(config["block_out_channels"]) - 1
    match name.split("."):
        case [half, "mid_block", "resnets", number, *rest]:
            return f"{half}.mid.block_{int(number) + 1}.{_shortcut(rest)}"
        case [half, "mid_block", _, _, "to_out", _, end]:
            return f"{half}.mid.attn_1.proj_out.{end}"
        case [half, "mid_block", _, _, layer, end]:
            return f"{half}.mid.attn_1.{_VAE_ATTENTION[layer]}.{end}"
        case [half, "down_blocks", level, "resnets", number, *rest]:
            return f"{half}.down.{level}.block.{number}.{_shortcut(rest)}"
        case [half, "down_blocks", level, _, _, *rest]:
            return f"{half}.down.{level}.downsample.{'.'.join(rest)}"
        case [half, "up_blocks", level, "resnets", number, *rest]:
            return f"{half}.up.{last - int(level)}.block.{number}.{_shortcut(rest)}"
        case [half, "up_blocks", level, _, _, *rest]:
            return f"{half}.up.{last - int(level)}.upsample.{'.'.join(rest)}"
        case [half, "conv_norm_out", end]:
            return f"{half}.norm_out.{end}"
    return name


def open_clip_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a tensor of one of OpenCLIP's text encoders."""
    if name in _CLIP_ENDS:
        return _CLIP_ENDS[name]
    match name.split("."):
        case ["final_layer_norm", end]:
            return f"ln_final.{end}"
        case ["encoder", "layers", number, "self_attn", projection, end]:
            # Three projections are in one tensor.
            inner = f"in_proj_{end}" if projection in _PROJECTIONS else f"{projection}.{end}"
            return f"transformer.resblocks.{number}.attn.{inner}"
        case ["encoder", "layers", number, *inner, end]:
            return f"transformer.resblocks.{number}.{_CLIP['.'.join(inner)]}.{end}"
    return name


def open_clip_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of a tensor under its original name, which `open_clip_name` gives."""
    if ".attn.in_proj_" in name:
        return (3 * shape[0], *shape[1:])
    return shape[::-1] if name == "text_projection" else shape


def _resnet(rest: Sequence[str]) -> str:
    layer, end = rest
    return f"{_RESNET[layer]}.{end}"


def _layer(kind: str, rest: Sequence[str]) -> str:
    return f"0.{_resnet(rest)}" if kind == "resnets" else f"1.{'.'.join(rest)}"


def _shortcut(rest: Sequence[str]) -> str:
    layer, end = rest
    return f"{'nin_shortcut' if layer == 'conv_shortcut' else layer}.{end}"


OriginalName = Callable[[str, Mapping[str, Any]], str]


_SHOWN_CHARACTERS = 80
# Diffusers takes the identity for this matrix, whether or not a file has one.
_IDENTITY = (SD3, "text_encoder", "text_projection.weight")
# Parts that draw with each of their tensors. Others have some that the converters leave out.
_WHOLE = ("unet", "transformer", "controlnet")
_NAMES: Mapping[str, OriginalName] = {"unet": unet_name, "controlnet": controlnet_name, "vae": vae_name}


def refusal_of(path: Path, prediction_type: str = "", vae: Path | None = None, parts: Path | None = None) -> str:
    """Return a sentence, with the file's name, on why workers cannot serve a single file; empty if they can.

    Args:
        prediction_type: See `read_single_file`.
        vae: See `read_single_file`.
        parts: Folder of a model that has the parts that the file lacks.
    """
    try:
        source = read_single_file(path, prediction_type=prediction_type, vae=vae)
        source = source if parts is None else with_parts(source, parts)
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
    configs = _configurations_of(source)
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


def with_parts(model: SingleFile, folder: Path) -> SingleFile:
    """Return a whole model that takes the parts that its file lacks from the folder of another one.

    Raises:
        ValueError: It is no folder of a model of the same family, or lacks the same parts. The text is a sentence.
    """
    if model.kind is not FileKind.MODEL or (model.problem and not model.lacking):
        return model
    refused = f"the folder {folder} of --parts cannot be used"
    if not is_there(folder / INDEX_FILE):
        raise ValueError(f"{refused}: {describe_other(folder)}")
    try:
        family, wrong = family_of(folder, read_json_object(folder / INDEX_FILE))
    except ValueError as error:
        family, wrong = "", str(error)
    if wrong:
        raise ValueError(f"{refused}: {INDEX_FILE}: {wrong}")
    if family != model.family:
        raise ValueError(f"{refused}: its model is of {TITLES[family]}, and the file is of {model.title}")
    found = completed(model, {part: folder / part for part in PARTS[family] if (folder / part).is_dir()})
    if found.lacking:
        raise ValueError(f"it and the folder {folder} lack {', '.join(found.lacking)}; download the folder again")
    return found


def expected_tensors(part: str, config: Config, family: str) -> Tensors:
    """Yield the names and shapes that a part of a family's models has in Diffusers and transformers.

    Raises:
        ValueError: The part is a ControlNet whose configuration is not served.
    """
    if part == "controlnet":
        try:
            return controlnet_tensors(read_network_config(json.dumps(config).encode()).fields)
        except InvalidRequest as error:
            raise ValueError(error.message) from None
    kind = class_of(part, family)
    return EXPECTED_TENSORS[kind](filled_config(kind, config))


def _configurations_of(source: SingleFile) -> dict[str, Config]:
    """Return the configuration of each part of a file that has weights, checked by the rules for folders.

    Raises:
        ValueError: The file cannot be converted, or not be served. The text is a sentence.
    """
    if source.problem:
        raise ValueError(source.problem)
    configs = derive_configurations(source)
    shifts = TRANSFORMER in PARTS[source.family]
    if source.kind is FileKind.VAE and (problem := next(check_vae_config(configs["vae"], shifts=shifts), "")):
        raise ValueError(f"its vae cannot be served: {problem}")
    if source.kind is FileKind.CONTROLNET:
        expected_tensors("controlnet", configs["controlnet"], source.family)
    if source.kind is not FileKind.MODEL:
        return configs
    tokenizers = {part: tokenizer_configs(source.family, part)["tokenizer_config.json"] for part in source.tokenizers}
    others, problems = read_configs(source.others, {part: config_file(part) for part in source.others})
    together: dict[str, Mapping[str, object]] = {
        **configs,
        **tokenizers,
        **others,
        "scheduler": scheduler_config(source),
    }
    problems += check_configurations(index_of(source, configs), together, family=source.family)
    if wrong := next(iter(problems or check_contents(source.others, source.family, together)), ""):
        taken = "".join(f" and those of {place.parent}" for place in islice(source.others.values(), 1))
        raise ValueError(f"its parts{taken} do not fit each other: {wrong}")
    return configs


def _wanted(source: SingleFile, part: str, config: Config) -> Iterator[tuple[str, Shape]]:
    """Yield the names and shapes that a part's tensors must have in the file."""
    is_diffusers = part == "controlnet" and DIFFUSERS_HINT in shapes_of(source, part)
    is_open_clip = part in FAMILIES[source.family].original_names
    for name, shape in expected_tensors(part, config, source.family):
        if is_open_clip:
            original = open_clip_name(name, config)
            yield original, open_clip_shape(original, shape)
        elif part == TRANSFORMER:
            yield original_tensor(source.family, name, shape)
        elif (source.family, part, name) == _IDENTITY:
            continue
        elif part in _NAMES and not is_diffusers:
            yield _NAMES[part](name, config), shape
        else:
            yield name, shape


def _significant(shape: Shape) -> Shape:
    """Return a shape without ones at its end: converters make linear layers of convolutions of one pixel."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape
