"""Derives the configurations of a single file's parts from its family and the shapes of its tensors. No torch.

What shapes do not tell, such as the number of attention heads and the scale of latents, are the values of the published
folders: stable-diffusion-v1-5/stable-diffusion-v1-5, stabilityai/stable-diffusion-2-1 and -2-1-base, and
stabilityai/stable-diffusion-xl-base-1.0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bottega.errors import InvalidRequest
from bottega.model_files.configuration_rules import check_configurations, filled_config
from bottega.model_files.controlnet_config import read_network_config
from bottega.model_files.family_names import SD15, SD21, SDXL, with_article
from bottega.model_files.single_file import (
    CLIP_PREFIXES,
    CONTROLNET,
    DIFFUSERS_HINT,
    OPEN_CLIP,
    OPEN_CLIP_SDXL,
    OTHER_VERSION,
    UNET,
    V_PREDICTION,
    VAE_PREFIXES,
    FileKind,
    SingleFile,
    read_single_file,
)
from bottega.model_files.tensor_check import EXPECTED_TENSORS
from bottega.model_files.vae_rules import check_vae_config
from bottega.safetensors_header import MAX_TENSORS

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# Diffusers writes its version into configurations. Nothing reads it, but some tools want it.
_VERSION = "0.42.1"
# Published models have at most 4 levels of at most 3 layers.
_MAX_BLOCKS = 64
# Layers of a level or of a text encoder, and blocks of a transformer. Published models have at most 32.
_MAX_LAYERS = 64
# Modules of a part, up to the third dot of their names. Published models have at most 150.
_MAX_MODULES = 1024
_HEAD_WIDTH = 64
_SD15_HEADS = 8
_GROUPS = 32
_LATENT_SCALES = {SD15: 0.18215, SD21: 0.18215, SDXL: 0.13025}
_HINT_BLOCKS = (0, 2, 4, 6, 8, 10, 12, 14)
_START, _END = "<|startoftext|>", "<|endoftext|>"
_PIPELINES = {SD15: "StableDiffusionPipeline", SD21: "StableDiffusionPipeline", SDXL: "StableDiffusionXLPipeline"}
_SCHEDULERS = {SD15: "PNDMScheduler", SD21: "DDIMScheduler", SDXL: "EulerDiscreteScheduler"}


def refusal_of(path: Path) -> str:
    """Return a sentence, with the file's name, on why workers cannot serve a single file; empty if they can."""
    try:
        source = read_single_file(path)
        if source.kind is not FileKind.MODEL and not source.problem:
            raise ValueError(f"it is {source.kind.value}, and not a whole model")
        check_header(source)
    except ValueError as error:
        return f"the model {path} cannot be served: {error}"
    return ""


def check_header(source: SingleFile) -> dict[str, Config]:
    """Return the configurations of a file's parts, after comparing the shapes of its tensors with them.

    A conversion compares every tensor under its new name instead. The names are Diffusers' business, which needs torch.

    Raises:
        ValueError: The file cannot be converted, or not be served. The text is a sentence.
    """
    configs = configurations_of(source)
    for part, config in configs.items():
        if part == "controlnet":
            continue
        wanted = list(islice(EXPECTED_TENSORS[part](filled_config(part, config)), MAX_TENSORS + 1))
        if len(wanted) > MAX_TENSORS:
            raise ValueError(f"{_misfit(part, source)}: it would need over {MAX_TENSORS} tensors; {OTHER_VERSION}")
        missing = Counter(_significant(shape) for _, shape in wanted)
        missing.subtract(
            _significant(converted)
            for name, shape in shapes_of(source, part).items()
            for converted in _converted_shapes(name, shape)
        )
        if lacking := next((shape for shape, count in missing.items() if count > 0), None):
            raise ValueError(
                f"{_misfit(part, source)}: it lacks a tensor of the shape {list(lacking)}; {OTHER_VERSION}"
            )
        # A UNet draws with each of its tensors. Other parts have some that the converters leave out.
        if part == "unet" and missing.total():
            raise ValueError(f"{_misfit(part, source)}: it has tensors that nothing takes; {OTHER_VERSION}")
    return configs


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without ones at its end: converters make linear layers of convolutions of one pixel."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _converted_shapes(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes that the converters make of a tensor. OpenCLIP has three projections in one tensor."""
    if shape and ".attn.in_proj_" in name:
        return [(shape[0] // 3, *shape[1:])] * 3
    return [shape[::-1] if name == "text_projection" else shape]


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
        try:
            read_network_config(json.dumps(configs["controlnet"]).encode())
        except InvalidRequest as error:
            raise ValueError(error.message) from None
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


def shapes_of(source: SingleFile, part: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a part's tensors by their names in its original network, without prefixes."""
    prefixes = _PREFIXES[part]
    return {_without(entry.name, prefixes): entry.shape for entry in source.parts[part]}


def derive_configurations(source: SingleFile) -> dict[str, Config]:
    """Return the configuration of each part of a file that has weights.

    Raises:
        ValueError: The tensors are not those of such a part. The text is a sentence.
    """
    derived = {}
    for part in source.parts:
        shapes = shapes_of(source, part)
        # Diffusers' converters look at every tensor for each of these.
        if len({tuple(name.split(".")[:3]) for name in shapes}) > _MAX_MODULES:
            raise ValueError(f"{_misfit(part, source)}: it has too many modules; {OTHER_VERSION}")
        try:
            derived[part] = _DERIVE[part](shapes, source)
        except KeyError as error:
            raise ValueError(f"{_misfit(part, source)}: it lacks {error.args[0]}; {OTHER_VERSION}") from None
        except IndexError:
            raise ValueError(f"{_misfit(part, source)}: a tensor has too few dimensions; {OTHER_VERSION}") from None
    if "unet" in derived:
        latent_scale = 2 ** (len(derived["vae"]["block_out_channels"]) - 1)
        derived["vae"]["sample_size"] = derived["unet"]["sample_size"] * latent_scale
    return derived


def _misfit(part: str, source: SingleFile) -> str:
    return f"its {part} is not that of {with_article(source.title)} model"


def index_of(source: SingleFile, configs: Mapping[str, Config]) -> Config:
    """Return the model_index.json of a whole model with these configurations of its parts."""
    unet = configs["unet"]
    return model_index(source.family, is_inpainting=unet["in_channels"] != unet["out_channels"])


def model_index(family: str, *, is_inpainting: bool = False) -> Config:
    """Return the model_index.json of a family.

    Args:
        is_inpainting: Whether the UNet takes a mask and a masked picture as well.
    """
    pipeline = _PIPELINES[family].replace("Pipeline", "InpaintPipeline" if is_inpainting else "Pipeline")
    index: Config = {"_class_name": pipeline, "_diffusers_version": _VERSION}
    if family == SDXL:
        index["force_zeros_for_empty_prompt"] = True
        index |= {"text_encoder_2": ["transformers", "CLIPTextModelWithProjection"]}
        index |= {"tokenizer_2": ["transformers", "CLIPTokenizer"]}
    else:
        # Files of this layout have no filter of pictures.
        index |= {"safety_checker": [None, None], "feature_extractor": [None, None], "requires_safety_checker": False}
    return index | {
        "scheduler": ["diffusers", _SCHEDULERS[family]],
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def scheduler_config(source: SingleFile) -> Config:
    """Return the scheduler_config.json of a family, with what the file says of its training."""
    config: Config = {
        "_class_name": _SCHEDULERS[source.family],
        "_diffusers_version": _VERSION,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "beta_start": 0.00085,
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": source.prediction_type,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "trained_betas": None,
    }
    if source.family == SDXL:
        config |= {"interpolation_type": "linear", "sample_max_value": 1.0, "timestep_spacing": "leading"}
        config |= {"use_karras_sigmas": False}
    if source.zero_terminal_snr:
        # Such a schedule must begin at its last timestep (arXiv 2305.08891, section 3.3).
        config |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return config


def tokenizer_configs(family: str, part: str) -> dict[str, Config]:
    """Return a tokenizer's JSON files but its vocabulary, by name.

    OpenCLIP's text encoders were trained with 0, the number of "!", behind a prompt's end, and CLIP's with its last.
    """
    pad = "!" if family == SD21 or part == "tokenizer_2" else _END
    start, end = (_special(text) for text in (_START, _END))
    special = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end}
    config = {
        "add_prefix_space": False,
        "bos_token": {"__type": "AddedToken", **start},
        "clean_up_tokenization_spaces": True,
        "do_lower_case": True,
        "eos_token": {"__type": "AddedToken", **end},
        "errors": "replace",
        "model_max_length": 77,
        "pad_token": pad,
        "tokenizer_class": "CLIPTokenizer",
        "unk_token": {"__type": "AddedToken", **end},
    }
    return {"special_tokens_map.json": special, "tokenizer_config.json": config}


def _unet(shapes: Shapes, source: SingleFile) -> Config:
    config = _encoder_config(_original_encoder(shapes), source.family)
    config |= {
        "_class_name": "UNet2DConditionModel",
        "out_channels": shapes["out.2.weight"][0],
        "up_block_types": [name.replace("Down", "Up") for name in reversed(config["down_block_types"])],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
    }
    is_large = source.prediction_type == V_PREDICTION and config["in_channels"] == config["out_channels"]
    sizes = {SD15: 64, SD21: 96 if is_large else 64, SDXL: 128}
    if source.family == SD21:
        config["upcast_attention"] = True  # version 2.1 overflows in float16; 2.0 draws the same with it
    return config | {"sample_size": sizes[source.family]}


def _controlnet(shapes: Shapes, source: SingleFile) -> Config:
    if DIFFUSERS_HINT in shapes:
        blocks = _count(shapes, "controlnet_cond_embedding.blocks.{}.weight")
        names = [f"controlnet_cond_embedding.blocks.{number}.weight" for number in range(blocks)]
        hints = [shapes[name] for name in (DIFFUSERS_HINT, *names, "controlnet_cond_embedding.conv_out.weight")]
        encoder = _diffusers_encoder(shapes)
    else:
        hints = [shapes[f"input_hint_block.{number}.weight"] for number in _HINT_BLOCKS]
        encoder = _original_encoder(shapes)
    return _encoder_config(encoder, source.family) | {
        "_class_name": "ControlNetModel",
        "conditioning_channels": hints[0][1],
        # Between the first and the last convolution, each second one widens.
        "conditioning_embedding_out_channels": [hints[0][0], *(hint[0] for hint in hints[2:-1:2])],
        "controlnet_conditioning_channel_order": "rgb",
        "global_pool_conditions": False,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Encoder:
    """The shape of the blocks on the way down and in the middle, which UNets and ControlNets share."""

    widths: list[int]
    """Channels of each level."""
    layers: int
    """Layers of each level."""
    depths: list[int]
    """Transformer blocks in a layer of each level. The last entry is also that of the middle."""
    attends: list[bool]
    """Whether the layers of each level have transformers."""
    in_channels: int
    is_linear: bool
    """Whether transformers project with linear layers."""
    context: int
    """Width of the prompt embeddings."""
    added: int
    """Width of SDXL's added conditions (pooled text and sizes) before their embedding; 0 without them."""


def _original_encoder(shapes: Shapes) -> _Encoder:
    widths, layers, depths, attends = _levels(shapes)
    return _Encoder(
        widths=widths,
        layers=layers,
        depths=depths,
        attends=attends,
        in_channels=shapes["input_blocks.0.0.weight"][1],
        is_linear=len(shapes["middle_block.1.proj_in.weight"]) == 2,
        context=shapes["middle_block.1.transformer_blocks.0.attn2.to_k.weight"][1],
        added=shapes.get("label_emb.0.0.weight", (0, 0))[1],
    )


def _diffusers_encoder(shapes: Shapes) -> _Encoder:
    levels = _count(shapes, "down_blocks.{}.resnets.0.conv1.weight")
    middle = "mid_block.attentions.0"
    if not 0 < levels <= _MAX_BLOCKS:
        raise KeyError("down_blocks.0.resnets.0.conv1.weight")
    attends = [f"down_blocks.{level}.attentions.0.proj_in.weight" in shapes for level in range(levels)]
    depths = [_depth(shapes, f"down_blocks.{level}.attentions.0") for level in range(levels)]
    return _Encoder(
        widths=[shapes[f"down_blocks.{level}.resnets.0.conv1.weight"][0] for level in range(levels)],
        layers=_count(shapes, "down_blocks.0.resnets.{}.conv1.weight"),
        depths=[depth if attention else 1 for depth, attention in zip(depths[:-1], attends[:-1], strict=True)]
        + [_depth(shapes, middle)],
        attends=attends,
        in_channels=shapes["conv_in.weight"][1],
        is_linear=len(shapes[f"{middle}.proj_in.weight"]) == 2,
        context=shapes[f"{middle}.transformer_blocks.0.attn2.to_k.weight"][1],
        added=shapes.get("add_embedding.linear_1.weight", (0, 0))[1],
    )


def _encoder_config(encoder: _Encoder, family: str) -> Config:
    config: Config = {
        "_diffusers_version": _VERSION,
        "act_fn": "silu",
        "block_out_channels": encoder.widths,
        "cross_attention_dim": encoder.context,
        "down_block_types": ["CrossAttnDownBlock2D" if attention else "DownBlock2D" for attention in encoder.attends],
        "downsample_padding": 1,
        "flip_sin_to_cos": True,
        "freq_shift": 0,
        "in_channels": encoder.in_channels,
        "layers_per_block": encoder.layers,
        "mid_block_scale_factor": 1,
        "norm_eps": 1e-05,
        "norm_num_groups": _GROUPS,
        "transformer_layers_per_block": encoder.depths if len(set(encoder.depths)) > 1 else encoder.depths[0],
        "use_linear_projection": encoder.is_linear,
        "attention_head_dim": (
            _SD15_HEADS if family == SD15 else [width // _HEAD_WIDTH or 1 for width in encoder.widths]
        ),
    }
    if family == SDXL:
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": encoder.added,
        }
    return config


def _levels(shapes: Shapes) -> tuple[list[int], int, list[int], list[bool]]:
    """Return the widths of the levels, the layers of each, their depths of transformers, and whether they have any.

    Raises:
        ValueError: The layers differ in a way that Diffusers' converter does not know.
    """
    numbers = {int(name.split(".")[1]) for name in shapes if _is_block(name)}
    if not 1 < len(numbers) <= _MAX_BLOCKS or numbers != set(range(len(numbers))):
        raise ValueError(f"its UNet has {len(numbers)} input blocks, and those of known models have 9 or 12")
    levels: list[list[tuple[int, int]]] = [[]]
    for number in range(1, len(numbers)):
        block = f"input_blocks.{number}"
        if f"{block}.0.op.weight" in shapes:
            levels.append([])
            continue
        levels[-1].append((shapes[f"{block}.0.out_layers.3.weight"][0], _depth(shapes, f"{block}.1")))
    if len({len(level) for level in levels}) > 1 or any(len(set(level)) != 1 for level in levels):
        raise ValueError("the layers of a level of its UNet differ, as in SSD-1B; download its folder instead")
    alike = [level[0] for level in levels]
    middle = _depth(shapes, "middle_block.1")
    if not middle:
        raise ValueError("its UNet has no transformer in the middle; download its folder instead")
    # Diffusers takes the depth of the middle from the last level, and ignores it in levels without transformers.
    depths = [depth or 1 for _, depth in alike[:-1]] + [middle]
    return [width for width, _ in alike], len(levels[0]), depths, [depth > 0 for _, depth in alike]


def _is_block(name: str) -> bool:
    first, number = [*name.split("."), ""][:2]
    return first == "input_blocks" and number.isdecimal() and len(number) <= 4


def _depth(shapes: Shapes, block: str) -> int:
    return _count(shapes, f"{block}.transformer_blocks.{{}}.norm1.weight")


def _vae(shapes: Shapes, source: SingleFile) -> Config:
    levels = _count(shapes, "encoder.down.{}.block.0.conv1.weight")
    if not levels:
        raise KeyError("encoder.down.0.block.0.conv1.weight")
    widths = [shapes[f"encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)]
    layers = _count(shapes, "encoder.down.0.block.{}.conv1.weight")
    return {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": _VERSION,
        "act_fn": "silu",
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "layers_per_block": layers,
        "norm_num_groups": _GROUPS,
        "sample_size": 1024 if source.family == SDXL else 512,
        "scaling_factor": _LATENT_SCALES[source.family],
    }


def _text_encoder(shapes: Shapes, source: SingleFile) -> Config:
    if source.family == SD21:
        return _open_clip(shapes) | {"architectures": ["CLIPTextModel"]}
    layers = _count(shapes, "text_model.encoder.layers.{}.layer_norm1.weight")
    embedding = shapes["text_model.embeddings.position_embedding.weight"]
    return _clip(
        act="quick_gelu",
        layers=layers,
        positions=embedding[0],
        width=embedding[1],
        vocabulary=shapes["text_model.embeddings.token_embedding.weight"][0],
        inner=shapes["text_model.encoder.layers.0.mlp.fc1.weight"][0],
    )


def _text_encoder_2(shapes: Shapes, source: SingleFile) -> Config:
    return _open_clip(shapes) | {
        "architectures": ["CLIPTextModelWithProjection"],
        "projection_dim": shapes["text_projection"][1],
    }


def _open_clip(shapes: Shapes) -> Config:
    embedding = shapes["positional_embedding"]
    layers = _count(shapes, "transformer.resblocks.{}.ln_1.weight")
    # Stable Diffusion 2 conditions on the last layer but one; Diffusers leaves the last of its 24 out.
    has_head = f"transformer.resblocks.{_OPEN_CLIP_LAYERS - 1}.ln_1.weight" in shapes
    return _clip(
        act="gelu",
        layers=layers - 1 if has_head and layers == _OPEN_CLIP_LAYERS else layers,
        positions=embedding[0],
        width=embedding[1],
        vocabulary=shapes["token_embedding.weight"][0],
        inner=shapes["transformer.resblocks.0.mlp.c_fc.weight"][0],
    )


_OPEN_CLIP_LAYERS = 24


def _count(shapes: Shapes, pattern: str) -> int:
    """Return how many tensors of consecutive numbers there are. Raise ValueError if no known model has so many."""
    layers = 0
    while pattern.format(layers) in shapes:
        layers += 1
        if layers > _MAX_LAYERS:
            raise ValueError(f"it has over {_MAX_LAYERS} layers such as {pattern.format(0)}, more than any known model")
    return layers


def _clip(*, act: str, layers: int, positions: int, width: int, vocabulary: int, inner: int) -> Config:
    return {
        "architectures": ["CLIPTextModel"],
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "dropout": 0.0,
        "eos_token_id": 2,
        "hidden_act": act,
        "hidden_size": width,
        "initializer_factor": 1.0,
        "initializer_range": 0.02,
        "intermediate_size": inner,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": positions,
        "model_type": "clip_text_model",
        "num_attention_heads": max(1, width // _HEAD_WIDTH),
        "num_hidden_layers": layers,
        "pad_token_id": 1,
        "projection_dim": width,
        "vocab_size": vocabulary,
    }


def _special(text: str) -> Config:
    return {"content": text, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}


def _without(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "unet": (UNET,),
    "controlnet": (CONTROLNET,),
    "vae": VAE_PREFIXES,
    "text_encoder": (*CLIP_PREFIXES, OPEN_CLIP),
    "text_encoder_2": (OPEN_CLIP_SDXL,),
}
_DERIVE = {
    "unet": _unet,
    "controlnet": _controlnet,
    "vae": _vae,
    "text_encoder": _text_encoder,
    "text_encoder_2": _text_encoder_2,
}
