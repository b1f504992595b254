"""Rules for all configurations of a model: model_index.json, each part, text encoders, and the parts together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from bottega.model_files.family_names import (
    FAMILIES,
    FLUX,
    OPTIONAL_PARTS,
    PARTS,
    SDXL,
    TITLES,
    TRANSFORMER,
    UNET,
    Z_IMAGE,
    class_of,
)
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
from bottega.model_files.scheduler_rules import FLOW_MATCHING, SCHEDULER_RULES
from bottega.model_files.transformer_rules import (
    FLUX_RULES,
    SD3_RULES,
    T5_RULES,
    broken_flux_channels,
    check_flux_config,
    check_sd3_config,
    check_t5_config,
)
from bottega.model_files.unet_rules import TIME_IDS, UNET_RULES, check_unet_config
from bottega.model_files.vae_rules import VAE_RULES, check_vae_config, latent_scale
from bottega.model_files.z_image_rules import (
    QWEN3_RULES,
    Z_IMAGE_RULES,
    broken_z_image,
    check_qwen3_config,
    check_z_image_config,
)
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
_NO_PART: list[object] = [None, None]


def config_files(family: str, index: Mapping[str, object] = MappingProxyType({})) -> Mapping[str, str]:
    """Return the configuration file of each part of a model, in the order of the parts' names.

    Args:
        family: Its family; see bottega.model_files.families.
        index: Contents of its model_index.json, which may leave out some parts.
    """
    left_out = {part for part in OPTIONAL_PARTS.get(family, ()) if index.get(part, True) in (None, _NO_PART)}
    parts = sorted({*PARTS[family], "scheduler"} - left_out)
    return {part: config_file(part) for part in parts}


def config_file(part: str) -> str:
    """Return the name of a part's configuration file."""
    if part == "scheduler":
        return "scheduler_config.json"
    return "tokenizer_config.json" if part.startswith("tokenizer") else "config.json"


_SHOWN_CHARACTERS = 40
# Widths and heights of pictures are multiples of this, as in Diffusers.
_SIZE_MULTIPLE = 8

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
_NOT_LOADED_PARTS = frozenset({"image_encoder", "feature_extractor"})
# Published folders of Stable Diffusion have a filter of pictures, which the suite does not run.
_IGNORED = frozenset({"safety_checker"})
_ALIASES = {
    "CLIPTokenizerFast": "CLIPTokenizer",
    "T5Tokenizer": "T5TokenizerFast",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
}
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
    scheduler_rules = partial(_check_scheduler, preset or Preset(), family)
    rules: dict[str, _Rules] = {part: _CLASSES[class_of(part, family)][1] for part in PARTS[family]}
    rules |= {"scheduler": scheduler_rules, "vae": partial(check_vae_config, shifts=TRANSFORMER in PARTS[family])}
    if UNET in rules:
        rules[UNET] = partial(check_unet_config, added_conditions=FAMILIES[family].has_two_encoders)
    for part, config in configs.items():
        problems += [f"{part}/{config_file(part)}: {sentence}" for sentence in rules[part](config)]
    if not problems and configs.keys() >= config_files(family, index).keys():
        problems += check_parts_together(configs, family)
    return problems


def check_index(index: Mapping[str, object], family: str = SDXL) -> Iterator[str]:
    """Yield a sentence for each field of model_index.json, and each class of a part, that is not served."""
    yield from broken_fields(INDEX_RULES, index)
    classes = {part: names for part, names in PARTS[family].items() if part in config_files(family, index)}
    for part, (library, name) in classes.items():
        entry = index.get(part)
        found = [_ALIASES.get(str(each), each) for each in entry] if isinstance(entry, list) else entry
        if found != [library, name]:
            yield f"{part} must be {shown([library, name])}, not {shown(entry)}: no other class is served"
    for name, entry in index.items():
        known = {*classes, "scheduler", *_NOT_LOADED_PARTS, *(() if family == SDXL else _IGNORED)}
        if name not in known and isinstance(entry, list) and entry != _NO_PART:
            what = excerpt(name, _SHOWN_CHARACTERS)
            yield f"{what} is a part that is not served: pictures would be drawn without it; remove it from the model"
    scheduler = index.get("scheduler")
    if not isinstance(scheduler, list) or len(scheduler) != 2 or scheduler[0] != "diffusers":
        yield f'scheduler must be ["diffusers", "CLASS"], not {shown(scheduler)}'


def _check_scheduler(preset: Preset, family: str, config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the scheduler, with the preset applied, that is not served."""
    name = config.get("_class_name")
    if name in SCHEDULER_RULES and (name == FLOW_MATCHING) != (TRANSFORMER in PARTS[family]):
        trained = "with flow matching" if TRANSFORMER in PARTS[family] else "to predict noise"
        yield f"_class_name is {shown(name)}, and models of {TITLES[family]} were trained {trained}"
        return
    yield from check_scheduler_config({**config, **preset.scheduler_overrides}, sampler=preset.sampler or "")


def check_tokenizer_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of a tokenizer's tokenizer_config.json whose value is not served."""
    yield from broken_fields(TOKENIZER_RULES, config)


def check_parts_together(configs: Mapping[str, Mapping[str, Any]], family: str = SDXL) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each field that does not fit another part.

    Args:
        configs: Configurations by part, of all parts. Each must be valid.
    """
    filled = {
        part: filled_config(class_of(part, family), config) for part, config in configs.items() if part != "scheduler"
    }
    if family == FLUX:
        yield from _broken_flux(filled)
    elif family == Z_IMAGE:
        yield from broken_z_image(filled)
    else:
        yield from _broken_transformer_widths(filled) if TRANSFORMER in filled else _broken_widths(filled)
        yield from _broken_sizes(filled)
    yield from _broken_lengths(filled, family)
    encoders = [part for part in filled if part.startswith("text_encoder")]
    tokenizers = [part for part in filled if part.startswith("tokenizer")]
    if len(encoders) != len(tokenizers):
        yield f"{INDEX_FILE}: a text encoder and its tokenizer must both be there, or both be [null, null]"


def filled_config(kind: str, config: Mapping[str, object]) -> dict[str, Any]:
    """Return a part's configuration with the defaults of Diffusers or transformers for missing fields.

    Args:
        kind: Name of the part's class; see `class_of`.
    """
    rules, _ = _CLASSES[kind]
    return with_defaults(rules, config)


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


def _broken_transformer_widths(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each width of the transformer that differs from the text encoders' outputs."""
    transformer, encoders = configs[TRANSFORMER], [configs["text_encoder"], configs["text_encoder_2"]]
    if any(encoder["projection_dim"] is None for encoder in encoders):
        yield "text_encoder/config.json and that of text_encoder_2: projection_dim must be a whole number from 1"
        return
    pooled = sum(encoder["projection_dim"] for encoder in encoders)
    if transformer["pooled_projection_dim"] != pooled:
        why = "projection_dim of text_encoder and of text_encoder_2 together"
        yield f"transformer/config.json: pooled_projection_dim must be {pooled}, {why}"
    joined, context = sum(encoder["hidden_size"] for encoder in encoders), transformer["joint_attention_dim"]
    if joined > context:
        why = "hidden_size of text_encoder and of text_encoder_2 together"
        yield f"transformer/config.json: joint_attention_dim must be at least {joined}, {why}, not {context}"
    t5 = configs.get("text_encoder_3")
    if t5 is not None and t5["d_model"] != context:
        yield f"transformer/config.json: joint_attention_dim must be {t5['d_model']}, d_model of text_encoder_3"


def _broken_flux(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each width of Flux's transformer that differs from what other parts give it."""
    transformer, where = configs[TRANSFORMER], f"{TRANSFORMER}/config.json"
    for name, encoder, width in (
        ("pooled_projection_dim", "text_encoder", "hidden_size"),
        ("joint_attention_dim", "text_encoder_2", "d_model"),
    ):
        wanted = configs[encoder][width]
        if transformer[name] != wanted:
            yield f"{where}: {name} must be {wanted}, {width} of {encoder}, not {transformer[name]}"
    vae = configs["vae"]
    for sentence in broken_flux_channels(
        transformer, latent_channels=vae["latent_channels"], latent_scale=latent_scale(vae)
    ):
        yield f"{where}: {sentence}"


def _broken_sizes(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each size of the denoising network's latent that does not fit the VAE."""
    part, vae = TRANSFORMER if TRANSFORMER in configs else UNET, configs["vae"]
    network = configs[part]
    name = "in_channels" if network["in_channels"] == network["out_channels"] else "out_channels"
    channels = vae["latent_channels"]
    if network[name] != channels:
        yield f"{part}/config.json: {name} must be {channels}, as latent_channels of the VAE is, not {network[name]}"
    size = network["sample_size"] * latent_scale(vae)
    if size % _SIZE_MULTIPLE:
        yield (
            f"{part}/config.json: sample_size must give pictures whose sides are multiples of {_SIZE_MULTIPLE} pixels, "
            f"not {size}"
        )


def _broken_lengths(configs: Mapping[str, Mapping[str, Any]], family: str) -> Iterator[str]:
    """Yield a sentence for each CLIP tokenizer that makes more tokens than its encoder, or the other encoder, reads.

    T5 and Qwen3 read any number of tokens, and the pipelines cut their prompts.
    """
    name = "model_max_length"
    read = [part for part in configs if class_of(part, family).startswith("CLIPText")]
    length, other = (configs.get(tokenizer, {}).get(name) for tokenizer in ("tokenizer", "tokenizer_2"))
    if "text_encoder_2" in read and other != length:
        yield (f"tokenizer_2/tokenizer_config.json: {name} must be {length}, as the first tokenizer's is, not {other}")
    for encoder in read:
        tokenizer = encoder.replace("text_encoder", "tokenizer")
        if tokenizer not in configs:
            continue
        most, length = configs[encoder]["max_position_embeddings"], configs[tokenizer][name]
        if length > most:
            yield (
                f"{tokenizer}/tokenizer_config.json: {name} must be at most {most}, max_position_embeddings of "
                f"{encoder}, not {length}"
            )


_CLASSES: Mapping[str, tuple[Sequence[FieldRule], _Rules]] = {
    "CLIPTextModel": (TEXT_ENCODER_RULES, check_text_encoder_config),
    "CLIPTextModelWithProjection": (TEXT_ENCODER_RULES, check_text_encoder_config),
    "T5EncoderModel": (T5_RULES, check_t5_config),
    "Qwen3Model": (QWEN3_RULES, check_qwen3_config),
    "CLIPTokenizer": (TOKENIZER_RULES, check_tokenizer_config),
    "T5TokenizerFast": ((), lambda _config: ()),
    "Qwen2Tokenizer": ((), lambda _config: ()),
    "UNet2DConditionModel": (UNET_RULES, check_unet_config),
    "SD3Transformer2DModel": (SD3_RULES, check_sd3_config),
    "FluxTransformer2DModel": (FLUX_RULES, check_flux_config),
    "ZImageTransformer2DModel": (Z_IMAGE_RULES, check_z_image_config),
    "AutoencoderKL": (VAE_RULES, check_vae_config),
}
"""Rules for the fields of a part's configuration, and a check of the whole configuration, by the part's class."""
