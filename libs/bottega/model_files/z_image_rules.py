"""Rules for the configurations of Z-Image's transformer and of its text encoder Qwen3, and the tensors of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    only,
    whole,
    with_defaults,
)
from bottega.model_files.transformer_rules import Tensors, linear_tensors

# Published transformers have 30 blocks and 30 heads, and their text encoder has 36 layers.
_MOST_BLOCKS, _MOST_HEADS, _MOST_WIDTH = 256, 1024, 65_536
# The pipelines split a latent into patches with this side, and pass a picture as this number of frames.
_PATCH, _FRAMES = 2, 1
# Sizes of the timestep embedding: sines and cosines, hidden features, and the maximum of its features.
_TIME_FEATURES, _TIME_HIDDEN, _TIME_WIDTH = 256, 1024, 256
# A rotary position has three axes: the token (prompts first, then the picture), the row, and the column.
_AXES = 3
# The first axis must have positions for 512 tokens of a prompt, and for the picture after them.
_LEAST_PLACES = 512 + 2


def _axes(least: int, text: str) -> Values:
    return Values(
        text=f"a list of {_AXES} {text}",
        accepts=lambda value: (
            isinstance(value, list)
            and len(value) == _AXES
            and all(whole(least, _MOST_WIDTH).accepts(each) and each % least == 0 for each in value)
        ),
    )


Z_IMAGE_RULES = (
    FieldRule(
        name="_class_name",
        default="ZImageTransformer2DModel",
        values=only("ZImageTransformer2DModel"),
        why="no other class is served",
    ),
    FieldRule(name="all_patch_size", default=[_PATCH], values=only([_PATCH]), why="the pipelines make no others"),
    FieldRule(name="all_f_patch_size", default=[_FRAMES], values=only([_FRAMES]), why="the pipelines make no others"),
    FieldRule(name="in_channels", default=16, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="dim", default=3840, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="n_layers", default=30, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="n_refiner_layers", default=2, values=whole(0, _MOST_BLOCKS)),
    FieldRule(name="n_heads", default=30, values=whole(1, _MOST_HEADS)),
    FieldRule(name="n_kv_heads", default=30, values=ANY, why="the network does not read it"),
    FieldRule(name="norm_eps", default=1e-5, values=POSITIVE),
    FieldRule(name="qk_norm", default=True, values=FLAG),
    FieldRule(name="cap_feat_dim", default=2560, values=whole(1, _MOST_WIDTH)),
    FieldRule(
        name="siglip_feat_dim",
        default=None,
        values=NULL,
        why="transformers that read pictures beside the prompt are not served",
    ),
    FieldRule(name="rope_theta", default=256.0, values=POSITIVE),
    FieldRule(name="t_scale", default=1000.0, values=POSITIVE),
    FieldRule(name="axes_dims", default=[32, 48, 48], values=_axes(2, "even numbers")),
    FieldRule(name="axes_lens", default=[1024, 512, 512], values=_axes(1, "whole numbers")),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)

QWEN3_RULES = (
    FieldRule(name="model_type", default="qwen3", values=only("qwen3"), why="no other text encoder is served here"),
    FieldRule(name="vocab_size", default=151_936, values=whole(1)),
    FieldRule(name="hidden_size", default=4096, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="intermediate_size", default=22_016, values=whole(1)),
    FieldRule(name="num_hidden_layers", default=32, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="num_attention_heads", default=32, values=whole(1, _MOST_HEADS)),
    FieldRule(name="num_key_value_heads", default=32, values=whole(1, _MOST_HEADS) | NULL),
    FieldRule(name="head_dim", default=128, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="hidden_act", default="silu", values=only("silu"), why="published text encoders have no other"),
    FieldRule(name="max_position_embeddings", default=32_768, values=whole(1)),
    FieldRule(name="rms_norm_eps", default=1e-6, values=POSITIVE),
    FieldRule(name="rope_theta", default=None, values=POSITIVE | NULL),
    FieldRule(name="rope_scaling", default=None, values=NULL, why="published text encoders have none"),
    FieldRule(name="rope_parameters", default=None, values=ANY, why="transformers reads it"),
    FieldRule(name="attention_bias", default=False, values=FLAG),
    FieldRule(name="attention_dropout", default=0.0, values=FRACTION),
    FieldRule(name="use_sliding_window", default=False, values=OFF, why="published text encoders attend to all tokens"),
    FieldRule(name="layer_types", default=None, values=ANY, why="transformers derives it"),
    FieldRule(name="return_dict", default=True, values=only(True)),
    FieldRule(name="output_hidden_states", default=False, values=FLAG),
    FieldRule(name="dtype", default=None, values=TEXT | NULL),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)


def check_z_image_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the config.json of Z-Image's transformer whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(Z_IMAGE_RULES, config))
    yield from broken
    if broken:
        return
    filled = with_defaults(Z_IMAGE_RULES, config)
    if (width := sum(filled["axes_dims"]) * filled["n_heads"]) != filled["dim"]:
        yield f"dim must be {width}, the sum of axes_dims times n_heads, not {filled['dim']}"
    if (places := filled["axes_lens"][0]) < _LEAST_PLACES:
        yield f"axes_lens must begin with at least {_LEAST_PLACES}, for the tokens of prompts, not {places}"


def check_qwen3_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the config.json of a Qwen3 text encoder whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(QWEN3_RULES, config))
    yield from broken
    if broken:
        return
    filled = with_defaults(QWEN3_RULES, config)
    groups = _key_heads(filled)
    if filled["num_attention_heads"] % groups:
        yield f"num_attention_heads must be a multiple of num_key_value_heads ({groups})"


def broken_z_image(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each width of the transformer that does not fit another part.

    Args:
        configs: Configurations by part, with all defaults.
    """
    transformer = configs["transformer"]
    for name, part, field in (
        ("cap_feat_dim", "text_encoder", "hidden_size"),
        ("in_channels", "vae", "latent_channels"),
    ):
        if transformer[name] != (wanted := configs[part][field]):
            yield f"transformer/config.json: {name} must be {wanted}, {field} of {part}, not {transformer[name]}"


def z_image_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of a ZImageTransformer2DModel."""
    width, patches = config["dim"], f"{_PATCH}-{_FRAMES}"
    time, features = min(width, _TIME_WIDTH), _PATCH**2 * _FRAMES * config["in_channels"]
    yield from linear_tensors(f"all_x_embedder.{patches}", features, width)
    yield from linear_tensors(f"all_final_layer.{patches}.linear", width, features)
    yield from linear_tensors(f"all_final_layer.{patches}.adaLN_modulation.1", time, width)
    yield from linear_tensors("t_embedder.mlp.0", _TIME_FEATURES, _TIME_HIDDEN)
    yield from linear_tensors("t_embedder.mlp.2", _TIME_HIDDEN, time)
    yield "cap_embedder.0.weight", (config["cap_feat_dim"],)
    yield from linear_tensors("cap_embedder.1", config["cap_feat_dim"], width)
    yield from (("x_pad_token", (1, width)), ("cap_pad_token", (1, width)))
    counts = dict.fromkeys(("noise_refiner", "context_refiner"), config["n_refiner_layers"])
    for name, count in {**counts, "layers": config["n_layers"]}.items():
        for number in range(count):
            yield from _block(f"{name}.{number}", config, time=None if name == "context_refiner" else time)


def _block(block: str, config: Mapping[str, Any], *, time: int | None) -> Tensors:
    """Yield the names and shapes of a block's tensors.

    Args:
        time: Number of features of the timestep embedding; None for blocks that do not read it.
    """
    width = config["dim"]
    hidden = int(width / 3 * 8)
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        yield f"{block}.attention.{name}.weight", (width, width)
    for name in ("norm_q", "norm_k") if config["qk_norm"] else ():
        yield f"{block}.attention.{name}.weight", (width // config["n_heads"],)
    for name, shape in (("w1", (hidden, width)), ("w2", (width, hidden)), ("w3", (hidden, width))):
        yield f"{block}.feed_forward.{name}.weight", shape
    for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
        yield f"{block}.{name}.weight", (width,)
    if time is not None:
        yield from linear_tensors(f"{block}.adaLN_modulation.0", time, 4 * width)


def qwen3_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of a Qwen3Model, without the prefix `model.` of published files."""
    width, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = head * config["num_attention_heads"], head * _key_heads(config)
    yield "embed_tokens.weight", (config["vocab_size"], width)
    yield "norm.weight", (width,)
    for number in range(config["num_hidden_layers"]):
        layer = f"layers.{number}"
        for name, inputs, outputs in (
            ("q_proj", width, queries),
            ("k_proj", width, keys),
            ("v_proj", width, keys),
            ("o_proj", queries, width),
        ):
            yield f"{layer}.self_attn.{name}.weight", (outputs, inputs)
            if config["attention_bias"]:
                yield f"{layer}.self_attn.{name}.bias", (outputs,)
        for name in ("q_norm", "k_norm"):
            yield f"{layer}.self_attn.{name}.weight", (head,)
        for name, shape in (
            ("gate_proj", (inner, width)),
            ("up_proj", (inner, width)),
            ("down_proj", (width, inner)),
        ):
            yield f"{layer}.mlp.{name}.weight", shape
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (width,)


def _key_heads(config: Mapping[str, Any]) -> int:
    """Return the number of heads of keys and values. Several query heads may share one of them."""
    return int(config["num_key_value_heads"] or config["num_attention_heads"])
