"""Checks the names and shapes of a part's tensors, in the headers of its files, against its configuration.

`unet_tensors`, `controlnet_tensors`, `vae_tensors` and `text_encoder_tensors` yield the names and shapes in a network's
`state_dict()`; the functions for transformers are in `transformer_rules` and `z_image_rules`. They require a valid
configuration with a value for each field that they read; see `unet_rules`, `controlnet_config` and `vae_rules`. They
yield one tensor at a time, because a configuration may describe any number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from typing import Any

from bottega.model_files.transformer_rules import Tensors, flux_tensors, linear_tensors, sd3_tensors, t5_tensors
from bottega.model_files.weights import FLOATING_POINT, Weights
from bottega.model_files.z_image_rules import qwen3_tensors, z_image_tensors
from bottega.plain_text import excerpt
from bottega.safetensors_header import MAX_TENSORS

Shape = tuple[int, ...]

# GEGLU: the hidden layer is four times as wide as the transformer, and each of its values has a gate.
_FEED_FORWARD = 4
_GATED = 2
_CROSS_ATTENTION = "CrossAttn"
_SHOWN_CHARACTERS = 120
_TEXT_PREFIXES = ("text_model.", "model.")
# Tensors that published text encoders have in addition: positions of CLIP, and a copy of T5's embeddings.
_ADDITIONAL = frozenset({"embeddings.position_ids", "encoder.embed_tokens.weight"})
_OLD_VAE_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


def check_tensors(part: str, kind: str, config: Mapping[str, Any], weights: Weights) -> Iterator[str]:
    """Yield a sentence for each way in which a part's tensors differ from those of its configuration.

    Args:
        part: Name of the part, such as `text_encoder`.
        kind: Name of its class, of EXPECTED_TENSORS.
        config: Valid configuration of the part with all defaults.
    """
    wanted = dict(islice(EXPECTED_TENSORS[kind](config), MAX_TENSORS + 1))
    if len(wanted) > MAX_TENSORS:
        yield f"{part}/config.json: it asks for over {MAX_TENSORS} tensors; download the file again"
        return
    found = {_loaded_name(part, name, weights): tensor for name, tensor in weights.tensors.items()}
    where = f"{part}/{weights.files[0].name}" if len(weights.files) == 1 else part
    if len(found) < len(weights.tensors):
        yield f"{where}: two tensors are loaded under one name; download the part {part} again"
        return
    missing = [name for name in wanted if name not in found]
    if missing:
        lacks = f"{len(missing)} of {len(wanted)} tensors are missing, such as {missing[0]}"
        yield f"{where}: {lacks}; download the file again, or the config.json that belongs to it"
        return
    for name, shape in wanted.items():
        if found[name].shape != shape:
            yield (
                f"{where}: the tensor {name} has the shape {list(found[name].shape)} and config.json asks for "
                f"{list(shape)}; download both files from one model"
            )
            return
        if found[name].dtype not in FLOATING_POINT:
            yield (
                f"{where}: the tensor {name} has elements of {found[name].dtype}; quantized weights are not served, "
                "download float32, float16 or bfloat16 ones"
            )
            return
    # Diffusers and transformers ignore tensors outside the network's modules. Inside one, the network differs.
    modules = {name.split(".")[0] for name in wanted}
    unused = [
        name for name in found if name not in wanted and name.split(".")[0] in modules and name not in _ADDITIONAL
    ]
    if unused:
        yield (
            f"{where}: {len(unused)} tensors have no place in the network that config.json describes, such as "
            f"{excerpt(unused[0], _SHOWN_CHARACTERS)}; download both files from one model"
        )


def _loaded_name(part: str, name: str, weights: Weights) -> str:
    """Return the name under which Diffusers or transformers looks for a tensor of a file."""
    if part.startswith("text_encoder"):
        return next((name.removeprefix(each) for each in _TEXT_PREFIXES if name.startswith(each)), name)
    if part == "vae" and len(weights.files) == 1 and ".attentions." in name:  # Diffusers renames none of shards
        module, _, kind = name.rpartition(".")
        block, _, projection = module.rpartition(".")
        return f"{block}.{_OLD_VAE_NAMES.get(projection, projection)}.{kind}"
    return name


def unet_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors of a UNet2DConditionModel, with SDXL's added conditions or with none."""
    channels = config["block_out_channels"]
    width = channels[0]
    time = config["time_embedding_dim"] or 4 * width
    yield from _convolution("conv_in", config["in_channels"], width, config["conv_in_kernel"])
    yield from _embedding("time_embedding", width, time)
    if config["time_cond_proj_dim"] is not None:
        yield "time_embedding.cond_proj.weight", (width, config["time_cond_proj_dim"])
    if config["addition_embed_type"] is not None:
        yield from _embedding("add_embedding", config["projection_class_embeddings_input_dim"], time)
    levels = _unet_levels(config)
    yield from _unet_encoder(levels, config)
    reverse = config["reverse_transformer_layers_per_block"]
    for level, kind in enumerate(config["up_block_types"]):
        mirrored = len(channels) - 1 - level
        block, at = f"up_blocks.{level}", levels[mirrored]
        if reverse is not None:
            at = replace(at, depth=reverse[level])
        yield from _unet_block(block, kind, _up_inputs(config, mirrored), at, config)
        if mirrored > 0:
            yield from _convolution(f"{block}.upsamplers.0.conv", at.width, at.width, 3)
    yield from _norm("conv_norm_out", width)
    yield from _convolution("conv_out", width, config["out_channels"], config["conv_out_kernel"])


def controlnet_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors of a ControlNetModel, or of a ControlNetUnionModel if the arguments are a union's.

    Args:
        config: The arguments that it is built from, with lists or tuples.
    """
    config = {name: _as_lists(value) for name, value in config.items()} | {"time_embedding_dim": None}
    config.setdefault("mid_block_type", "UNetMidBlock2DCrossAttn")  # a union has no other
    heads = config["num_attention_heads"] or config["attention_head_dim"]
    channels, embedding = config["block_out_channels"], config["conditioning_embedding_out_channels"]
    width, layers = channels[0], config["layers_per_block"]
    yield from _convolution("conv_in", config["in_channels"], width, 3)
    yield from _embedding("time_embedding", width, 4 * width)
    if config["addition_embed_type"] is not None:
        yield from _embedding("add_embedding", config["projection_class_embeddings_input_dim"], 4 * width)
    conditioning = "controlnet_cond_embedding"
    yield from _convolution(f"{conditioning}.conv_in", config["conditioning_channels"], embedding[0], 3)
    for number, (inputs, outputs) in enumerate(pairwise(embedding)):
        yield from _convolution(f"{conditioning}.blocks.{2 * number}", inputs, inputs, 3)
        yield from _convolution(f"{conditioning}.blocks.{2 * number + 1}", inputs, outputs, 3)
    yield from _convolution(f"{conditioning}.conv_out", embedding[-1], width, 3)
    yield from _unet_encoder(_unet_levels({**config, "attention_head_dim": heads}), config)
    # One for the input, each layer and each halving.
    points = [width, *(out for level, out in enumerate(channels) for _ in range(layers + (level < len(channels) - 1)))]
    for number, out in enumerate(points):
        yield from _point_convolution(f"controlnet_down_blocks.{number}", out, out)
    yield from _point_convolution("controlnet_mid_block", channels[-1], channels[-1])
    if "num_control_type" in config:
        yield from _union_tensors(config)


def _union_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors that a ControlNetUnionModel has besides those of a ControlNetModel."""
    modes, width = config["num_control_type"], config["num_trans_channel"]
    yield "task_embedding", (modes, width)
    for layer in range(config["num_trans_layer"]):
        block = f"transformer_layes.{layer}"  # spelt so in Diffusers
        yield f"{block}.attn.in_proj_weight", (3 * width, width)
        yield f"{block}.attn.in_proj_bias", (3 * width,)
        yield from linear_tensors(f"{block}.attn.out_proj", width, width)
        for norm in ("ln_1", "ln_2"):
            yield from _norm(f"{block}.{norm}", width)
        yield from linear_tensors(f"{block}.mlp.c_fc", width, 4 * width)
        yield from linear_tensors(f"{block}.mlp.c_proj", 4 * width, width)
    yield from linear_tensors("spatial_ch_projs", width, config["num_proj_channel"])
    yield from _embedding(
        "control_add_embedding", modes * config["addition_time_embed_dim"], 4 * config["block_out_channels"][0]
    )


def vae_tensors(config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors of an AutoencoderKL."""
    channels, latent = config["block_out_channels"], config["latent_channels"]
    first, last = channels[0], channels[-1]
    yield from _convolution("encoder.conv_in", config["in_channels"], first, 3)
    for level, kind in enumerate(config["down_block_types"]):
        block, out = f"encoder.down_blocks.{level}", channels[level]
        inputs = [channels[max(level - 1, 0)], *[out] * (config["layers_per_block"] - 1)]
        yield from _vae_block(block, kind, inputs, out)
        if level < len(channels) - 1:
            yield from _convolution(f"{block}.downsamplers.0.conv", out, out, 3)
    yield from _vae_ends("encoder", config, last, last, 2 * latent)
    yield from _convolution("decoder.conv_in", latent, last, 3)
    for level, kind in enumerate(config["up_block_types"]):
        mirrored = len(channels) - 1 - level
        block, out = f"decoder.up_blocks.{level}", channels[mirrored]
        inputs = [channels[min(mirrored + 1, len(channels) - 1)], *[out] * config["layers_per_block"]]
        yield from _vae_block(block, kind, inputs, out)
        if mirrored > 0:
            yield from _convolution(f"{block}.upsamplers.0.conv", out, out, 3)
    yield from _vae_ends("decoder", config, last, first, config["out_channels"])
    if config["use_quant_conv"]:
        yield from _convolution("quant_conv", 2 * latent, 2 * latent, 1)
    if config["use_post_quant_conv"]:
        yield from _convolution("post_quant_conv", latent, latent, 1)


def text_encoder_tensors(config: Mapping[str, Any], *, projects: bool) -> Tensors:
    """Yield the tensors of a CLIPTextModel, without the prefix `text_model.` that published files have.

    Args:
        config: Configuration of the text encoder.
        projects: Whether it is a CLIPTextModelWithProjection.
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    yield "embeddings.token_embedding.weight", (config["vocab_size"], width)
    yield "embeddings.position_embedding.weight", (config["max_position_embeddings"], width)
    for number in range(config["num_hidden_layers"]):
        layer = f"encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from linear_tensors(f"{layer}.self_attn.{name}", width, width)
        yield from _norm(f"{layer}.layer_norm1", width)
        yield from linear_tensors(f"{layer}.mlp.fc1", width, inner)
        yield from linear_tensors(f"{layer}.mlp.fc2", inner, width)
        yield from _norm(f"{layer}.layer_norm2", width)
    yield from _norm("final_layer_norm", width)
    if projects:
        yield "text_projection.weight", (config["projection_dim"], width)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The parameters of one UNet level, which its down block and its up block share."""

    width: int
    heads: int
    context: int
    """Width of the prompt embeddings."""
    attends_prompt_alone: bool
    """Whether the first attention of each transformer attends to the prompt as well."""
    depth: int | Sequence[int]
    """Transformers of each layer."""


def _unet_levels(config: Mapping[str, Any]) -> list[_Level]:
    names = ("block_out_channels", "attention_head_dim", "cross_attention_dim", "only_cross_attention")
    columns = [_by_level(config, name) for name in (*names, "transformer_layers_per_block")]
    return [
        _Level(width=width, heads=heads, context=context, attends_prompt_alone=alone, depth=depth)
        for width, heads, context, alone, depth in zip(*columns, strict=True)
    ]


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _by_level(config: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = config[name]
    return value if isinstance(value, list) else [value] * len(config["block_out_channels"])


def _up_inputs(config: Mapping[str, Any], mirrored: int) -> list[int]:
    """Return the input channels of each residual block of a level on the way up, including its skip connection."""
    channels, layers = config["block_out_channels"], _by_level(config, "layers_per_block")[mirrored] + 1
    width = channels[mirrored]
    below = channels[min(mirrored + 1, len(channels) - 1)]
    last_skip = channels[max(mirrored - 1, 0)]
    return [(below if layer == 0 else width) + (last_skip if layer == layers - 1 else width) for layer in range(layers)]


def _unet_encoder(levels: Sequence[_Level], config: Mapping[str, Any]) -> Tensors:
    """Yield the tensors of the blocks on the way down and of the middle block."""
    channels = config["block_out_channels"]
    for level, kind in enumerate(config["down_block_types"]):
        block, out = f"down_blocks.{level}", channels[level]
        inputs = [channels[max(level - 1, 0)], *[out] * (_by_level(config, "layers_per_block")[level] - 1)]
        yield from _unet_block(block, kind, inputs, levels[level], config)
        if level < len(channels) - 1:
            yield from _convolution(f"{block}.downsamplers.0.conv", out, out, 3)
    yield from _unet_middle(levels[-1], config)


def _unet_block(block: str, kind: str, inputs: Sequence[int], level: _Level, config: Mapping[str, Any]) -> Tensors:
    for layer, taken in enumerate(inputs):
        yield from _residual(f"{block}.resnets.{layer}", taken, level.width, config)
        if _CROSS_ATTENTION in kind:
            depth = level.depth if isinstance(level.depth, int) else level.depth[layer]
            yield from _transformer(f"{block}.attentions.{layer}", depth, level, config)


def _unet_middle(level: _Level, config: Mapping[str, Any]) -> Tensors:
    kind = config["mid_block_type"]
    if kind is None:
        return
    yield from _residual("mid_block.resnets.0", level.width, level.width, config)
    if _CROSS_ATTENTION in kind:
        depth = level.depth if isinstance(level.depth, int) else level.depth[0]
        yield from _transformer("mid_block.attentions.0", depth, replace(level, attends_prompt_alone=False), config)
        yield from _residual("mid_block.resnets.1", level.width, level.width, config)


def _transformer(name: str, depth: int, level: _Level, config: Mapping[str, Any]) -> Tensors:
    width = level.width
    inner = level.heads * (width // level.heads)
    project = linear_tensors if config["use_linear_projection"] else _point_convolution
    yield from _norm(f"{name}.norm", width)
    yield from project(f"{name}.proj_in", width, inner)
    for number in range(depth):
        block = f"{name}.transformer_blocks.{number}"
        for norm in ("norm1", "norm2", "norm3"):
            yield from _norm(f"{block}.{norm}", inner)
        yield from _attention(f"{block}.attn1", inner, level.context if level.attends_prompt_alone else inner)
        yield from _attention(f"{block}.attn2", inner, level.context)
        hidden = _FEED_FORWARD * inner
        yield from linear_tensors(f"{block}.ff.net.0.proj", inner, _GATED * hidden)
        yield from linear_tensors(f"{block}.ff.net.2", hidden, inner)
    yield from project(f"{name}.proj_out", inner, width)


def _attention(name: str, width: int, context: int) -> Tensors:
    yield f"{name}.to_q.weight", (width, width)
    yield f"{name}.to_k.weight", (width, context)
    yield f"{name}.to_v.weight", (width, context)
    yield from linear_tensors(f"{name}.to_out.0", width, width)


def _residual(name: str, inputs: int, outputs: int, config: Mapping[str, Any] | None = None) -> Tensors:
    """Yield the tensors of a residual block.

    Args:
        config: Configuration of the UNet; None for a VAE, whose blocks have no time embedding.
    """
    yield from _norm(f"{name}.norm1", inputs)
    yield from _convolution(f"{name}.conv1", inputs, outputs, 3)
    if config is not None:
        time = config["time_embedding_dim"] or 4 * config["block_out_channels"][0]
        scales = 2 if config["resnet_time_scale_shift"] == "scale_shift" else 1
        yield from linear_tensors(f"{name}.time_emb_proj", time, scales * outputs)
    yield from _norm(f"{name}.norm2", outputs)
    yield from _convolution(f"{name}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        yield from _point_convolution(f"{name}.conv_shortcut", inputs, outputs)


def _vae_block(block: str, kind: str, inputs: Sequence[int], width: int) -> Tensors:
    for layer, taken in enumerate(inputs):
        yield from _residual(f"{block}.resnets.{layer}", taken, width)
        if kind.startswith("Attn"):
            yield from _vae_attention(f"{block}.attentions.{layer}", width)


def _vae_ends(half: str, config: Mapping[str, Any], middle: int, width: int, outputs: int) -> Tensors:
    """Yield the tensors of the middle block and the last layers of a half."""
    for number in range(2):
        yield from _residual(f"{half}.mid_block.resnets.{number}", middle, middle)
    if config["mid_block_add_attention"]:
        yield from _vae_attention(f"{half}.mid_block.attentions.0", middle)
    yield from _norm(f"{half}.conv_norm_out", width)
    yield from _convolution(f"{half}.conv_out", width, outputs, 3)


def _vae_attention(name: str, width: int) -> Tensors:
    yield from _norm(f"{name}.group_norm", width)
    for projection in ("to_q", "to_k", "to_v", "to_out.0"):
        yield from linear_tensors(f"{name}.{projection}", width, width)


def _embedding(name: str, inputs: int, outputs: int) -> Tensors:
    yield from linear_tensors(f"{name}.linear_1", inputs, outputs)
    yield from linear_tensors(f"{name}.linear_2", outputs, outputs)


def _convolution(name: str, inputs: int, outputs: int, kernel: int) -> Tensors:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}.bias", (outputs,)


def _point_convolution(name: str, inputs: int, outputs: int) -> Tensors:
    yield from _convolution(name, inputs, outputs, 1)


def _norm(name: str, width: int) -> Tensors:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


EXPECTED_TENSORS: Mapping[str, Callable[[Mapping[str, Any]], Tensors]] = {
    "UNet2DConditionModel": unet_tensors,
    "SD3Transformer2DModel": sd3_tensors,
    "FluxTransformer2DModel": flux_tensors,
    "AutoencoderKL": vae_tensors,
    "CLIPTextModel": partial(text_encoder_tensors, projects=False),
    "CLIPTextModelWithProjection": partial(text_encoder_tensors, projects=True),
    "T5EncoderModel": t5_tensors,
    "ZImageTransformer2DModel": z_image_tensors,
    "Qwen3Model": qwen3_tensors,
}
"""For each class, a function that yields its tensors from its valid configuration with all defaults."""
