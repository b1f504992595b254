"""Transformers and T5 in a single file: their configurations, and the original names of transformers' tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bottega.model_files.family_names import FLUX, SD3

Shape = tuple[int, ...]

WITHOUT_T5 = (
    "It draws without T5, whose tokenizer is in no single file; `bottega models import --parts FOLDER` takes T5 from a "
    "model's folder."
)
GUIDANCE = "guidance_in."
"""Beginning of the names of the layers with which Flux.1 dev and Fill embed their guidance scale."""

# Published transformers have at most 38 blocks, and T5 has 24.
_MAX_BLOCKS = 64
_HEAD_WIDTH = 64
_SD3_ENDS = {
    "pos_embed.pos_embed": "pos_embed",
    "pos_embed.proj": "x_embedder.proj",
    "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
    "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
    "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_SD3_BLOCK = {
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


_FLUX_ENDS = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "time_text_embed.guidance_embedder.linear_1": f"{GUIDANCE}in_layer",
    "time_text_embed.guidance_embedder.linear_2": f"{GUIDANCE}out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
_FLUX_BLOCK = {
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.to_q": "img_attn.qkv",
    "attn.to_k": "img_attn.qkv",
    "attn.to_v": "img_attn.qkv",
    "attn.to_out.0": "img_attn.proj",
    "attn.add_q_proj": "txt_attn.qkv",
    "attn.add_k_proj": "txt_attn.qkv",
    "attn.add_v_proj": "txt_attn.qkv",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}
_MLP, _FUSED = "proj_mlp", "linear1"
_FLUX_SINGLE_BLOCK = {
    "norm.linear": "modulation.lin",
    "attn.to_q": _FUSED,
    "attn.to_k": _FUSED,
    "attn.to_v": _FUSED,
    _MLP: _FUSED,
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
    "proj_out": "linear2",
}
_ENDS = {SD3: _SD3_ENDS, FLUX: _FLUX_ENDS}
_BLOCKS = {
    SD3: {"transformer_blocks": ("joint_blocks", _SD3_BLOCK)},
    FLUX: {
        "transformer_blocks": ("double_blocks", _FLUX_BLOCK),
        "single_transformer_blocks": ("single_blocks", _FLUX_SINGLE_BLOCK),
    },
}


def transformer_config(family: str, shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the fields of the config.json of a transformer that its tensors tell, by their original names.

    Raises:
        KeyError: A tensor is missing.
        IndexError: A tensor has too few dimensions.
        ValueError: It has more blocks than any known model. The text is a sentence.
    """
    return _flux_config(shapes) if family == FLUX else _sd3_config(shapes)


def _sd3_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    blocks = _count(shapes, "joint_blocks.{}.x_block.attn.qkv.weight")
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


def _flux_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    patches, out = shapes["img_in.weight"], shapes["final_layer.linear.weight"][0]
    width, channels = patches[0], patches[1]
    head = shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    return {
        "_class_name": "FluxTransformer2DModel",
        "attention_head_dim": head,
        "axes_dims_rope": [16, 56, 56],
        "guidance_embeds": f"{GUIDANCE}in_layer.weight" in shapes,
        "in_channels": channels,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "num_attention_heads": width // max(1, head),
        "num_layers": _count(shapes, "double_blocks.{}.img_attn.qkv.weight"),
        "num_single_layers": _count(shapes, f"single_blocks.{{}}.{_FUSED}.weight"),
        "out_channels": None if out == channels else out,
        "patch_size": 1,
        "pooled_projection_dim": shapes["vector_in.in_layer.weight"][1],
    }


def t5_config(shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the config.json of a T5 text encoder with these tensors. Raises as `transformer_config` does."""
    first = "encoder.block.0.layer"
    bias, embedding = shapes[f"{first}.0.SelfAttention.relative_attention_bias.weight"], shapes["shared.weight"]
    is_gated = f"{first}.1.DenseReluDense.wi_0.weight" in shapes
    return {
        "architectures": ["T5EncoderModel"],
        "d_ff": shapes[f"{first}.1.DenseReluDense.{'wi_0' if is_gated else 'wi'}.weight"][0],
        "d_kv": shapes[f"{first}.0.SelfAttention.q.weight"][0] // max(1, bias[1]),
        "d_model": embedding[1],
        "dense_act_fn": "gelu_new" if is_gated else "relu",
        "dropout_rate": 0.1,
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "is_gated_act": is_gated,
        "layer_norm_epsilon": 1e-06,
        "model_type": "t5",
        "num_heads": bias[1],
        "num_layers": _count(shapes, "encoder.block.{}.layer.0.SelfAttention.q.weight"),
        "relative_attention_max_distance": 128,
        "relative_attention_num_buckets": bias[0],
        "vocab_size": embedding[0],
    }


def _count(shapes: Mapping[str, Shape], pattern: str) -> int:
    """Return the number of blocks, each of which has a tensor of this name with its number."""
    blocks = 0
    while pattern.format(blocks) in shapes:
        blocks += 1
        if blocks > _MAX_BLOCKS:
            raise ValueError(f"it has over {_MAX_BLOCKS} blocks, more than any known transformer")
    return blocks


def original_tensor(family: str, name: str, shape: Shape) -> tuple[str, Shape]:
    """Return the original name and shape of a transformer's tensor. Layers that read the same are in one tensor."""
    path, _, end = name.rpartition(".")
    ends = _ENDS[family]
    if name in ends:
        return ends[name], shape
    if path in ends:
        return f"{ends[path]}.{end}", shape
    kind, _, rest = path.partition(".")
    number, _, inner = rest.partition(".")
    block, names = _BLOCKS[family].get(kind, ("", {}))
    if inner not in names:
        return name, shape
    original, rows = names[inner], shape[0]
    if original.endswith(".qkv"):
        rows *= 3
    elif original == _FUSED:
        # Queries, keys, values, and a feed-forward layer of four times their width.
        rows = 7 * (rows // 4 if inner == _MLP else rows)
    elif original.endswith("_norm"):
        end = "scale"
    return f"{block}.{number}.{original}.{end}", (rows, *shape[1:])
