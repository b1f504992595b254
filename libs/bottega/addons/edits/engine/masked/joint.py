"""Stable Diffusion 3's transformer for masked rows: image tokens outside masks are read from recordings.

The tokens of the text are computed in every block, because they depend on the prompt and on the masked tokens. The
computed tokens of image and text attend to all tokens. Source: InstGenIE (2025), which caches Flux in this way.

A block's output is recorded, and not its keys and values: these would take twice the bytes, or four times with the
second attention of Stable Diffusion 3.5, so that half as many blocks would fit into a template. Where projecting them
again is slow, they are cached beside the recording (`self_attention.keep_projections`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from diffusers import SD3Transformer2DModel
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor
from torch.nn import functional

from bottega.addons.edits.engine.activations import edit_activations
from bottega.addons.edits.engine.masked.feature_maps import PackedTokens, TokensIn
from bottega.addons.edits.engine.masked.self_attention import (
    BlockStart,
    Projected,
    attend,
    attend_jointly,
    normed_heads,
    on_items,
    packed_input,
    project_block,
)
from bottega.addons.edits.engine.masked.tokens import MaskedActivations, Packing, TokenCache
from bottega.model.backbone import Activations, Backbone, Inputs, RowSpans
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone
from bottega.model.operations import Operations
from bottega.model.rows import Row


@dataclass(slots=True, kw_only=True)
class JointActivations(MaskedActivations):
    """The state of a masked forward pass of a transformer."""

    tokens: tuple[int, int]
    """Height and width of the picture in tokens."""
    controlled: bool
    """Whether residuals are added to whole outputs between blocks."""
    made: PackedTokens | None = None
    """Output of the block before. None before the first block and where residuals are added; it is then `hidden`."""


class MaskedJointBackbone(Sd3Backbone):
    """A transformer whose rows may reuse recorded activations.

    Args:
        beat: Called after each block, see `Heartbeat`.
    """

    def __init__(
        self,
        transformer: SD3Transformer2DModel,
        *,
        beat: Callable[[], None] | None = None,
        operations: Operations | None = None,
    ) -> None:
        self.spans: RowSpans = RowSpans()
        self.block_names = joint_blocks(transformer)
        self._tokens = TokenCache()
        self._beat = beat
        self._operations = operations or Operations()
        super().__init__(transformer)

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | None:
        """Return this backbone for batches with a row that reads or writes a recording; None for others."""
        return self if any(row.activations is not None for row in rows) else None

    def begin(self, inputs: Inputs) -> JointActivations:
        plain = super().begin(inputs)
        height, width = (side // self.network.config.patch_size for side in plain.size)
        return JointActivations(
            hidden=plain.hidden,
            embedding=plain.embedding,
            context=plain.context,
            size=plain.size,
            edits=[edit_activations(activations) for activations in inputs.activations] or [None] * len(plain.hidden),
            cache=self._tokens,
            spans=self.spans,
            moves=self._operations.moves,
            tokens=(height, width),
            controlled=inputs.controlled,
        )

    def finish(self, activations: Activations) -> Tensor:
        forward, network = _masked(activations), self.network
        made = forward.made
        assert made is not None, "the last block has run"
        # As AdaLayerNormContinuous computes it.
        embedding = functional.silu(forward.embedding).to(made.items.dtype)
        scale, shift = network.norm_out.linear(embedding).chunk(2, dim=1)
        normed = _modulated(network.norm_out.norm(made.items), scale, shift, made.packing)
        tokens = made.packing.merge(on_items(network.proj_out, normed, made.packing, forward), made.recorded)
        forward.put(self.block_names[-1], tokens)
        return self.unpatchify(tokens, forward.size)

    def _joint(self, index: int) -> Callable[[Activations], None]:
        block, names = self.network.transformer_blocks[index], self.block_names
        last = index == len(names) - 1

        def run(activations: Activations) -> None:
            forward = _masked(activations)
            # As in the plain block: `hidden` is another tensor after `select`.
            forward.hidden = forward.points.pop(index - 1, forward.hidden)
            recorded = forward.recorded(names[index])
            masked = [rest is not None for rest in recorded]
            packing = forward.packing(forward.tokens, masked)
            made, whole = forward.made, None if forward.made is not None else forward.hidden
            if index == 0:
                # A token's embedding depends on its own patch alone, which outside the mask is the recording's.
                made = packed_input(TokensIn(whole=forward.hidden, as_recorded=masked), masked, packing)
            run_block = _JointBlock(block, f"transformer_blocks.{index}", forward)
            items = run_block.run(names[index - 1], made, whole, packing)
            forward.made = PackedTokens(items=items, packing=packing, recorded=recorded)
            if forward.controlled and not last:
                forward.hidden = forward.points[index] = packing.merge(items, recorded)
                forward.put(names[index], forward.hidden)
                forward.made = None
            if self._beat is not None:
                self._beat()

        return run


def joint_blocks(transformer: SD3Transformer2DModel) -> tuple[str, ...]:
    """Return the names of recorded outputs, one for each block.

    Only the last projection reads the last block, so it is recorded behind the projection, which has fewer channels.
    """
    return *(f"transformer_blocks.{index}" for index in range(len(transformer.transformer_blocks) - 1)), "proj_out"


class _JointBlock:
    """A block in one forward pass. `path` is that of its module."""

    def __init__(self, block: JointTransformerBlock, path: str, forward: JointActivations) -> None:
        self._block = block
        self._forward = forward
        norm = block.norm1
        parts = norm.linear(norm.silu(forward.embedding)).chunk(9 if block.use_dual_attention else 6, dim=1)
        shift, scale, gate, self._shift_mlp, self._scale_mlp, self._gate_mlp, *second = parts
        self._attentions = {f"{path}.attn": block.attn}
        self._modulations, self._gates = [(scale, shift)], [gate]
        if second:
            shift, scale, gate = second
            self._attentions[f"{path}.attn2"] = block.attn2
            self._modulations.append((scale, shift))
            self._gates.append(gate)

    def run(self, before: str, made: PackedTokens | None, whole: Tensor | None, packing: Packing) -> Tensor:
        """Return the computed tokens, [items, channels], and change the text's. See `project_block`."""
        block, forward = self._block, self._forward
        start = BlockStart(before=before, size=forward.tokens, attentions=self._attentions, norm=self._norm)
        items, projected = project_block(start, made, whole, packing, forward)
        attended = [self._attend_with_text(projected[0], packing)]
        # The second attention of Stable Diffusion 3.5 is among image tokens.
        attended += [
            attend(each.queries, each.keys, each.values, packing, heads=block.attn2.heads) for each in projected[1:]
        ]
        for states, attention, gate in zip(attended, self._attentions.values(), self._gates, strict=True):
            items = items + packing.spread(gate) * on_items(attention.to_out[0], states, packing, forward)
        normed = _modulated(block.norm2(items), self._scale_mlp, self._shift_mlp, packing)
        return items + packing.spread(self._gate_mlp) * on_items(block.ff, normed, packing, forward)

    def _norm(self, states: Tensor, packing: Packing | None) -> Sequence[Tensor]:
        normed = self._block.norm1.norm(states)
        return [_modulated(normed, scale, shift, packing) for scale, shift in self._modulations]

    def _attend_with_text(self, image: Projected, packing: Packing) -> Tensor:
        """Return the attention of the image's computed tokens, and run the rest of the block for the text's."""
        block, attention, context = self._block, self._block.attn, self._forward.context
        gates: Sequence[Tensor] = ()
        if block.context_pre_only:
            normed = block.norm1_context(context, self._forward.embedding)
        else:
            normed, *gates = block.norm1_context(context, emb=self._forward.embedding)
        keys = normed_heads(attention.norm_added_k, attention.add_k_proj(normed), attention.heads)
        keys = torch.cat([image.keys, keys], dim=1)
        values = torch.cat([image.values, attention.add_v_proj(normed)], dim=1)
        if not gates:  # Nothing reads the text's tokens after the last block.
            return attend(image.queries, keys, values, packing, heads=attention.heads)
        queries = normed_heads(attention.norm_added_q, attention.add_q_proj(normed), attention.heads)
        attended, of_text = attend_jointly(image.queries, queries, keys, values, packing, heads=attention.heads)
        gate, shift_mlp, scale_mlp, gate_mlp = (each[:, None] for each in gates)
        context = context + gate * attention.to_add_out(of_text)
        normed = block.norm2_context(context) * (1 + scale_mlp) + shift_mlp
        self._forward.context = context + gate_mlp * block.ff_context(normed)
        return attended


def _modulated(normed: Tensor, scale: Tensor, shift: Tensor, packing: Packing | None) -> Tensor:
    """Scale and shift whole tensors, or the items of a packing, by the values of their row, [rows, channels]."""
    if packing is None:
        return normed * (1 + scale[:, None]) + shift[:, None]
    return normed * (1 + packing.spread(scale)) + packing.spread(shift)


def _masked(activations: Activations) -> JointActivations:
    assert isinstance(activations, JointActivations), "they are what `begin` has made"
    return activations
