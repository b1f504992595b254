"""Derives the configurations of a single file's networks from its family and the shapes of its tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bottega.model_files.family_names import (
    CLIP_G_SD3,
    CLIP_L_SD3,
    CLIP_PREFIXES,
    FAMILIES,
    FLUX,
    OPEN_CLIP,
    OPEN_CLIP_SDXL,
    SD3,
    T5,
    V_PREDICTION,
    class_of,
    denoiser_part,
    with_article,
)
from bottega.model_files.single_file import OTHER_VERSION, SingleFile
from bottega.model_files.single_file_kind import CONTROLNET, DIFFUSERS_HINT, UNET, VAE_PREFIXES
from bottega.model_files.single_file_transformer import t5_config, transformer_config

Config = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

VERSION = "0.42.1"
"""Version of Diffusers whose layout the folders have."""
# Published models have at most 4 levels of at most 3 layers.
_MAX_BLOCKS = 64
# Layers of a level or of a text encoder, and blocks of a transformer. Published models have at most 32.
_MAX_LAYERS = 64
# Modules of a part, up to the third dot of their names. Published models have at most 150.
_MAX_MODULES = 1024
_HEAD_WIDTH = 64
# Of the published unions for SDXL.
_UNION_HEADS = 8
_GROUPS = 32
_HINT_BLOCKS = (0, 2, 4, 6, 8, 10, 12, 14)


def shapes_of(source: SingleFile, part: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a part's tensors by their names in its original network, without prefixes.

    OpenAI's CLIP has the names of transformers, without `text_model.`.
    """
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
            raise ValueError(f"{misfit(part, source)}: it has too many modules; {OTHER_VERSION}")
        try:
            derived[part] = _DERIVE[part](shapes, source)
        except KeyError as error:
            raise ValueError(f"{misfit(part, source)}: it lacks {error.args[0]}; {OTHER_VERSION}") from None
        except IndexError:
            raise ValueError(f"{misfit(part, source)}: a tensor has too few dimensions; {OTHER_VERSION}") from None
    side = derived.get(denoiser_part(source.family), {}).get("sample_size")
    if side and "vae" in derived:
        latent_scale = 2 ** (len(derived["vae"]["block_out_channels"]) - 1)
        derived["vae"]["sample_size"] = side * latent_scale
    return derived


def misfit(part: str, source: SingleFile) -> str:
    """Return the beginning of a sentence on a part whose tensors are not those of the file's family."""
    return f"its {part} is not that of {with_article(source.title)} model"


def _unet(shapes: Shapes, source: SingleFile) -> Config:
    config = _encoder_config(_original_encoder(shapes), source.family)
    config |= {
        "_class_name": "UNet2DConditionModel",
        "out_channels": shapes["out.2.weight"][0],
        "up_block_types": [name.replace("Down", "Up") for name in reversed(config["down_block_types"])],
        "mid_block_type": "UNetMidBlock2DCrossAttn",
    }
    family = FAMILIES[source.family]
    if family.upcasts_attention:
        config["upcast_attention"] = True
    is_of_v = source.prediction_type == V_PREDICTION and config["in_channels"] == config["out_channels"]
    return config | {"sample_size": family.latent_side_of_v if is_of_v else family.latent_side}


def _transformer(shapes: Shapes, source: SingleFile) -> Config:
    derived: Config = {"_diffusers_version": VERSION}
    if source.family == SD3:
        derived["sample_size"] = FAMILIES[SD3].latent_side
    return derived | transformer_config(source.family, shapes)


def _controlnet(shapes: Shapes, source: SingleFile) -> Config:
    if DIFFUSERS_HINT in shapes:
        blocks = _count(shapes, "controlnet_cond_embedding.blocks.{}.weight")
        names = [f"controlnet_cond_embedding.blocks.{number}.weight" for number in range(blocks)]
        hints = [shapes[name] for name in (DIFFUSERS_HINT, *names, "controlnet_cond_embedding.conv_out.weight")]
        encoder = _diffusers_encoder(shapes)
    else:
        hints = [shapes[f"input_hint_block.{number}.weight"] for number in _HINT_BLOCKS]
        encoder = _original_encoder(shapes)
    return (
        _encoder_config(encoder, source.family)
        | _union(shapes)
        | {
            "conditioning_channels": hints[0][1],
            # Between the first and the last convolution, each second one widens.
            "conditioning_embedding_out_channels": [hints[0][0], *(hint[0] for hint in hints[2:-1:2])],
            "controlnet_conditioning_channel_order": "rgb",
            "global_pool_conditions": False,
        }
    )


def _union(shapes: Shapes) -> Config:
    """Return the class of a ControlNet, and what a union has besides."""
    if "task_embedding" not in shapes:
        return {"_class_name": "ControlNetModel"}
    modes, width = shapes["task_embedding"][0], shapes["task_embedding"][1]
    return {
        "_class_name": "ControlNetUnionModel",
        "addition_time_embed_dim": shapes["control_add_embedding.linear_1.weight"][1] // max(1, modes),
        "num_control_type": modes,
        "num_proj_channel": shapes["spatial_ch_projs.weight"][0],
        "num_trans_channel": width,
        "num_trans_head": _UNION_HEADS,
        "num_trans_layer": _count(shapes, "transformer_layes.{}.ln_1.weight"),
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
        "_diffusers_version": VERSION,
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
        "attention_head_dim": FAMILIES[family].heads or [width // _HEAD_WIDTH or 1 for width in encoder.widths],
    }
    if FAMILIES[family].has_two_encoders:
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
    shift = FAMILIES[source.family].shift_factor
    shifted = {"shift_factor": shift, "use_post_quant_conv": False, "use_quant_conv": False}
    return (shifted if shift is not None else {}) | {
        "_class_name": "AutoencoderKL",
        "_diffusers_version": VERSION,
        "act_fn": "silu",
        "block_out_channels": widths,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "in_channels": shapes["encoder.conv_in.weight"][1],
        "out_channels": shapes["decoder.conv_out.weight"][0],
        "latent_channels": shapes["decoder.conv_in.weight"][1],
        "layers_per_block": layers,
        "norm_num_groups": _GROUPS,
        "sample_size": FAMILIES[source.family].vae_pixels,
        "scaling_factor": FAMILIES[source.family].scaling_factor,
    }


def _text_encoder(shapes: Shapes, source: SingleFile) -> Config:
    if "text_encoder" in FAMILIES[source.family].original_names:
        return _open_clip(shapes) | {"architectures": ["CLIPTextModel"]}
    return _transformers_clip(shapes, "quick_gelu") | {"architectures": [class_of("text_encoder", source.family)]}


def _transformers_clip(shapes: Shapes, act: str) -> Config:
    layers = _count(shapes, "encoder.layers.{}.layer_norm1.weight")
    embedding = shapes["embeddings.position_embedding.weight"]
    return _clip(
        act=act,
        layers=layers,
        positions=embedding[0],
        width=embedding[1],
        vocabulary=shapes["embeddings.token_embedding.weight"][0],
        inner=shapes["encoder.layers.0.mlp.fc1.weight"][0],
    )


def _text_encoder_2(shapes: Shapes, source: SingleFile) -> Config:
    if source.family == FLUX:
        return t5_config(shapes)
    original = "text_encoder_2" in FAMILIES[source.family].original_names
    return (_open_clip(shapes) if original else _transformers_clip(shapes, "gelu")) | {
        "architectures": ["CLIPTextModelWithProjection"],
        "projection_dim": shapes["text_projection"][1] if original else shapes["text_projection.weight"][0],
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


def _without(name: str, prefixes: tuple[str, ...]) -> str:
    for prefix in prefixes:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


_PREFIXES: Mapping[str, tuple[str, ...]] = {
    "unet": (UNET,),
    "transformer": (UNET,),
    "controlnet": (CONTROLNET,),
    "vae": VAE_PREFIXES,
    # Some files lack the prefix of transformers' older versions.
    "text_encoder": (
        *(prefix + inner for prefix in (*CLIP_PREFIXES, CLIP_L_SD3) for inner in ("text_model.", "")),
        OPEN_CLIP,
    ),
    "text_encoder_2": (f"{CLIP_G_SD3}text_model.", CLIP_G_SD3, OPEN_CLIP_SDXL, T5),
}
_DERIVE = {
    "unet": _unet,
    "transformer": _transformer,
    "controlnet": _controlnet,
    "vae": _vae,
    "text_encoder": _text_encoder,
    "text_encoder_2": _text_encoder_2,
}
