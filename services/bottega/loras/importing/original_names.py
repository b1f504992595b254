"""Maps names of modules in the code of a model's authors, which LoRA files use, to the modules' paths in Diffusers.

kohya's trainer uses the authors' names for SDXL's UNet and the transformers of Stable Diffusion 3 and Flux.1, and
Diffusers' names for other UNets. Positions in the UNet follow from its configuration. A module of the authors'
transformer may be several modules in Diffusers, such as the projections of queries, keys and values.

Sources: sgm's OpenAIModel (input_blocks, middle_block, output_blocks) and Diffusers' UNet2DConditionModel; MMDiTX of
Stability's code for Stable Diffusion 3, and Diffusers' conversion of its checkpoints; Flux of Black Forest Labs' code,
and Diffusers' lora_conversion_utils.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Names of a resnet's modules in Stability's code, by their names in Diffusers.
_RESNET = {
    "norm1": "in_layers_0",
    "conv1": "in_layers_2",
    "time_emb_proj": "emb_layers_1",
    "norm2": "out_layers_0",
    "conv2": "out_layers_3",
    "conv_shortcut": "skip_connection",
}
_OUTSIDE = {
    "conv_in": "input_blocks_0_0",
    "time_embedding.linear_1": "time_embed_0",
    "time_embedding.linear_2": "time_embed_2",
    "add_embedding.linear_1": "label_emb_0_0",
    "add_embedding.linear_2": "label_emb_0_2",
    "conv_norm_out": "out_0",
    "conv_out": "out_2",
}
# Modules of one transformer block, whose names are equal in Stability's code and in Diffusers.
_BLOCK = (
    *(f"attn{place}.{name}" for place in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
    *(f"norm{place}" for place in (1, 2, 3)),
)
_CROSS = "CrossAttn"
# Modules outside of the blocks of Stable Diffusion 3's transformer, by their names in Stability's code.
_SD3_OUTSIDE = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "context_embedder": "context_embedder",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
_QKV, _ADDED_QKV = ("attn.to_q", "attn.to_k", "attn.to_v"), ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")
# Modules of a block of Stable Diffusion 3's transformer, by their names in Stability's code.
_SD3_BLOCK = {
    "x_block.attn.qkv": _QKV,
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.attn.qkv": _ADDED_QKV,
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
    "context_block.adaLN_modulation.1": ("norm1_context.linear",),
}
# Modules outside of the blocks of Flux.1's transformer, by their names in Black Forest Labs' code.
_FLUX_OUTSIDE = {
    "img_in": "x_embedder",
    "txt_in": "context_embedder",
    "time_in.in_layer": "time_text_embed.timestep_embedder.linear_1",
    "time_in.out_layer": "time_text_embed.timestep_embedder.linear_2",
    "vector_in.in_layer": "time_text_embed.text_embedder.linear_1",
    "vector_in.out_layer": "time_text_embed.text_embedder.linear_2",
    "guidance_in.in_layer": "time_text_embed.guidance_embedder.linear_1",
    "guidance_in.out_layer": "time_text_embed.guidance_embedder.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer.adaLN_modulation.1": "norm_out.linear",
}
# Modules of a joint block and of a single block of Flux.1's transformer. The last names of each are those of XLabs,
# without "processor".
_FLUX_JOINT = {
    "img_attn.qkv": _QKV,
    "img_attn.proj": ("attn.to_out.0",),
    "img_mlp.0": ("ff.net.0.proj",),
    "img_mlp.2": ("ff.net.2",),
    "img_mod.lin": ("norm1.linear",),
    "txt_attn.qkv": _ADDED_QKV,
    "txt_attn.proj": ("attn.to_add_out",),
    "txt_mlp.0": ("ff_context.net.0.proj",),
    "txt_mlp.2": ("ff_context.net.2",),
    "txt_mod.lin": ("norm1_context.linear",),
    "qkv_lora1": _QKV,
    "proj_lora1": ("attn.to_out.0",),
    "qkv_lora2": _ADDED_QKV,
    "proj_lora2": ("attn.to_add_out",),
}
_FLUX_SINGLE = {
    "linear1": (*_QKV, "proj_mlp"),
    "linear2": ("proj_out",),
    "modulation.lin": ("norm.linear",),
    "qkv": _QKV,
    "proj": ("proj_out",),
}


# Modules of Z-Image's transformer whose names differ between its authors' code and Diffusers.
_Z_IMAGE_OUTSIDE = {
    "x_embedder": "all_x_embedder.2-1",
    "final_layer.linear": "all_final_layer.2-1.linear",
    "final_layer.adaLN_modulation.1": "all_final_layer.2-1.adaLN_modulation.1",
}
_Z_IMAGE_BLOCK = {
    "attention.qkv": tuple(f"attention.to_{name}" for name in "qkv"),
    "attention.out": ("attention.to_out.0",),
}


def sgm_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return paths in Diffusers' UNet, by the names in Stability's code with underscores in place of dots.

    Some of the modules may not exist. Raises KeyError, TypeError or ValueError for an invalid configuration.

    Args:
        config: Diffusers' configuration of the UNet.
    """
    names = {name: path for path, name in _OUTSIDE.items()}
    for theirs, ours, is_resnet, depth in _places(config):
        names.update(_resnet(theirs, ours) if is_resnet else _transformer(theirs, ours, depth))
    names.update(_samplers(config))
    return names


def sd3_names(blocks: int) -> dict[str, Sequence[str]]:
    """Return paths in Diffusers' transformer of Stable Diffusion 3, by the names in Stability's code.

    Some of the modules may not exist.

    Args:
        blocks: Number of joint blocks.
    """
    return _block_names(_SD3_OUTSIDE, ("joint_blocks", "transformer_blocks", blocks, _SD3_BLOCK))


def flux_names(joint: int, single: int) -> dict[str, Sequence[str]]:
    """Return paths in Diffusers' transformer of Flux.1, by the names in Black Forest Labs' code and in XLabs' files.

    Some of the modules may not exist.

    Args:
        joint: Number of joint blocks.
        single: Number of single blocks.
    """
    return _block_names(
        _FLUX_OUTSIDE,
        ("double_blocks", "transformer_blocks", joint, _FLUX_JOINT),
        ("single_blocks", "single_transformer_blocks", single, _FLUX_SINGLE),
    )


def z_image_names(blocks: int, refiners: int) -> dict[str, Sequence[str]]:
    """Return paths in Diffusers' transformer of Z-Image, by the names in its authors' code, where these differ.

    Some of the modules may not exist.

    Args:
        blocks: Number of blocks that compute all tokens.
        refiners: Number of blocks that refine pictures; as many refine prompts.
    """
    lengths = {"layers": blocks, "noise_refiner": refiners, "context_refiner": refiners}
    lists = ((name, name, length, _Z_IMAGE_BLOCK) for name, length in lengths.items())
    return _block_names(_Z_IMAGE_OUTSIDE, *lists)


def _block_names(
    outside: Mapping[str, str], *lists: tuple[str, str, int, Mapping[str, Sequence[str]]]
) -> dict[str, Sequence[str]]:
    """Return paths in Diffusers, by the names in the authors' code.

    Args:
        outside: Modules outside of blocks.
        lists: For each list of blocks: its names in the authors' code and in Diffusers, its length, and a block's
            modules.
    """
    names: dict[str, Sequence[str]] = {name: (path,) for name, path in outside.items()}
    for theirs, ours, length, block in lists:
        for number in range(length):
            for name, paths in block.items():
                names[f"{theirs}.{number}.{name}"] = [f"{ours}.{number}.{path}" for path in paths]
    return names


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, int]]:
    """Yield each resnet and transformer: its two names, whether it is a resnet, and the depth of a transformer."""
    levels = len(config["block_out_channels"])
    layers = int(config["layers_per_block"])
    down = _by_level(config.get("transformer_layers_per_block", 1), levels)
    up = config.get("reverse_transformer_layers_per_block") or down[::-1]
    for level, kind in enumerate(config["down_block_types"]):
        for layer in range(layers):
            at = f"input_blocks_{1 + level * (layers + 1) + layer}"
            yield f"{at}_0", f"down_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"down_blocks.{level}.attentions.{layer}", False, _depth(down[level], layer)
    yield "middle_block_0", "mid_block.resnets.0", True, 0
    yield "middle_block_1", "mid_block.attentions.0", False, _depth(down[-1], 0)
    yield "middle_block_2", "mid_block.resnets.1", True, 0
    for level, kind in enumerate(config["up_block_types"]):
        for layer in range(layers + 1):
            at = f"output_blocks_{level * (layers + 1) + layer}"
            yield f"{at}_0", f"up_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"up_blocks.{level}.attentions.{layer}", False, _depth(up[level], layer)


def _samplers(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    levels = len(config["block_out_channels"])
    layers = int(config["layers_per_block"])
    for level in range(levels - 1):
        yield f"input_blocks_{(level + 1) * (layers + 1)}_0_op", f"down_blocks.{level}.downsamplers.0.conv"
        place = 2 if _CROSS in config["up_block_types"][level] else 1
        yield f"output_blocks_{level * (layers + 1) + layers}_{place}_conv", f"up_blocks.{level}.upsamplers.0.conv"


def _resnet(theirs: str, ours: str) -> dict[str, str]:
    return {f"{theirs}_{name}": f"{ours}.{path}" for path, name in _RESNET.items()}


def _transformer(theirs: str, ours: str, depth: int) -> dict[str, str]:
    paths = [
        "norm",
        "proj_in",
        "proj_out",
        *(f"transformer_blocks.{n}.{path}" for n in range(depth) for path in _BLOCK),
    ]
    return {f"{theirs}_{path.replace('.', '_')}": f"{ours}.{path}" for path in paths}


def _by_level(depth: Any, levels: int) -> list[Any]:
    return [depth] * levels if isinstance(depth, int) else list(depth)


def _depth(level: Any, layer: int) -> int:
    """Return the depth of one layer's transformer. In pruned models, `level` is a list with a depth per layer."""
    return int(level if isinstance(level, int) else level[layer])
