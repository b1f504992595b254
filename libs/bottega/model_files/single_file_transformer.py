"""The transformer of Stable Diffusion 3 in a single file: its configuration, and the original names of its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Shape = tuple[int, ...]

WITHOUT_T5 = "It draws without T5, whose tokenizer is in no single file; download the model's folder to draw with T5."

# Published transformers have at most 38 blocks.
_MAX_BLOCKS = 64
_HEAD_WIDTH = 64
_ENDS = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_BLOCK = {
    "norm1.linear": "x_block.adaLN_modulation.1",
    "norm1_context.linear": "context_block.adaLN_modulation.1",
    "attn.to_q": "x_block.attn.qkv",
    "attn.to_k": "x_block.attn.qkv",
    "attn.to_v": "x_block.attn.qkv",
    "attn.to_out.0": "x_block.attn.proj",
    "attn.add_q_proj": "context_block.attn.qkv",
    "attn.add_k_proj": "context_block.attn.qkv",
    "attn.add_v_proj": "context_block.attn.qkv",
    "attn.to_add_out": "context_block.attn.proj",
    "attn.norm_q": "x_block.attn.ln_q",
    "attn.norm_k": "x_block.attn.ln_k",
    "attn.norm_added_q": "context_block.attn.ln_q",
    "attn.norm_added_k": "context_block.attn.ln_k",
    "attn2.to_q": "x_block.attn2.qkv",
    "attn2.to_k": "x_block.attn2.qkv",
    "attn2.to_v": "x_block.attn2.qkv",
    "attn2.to_out.0": "x_block.attn2.proj",
    "attn2.norm_q": "x_block.attn2.ln_q",
    "attn2.norm_k": "x_block.attn2.ln_k",
    "ff.net.0.proj": "x_block.mlp.fc1",
    "ff.net.2": "x_block.mlp.fc2",
    "ff_context.net.0.proj": "context_block.mlp.fc1",
    "ff_context.net.2": "context_block.mlp.fc2",
}


def transformer_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the fields of the config.json of a transformer that its tensors tell, by their original names.

    Raises:
        KeyError: A tensor is missing.
        IndexError: A tensor has too few dimensions.
        ValueError: It has more blocks than any known model. The text is a sentence.
    """
    blocks = 0
    while f"joint_blocks.{blocks}.x_block.attn.qkv.weight" in shapes:
        blocks += 1
        if blocks > _MAX_BLOCKS:
            raise ValueError(f"it has over {_MAX_BLOCKS} blocks, more than any known transformer")
    patches = shapes["x_embedder.proj.weight"]
    width, channels, patch = patches[0], patches[1], patches[2]
    norm = shapes.get("joint_blocks.0.x_block.attn.ln_q.weight")
    head = norm[0] if norm is not None else _HEAD_WIDTH
    return {
        "_class_name": "SD3Transformer2DModel",
        "attention_head_dim": head,
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "dual_attention_layers": [
            block for block in range(blocks) if f"joint_blocks.{block}.x_block.attn2.qkv.weight" in shapes
        ],
        "in_channels": channels,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "num_attention_heads": width // max(1, head),
        "num_layers": blocks,
        "out_channels": channels,
        "patch_size": patch,
        "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
        "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
        "qk_norm": None if norm is None else "rms_norm",
    }


def transformer_name(name: str) -> str:
    """Return the original name of a tensor. Three projections of attention are in one tensor."""
    path, _, end = name.rpartition(".")
    if name in _ENDS:
        return _ENDS[name]
    if path in _ENDS:
        return f"{_ENDS[path]}.{end}"
    match path.split(".", 2):
        case ["transformer_blocks", number, inner] if inner in _BLOCK:
            return f"joint_blocks.{number}.{_BLOCK[inner]}.{end}"
    return name


def transformer_shape(name: str, shape: Shape) -> Shape:
    """Return the shape of a tensor under its original name, which `transformer_name` gives."""
    return (3 * shape[0], *shape[1:]) if ".qkv." in name else shape
