"""Rules for all configurations of a model: model_index.json, each part, text encoders, and the parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from bottega.model_files.family_names import FAMILIES, SDXL
from bottega.model_files.field_rules import (
    ANY,
    FLAG,
    FRACTION,
    NULL,
    OFF,
    POSITIVE,
    TEXT,
    FieldRule,
    Values,
    broken_fields,
    number,
    only,
    shown,
    whole,
    with_defaults,
)
from bottega.model_files.presets import Preset
from bottega.model_files.scheduler_check import check_scheduler_config
from bottega.model_files.unet_rules import TIME_IDS, UNET_RULES, check_unet_config
from bottega.model_files.vae_rules import VAE_RULES, check_vae_config, latent_scale
from bottega.plain_text import excerpt

# Activations of transformers that published CLIP text encoders have.
ACTIVATIONS = ("quick_gelu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "silu", "swish", "tanh")

# SDXL's second encoder has 32.
_MOST_LAYERS = 256

TEXT_ENCODER_RULES = (
    FieldRule(
        name="model_type",
        default="clip_text_model",
        values=only("clip_text_model"),
        why="only CLIP's text encoders are served",
    ),
    FieldRule(name="vocab_size", default=49408, values=whole(1)),
    FieldRule(name="hidden_size", default=512, values=whole(1)),
    FieldRule(name="intermediate_size", default=2048, values=whole(1)),
    FieldRule(name="projection_dim", default=512, values=whole(1) | NULL),
    FieldRule(name="num_hidden_layers", default=12, values=whole(1, _MOST_LAYERS)),
    FieldRule(name="num_attention_heads", default=8, values=whole(1)),
    FieldRule(name="max_position_embeddings", default=77, values=whole(1)),
    FieldRule(
        name="hidden_act", default="quick_gelu", values=only(*ACTIVATIONS), why="published text encoders have no other"
    ),
    FieldRule(name="layer_norm_eps", default=1e-5, values=POSITIVE),
    FieldRule(name="attention_dropout", default=0.0, values=FRACTION | NULL),
    FieldRule(name="initializer_range", default=0.02, values=number("a number")),
    FieldRule(name="initializer_factor", default=1.0, values=number("a number")),
    FieldRule(name="pad_token_id", default=1, values=whole(0) | NULL),
    FieldRule(name="bos_token_id", default=49406, values=whole(0) | NULL),
    FieldRule(name="eos_token_id", default=49407, values=whole(0)),
    FieldRule(name="dtype", default=None, values=TEXT | NULL),
    FieldRule(name="return_dict", default=True, values=only(True)),
    FieldRule(name="output_hidden_states", default=False, values=only(False, True, None)),
    FieldRule(name="chunk_size_feed_forward", default=0, values=whole(0)),
    FieldRule(name="is_encoder_decoder", default=False, values=only(False, True)),
    FieldRule(name="transformers_version", default=None, values=TEXT | NULL),
    FieldRule(name="architectures", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="id2label", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="label2id", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="problem_type", default=None, values=ANY, why="the text encoders do not read it"),
    FieldRule(name="use_attention_mask", default=None, values=OFF, why="prompts are encoded without an attention mask"),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)


def check_text_encoder_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of a text encoder's config.json whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(TEXT_ENCODER_RULES, config))
    # Rules between fields assume valid fields.
    yield from broken or _broken_together(with_defaults(TEXT_ENCODER_RULES, config))


def _broken_together(config: Mapping[str, Any]) -> Iterator[str]:
    if config["hidden_size"] % config["num_attention_heads"]:
        yield f"hidden_size must be a multiple of num_attention_heads ({config['num_attention_heads']})"


_Rules = Callable[[Mapping[str, object]], Iterable[str]]

INDEX_FILE = "model_index.json"
CONFIG_FILES = {
    "scheduler": "scheduler_config.json",
    "text_encoder": "config.json",
    "text_encoder_2": "config.json",
    "tokenizer": "tokenizer_config.json",
    "tokenizer_2": "tokenizer_config.json",
    "unet": "config.json",
    "vae": "config.json",
}
"""Configuration file of each part."""
_SECOND = ("text_encoder_2", "tokenizer_2")


def config_files(family: str) -> Mapping[str, str]:
    """Return the configuration file of each part that a family has; see bottega.model_files.families."""
    two = FAMILIES[family].has_two_encoders
    return {part: file for part, file in CONFIG_FILES.items() if two or part not in _SECOND}


_SHOWN_CHARACTERS = 40
# Widths and heights of pictures are multiples of this, as in Diffusers.
_SIZE_MULTIPLE = 8

_NO_PART: list[object] = [None, None]
_NOT_LOADED = "only IP-Adapters use it: it is not loaded"
_PART = Values(
    text="the library and the class of a part, or [null, null]",
    accepts=lambda value: (
        value == _NO_PART or (isinstance(value, list) and [type(each) for each in value] == [str, str])
    ),
)

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
    FieldRule(name="image_encoder", default=_NO_PART, values=_PART, why=_NOT_LOADED),
    FieldRule(name="feature_extractor", default=_NO_PART, values=_PART, why=_NOT_LOADED),
)
# Library and class of each part but the scheduler.
_CLASSES = {
    "unet": ("diffusers", "UNet2DConditionModel"),
    "vae": ("diffusers", "AutoencoderKL"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "CLIPTextModelWithProjection"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "CLIPTokenizer"),
}
_KNOWN_PARTS = frozenset({*_CLASSES, "scheduler", "image_encoder", "feature_extractor"})
# Published folders of Stable Diffusion have a filter of pictures, which the suite does not run.
_IGNORED = frozenset({"safety_checker"})
_ALIASES = {"CLIPTokenizerFast": "CLIPTokenizer"}
TOKENIZER_RULES = (FieldRule(name="model_max_length", default=None, values=whole(1)),)


def check_configurations(
    index: Mapping[str, object],
    configs: Mapping[str, Mapping[str, object]],
    preset: Preset | None = None,
    family: str = SDXL,
) -> list[str]:
    """Return a sentence, with the file's name, for each field that is not served.

    Args:
        index: Contents of model_index.json.
        configs: Configurations by part of `config_files`. That of the scheduler has the class in model_index.json as
            `_class_name`.
        preset: The model's bottega.json, which overrides its scheduler_config.json.
    """
    problems = [f"{INDEX_FILE}: {sentence}" for sentence in check_index(index, family)]
    scheduler_rules = partial(_check_scheduler, preset or Preset())
    unet_rules = partial(check_unet_config, added_conditions=FAMILIES[family].has_two_encoders)
    rules: Mapping[str, _Rules] = {**_RULES, "scheduler": scheduler_rules, "unet": unet_rules}
    for part, config in configs.items():
        problems += [f"{part}/{CONFIG_FILES[part]}: {sentence}" for sentence in rules[part](config)]
    if not problems and configs.keys() >= config_files(family).keys():
        problems += check_parts_together(configs)
    return problems


def check_index(index: Mapping[str, object], family: str = SDXL) -> Iterator[str]:
    """Yield a sentence for each field of model_index.json, and each class of a part, that is not served."""
    yield from broken_fields(INDEX_RULES, index)
    parts = config_files(family)
    for part, (library, name) in _CLASSES.items():
        if part not in parts:
            continue
        entry = index.get(part)
        found = [_ALIASES.get(str(each), each) for each in entry] if isinstance(entry, list) else entry
        if found != [library, name]:
            yield f"{part} must be {shown([library, name])}, not {shown(entry)}: no other class is served"
    for name, entry in index.items():
        known = name in _KNOWN_PARTS and (name in parts or name not in _CLASSES)
        ignored = family != SDXL and name in _IGNORED
        if not (known or ignored) and isinstance(entry, list) and entry != _NO_PART:
            what = excerpt(name, _SHOWN_CHARACTERS)
            yield f"{what} is a part that is not served: pictures would be drawn without it; remove it from the model"
    scheduler = index.get("scheduler")
    if not isinstance(scheduler, list) or len(scheduler) != 2 or scheduler[0] != "diffusers":
        yield f'scheduler must be ["diffusers", "CLASS"], not {shown(scheduler)}'


def _check_scheduler(preset: Preset, config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the scheduler, with the preset applied, that is not served."""
    yield from check_scheduler_config({**config, **preset.scheduler_overrides}, sampler=preset.sampler or "")


def check_tokenizer_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of a tokenizer's tokenizer_config.json whose value is not served."""
    yield from broken_fields(TOKENIZER_RULES, config)


def check_parts_together(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each field that does not fit another part.

    Args:
        configs: Configurations by part, of all parts. Each must be valid.
    """
    filled = {part: with_defaults(_TABLES[part], config) for part, config in configs.items() if part in _TABLES}
    yield from _broken_widths(filled)
    yield from _broken_sizes(filled)
    yield from _broken_lengths(filled)


def filled_config(part: str, config: Mapping[str, object]) -> dict[str, Any]:
    """Return a part's configuration with the defaults of Diffusers or transformers for missing fields."""
    return with_defaults(_TABLES[part], config)


def _broken_widths(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each width of the UNet that differs from the text encoders' outputs."""
    unet, first = configs["unet"], configs["text_encoder"]
    if "text_encoder_2" not in configs:
        if unet["cross_attention_dim"] != first["hidden_size"]:
            yield (
                f"unet/config.json: cross_attention_dim must be {first['hidden_size']}, hidden_size of text_encoder, "
                f"not {unet['cross_attention_dim']}"
            )
        return
    second = configs["text_encoder_2"]
    if second["projection_dim"] is None:
        yield "text_encoder_2/config.json: projection_dim must be a whole number from 1, not null"
        return
    context = first["hidden_size"] + second["hidden_size"]
    added = second["projection_dim"] + TIME_IDS * unet["addition_time_embed_dim"]
    for name, width, why in (
        ("cross_attention_dim", context, "hidden_size of text_encoder and of text_encoder_2 together"),
        (
            "projection_class_embeddings_input_dim",
            added,
            f"projection_dim of text_encoder_2 and {TIME_IDS} times addition_time_embed_dim",
        ),
    ):
        if unet[name] != width:
            yield f"unet/config.json: {name} must be {width}, {why}, not {unet[name]}"


def _broken_sizes(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each size of the UNet's latent that does not fit the VAE."""
    unet, vae = configs["unet"], configs["vae"]
    name = "in_channels" if unet["in_channels"] == unet["out_channels"] else "out_channels"
    channels = vae["latent_channels"]
    if unet[name] != channels:
        yield f"unet/config.json: {name} must be {channels}, as latent_channels of the VAE is, not {unet[name]}"
    size = unet["sample_size"] * latent_scale(vae)
    if size % _SIZE_MULTIPLE:
        yield (
            f"unet/config.json: sample_size must give pictures whose sides are multiples of {_SIZE_MULTIPLE} pixels, "
            f"not {size}"
        )


def _broken_lengths(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each tokenizer that makes more tokens than its text encoder accepts, or than the other."""
    name, length = "model_max_length", configs["tokenizer"]["model_max_length"]
    if "tokenizer_2" in configs and (other := configs["tokenizer_2"][name]) != length:
        yield (f"tokenizer_2/tokenizer_config.json: {name} must be {length}, as the first tokenizer's is, not {other}")
    for tokenizer, encoder in (("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2")):
        if tokenizer not in configs:
            continue
        most, length = configs[encoder]["max_position_embeddings"], configs[tokenizer][name]
        if length > most:
            yield (
                f"{tokenizer}/tokenizer_config.json: {name} must be at most {most}, max_position_embeddings of "
                f"{encoder}, not {length}"
            )


_TABLES: Mapping[str, Sequence[FieldRule]] = {
    "text_encoder": TEXT_ENCODER_RULES,
    "text_encoder_2": TEXT_ENCODER_RULES,
    "tokenizer": TOKENIZER_RULES,
    "tokenizer_2": TOKENIZER_RULES,
    "unet": UNET_RULES,
    "vae": VAE_RULES,
}
# Checks of each part's configuration.
_RULES: Mapping[str, _Rules] = {
    "text_encoder": check_text_encoder_config,
    "text_encoder_2": check_text_encoder_config,
    "tokenizer": check_tokenizer_config,
    "tokenizer_2": check_tokenizer_config,
    "vae": check_vae_config,
}
