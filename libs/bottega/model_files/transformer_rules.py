"""Rules for the configurations of diffusion transformers and of their text encoder T5, and the tensors of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import (
    ANY,
    FLAG,
    FRACTION,
    NULL,
    POSITIVE,
    TEXT,
    FieldRule,
    Values,
    broken_fields,
    only,
    shown,
    whole,
    with_defaults,
)
from bottega.rules import MAX_SIDE

# Published transformers have at most 38 blocks, 64 heads and 384 places on a side.
_MOST_BLOCKS, _MOST_HEADS, _MOST_PLACES = 256, 1024, 1024
_MOST_WIDTH = 65_536
# Diffusers embeds timesteps and guidance by so many sines and cosines.
_TIME_FEATURES = 256
FLUX_PATCH = 2
"""Number of elements of a latent, on each side, that Flux's pipelines pack into one token."""
# Axes of Flux's rotary positions: one that pictures do not use, rows and columns.
_AXES = 3
_LAYERS = Values(
    text=f"a list of up to {_MOST_BLOCKS} whole numbers",
    accepts=lambda value: (
        isinstance(value, list) and len(value) <= _MOST_BLOCKS and all(whole(0).accepts(entry) for entry in value)
    ),
)

SD3_RULES = (
    FieldRule(
        name="_class_name",
        default="SD3Transformer2DModel",
        values=only("SD3Transformer2DModel"),
        why="no other class is served",
    ),
    FieldRule(name="sample_size", default=128, values=whole(1, MAX_SIDE)),
    FieldRule(name="patch_size", default=2, values=whole(1, 16)),
    FieldRule(name="in_channels", default=16, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="out_channels", default=16, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="num_layers", default=18, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="attention_head_dim", default=64, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="num_attention_heads", default=18, values=whole(1, _MOST_HEADS)),
    FieldRule(name="joint_attention_dim", default=4096, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="caption_projection_dim", default=1152, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="pooled_projection_dim", default=2048, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="pos_embed_max_size", default=96, values=whole(1, _MOST_PLACES)),
    FieldRule(name="dual_attention_layers", default=[], values=_LAYERS),
    FieldRule(
        name="qk_norm", default=None, values=only(None, "rms_norm"), why="published transformers have no other norm"
    ),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)

FLUX_RULES = (
    FieldRule(
        name="_class_name",
        default="FluxTransformer2DModel",
        values=only("FluxTransformer2DModel"),
        why="no other class is served",
    ),
    FieldRule(name="patch_size", default=1, values=only(1)),
    FieldRule(name="in_channels", default=64, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="out_channels", default=None, values=whole(1, _MOST_WIDTH) | NULL),
    FieldRule(name="num_layers", default=19, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="num_single_layers", default=38, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="attention_head_dim", default=128, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="num_attention_heads", default=24, values=whole(1, _MOST_HEADS)),
    FieldRule(name="joint_attention_dim", default=4096, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="pooled_projection_dim", default=768, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="guidance_embeds", default=False, values=FLAG),
    FieldRule(
        name="axes_dims_rope",
        default=[16, 56, 56],
        values=Values(
            text=f"a list of {_AXES} even numbers",
            accepts=lambda value: (
                isinstance(value, list)
                and len(value) == _AXES
                and all(whole(2, _MOST_WIDTH).accepts(size) and size % 2 == 0 for size in value)
            ),
        ),
    ),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)

# Values of feed_forward_proj, with is_gated_act and dense_act_fn that transformers derives from them.
_ACTIVATIONS = {"relu": (False, "relu"), "gated-gelu": (True, "gelu_new"), "gated-silu": (True, "silu")}
_UNREAD = "the text encoder does not read it"
T5_RULES = (
    FieldRule(name="model_type", default="t5", values=only("t5"), why="no other text encoder is served here"),
    FieldRule(name="vocab_size", default=32128, values=whole(1)),
    FieldRule(name="d_model", default=512, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="d_kv", default=64, values=whole(1, _MOST_WIDTH)),
    FieldRule(name="d_ff", default=2048, values=whole(1)),
    FieldRule(name="num_layers", default=6, values=whole(1, _MOST_BLOCKS)),
    FieldRule(name="num_heads", default=8, values=whole(1, _MOST_HEADS)),
    FieldRule(name="relative_attention_num_buckets", default=32, values=whole(2, _MOST_WIDTH)),
    FieldRule(name="relative_attention_max_distance", default=128, values=whole(2)),
    FieldRule(name="dropout_rate", default=0.1, values=FRACTION),
    FieldRule(name="layer_norm_epsilon", default=1e-6, values=POSITIVE),
    FieldRule(
        name="feed_forward_proj",
        default="relu",
        values=only(*_ACTIVATIONS),
        why="published text encoders have no other",
    ),
    FieldRule(name="is_decoder", default=False, values=only(False), why="T5's encoder alone reads prompts"),
    FieldRule(name="is_gated_act", default=None, values=FLAG),
    FieldRule(name="dense_act_fn", default=None, values=TEXT | NULL),
    FieldRule(name="return_dict", default=True, values=only(True)),
    FieldRule(name="output_hidden_states", default=False, values=FLAG),
    FieldRule(name="dtype", default=None, values=TEXT | NULL),
    FieldRule(name="architectures", default=None, values=ANY, why=_UNREAD),
    FieldRule(name="quantization_config", default=None, values=NULL, why="quantized weights are not served"),
)


def check_t5_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the config.json of a T5 text encoder whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(T5_RULES, config))
    yield from broken
    if broken:
        return
    filled = with_defaults(T5_RULES, config)
    kind = filled["feed_forward_proj"]
    for name, derived in zip(("is_gated_act", "dense_act_fn"), _ACTIVATIONS[kind], strict=True):
        if filled[name] not in (None, derived):
            yield f"{name} must be {shown(derived)} with feed_forward_proj {shown(kind)}, not {shown(filled[name])}"


def check_sd3_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the config.json of SD3's transformer whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(SD3_RULES, config))
    # Rules between fields assume valid fields.
    yield from broken or _broken_together(with_defaults(SD3_RULES, config))


def _broken_together(config: Mapping[str, Any]) -> Iterator[str]:
    width = config["attention_head_dim"] * config["num_attention_heads"]
    if config["in_channels"] != config["out_channels"]:
        yield f"in_channels must be {config['out_channels']}, as out_channels is, not {config['in_channels']}"
    if config["caption_projection_dim"] != width:
        why = "attention_head_dim times num_attention_heads"
        yield f"caption_projection_dim must be {width}, {why}, not {config['caption_projection_dim']}"
    if width % 4:
        yield "attention_head_dim times num_attention_heads must be a multiple of 4, for the embeddings of positions"
    if config["sample_size"] % config["patch_size"]:
        yield f"sample_size must be a multiple of patch_size ({config['patch_size']}), not {config['sample_size']}"
    places = config["sample_size"] // config["patch_size"]
    if places > config["pos_embed_max_size"]:
        yield f"pos_embed_max_size must be at least {places}, sample_size divided by patch_size"
    if any(layer >= config["num_layers"] for layer in config["dual_attention_layers"]):
        layers = shown(config["dual_attention_layers"])
        yield f"dual_attention_layers must be below num_layers ({config['num_layers']}), not {layers}"


def check_flux_config(config: Mapping[str, object]) -> Iterator[str]:
    """Yield a sentence for each field of the config.json of Flux's transformer whose value is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.
    """
    broken = list(broken_fields(FLUX_RULES, config))
    yield from broken
    if broken:
        return
    filled = with_defaults(FLUX_RULES, config)
    if (sizes := sum(filled["axes_dims_rope"])) != filled["attention_head_dim"]:
        yield f"attention_head_dim must be {sizes}, the sum of axes_dims_rope, not {filled['attention_head_dim']}"


def broken_flux_channels(config: Mapping[str, Any], *, latent_channels: int, latent_scale: int) -> Iterator[str]:
    """Yield a sentence for each number of channels of Flux's transformer that does not fit its VAE.

    Args:
        config: Configuration of the transformer, with all defaults.
        latent_channels: Channels of the VAE's latent.
        latent_scale: Pixels per element of the latent, along a side.
    """
    packed = FLUX_PATCH**2
    plain = packed * latent_channels
    # Flux Fill reads the latent of a masked image and each pixel of the mask, too.
    filling = packed * (2 * latent_channels + latent_scale**2)
    found = config["in_channels"]
    if found not in (plain, filling):
        yield (
            f"in_channels must be {plain}, or {filling} where a mask is read, by the VAE's {latent_channels} "
            f"latent_channels, not {found}"
        )
    elif (out := config["out_channels"] or found) != plain:
        yield f"out_channels must be {plain}, by the VAE's {latent_channels} latent_channels, not {out}"


Tensors = Iterator[tuple[str, tuple[int, ...]]]
"""Names and shapes of tensors."""


def sd3_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of an SD3Transformer2DModel."""
    head = config["attention_head_dim"]
    width = head * config["num_attention_heads"]
    yield from _sd3_inputs(width, config)
    for number in range(config["num_layers"]):
        yield from _joint_block(
            f"transformer_blocks.{number}",
            width,
            head if config["qk_norm"] else None,
            is_last=number == config["num_layers"] - 1,
            is_dual=number in config["dual_attention_layers"],
        )
    yield from linear_tensors("norm_out.linear", width, 2 * width)
    yield from linear_tensors("proj_out", width, config["patch_size"] ** 2 * config["out_channels"])


def sd3_controlnet_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of an SD3ControlNetModel."""
    head = config["attention_head_dim"]
    width = head * config["num_attention_heads"]
    yield from _sd3_inputs(width, config)
    yield from _patches("pos_embed_input", width, config)
    for number in range(config["num_layers"]):
        block, is_dual = f"transformer_blocks.{number}", number in config["dual_attention_layers"]
        if config["joint_attention_dim"] is None:
            yield from _single_block(block, width)
        else:
            yield from _joint_block(block, width, head if config["qk_norm"] else None, is_dual=is_dual)
        yield from linear_tensors(f"controlnet_blocks.{number}", width, width)


def _sd3_inputs(width: int, config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors that embed latents, timesteps and prompts, as far as a network has them."""
    if config.get("use_pos_embed", True):
        yield "pos_embed.pos_embed", (1, config["pos_embed_max_size"] ** 2, width)
        yield from _patches("pos_embed", width, config)
    yield from _conditions(width, timestep=_TIME_FEATURES, text=config["pooled_projection_dim"])
    if config["joint_attention_dim"] is not None:
        yield from linear_tensors("context_embedder", config["joint_attention_dim"], config["caption_projection_dim"])


def _patches(name: str, width: int, config: Mapping[str, Any]) -> Tensors:
    patch = config["patch_size"]
    yield f"{name}.proj.weight", (width, config["in_channels"], patch, patch)
    yield f"{name}.proj.bias", (width,)


def _single_block(block: str, width: int) -> Tensors:
    """Yield the tensors of a block in which the image attends to itself alone."""
    yield from linear_tensors(f"{block}.norm1.linear", width, 6 * width)
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from linear_tensors(f"{block}.attn.{name}", width, width)
    yield from linear_tensors(f"{block}.ff.net.0.proj", width, 4 * width)
    yield from linear_tensors(f"{block}.ff.net.2", 4 * width, width)


def flux_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of a FluxTransformer2DModel."""
    width = config["attention_head_dim"] * config["num_attention_heads"]
    yield from _flux_blocks(config)
    yield from linear_tensors("norm_out.linear", width, 2 * width)
    yield from linear_tensors("proj_out", width, config["out_channels"] or config["in_channels"])


def flux_controlnet_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of a FluxControlNetModel."""
    width = config["attention_head_dim"] * config["num_attention_heads"]
    yield from _flux_blocks(config)
    for name, blocks in (("controlnet_blocks", "num_layers"), ("controlnet_single_blocks", "num_single_layers")):
        for number in range(config[blocks]):
            yield from linear_tensors(f"{name}.{number}", width, width)
    if config["num_mode"] is not None:
        yield "controlnet_mode_embedder.weight", (config["num_mode"], width)
    yield from linear_tensors("controlnet_x_embedder", config["in_channels"], width)


def _flux_blocks(config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors of Flux's blocks and of the layers that embed the inputs."""
    head = config["attention_head_dim"]
    width = head * config["num_attention_heads"]
    guidance = {"guidance": _TIME_FEATURES} if config["guidance_embeds"] else {}
    yield from linear_tensors("x_embedder", config["in_channels"], width)
    yield from _conditions(width, timestep=_TIME_FEATURES, text=config["pooled_projection_dim"], **guidance)
    yield from linear_tensors("context_embedder", config["joint_attention_dim"], width)
    for number in range(config["num_layers"]):
        yield from _joint_block(f"transformer_blocks.{number}", width, head)
    for number in range(config["num_single_layers"]):
        block = f"single_transformer_blocks.{number}"
        yield from linear_tensors(f"{block}.norm.linear", width, 3 * width)
        yield from linear_tensors(f"{block}.proj_mlp", width, 4 * width)
        yield from linear_tensors(f"{block}.proj_out", 5 * width, width)
        for name in ("to_q", "to_k", "to_v"):
            yield from linear_tensors(f"{block}.attn.{name}", width, width)
        for name in ("norm_q", "norm_k"):
            yield f"{block}.attn.{name}.weight", (head,)


def _conditions(width: int, **inputs: int) -> Tensors:
    """Yield the tensors of the networks that embed conditions, by their name with the number of their inputs."""
    for name, features in inputs.items():
        yield from linear_tensors(f"time_text_embed.{name}_embedder.linear_1", features, width)
        yield from linear_tensors(f"time_text_embed.{name}_embedder.linear_2", width, width)


def _joint_block(block: str, width: int, head: int | None, *, is_last: bool = False, is_dual: bool = False) -> Tensors:
    """Yield the tensors of a block in which image and text attend to each other.

    Args:
        head: Width of the norms of queries and keys; None without them.
        is_last: Whether the text does not go on.
        is_dual: Whether the image also attends to itself alone.
    """
    yield from linear_tensors(f"{block}.norm1.linear", width, (9 if is_dual else 6) * width)
    # The last block changes the text no more: it only attends to it.
    yield from linear_tensors(f"{block}.norm1_context.linear", width, (2 if is_last else 6) * width)
    projections = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj"]
    norms = ["norm_q", "norm_k", "norm_added_q", "norm_added_k"]
    layers = {"attn": [*projections, *([] if is_last else ["to_add_out"])]}
    layers |= {"attn2": projections[:4]} if is_dual else {}
    for attention, names in layers.items():
        for name in names:
            yield from linear_tensors(f"{block}.{attention}.{name}", width, width)
        if head is not None:
            for norm in norms[: 4 if attention == "attn" else 2]:
                yield f"{block}.{attention}.{norm}.weight", (head,)
    for network in ("ff",) if is_last else ("ff", "ff_context"):
        yield from linear_tensors(f"{block}.{network}.net.0.proj", width, 4 * width)
        yield from linear_tensors(f"{block}.{network}.net.2", 4 * width, width)


def t5_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the names and shapes of the tensors of a T5EncoderModel in its files."""
    width, inner, hidden = config["d_model"], config["d_kv"] * config["num_heads"], config["d_ff"]
    yield "shared.weight", (config["vocab_size"], width)
    for number in range(config["num_layers"]):
        attention, feed_forward = (f"encoder.block.{number}.layer.{layer}" for layer in (0, 1))
        for name in ("q", "k", "v"):
            yield f"{attention}.SelfAttention.{name}.weight", (inner, width)
        yield f"{attention}.SelfAttention.o.weight", (width, inner)
        if number == 0:
            buckets = config["relative_attention_num_buckets"]
            yield f"{attention}.SelfAttention.relative_attention_bias.weight", (buckets, config["num_heads"])
        yield f"{attention}.layer_norm.weight", (width,)
        for name in ("wi_0", "wi_1") if config["feed_forward_proj"].startswith("gated") else ("wi",):
            yield f"{feed_forward}.DenseReluDense.{name}.weight", (hidden, width)
        yield f"{feed_forward}.DenseReluDense.wo.weight", (width, hidden)
        yield f"{feed_forward}.layer_norm.weight", (width,)
    yield "encoder.final_layer_norm.weight", (width,)


def linear_tensors(name: str, inputs: int, outputs: int) -> Tensors:
    """Yield the names and shapes of the weight and the bias of a linear layer."""
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)
