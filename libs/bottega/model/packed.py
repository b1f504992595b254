"""Forward passes of rows with several sizes: a transformer's layers get the tokens of all rows as one tensor.

Linear layers, norms and feed-forward layers compute every token by itself, so they run once for all rows, on packed
tokens, [items, features]. Modulation and attention run part by part; a part is adjacent rows of one size. Padding would
instead compute as many tokens for each row as the largest one has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional

from bottega.model.backbone import Activations, Block, Inputs, RowSpans
from bottega.model.backbones import MadeBackbone
from bottega.model.backbones.stable_diffusion_3 import Sd3Backbone

Size = tuple[int, int]
"""Height and width of a latent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The places of each row's tokens, either of its latent or of its prompt, among those of all rows."""

    offsets: tuple[int, ...]
    """Row i has the items [offsets[i], offsets[i + 1])."""
    parts: tuple[slice, ...]
    """The rows of each part."""

    def cut(self, items: Tensor) -> list[Tensor]:
        """Return a view for each part, [rows, tokens, ...]."""
        return [
            items[self.offsets[rows.start] : self.offsets[rows.stop]].view(rows.stop - rows.start, -1, *items.shape[1:])
            for rows in self.parts
        ]

    def modulate(self, items: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Scale and shift the tokens of each row in place, and return them. Both vectors are [rows, features]."""
        for rows, tokens in zip(self.parts, self.cut(items), strict=True):
            tokens.mul_(1 + scale[rows, None]).add_(shift[rows, None])
        return items

    def gate(self, items: Tensor, gate: Tensor) -> Tensor:
        """Multiply the tokens of each row by its vector of `gate`, [rows, features], in place, and return them."""
        for rows, tokens in zip(self.parts, self.cut(items), strict=True):
            tokens.mul_(gate[rows, None])
        return items


def _stream(counts: Sequence[tuple[int, int]]) -> Stream:
    """Return the stream of parts with so many rows, and so many tokens in each of them."""
    ends = accumulate((rows for rows, _ in counts), initial=0)
    return Stream(
        offsets=tuple(accumulate((tokens for rows, tokens in counts for _ in range(rows)), initial=0)),
        parts=tuple(slice(first, last) for first, last in pairwise(ends)),
    )


@dataclass(slots=True, kw_only=True)
class PackedActivations(Activations):
    """The state between two blocks. `hidden`, `context` and the points are packed; `embedding` is [rows, features]."""

    image: Stream
    """The tokens of `hidden`."""
    text: Stream
    """The tokens of `context`."""
    sizes: tuple[Size, ...]
    """The size of each part."""

    def row_of(self, tensor: Tensor, row: int) -> Tensor:
        return tensor[self.image.offsets[row] : self.image.offsets[row + 1]]

    def select(self, rows: Sequence[int], index: Tensor) -> None:
        kept = [sum(part.start <= row < part.stop for row in rows) for part in self.image.parts]
        self.sizes = tuple(size for size, count in zip(self.sizes, kept, strict=True) if count)
        self.embedding = self.embedding.index_select(0, index)
        self.image, items = _selected(self.image, rows, kept)
        items = items.to(index.device)
        self.hidden = self.hidden.index_select(0, items)
        self.points = dict.fromkeys(self.points, self.hidden)  # They are `hidden` itself.
        self.text, items = _selected(self.text, rows, kept)
        self.context = self.context.index_select(0, items.to(index.device))


def _selected(stream: Stream, rows: Sequence[int], kept: Sequence[int]) -> tuple[Stream, Tensor]:
    """Return the stream of some rows, in ascending order, and the indexes of their items.

    Args:
        kept: Number of the rows that are in each part.
    """
    offsets = stream.offsets
    tokens = [offsets[part.start + 1] - offsets[part.start] for part in stream.parts]
    counts = [(count, each) for count, each in zip(kept, tokens, strict=True) if count]
    return _stream(counts), torch.cat([torch.arange(offsets[row], offsets[row + 1]) for row in rows])


class PackedSd3Backbone:
    """A second backbone over the modules of an Sd3Backbone, for rows of several sizes.

    Its predictions equal those of the first one up to the last bits of sums.
    """

    def __init__(self, plain: Sd3Backbone) -> None:
        self.spans = RowSpans()
        self._plain = plain
        self.blocks: Sequence[Block] = [
            Block(name=block.name, run=self._joint(index), needs=block.needs)
            for index, block in enumerate(plain.blocks)
        ]

    def begin(self, parts: Sequence[Inputs]) -> PackedActivations:
        """Embed the inputs of each part."""
        ends = [0, *accumulate(len(part.sample) for part in parts)]
        states = []
        for part, rows in zip(parts, pairwise(ends), strict=True):
            with self.spans.packed(_row_offsets(*rows, ends[-1])):
                states.append(self._plain.begin(part))
        return PackedActivations(
            hidden=torch.cat([state.hidden.flatten(0, 1) for state in states]),
            embedding=torch.cat([state.embedding for state in states]),
            context=torch.cat([state.context.flatten(0, 1) for state in states]),
            image=_stream([(len(state.hidden), state.hidden.shape[1]) for state in states]),
            text=_stream([(len(state.context), state.context.shape[1]) for state in states]),
            sizes=tuple(state.size for state in states),
        )

    def finish(self, activations: Activations) -> list[Tensor]:
        """Return the prediction for each row, [channels, height, width]."""
        state = _packed(activations)
        made: list[Tensor] = []
        for rows, hidden, size in zip(state.image.parts, state.image.cut(state.hidden), state.sizes, strict=True):
            part = Activations(hidden=hidden, embedding=state.embedding[rows], context=state.context, size=size)
            with self.spans.packed(_row_offsets(rows.start, rows.stop, len(state.embedding))):
                made += self._plain.finish(part)
        return made

    def _joint(self, index: int) -> Callable[[Activations], None]:
        """Return the function that runs a block. Source: JointTransformerBlock of Diffusers."""
        block = self._plain.network.transformer_blocks[index]

        def run(activations: Activations) -> None:
            state = _packed(activations)
            state.points.pop(index - 1, None)
            image, text = state.image, state.text
            vectors, others = (_vectors(norm, state.embedding) for norm in (block.norm1, block.norm1_context))
            normed = block.norm1.norm(state.hidden)
            second = image.modulate(normed.clone(), *vectors[6:8]) if block.use_dual_attention else None
            normed = image.modulate(normed, *vectors[:2])
            # The last block's norm of the prompt returns the scale first, and nothing else.
            pair = others[1::-1] if block.context_pre_only else others[:2]
            normed_text = text.modulate(block.norm1_context.norm(state.context), *pair)
            attended, *attended_text = self._attend(block.attn, normed, normed_text, state)
            hidden = state.hidden + image.gate(attended, vectors[2])
            if second is not None:
                (attended,) = self._attend(block.attn2, second, None, state)
                hidden = hidden + image.gate(attended, vectors[8])
            state.hidden = self._feed_forward(block.norm2, block.ff, image, hidden, vectors[3:6])
            if attended_text:
                context = state.context + text.gate(attended_text[0], others[2])
                state.context = self._feed_forward(block.norm2_context, block.ff_context, text, context, others[3:6])
                state.points[index] = state.hidden

        return run

    def _attend(
        self, attention: Attention, images: Tensor, texts: Tensor | None, state: PackedActivations
    ) -> list[Tensor]:
        """Return the outputs of joint attention for both streams, but not for prompts that end here.

        Source: JointAttnProcessor2_0 of Diffusers.
        """
        a = attention
        layers = ((a.to_q, a.norm_q), (a.to_k, a.norm_k), (a.to_v, None))
        heads = [self._heads(a, layer, norm, images, state.image) for layer, norm in layers]
        if texts is not None:
            layers = ((a.add_q_proj, a.norm_added_q), (a.add_k_proj, a.norm_added_k), (a.add_v_proj, None))
            added = [self._heads(a, layer, norm, texts, state.text) for layer, norm in layers]
            heads = [
                [torch.cat(parts, dim=2) for parts in zip(*both, strict=True)]
                for both in zip(heads, added, strict=True)
            ]
        made, prompts = list[Tensor](), list[Tensor]()
        for (query, key, value), own in zip(zip(*heads, strict=True), state.image.cut(images), strict=True):
            attended = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            made.append(attended[:, : own.shape[1]].flatten(0, 1))
            prompts.append(attended[:, own.shape[1] :].flatten(0, 1))
        out = [self._run(a.to_out[0], torch.cat(made), state.image)]
        if texts is not None and not a.context_pre_only:
            out.append(self._run(a.to_add_out, torch.cat(prompts), state.text))
        return out

    def _heads(
        self, attention: Attention, layer: nn.Module, norm: nn.Module | None, items: Tensor, stream: Stream
    ) -> list[Tensor]:
        """Return a projection of the tokens of each part, [rows, heads, tokens, features]."""
        made = self._run(layer, items, stream).view(len(items), attention.heads, -1)
        made = made if norm is None else self._run(norm, made, stream)
        return [tokens.transpose(1, 2) for tokens in stream.cut(made)]

    def _feed_forward(
        self, norm: nn.Module, layers: nn.Module, stream: Stream, items: Tensor, vectors: Sequence[Tensor]
    ) -> Tensor:
        shift, scale, gate = vectors
        made = self._run(layers, stream.modulate(norm(items), shift, scale), stream)
        return items + stream.gate(made, gate)

    def _run(self, layer: nn.Module, items: Tensor, stream: Stream) -> Tensor:
        """Apply a layer to packed tokens."""
        with self.spans.packed(stream.offsets):
            made: Tensor = layer(items)
        return made


def packed_backbone(backbone: MadeBackbone) -> PackedSd3Backbone | None:
    """Return the backbone for rows of several sizes; None for UNets, whose convolutions need maps of one size."""
    return PackedSd3Backbone(backbone) if isinstance(backbone, Sd3Backbone) else None


def _vectors(norm: Any, embedding: Tensor) -> tuple[Tensor, ...]:
    """Return the vectors with which a layer norm modulates each row, [rows, features] each, in Diffusers' order."""
    made: Tensor = norm.linear(norm.silu(embedding))
    return made.chunk(made.shape[1] // embedding.shape[1], dim=1)


def _row_offsets(first: int, last: int, rows: int) -> tuple[int, ...]:
    """Return the offsets of `rows` rows in a call with the rows [first, last) alone."""
    return tuple(min(max(row, first), last) - first for row in range(rows + 1))


def _packed(activations: Activations) -> PackedActivations:
    assert isinstance(activations, PackedActivations), "they are what `begin` has made"
    return activations
