"""The names of SDXL's UNet modules in Stability's code, which kohya's trainer uses.

Source: sgm's OpenAIModel (input_blocks, middle_block, output_blocks) and Diffusers' UNet2DConditionModel. The positions
follow from the UNet's configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
    "conv_out": "out_2",
}
# Modules of one transformer block, which have the same names in both.
_BLOCK = (
    *(f"attn{place}.{name}" for place in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    "ff.net.2",
)
_CROSS = "CrossAttn"


def sgm_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the modules' paths in Diffusers by their names in Stability's code, with underscores in place of dots.

    Some of the modules may not exist. Raises KeyError, TypeError or ValueError for an invalid configuration.

    Args:
        config: Diffusers' configuration of the UNet.
    """
    names = {name: path for path, name in _OUTSIDE.items()}
    for theirs, ours, is_resnet, depth in _places(config):
        names.update(_resnet(theirs, ours) if is_resnet else _transformer(theirs, ours, depth))
    names.update(_samplers(config))
    return names


def _places(config: Mapping[str, Any]) -> Iterator[tuple[str, str, bool, int]]:
    """Yield for each resnet and transformer its name in both, whether it is a resnet, and a transformer's depth."""
    levels = len(config["block_out_channels"])
    layers = int(config["layers_per_block"])
    depths = _depths(config, levels)
    for level, kind in enumerate(config["down_block_types"]):
        for layer in range(layers):
            at = f"input_blocks_{1 + level * (layers + 1) + layer}"
            yield f"{at}_0", f"down_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"down_blocks.{level}.attentions.{layer}", False, depths[level]
    yield "middle_block_0", "mid_block.resnets.0", True, 0
    yield "middle_block_1", "mid_block.attentions.0", False, depths[-1]
    yield "middle_block_2", "mid_block.resnets.1", True, 0
    for level, kind in enumerate(config["up_block_types"]):
        for layer in range(layers + 1):
            at = f"output_blocks_{level * (layers + 1) + layer}"
            yield f"{at}_0", f"up_blocks.{level}.resnets.{layer}", True, 0
            if _CROSS in kind:
                yield f"{at}_1", f"up_blocks.{level}.attentions.{layer}", False, depths[-1 - level]


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
    paths = ["proj_in", "proj_out", *(f"transformer_blocks.{n}.{path}" for n in range(depth) for path in _BLOCK)]
    return {f"{theirs}_{path.replace('.', '_')}": f"{ours}.{path}" for path in paths}


def _depths(config: Mapping[str, Any], levels: int) -> list[int]:
    depth = config["transformer_layers_per_block"]
    return [int(depth)] * levels if isinstance(depth, int) else [int(level_depth) for level_depth in depth]
