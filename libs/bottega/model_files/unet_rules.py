"""Rules for the configuration of a model's UNet: which fields have values that are not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import (
    ANY,
    BOOLEAN,
    FLAG,
    FRACTION,
    NULL,
    OFF,
    FieldRule,
    broken_fields,
    list_of,
    number,
    only,
    shown,
    whole,
    with_defaults,
)
from bottega.rules import MAX_SIDE

TIME_IDS = 6
"""Numbers in SDXL's time_ids: original size, crop and target size."""

_ACTIVATIONS = ("silu", "swish", "mish", "gelu", "relu")
_DOWN_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D")
_UP_BLOCKS = ("UpBlock2D", "CrossAttnUpBlock2D")
_MIDDLE = "UNetMidBlock2DCrossAttn"
# A convolution with such a kernel keeps the size of the latent.
_KERNELS = (1, 3, 5, 7)
# The embedding of a timestep divides by half of its width less freq_shift.
_LEAST_CHANNELS = 4
# Published UNets have at most 1,280 channels, 3 layers a level and 10 transformer blocks a layer.
_MOST_CHANNELS, _MOST_LAYERS, _MOST_DEPTH = 8192, 16, 64
_DEPTHS = whole(0, _MOST_DEPTH) | list_of(
    whole(0, _MOST_DEPTH) | list_of(whole(0, _MOST_DEPTH), ""),
    "a list with a whole number, or a list of them, for each level",
)
_CLASSES = "UNets that take class labels are not served"
_KIND = "only UNets of SDXL's kind of conditioning are served"

UNET_RULES = (
    FieldRule(
        name="_class_name",
        default="UNet2DConditionModel",
        values=only("UNet2DConditionModel"),
        why="no other class is served",
    ),
    FieldRule(name="sample_size", default=None, values=whole(1, MAX_SIDE), why="it gives the default size of pictures"),
    FieldRule(name="in_channels", default=4, values=whole(1, _MOST_CHANNELS)),
    FieldRule(name="out_channels", default=4, values=whole(1, _MOST_CHANNELS)),
    FieldRule(name="center_input_sample", default=False, values=FLAG),
    FieldRule(name="flip_sin_to_cos", default=True, values=FLAG),
    FieldRule(name="freq_shift", default=0, values=only(0, 1), why="published UNets have no other"),
    FieldRule(
        name="down_block_types",
        default=["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        values=list_of(only(*_DOWN_BLOCKS), f"a list of {' and '.join(_DOWN_BLOCKS)}"),
        why="the forward of other blocks is not implemented",
    ),
    FieldRule(
        name="mid_block_type",
        default=_MIDDLE,
        values=only(_MIDDLE, "UNetMidBlock2D", None),
        why="the forward of other blocks is not implemented",
    ),
    FieldRule(
        name="up_block_types",
        default=["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        values=list_of(only(*_UP_BLOCKS), f"a list of {' and '.join(_UP_BLOCKS)}"),
        why="the forward of other blocks is not implemented",
    ),
    FieldRule(
        name="only_cross_attention",
        default=False,
        values=BOOLEAN | list_of(BOOLEAN, "a list of them, one for each level"),
    ),
    FieldRule(
        name="block_out_channels",
        default=[320, 640, 1280, 1280],
        values=list_of(
            whole(_LEAST_CHANNELS, _MOST_CHANNELS),
            f"a list of whole numbers from {_LEAST_CHANNELS} to {_MOST_CHANNELS}, one for each level",
        ),
    ),
    FieldRule(
        name="layers_per_block",
        default=2,
        values=whole(1, _MOST_LAYERS) | list_of(whole(1, _MOST_LAYERS), "a list of them, one for each level"),
    ),
    FieldRule(name="downsample_padding", default=1, values=only(0, 1)),
    FieldRule(
        name="mid_block_scale_factor", default=1, values=number("a number other than 0", lambda value: value != 0)
    ),
    FieldRule(name="dropout", default=0.0, values=FRACTION),
    FieldRule(name="act_fn", default="silu", values=only(*_ACTIVATIONS)),
    FieldRule(name="norm_num_groups", default=32, values=whole(1, _MOST_CHANNELS)),
    FieldRule(name="norm_eps", default=1e-5, values=number("a number from 0", lambda value: value >= 0)),
    FieldRule(
        name="cross_attention_dim",
        default=1280,
        values=whole(1),
        why="all levels attend to the same prompt embeddings",
    ),
    FieldRule(name="transformer_layers_per_block", default=1, values=_DEPTHS),
    FieldRule(
        name="reverse_transformer_layers_per_block",
        default=None,
        values=NULL
        | list_of(whole(0, _MOST_DEPTH) | list_of(whole(0, _MOST_DEPTH), ""), "a list with an entry for each level"),
    ),
    FieldRule(
        name="encoder_hid_dim",
        default=None,
        values=NULL,
        why="UNets that project prompt embeddings are not served",
    ),
    FieldRule(
        name="encoder_hid_dim_type",
        default=None,
        values=NULL,
        why="UNets that project prompt or image embeddings are not served",
    ),
    FieldRule(
        name="attention_head_dim",
        default=8,
        values=whole(1, _MOST_CHANNELS) | list_of(whole(1, _MOST_CHANNELS), "a list of them, one for each level"),
    ),
    FieldRule(name="num_attention_heads", default=None, values=NULL),
    FieldRule(
        name="dual_cross_attention",
        default=False,
        values=OFF,
        why="UNets with two transformers in place of one are not served",
    ),
    FieldRule(name="use_linear_projection", default=False, values=FLAG),
    FieldRule(name="class_embed_type", default=None, values=NULL, why=_CLASSES),
    FieldRule(name="addition_embed_type", default=None, values=only("text_time"), why=_KIND),
    FieldRule(
        name="addition_time_embed_dim",
        default=None,
        values=whole(_LEAST_CHANNELS),
    ),
    FieldRule(name="num_class_embeds", default=None, values=NULL, why=_CLASSES),
    FieldRule(name="upcast_attention", default=False, values=FLAG),
    FieldRule(name="resnet_time_scale_shift", default="default", values=only("default", "scale_shift")),
    FieldRule(name="resnet_skip_time_act", default=False, values=ANY, why="Diffusers reads it for other blocks alone"),
    FieldRule(name="resnet_out_scale_factor", default=1.0, values=ANY, why="Diffusers reads it for other blocks alone"),
    FieldRule(
        name="time_embedding_type",
        default="positional",
        values=only("positional"),
        why="Fourier embeddings of the timestep are not served",
    ),
    FieldRule(name="time_embedding_dim", default=None, values=NULL | whole(0)),
    FieldRule(name="time_embedding_act_fn", default=None, values=only(None, *_ACTIVATIONS)),
    FieldRule(name="timestep_post_act", default=None, values=only(None, *_ACTIVATIONS)),
    FieldRule(
        name="time_cond_proj_dim",
        default=None,
        values=NULL | whole(_LEAST_CHANNELS, _MOST_CHANNELS),
    ),
    FieldRule(name="conv_in_kernel", default=3, values=only(*_KERNELS)),
    FieldRule(
        name="conv_out_kernel", default=3, values=only(3), why="edits compute this convolution around their masks alone"
    ),
    FieldRule(name="projection_class_embeddings_input_dim", default=None, values=whole(1)),
    FieldRule(
        name="attention_type",
        default="default",
        values=only("default", None),
        why="UNets that take boxes with the prompt (GLIGEN) are not served",
    ),
    FieldRule(name="class_embeddings_concat", default=False, values=OFF, why=_CLASSES),
    FieldRule(
        name="mid_block_only_cross_attention", default=None, values=ANY, why="Diffusers reads it for other blocks alone"
    ),
    FieldRule(name="cross_attention_norm", default=None, values=ANY, why="Diffusers reads it for other blocks alone"),
    FieldRule(
        name="addition_embed_type_num_heads",
        default=64,
        values=ANY,
        why="Diffusers reads it with other kinds of addition_embed_type alone",
    ),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)
_NO_CONDITIONS = "Stable Diffusion 1 and 2 have no added conditions"
# Fields that the UNets of Stable Diffusion 1 and 2 have otherwise. Diffusers reads no width without its condition.
_WITHOUT_ADDED_CONDITIONS = {
    "addition_embed_type": FieldRule(name="addition_embed_type", default=None, values=NULL, why=_NO_CONDITIONS),
    "addition_time_embed_dim": FieldRule(name="addition_time_embed_dim", default=None, values=ANY),
    "projection_class_embeddings_input_dim": FieldRule(
        name="projection_class_embeddings_input_dim", default=None, values=ANY
    ),
}
_BY_LEVEL = (
    "down_block_types",
    "up_block_types",
    "only_cross_attention",
    "layers_per_block",
    "transformer_layers_per_block",
    "reverse_transformer_layers_per_block",
    "attention_head_dim",
)


def check_unet_config(config: Mapping[str, object], *, added_conditions: bool = True) -> Iterator[str]:
    """Yield a sentence for each field of the UNet's config.json whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.

    Args:
        added_conditions: Whether the UNet must take SDXL's pooled embeddings and time_ids; if not, it must take none.
    """
    rules: tuple[FieldRule, ...] = UNET_RULES
    if not added_conditions:
        rules = tuple(_WITHOUT_ADDED_CONDITIONS.get(rule.name, rule) for rule in UNET_RULES)
    broken = list(broken_fields(rules, config))
    # Rules between fields assume valid fields.
    yield from broken or _broken_together(with_defaults(UNET_RULES, config))


def _broken_together(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field that does not fit the others. Single fields must be valid."""
    channels, taken, made = config["block_out_channels"], config["in_channels"], config["out_channels"]
    if taken not in {made, 2 * made + 1}:
        yield (
            f"in_channels must be {made}, as out_channels is, or {2 * made + 1} for inpainting, with a mask and a "
            f"masked image beside the latent, not {taken}"
        )
    levels = len(channels)
    unlike = [name for name in _BY_LEVEL if isinstance(config[name], list) and len(config[name]) != levels]
    for name in unlike:
        yield f"{name} must have {levels} entries, as block_out_channels has, not {len(config[name])}"
    if any(count % config["norm_num_groups"] for count in channels):
        yield f"block_out_channels must be multiples of norm_num_groups ({config['norm_num_groups']})"
    if not unlike:
        yield from _broken_depths(config)
        yield from _broken_heads(config)


def _broken_depths(config: Mapping[str, Any]) -> Iterator[str]:
    name, reverse_name = "transformer_layers_per_block", "reverse_transformer_layers_per_block"
    depths, reverse, layers = config[name], config[reverse_name], config["layers_per_block"]
    if not isinstance(depths, list):
        depths = [depths] * len(config["block_out_channels"])
    if reverse is None and any(isinstance(depth, list) for depth in depths):
        yield f"{reverse_name} must be there with {name} {shown(depths)}"
    per_level = layers if isinstance(layers, list) else [layers] * len(depths)
    for level, (depth, kind, count) in enumerate(zip(depths, config["down_block_types"], per_level, strict=True)):
        if isinstance(depth, list) and len(depth) < count and kind == _DOWN_BLOCKS[1]:
            yield f"{name}[{level}] must have {count} entries, one for each layer, not {len(depth)}"
    for level, (depth, kind, count) in enumerate(
        zip(reverse or [], config["up_block_types"], reversed(per_level), strict=reverse is not None)
    ):
        if isinstance(depth, list) and len(depth) < count + 1 and kind == _UP_BLOCKS[1]:
            yield f"{reverse_name}[{level}] must have {count + 1} entries, one for each layer, not {len(depth)}"


def _broken_heads(config: Mapping[str, Any]) -> Iterator[str]:
    channels, heads = config["block_out_channels"], config["attention_head_dim"]
    each = heads if isinstance(heads, list) else [heads] * len(channels)
    attends = {level for level, kind in enumerate(config["down_block_types"]) if kind == _DOWN_BLOCKS[1]}
    attends |= {len(channels) - 1 - at for at, kind in enumerate(config["up_block_types"]) if kind == _UP_BLOCKS[1]}
    attends |= {len(channels) - 1} if config["mid_block_type"] == _MIDDLE else set()
    if any(each[level] > channels[level] for level in attends):
        yield f"attention_head_dim must be at most the channels of its level, not {shown(heads)}"
