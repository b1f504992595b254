"""Plain attention for training on a processor: PyTorch's fused kernel takes four times as long backwards here.

The same function as stock attention, up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch


class PlainAttention:
    """An attention processor of Diffusers, for blocks of SDXL's kind: no masks, no group norm, no spatial inputs."""

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None, **_: Any
    ) -> torch.Tensor:
        """hidden_states: (rows, elements, channels). encoder_hidden_states: (rows, tokens, channels), or none."""
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        rows, heads = hidden_states.shape[0], attn.heads
        query, key, value = (
            projected.reshape(rows, -1, heads, projected.shape[-1] // heads).transpose(1, 2).flatten(0, 1)
            for projected in (attn.to_q(hidden_states), attn.to_k(context), attn.to_v(context))
        )
        scores = torch.bmm(query * attn.scale, key.transpose(1, 2))
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        mixed = torch.bmm(weights, value).reshape(rows, heads, *query.shape[1:]).transpose(1, 2).flatten(2)
        out: torch.Tensor = attn.to_out[0](mixed)
        return out
