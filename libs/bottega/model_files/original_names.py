"""The names that a network's tensors have in single files, by their names in Diffusers and transformers. No torch.

Diffusers' converters go the other way (diffusers.loaders.single_file_utils). With these names a file can be checked
without running them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Shape = tuple[int, ...]

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_EMBEDDING = {"linear_1": "0", "linear_2": "2"}
_VAE_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v"}
_CLIP = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
_CLIP_ENDS = {
    "embeddings.token_embedding.weight": "token_embedding.weight",
    "embeddings.position_embedding.weight": "positional_embedding",
    "text_projection.weight": "text_projection",
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def unet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a tensor of a UNet or a ControlNet.

    Args:
        config: Its configuration, all of whose levels have as many layers.
    """
    layers = config["layers_per_block"]
    match name.split("."):
        case ["conv_in", end]:
            return f"input_blocks.0.0.{end}"
        case ["conv_norm_out", end]:
            return f"out.0.{end}"
        case ["conv_out", end]:
            return f"out.2.{end}"
        case ["time_embedding", layer, end]:
            return f"time_embed.{_EMBEDDING.get(layer, layer)}.{end}"
        case ["add_embedding", layer, end]:
            return f"label_emb.0.{_EMBEDDING[layer]}.{end}"
        case ["mid_block", "attentions", _, *rest]:
            return f"middle_block.1.{'.'.join(rest)}"
        case ["mid_block", _, number, *rest]:
            return f"middle_block.{2 * int(number)}.{_resnet(rest)}"
        case ["down_blocks", level, "downsamplers", _, _, end]:
            return f"input_blocks.{(int(level) + 1) * (layers + 1)}.0.op.{end}"
        case ["down_blocks", level, kind, number, *rest]:
            return f"input_blocks.{int(level) * (layers + 1) + int(number) + 1}.{_layer(kind, rest)}"
        case ["up_blocks", level, "upsamplers", _, _, end]:
            place = 2 if config["up_block_types"][int(level)].startswith("CrossAttn") else 1
            return f"output_blocks.{int(level) * (layers + 1) + layers}.{place}.conv.{end}"
        case ["up_blocks", level, kind, number, *rest]:
            return f"output_blocks.{int(level) * (layers + 1) + int(number)}.{_layer(kind, rest)}"
    return name


def controlnet_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a ControlNet's tensor."""
    match name.split("."):
        case ["controlnet_cond_embedding", "conv_in", end]:
            return f"input_hint_block.0.{end}"
        case ["controlnet_cond_embedding", "blocks", number, end]:
            return f"input_hint_block.{2 * (int(number) + 1)}.{end}"
        case ["controlnet_cond_embedding", _, end]:
            return f"input_hint_block.{4 * len(config['conditioning_embedding_out_channels']) - 2}.{end}"
        case ["controlnet_down_blocks", number, end]:
            return f"zero_convs.{number}.0.{end}"
        case ["controlnet_mid_block", end]:
            return f"middle_block_out.0.{end}"
    return unet_name(name, config)


def vae_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a VAE's tensor."""
    last = len(config["block_out_channels"]) - 1
    match name.split("."):
        case [half, "mid_block", "resnets", number, *rest]:
            return f"{half}.mid.block_{int(number) + 1}.{_shortcut(rest)}"
        case [half, "mid_block", _, _, "to_out", _, end]:
            return f"{half}.mid.attn_1.proj_out.{end}"
        case [half, "mid_block", _, _, layer, end]:
            return f"{half}.mid.attn_1.{_VAE_ATTENTION[layer]}.{end}"
        case [half, "down_blocks", level, "resnets", number, *rest]:
            return f"{half}.down.{level}.block.{number}.{_shortcut(rest)}"
        case [half, "down_blocks", level, _, _, *rest]:
            return f"{half}.down.{level}.downsample.{'.'.join(rest)}"
        case [half, "up_blocks", level, "resnets", number, *rest]:
            return f"{half}.up.{last - int(level)}.block.{number}.{_shortcut(rest)}"
        case [half, "up_blocks", level, _, _, *rest]:
            return f"{half}.up.{last - int(level)}.upsample.{'.'.join(rest)}"
        case [half, "conv_norm_out", end]:
            return f"{half}.norm_out.{end}"
    return name


def open_clip_name(name: str, config: Mapping[str, Any]) -> str:
    """Return the original name of a tensor of one of OpenCLIP's text encoders."""
    if name in _CLIP_ENDS:
        return _CLIP_ENDS[name]
    match name.split("."):
        case ["final_layer_norm", end]:
            return f"ln_final.{end}"
        case ["encoder", "layers", number, "self_attn", projection, end]:
            # Three projections are in one tensor.
            inner = f"in_proj_{end}" if projection in _PROJECTIONS else f"{projection}.{end}"
            return f"transformer.resblocks.{number}.attn.{inner}"
        case ["encoder", "layers", number, *inner, end]:
            return f"transformer.resblocks.{number}.{_CLIP['.'.join(inner)]}.{end}"
    return name


def open_clip_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of a tensor under its original name, which `open_clip_name` gives."""
    if ".attn.in_proj_" in name:
        return (3 * shape[0], *shape[1:])
    return shape[::-1] if name == "text_projection" else shape


def _resnet(rest: Sequence[str]) -> str:
    layer, end = rest
    return f"{_RESNET[layer]}.{end}"


def _layer(kind: str, rest: Sequence[str]) -> str:
    return f"0.{_resnet(rest)}" if kind == "resnets" else f"1.{'.'.join(rest)}"


def _shortcut(rest: Sequence[str]) -> str:
    layer, end = rest
    return f"{'nin_shortcut' if layer == 'conv_shortcut' else layer}.{end}"


OriginalName = Callable[[str, Mapping[str, Any]], str]
