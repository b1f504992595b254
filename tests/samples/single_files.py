"""Tiny models in one file, with random weights, under the tensor names of Stable Diffusion's first authors.

The names are written out here, and not made by inverting a converter, so that converters can be tested with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.samples.wrong_folders import write_zeros

Named = Iterator[tuple[str, tuple[int, ...]]]

VOCABULARY = 49_408
_POSITIONS = 77
_T5 = "text_encoders.t5xxl.transformer."
_HEAD = 128  # Of Flux.1, whose rotary positions are for this width.
_LATENT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    widths: tuple[int, ...] = (32, 64)
    depths: tuple[int, ...] = (1, 1)
    """Transformer blocks of each level; 0 for a level without any."""
    middle_depth: int = 1
    layers: int = 1
    in_channels: int = 4
    linear: bool = True
    """Whether transformers project with linear layers."""
    context: int = 64
    pooled: int = 0
    """Width of SDXL's pooled embeddings; 0 without added conditions."""
    vae_widths: tuple[int, ...] = (32, 64)
    vae_layers: int = 1
    clip: tuple[int, int] = (64, 2)
    """Width and layers of OpenAI's text encoder."""
    open_clip: tuple[int, int] = (64, 2)
    """Width and layers of OpenCLIP's text encoder."""

    clip_g: tuple[int, int] = (128, 2)
    """Width and layers of the second text encoder of Stable Diffusion 3."""
    t5: tuple[int, int, int, int] = (64, 2, 2, 40)
    """Width, layers, heads and vocabulary of the T5 of Flux.1."""
    singles: int = 2
    """Blocks of its transformer in which text and picture share all weights."""
    out_channels: int = 64
    """Channels of its predictions; it reads `in_channels`."""
    guided: bool = True
    """Whether it embeds the guidance scale."""
    dual: tuple[int, ...] = ()
    """Blocks of its transformer with a second attention. If there are any, all blocks norm queries and keys."""
    places: int = 64
    """Places of its transformer on a side."""

    @property
    def label_width(self) -> int:
        """Inputs of the embedding of SDXL's added conditions."""
        return self.pooled + 6 * 256


SHAPES = {
    "sd15": Shape(depths=(1, 0), linear=False, context=64),
    "sd21": Shape(depths=(1, 0), context=64),
    # Diffusers tells the two text encoders apart by their widths.
    "sdxl": Shape(depths=(0, 2), middle_depth=2, context=64 + 128, pooled=128, open_clip=(128, 2)),
    "sd3": Shape(widths=(64,), layers=2, in_channels=16, context=256, dual=(0,)),
    "flux": Shape(widths=(128,), layers=2, in_channels=64),
}
_STABLE_DIFFUSION = Shape(
    widths=(320, 640, 1280, 1280), depths=(1, 1, 1, 0), layers=2, vae_widths=(128, 256, 512, 512), vae_layers=2
)
TRUE_SHAPES = {
    "sd15": replace(_STABLE_DIFFUSION, linear=False, context=768, clip=(768, 12)),
    "sd21": replace(_STABLE_DIFFUSION, context=1024, open_clip=(1024, 24)),
    "sdxl": replace(
        _STABLE_DIFFUSION,
        widths=(320, 640, 1280),
        depths=(0, 2, 10),
        middle_depth=10,
        context=2048,
        pooled=1280,
        clip=(768, 12),
        open_clip=(1280, 32),
    ),
    "sd3": Shape(
        widths=(1536,),
        layers=24,
        in_channels=16,
        context=4096,
        vae_widths=(128, 256, 512, 512),
        vae_layers=2,
        clip=(768, 12),
        clip_g=(1280, 32),
        dual=tuple(range(13)),
        places=384,
    ),
    "flux": Shape(
        widths=(3072,),
        layers=19,
        singles=38,
        in_channels=64,
        vae_widths=(128, 256, 512, 512),
        vae_layers=2,
        clip=(768, 12),
        t5=(4096, 24, 64, 32128),
    ),
}
"""The sizes of published models."""


def write_single_file(
    path: Path,
    family: str,
    *,
    shape: Shape | None = None,
    dtype: torch.dtype = torch.float16,
    extra: Sequence[str] = (),
    seed: int = 0,
) -> Path:
    """Write a whole model and return its file.

    Args:
        extra: Names of empty tensors, such as `v_pred`.
    """
    tensors = random_tensors(_model_tensors(family, shape or SHAPES[family]), dtype=dtype, seed=seed)
    positions = "embeddings.position_ids"
    tensors |= {
        name.replace("embeddings.token_embedding.weight", positions): torch.arange(_POSITIONS)[None]
        for name in list(tensors)
        if name.endswith("text_model.embeddings.token_embedding.weight")
    }
    if family == "flux":  # Programs save T5's embedding twice.
        tensors[f"{_T5}encoder.embed_tokens.weight"] = tensors[f"{_T5}shared.weight"].clone()
    tensors |= dict.fromkeys(extra, torch.zeros(0))
    # Training keeps averages beside the weights, which nothing draws with.
    tensors["model_ema.decay"] = torch.ones(())
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def write_zeros_file(path: Path, family: str, shape: Shape) -> Path:
    """Write a whole model of zeros, which takes no room on most file systems, and return its file."""
    write_zeros(path, {name: ("F16", extents) for name, extents in _model_tensors(family, shape)})
    return path


def write_vae_file(
    path: Path,
    *,
    prefix: str = "",
    dtype: torch.dtype = torch.float16,
    extra: Mapping[str, Tensor] = MappingProxyType({}),
    latent: int = _LATENT,
    seed: int = 0,
) -> Path:
    """Write a VAE and return its file."""
    named = [*_below(prefix, vae_tensors(latent=latent))]
    save_file(random_tensors(named, dtype=dtype, seed=seed) | dict(extra), path)
    return path


def write_controlnet_file(path: Path, family: str, *, prefix: str = "control_model.") -> Path:
    """Write a ControlNet and return its file."""
    save_file(random_tensors([*_below(prefix, controlnet_tensors(SHAPES[family]))], dtype=torch.float16), path)
    return path


def random_tensors(
    named: Sequence[tuple[str, tuple[int, ...]]], *, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    """Return tensors of these names and shapes."""
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(shape, generator=generator) / 8).to(dtype) for name, shape in named}


def unet_tensors(shape: Shape) -> Named:
    """Yield the names and shapes of a UNet."""
    yield from _encoder(shape)
    skips = _skips(shape)
    width, number = shape.widths[-1], 0
    for level in reversed(range(len(shape.widths))):
        out = shape.widths[level]
        for layer in range(shape.layers + 1):
            block = f"output_blocks.{number}"
            yield from _residual(f"{block}.0", width + skips.pop(), out, 4 * shape.widths[0])
            if shape.depths[level]:
                yield from _transformer(f"{block}.1", out, shape.depths[level], shape)
            if level and layer == shape.layers:
                yield from _conv(f"{block}.{2 if shape.depths[level] else 1}.conv", out, out, 3)
            width, number = out, number + 1
    yield from _norm("out.0", shape.widths[0])
    yield from _conv("out.2", shape.widths[0], _LATENT, 3)


def controlnet_tensors(shape: Shape) -> Named:
    """Yield the names and shapes of a ControlNet."""
    yield from _encoder(shape)
    hints = (3, 16, 16, 32, 32, 96, 96, 256, shape.widths[0])
    for number, (inputs, outputs) in enumerate(pairwise(hints)):
        yield from _conv(f"input_hint_block.{2 * number}", inputs, outputs, 3)
    for number, width in enumerate(_skips(shape)):
        yield from _conv(f"zero_convs.{number}.0", width, width, 1)
    yield from _conv("middle_block_out.0", shape.widths[-1], shape.widths[-1], 1)


def vae_tensors(widths: Sequence[int] = (32, 64), layers: int = 1, *, latent: int = _LATENT) -> Named:
    """Yield the names and shapes of a VAE. One of more latent channels has no convolutions around its latents."""
    last = widths[-1]
    yield from _conv("encoder.conv_in", 3, widths[0], 3)
    width = widths[0]
    for level, out in enumerate(widths):
        for layer in range(layers):
            yield from _vae_residual(f"encoder.down.{level}.block.{layer}", width, out)
            width = out
        if level < len(widths) - 1:
            yield from _conv(f"encoder.down.{level}.downsample.conv", out, out, 3)
    yield from _vae_ends("encoder", last, last, 2 * latent)
    yield from _conv("decoder.conv_in", latent, last, 3)
    for level in reversed(range(len(widths))):
        for layer in range(layers + 1):
            yield from _vae_residual(f"decoder.up.{level}.block.{layer}", width, widths[level])
            width = widths[level]
        if level:
            yield from _conv(f"decoder.up.{level}.upsample.conv", width, width, 3)
    yield from _vae_ends("decoder", last, widths[0], 3)
    if latent == _LATENT:
        yield from _conv("quant_conv", 2 * _LATENT, 2 * _LATENT, 1)
        yield from _conv("post_quant_conv", _LATENT, _LATENT, 1)


def transformer_tensors(shape: Shape) -> Named:
    """Yield the names and shapes of a transformer of Stable Diffusion 3."""
    width = shape.widths[0]
    yield "pos_embed", (1, shape.places**2, width)
    yield from _conv("x_embedder.proj", shape.in_channels, width, 2)
    for name, inputs in (("t", 256), ("y", shape.clip[0] + shape.clip_g[0])):
        yield from _linear(f"{name}_embedder.mlp.0", inputs, width)
        yield from _linear(f"{name}_embedder.mlp.2", width, width)
    yield from _linear("context_embedder", shape.context, width)
    for number in range(shape.layers):
        is_last, is_dual = number == shape.layers - 1, number in shape.dual
        for side in ("x_block", "context_block"):
            block, leaves = f"joint_blocks.{number}.{side}", is_last and side == "context_block"
            parts = 2 if leaves else 9 if is_dual and side == "x_block" else 6
            yield from _linear(f"{block}.adaLN_modulation.1", width, parts * width)
            for attention in ("attn", "attn2") if is_dual and side == "x_block" else ("attn",):
                yield from _linear(f"{block}.{attention}.qkv", width, 3 * width)
                for norm in ("ln_q", "ln_k") if shape.dual else ():
                    yield f"{block}.{attention}.{norm}.weight", (64,)
                if not leaves:
                    yield from _linear(f"{block}.{attention}.proj", width, width)
            if not leaves:
                yield from _linear(f"{block}.mlp.fc1", width, 4 * width)
                yield from _linear(f"{block}.mlp.fc2", 4 * width, width)
    yield from _linear("final_layer.adaLN_modulation.1", width, 2 * width)
    yield from _linear("final_layer.linear", width, 4 * shape.in_channels)


def flux_tensors(shape: Shape) -> Named:
    """Yield the names and shapes of a transformer of Flux.1."""
    width = shape.widths[0]
    yield from _linear("img_in", shape.in_channels, width)
    yield from _linear("txt_in", shape.t5[0], width)
    for name, inputs in (("time", 256), ("vector", shape.clip[0]), *((("guidance", 256),) if shape.guided else ())):
        yield from _linear(f"{name}_in.in_layer", inputs, width)
        yield from _linear(f"{name}_in.out_layer", width, width)
    for number in range(shape.layers):
        for side in ("img", "txt"):
            block = f"double_blocks.{number}.{side}"
            yield from _linear(f"{block}_mod.lin", width, 6 * width)
            yield from _linear(f"{block}_attn.qkv", width, 3 * width)
            yield from _linear(f"{block}_attn.proj", width, width)
            for norm in ("query_norm", "key_norm"):
                yield f"{block}_attn.norm.{norm}.scale", (_HEAD,)
            yield from _linear(f"{block}_mlp.0", width, 4 * width)
            yield from _linear(f"{block}_mlp.2", 4 * width, width)
    for number in range(shape.singles):
        block = f"single_blocks.{number}"
        yield from _linear(f"{block}.modulation.lin", width, 3 * width)
        yield from _linear(f"{block}.linear1", width, 7 * width)
        yield from _linear(f"{block}.linear2", 5 * width, width)
        for norm in ("query_norm", "key_norm"):
            yield f"{block}.norm.{norm}.scale", (_HEAD,)
    yield from _linear("final_layer.adaLN_modulation.1", width, 2 * width)
    yield from _linear("final_layer.linear", width, shape.out_channels)


def _model_tensors(family: str, shape: Shape) -> list[tuple[str, tuple[int, ...]]]:
    denoiser = {"sd3": transformer_tensors, "flux": flux_tensors}.get(family, unet_tensors)
    latent = _LATENT if denoiser is unet_tensors else 16
    return [
        *_below("model.diffusion_model.", denoiser(shape)),
        *_below("first_stage_model.", vae_tensors(shape.vae_widths, shape.vae_layers, latent=latent)),
        *_text_tensors(family, shape),
    ]


def _text_tensors(family: str, shape: Shape) -> Named:
    if family == "sd15":
        yield from _below("cond_stage_model.transformer.", _clip(*shape.clip))
    elif family == "sd21":
        yield from _below("cond_stage_model.model.", _open_clip(*shape.open_clip))
    elif family == "sd3":
        yield from _below("text_encoders.clip_l.transformer.", _clip(*shape.clip))
        yield from _below("text_encoders.clip_g.transformer.", _clip(*shape.clip_g))
        for part, width in (("clip_l", shape.clip[0]), ("clip_g", shape.clip_g[0])):
            yield f"text_encoders.{part}.transformer.text_projection.weight", (width, width)
            yield f"text_encoders.{part}.logit_scale", ()
        # Of T5, which is left out.
        yield f"{_T5}shared.weight", (8, shape.context)
    elif family == "flux":
        yield from _below("text_encoders.clip_l.transformer.", _clip(*shape.clip))
        yield from _below(_T5, _t5(*shape.t5))
    else:
        yield from _below("conditioner.embedders.0.transformer.", _clip(*shape.clip))
        yield from _below("conditioner.embedders.1.model.", _open_clip(*shape.open_clip))


def _clip(width: int, layers: int) -> Named:
    yield "text_model.embeddings.token_embedding.weight", (VOCABULARY, width)
    yield "text_model.embeddings.position_embedding.weight", (_POSITIONS, width)
    for number in range(layers):
        layer = f"text_model.encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", width, width)
        yield from _norm(f"{layer}.layer_norm1", width)
        yield from _linear(f"{layer}.mlp.fc1", width, 4 * width)
        yield from _linear(f"{layer}.mlp.fc2", 4 * width, width)
        yield from _norm(f"{layer}.layer_norm2", width)
    yield from _norm("text_model.final_layer_norm", width)


def _t5(width: int, layers: int, heads: int, vocabulary: int) -> Named:
    yield "shared.weight", (vocabulary, width)
    inner, hidden = 64 * heads, 5 * width // 2
    for number in range(layers):
        attention, network = (f"encoder.block.{number}.layer.{layer}" for layer in (0, 1))
        for name in ("q", "k", "v"):
            yield f"{attention}.SelfAttention.{name}.weight", (inner, width)
        yield f"{attention}.SelfAttention.o.weight", (width, inner)
        if number == 0:
            yield f"{attention}.SelfAttention.relative_attention_bias.weight", (32, heads)
        for name in ("wi_0", "wi_1"):
            yield f"{network}.DenseReluDense.{name}.weight", (hidden, width)
        yield f"{network}.DenseReluDense.wo.weight", (width, hidden)
        for block in (attention, network):
            yield f"{block}.layer_norm.weight", (width,)
    yield "encoder.final_layer_norm.weight", (width,)


def _open_clip(width: int, layers: int) -> Named:
    yield "positional_embedding", (_POSITIONS, width)
    yield "token_embedding.weight", (VOCABULARY, width)
    yield "text_projection", (width, width)
    yield "logit_scale", (1,)
    for number in range(layers):
        layer = f"transformer.resblocks.{number}"
        yield from _norm(f"{layer}.ln_1", width)
        yield f"{layer}.attn.in_proj_weight", (3 * width, width)
        yield f"{layer}.attn.in_proj_bias", (3 * width,)
        yield from _linear(f"{layer}.attn.out_proj", width, width)
        yield from _norm(f"{layer}.ln_2", width)
        yield from _linear(f"{layer}.mlp.c_fc", width, 4 * width)
        yield from _linear(f"{layer}.mlp.c_proj", 4 * width, width)
    yield from _norm("ln_final", width)


def _encoder(shape: Shape) -> Named:
    first, time = shape.widths[0], 4 * shape.widths[0]
    yield from _linear("time_embed.0", first, time)
    yield from _linear("time_embed.2", time, time)
    if shape.pooled:
        yield from _linear("label_emb.0.0", shape.label_width, time)
        yield from _linear("label_emb.0.2", time, time)
    yield from _conv("input_blocks.0.0", shape.in_channels, first, 3)
    width, number = first, 1
    for level, out in enumerate(shape.widths):
        for _ in range(shape.layers):
            yield from _residual(f"input_blocks.{number}.0", width, out, time)
            if shape.depths[level]:
                yield from _transformer(f"input_blocks.{number}.1", out, shape.depths[level], shape)
            width, number = out, number + 1
        if level < len(shape.widths) - 1:
            yield from _conv(f"input_blocks.{number}.0.op", out, out, 3)
            number += 1
    yield from _residual("middle_block.0", width, width, time)
    yield from _transformer("middle_block.1", width, shape.middle_depth, shape)
    yield from _residual("middle_block.2", width, width, time)


def _skips(shape: Shape) -> list[int]:
    """Return the channels behind each input block."""
    skips = [shape.widths[0]]
    for level, width in enumerate(shape.widths):
        skips += [width] * (shape.layers + (level < len(shape.widths) - 1))
    return skips


def _residual(name: str, inputs: int, outputs: int, time: int) -> Named:
    yield from _norm(f"{name}.in_layers.0", inputs)
    yield from _conv(f"{name}.in_layers.2", inputs, outputs, 3)
    yield from _linear(f"{name}.emb_layers.1", time, outputs)
    yield from _norm(f"{name}.out_layers.0", outputs)
    yield from _conv(f"{name}.out_layers.3", outputs, outputs, 3)
    if inputs != outputs:
        yield from _conv(f"{name}.skip_connection", inputs, outputs, 1)


def _transformer(name: str, width: int, depth: int, shape: Shape) -> Named:
    yield from _norm(f"{name}.norm", width)
    for projection in ("proj_in", "proj_out"):
        yield from (
            _linear(f"{name}.{projection}", width, width)
            if shape.linear
            else _conv(f"{name}.{projection}", width, width, 1)
        )
    for number in range(depth):
        block = f"{name}.transformer_blocks.{number}"
        for attention, context in (("attn1", width), ("attn2", shape.context)):
            yield f"{block}.{attention}.to_q.weight", (width, width)
            yield f"{block}.{attention}.to_k.weight", (width, context)
            yield f"{block}.{attention}.to_v.weight", (width, context)
            yield from _linear(f"{block}.{attention}.to_out.0", width, width)
        yield from _linear(f"{block}.ff.net.0.proj", width, 8 * width)
        yield from _linear(f"{block}.ff.net.2", 4 * width, width)
        for norm in ("norm1", "norm2", "norm3"):
            yield from _norm(f"{block}.{norm}", width)


def _vae_residual(name: str, inputs: int, outputs: int) -> Named:
    yield from _norm(f"{name}.norm1", inputs)
    yield from _conv(f"{name}.conv1", inputs, outputs, 3)
    yield from _norm(f"{name}.norm2", outputs)
    yield from _conv(f"{name}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        yield from _conv(f"{name}.nin_shortcut", inputs, outputs, 1)


def _vae_ends(half: str, middle: int, width: int, outputs: int) -> Named:
    yield from _vae_residual(f"{half}.mid.block_1", middle, middle)
    yield from _norm(f"{half}.mid.attn_1.norm", middle)
    for name in ("q", "k", "v", "proj_out"):
        yield from _conv(f"{half}.mid.attn_1.{name}", middle, middle, 1)
    yield from _vae_residual(f"{half}.mid.block_2", middle, middle)
    yield from _norm(f"{half}.norm_out", width)
    yield from _conv(f"{half}.conv_out", width, outputs, 3)


def _below(prefix: str, named: Named) -> Named:
    return ((prefix + name, shape) for name, shape in named)


def _conv(name: str, inputs: int, outputs: int, kernel: int) -> Named:
    yield f"{name}.weight", (outputs, inputs, kernel, kernel)
    yield f"{name}.bias", (outputs,)


def _linear(name: str, inputs: int, outputs: int) -> Named:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def _norm(name: str, width: int) -> Named:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)
