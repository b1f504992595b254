"""Rules for model_index.json, for tokenizers, and for what a model's parts must have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import ANY, FLAG, OFF, FieldRule, broken_fields, shown, whole, with_defaults
from bottega.model_files.text_encoder_rules import TEXT_ENCODER_RULES
from bottega.model_files.unet_rules import UNET_RULES
from bottega.model_files.vae_rules import VAE_RULES, latent_scale

# Of an added time embedding: original size, crop and target size.
_TIME_IDS = 6
# Widths and heights of pictures are multiples of it, as in Diffusers.
_SIZE_MULTIPLE = 8

INDEX_RULES = (
    FieldRule(name="force_zeros_for_empty_prompt", default=True, values=FLAG),
    FieldRule(
        name="add_watermarker",
        default=None,
        values=OFF,
        why="Diffusers would draw a watermark into every picture, and the suite draws none",
    ),
    FieldRule(
        name="requires_aesthetics_score",
        default=False,
        values=OFF,
        why="models that take an aesthetic score, as SDXL's refiner does, are not served",
    ),
    FieldRule(name="image_encoder", default=None, values=ANY),
    FieldRule(name="feature_extractor", default=None, values=ANY),
)
# Library and class of each part that has no rules of its own for that.
_CLASSES = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
}
_ALIASES = {"CLIPTokenizerFast": "CLIPTokenizer"}
TOKENIZER_RULES = (FieldRule(name="model_max_length", default=None, values=whole(1)),)


def check_index(index: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of model_index.json whose value is not served, parts' classes included."""
    yield from broken_fields(INDEX_RULES, index)
    for part, (library, name) in _CLASSES.items():
        entry = index.get(part)
        found = [_ALIASES.get(str(each), each) for each in entry] if isinstance(entry, list) else entry
        if found != [library, name]:
            yield f"{part} must be {shown([library, name])}, not {shown(entry)}: no other class is served"


def check_tokenizer_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of a tokenizer's tokenizer_config.json whose value is not served."""
    yield from broken_fields(TOKENIZER_RULES, config)


def check_parts_together(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each field that does not fit another part.

    Args:
        configs: The configurations of all parts, by part. The parts' own rules hold.
    """
    unet, vae = with_defaults(UNET_RULES, configs["unet"]), with_defaults(VAE_RULES, configs["vae"])
    first, second = (with_defaults(TEXT_ENCODER_RULES, configs[name]) for name in ("text_encoder", "text_encoder_2"))
    width = first["hidden_size"] + second["hidden_size"]
    if unet["cross_attention_dim"] != width:
        yield (
            f"unet/config.json: cross_attention_dim must be {width}, the hidden_size of both text encoders together, "
            f"not {unet['cross_attention_dim']}"
        )
    added = (second["projection_dim"] or 0) + _TIME_IDS * unet["addition_time_embed_dim"]
    if unet["projection_class_embeddings_input_dim"] != added:
        yield (
            f"unet/config.json: projection_class_embeddings_input_dim must be {added}, projection_dim of "
            f"text_encoder_2 and {_TIME_IDS} times addition_time_embed_dim, not {unet['projection_class_embeddings_input_dim']}"
        )
    if unet["in_channels"] != vae["latent_channels"]:
        yield (
            f"unet/config.json: in_channels must be {vae['latent_channels']}, as latent_channels of the VAE is, "
            f"not {unet['in_channels']}"
        )
    if unet["sample_size"] * latent_scale(vae) % _SIZE_MULTIPLE:
        yield (
            f"unet/config.json: sample_size must give pictures whose sides are multiples of {_SIZE_MULTIPLE}, "
            f"not {unet['sample_size']}"
        )
    lengths = {name: configs[name]["model_max_length"] for name in ("tokenizer", "tokenizer_2")}
    if lengths["tokenizer"] != lengths["tokenizer_2"]:
        yield (
            f"tokenizer_2/tokenizer_config.json: model_max_length must be {lengths['tokenizer']}, as the first "
            f"tokenizer's is, not {lengths['tokenizer_2']}"
        )
    for name, encoder in (("tokenizer", first), ("tokenizer_2", second)):
        if lengths[name] > encoder["max_position_embeddings"]:
            yield (
                f"{name}/tokenizer_config.json: model_max_length must be at most max_position_embeddings of the text "
                f"encoder ({encoder['max_position_embeddings']}), not {lengths[name]}"
            )
