"""Rules for the configuration of a model's VAE: which fields have values that are not served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import (
    FLAG,
    NULL,
    FieldRule,
    broken_fields,
    list_of,
    number,
    only,
    whole,
    with_defaults,
)

_DOWN_BLOCKS = ("DownEncoderBlock2D", "AttnDownEncoderBlock2D")
_UP_BLOCKS = ("UpDecoderBlock2D", "AttnUpDecoderBlock2D")
_NUMBERS = list_of(number("a number"), "a list of numbers")
# StableDiffusionXLPipeline reads means and deviations of so many channels.
_STATISTICS = 4
# Published VAEs have at most 512 channels and 3 layers a level.
_MOST_CHANNELS, _MOST_LAYERS = 8192, 16
_RGB = "pictures are RGB"

VAE_RULES = (
    FieldRule(
        name="_class_name",
        default="AutoencoderKL",
        values=only("AutoencoderKL"),
        why="no other class is served",
    ),
    FieldRule(name="in_channels", default=3, values=only(3), why=_RGB),
    FieldRule(name="out_channels", default=3, values=only(3), why=_RGB),
    FieldRule(
        name="down_block_types",
        default=["DownEncoderBlock2D"],
        values=list_of(only(*_DOWN_BLOCKS), f"a list of {' and '.join(_DOWN_BLOCKS)}"),
        why="VAEs of other blocks are not served",
    ),
    FieldRule(
        name="up_block_types",
        default=["UpDecoderBlock2D"],
        values=list_of(only(*_UP_BLOCKS), f"a list of {' and '.join(_UP_BLOCKS)}"),
        why="VAEs of other blocks are not served",
    ),
    FieldRule(
        name="block_out_channels",
        default=[64],
        values=list_of(whole(1, _MOST_CHANNELS), "a list of whole numbers, one for each level"),
    ),
    FieldRule(name="layers_per_block", default=1, values=whole(1, _MOST_LAYERS)),
    FieldRule(name="act_fn", default="silu", values=only("silu", "swish", "mish", "gelu", "relu")),
    FieldRule(name="latent_channels", default=4, values=whole(1)),
    FieldRule(name="norm_num_groups", default=32, values=whole(1)),
    FieldRule(
        name="sample_size",
        default=32,
        values=whole(1),
        why="it gives the size of the tiles in which large pictures may be decoded",
    ),
    FieldRule(
        name="scaling_factor",
        default=0.18215,
        values=number("a number other than 0", lambda value: value != 0),
    ),
    FieldRule(
        name="shift_factor",
        default=None,
        values=only(None, 0),
        why="only pipelines of transformers shift latents",
    ),
    FieldRule(name="latents_mean", default=None, values=NULL | _NUMBERS),
    FieldRule(name="latents_std", default=None, values=NULL | _NUMBERS),
    FieldRule(name="force_upcast", default=True, values=FLAG),
    FieldRule(name="use_quant_conv", default=True, values=FLAG),
    FieldRule(name="use_post_quant_conv", default=True, values=FLAG),
    FieldRule(name="mid_block_add_attention", default=True, values=FLAG),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)

_ANY_SHIFT = FieldRule(name="shift_factor", default=None, values=NULL | number("a number"))


def check_vae_config(config: Mapping[str, object], *, shifts: bool = False) -> Iterator[str]:
    """Yield a sentence for each field of the VAE's config.json whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.

    Args:
        shifts: Whether the family's pipelines apply `shift_factor`.
    """
    rules = [_ANY_SHIFT if shifts and rule.name == _ANY_SHIFT.name else rule for rule in VAE_RULES]
    broken = list(broken_fields(rules, config))
    # Rules between fields assume valid fields.
    yield from broken or _broken_together(with_defaults(VAE_RULES, config))


def latent_scale(config: Mapping[str, Any]) -> int:
    """Return the pixels per element of a VAE's latent, along a side. The configuration must be valid."""
    return int(2 ** (len(with_defaults(VAE_RULES, config)["block_out_channels"]) - 1))


def _broken_together(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field that does not fit the other fields. Each field must be valid by itself."""
    channels, groups, scale = config["block_out_channels"], config["norm_num_groups"], latent_scale(config)
    for name in ("down_block_types", "up_block_types"):
        if len(config[name]) != len(channels):
            yield f"{name} must have {len(channels)} entries, as block_out_channels has, not {len(config[name])}"
    if any(count % groups for count in channels):
        yield f"block_out_channels must be multiples of norm_num_groups ({groups})"
    if config["sample_size"] < scale:
        yield f"sample_size must be at least {scale}, the pixels of one latent element, not {config['sample_size']}"
    for name in ("latents_mean", "latents_std"):
        if config[name] is not None and not len(config[name]) == config["latent_channels"] == _STATISTICS:
            yield f"{name} must be null or have {_STATISTICS} entries, one for each of as many latent channels"
    if config["latents_std"] is not None and 0 in config["latents_std"]:
        yield "latents_std must have no 0"
