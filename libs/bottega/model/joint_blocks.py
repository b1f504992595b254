"""Transformer blocks in which the tokens of picture and prompt attend to each other, for rows of different lengths.

This module runs the blocks of Stable Diffusion 3 and Flux.1 with the modules of Diffusers. Linear layers, norms and
feed-forward layers compute every token by itself, so each is called once, with the packed tokens of all rows:
[tokens, features], the tokens of the first row, then the tokens of the second row, and so on. Modulation and attention
run once per group of adjacent rows that have equal numbers of tokens. Padding would instead compute as many tokens for
each row as the longest row has.

The results equal those of Diffusers' blocks, apart from rounding in sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor, nn
from torch.nn import functional

from bottega.model.backbone import RowSpans

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary embedding of packed tokens, [tokens, features of a head] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Adjacent rows [first, last) that have `count` tokens each."""

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowLayout:
    """The positions of each row's tokens in a tensor of packed tokens."""

    parts: tuple[RowGroup, ...]
    offsets: tuple[int, ...]
    """The tokens of row i are at [offsets[i], offsets[i + 1])."""
    spans: RowSpans
    """Tells hooks on a layer the offsets while the layer runs."""

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]], spans: RowSpans) -> RowLayout:
        """Return the layout whose groups have these numbers of rows, and of tokens per row."""
        ends = accumulate((rows for rows, _ in counts), initial=0)
        return cls(
            parts=tuple(
                RowGroup(first=first, last=last, count=count)
                for (first, last), (_, count) in zip(pairwise(ends), counts, strict=True)
            ),
            offsets=tuple(accumulate((count for rows, count in counts for _ in range(rows)), initial=0)),
            spans=spans,
        )

    def aligned(self, count: int) -> RowLayout:
        """Return a layout with the same groups of rows, but `count` tokens in each row."""
        return RowLayout.of([(part.last - part.first, count) for part in self.parts], self.spans)

    def cut(self, tokens: Tensor) -> list[Tensor]:
        """Return a view of the tokens of each group of rows, [rows, tokens of a row, ...]."""
        return [
            tokens[self.offsets[part.first] : self.offsets[part.last]].view(
                part.last - part.first, part.count, *tokens.shape[1:]
            )
            for part in self.parts
        ]

    def run(self, layer: nn.Module, tokens: Tensor) -> Tensor:
        """Apply a layer to the packed tokens of all rows."""
        with self.spans.packed(self.offsets):
            made: Tensor = layer(tokens)
        return made

    def modulate(self, tokens: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Scale and shift the tokens of each row in place, and return them. Both vectors are [rows, features]."""
        for part, view in zip(self.parts, self.cut(tokens), strict=True):
            rows = slice(part.first, part.last)
            view.mul_(1 + scale[rows, None]).add_(shift[rows, None])
        return tokens

    def gate(self, tokens: Tensor, gate: Tensor) -> Tensor:
        """Multiply the tokens of each row by its vector of `gate`, [rows, features], in place, and return them."""
        for part, view in zip(self.parts, self.cut(tokens), strict=True):
            view.mul_(gate[part.first : part.last, None])
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectedTokens:
    """Queries, keys and values of packed tokens, either of the picture or of the prompt."""

    queries: Tensor
    """[tokens of `query_layout`, channels]."""
    keys: Tensor
    """[tokens of `key_layout`, channels]."""
    values: Tensor
    """[tokens of `key_layout`, channels]."""
    query_layout: RowLayout
    """The tokens that attend."""
    key_layout: RowLayout
    """The tokens that are attended to. Its groups of rows equal those of `query_layout`."""


def attend(projections: Sequence[ProjectedTokens], heads: int) -> list[Tensor]:
    """Compute the attention of each row's queries to all keys of the row, in all projections.

    Args:
        projections: Projected tokens whose layouts have equal groups of rows.
        heads: Number of heads.

    Returns:
        The outputs for the queries of each projection, [tokens, channels].
    """
    made: list[list[Tensor]] = [[] for _ in projections]
    cut = [
        zip(
            each.query_layout.cut(each.queries),
            each.key_layout.cut(each.keys),
            each.key_layout.cut(each.values),
            strict=True,
        )
        for each in projections
    ]
    for group in zip(*cut, strict=True):
        queries, keys, values = zip(*group, strict=True)
        lengths = [each.shape[1] for each in queries]
        attended = _attend(_side_by_side(queries), _side_by_side(keys), _side_by_side(values), heads)
        for outputs, output in zip(made, torch.split(attended, lengths, dim=1), strict=True):
            outputs.append(output.flatten(0, 1))
    return [outputs[0] if len(outputs) == 1 else torch.cat(outputs) for outputs in made]


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Compute the attention of a group of rows. Each argument is [rows, length, channels]."""
    if not queries.shape[1]:
        return queries  # These rows have no queries.
    queries, keys, values = (
        tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2) for tensor in (queries, keys, values)
    )
    return functional.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectionLayers:
    """The layers of an attention that project the tokens of either the picture or the prompt."""

    to_queries: nn.Module
    to_keys: nn.Module
    to_values: nn.Module
    norm_queries: nn.Module | None
    """Norm that is applied to each head of the queries; None for no norm."""
    norm_keys: nn.Module | None
    """Norm that is applied to each head of the keys; None for no norm."""
    heads: int

    @classmethod
    def of_picture(cls, attention: Any) -> ProjectionLayers:
        """Return the layers for the tokens of the picture."""
        return cls(
            to_queries=attention.to_q,
            to_keys=attention.to_k,
            to_values=attention.to_v,
            norm_queries=attention.norm_q,
            norm_keys=attention.norm_k,
            heads=attention.heads,
        )

    @classmethod
    def of_prompt(cls, attention: Any) -> ProjectionLayers:
        """Return the layers for the tokens of the prompt, in an attention with separate layers for them."""
        return cls(
            to_queries=attention.add_q_proj,
            to_keys=attention.add_k_proj,
            to_values=attention.add_v_proj,
            norm_queries=attention.norm_added_q,
            norm_keys=attention.norm_added_k,
            heads=attention.heads,
        )

    def queries(self, tokens: Tensor, layout: RowLayout, rotary: Rotary | None) -> Tensor:
        """Return the queries of packed tokens, [tokens, channels]."""
        return self._by_head(layout.run(self.to_queries, tokens), self.norm_queries, layout, rotary)

    def keys(self, tokens: Tensor, layout: RowLayout, rotary: Rotary | None) -> Tensor:
        """Return the keys of packed tokens, [tokens, channels]."""
        return self._by_head(layout.run(self.to_keys, tokens), self.norm_keys, layout, rotary)

    def values(self, tokens: Tensor, layout: RowLayout) -> Tensor:
        """Return the values of packed tokens, [tokens, channels]."""
        return layout.run(self.to_values, tokens)

    def project(
        self, tokens: Tensor, layout: RowLayout, rotary: Rotary | None, *, has_queries: bool = True
    ) -> ProjectedTokens:
        """Project packed tokens. Pass `has_queries=False` if nothing reads the attention's outputs for these tokens."""
        keys = self.keys(tokens, layout, rotary)
        return ProjectedTokens(
            queries=self.queries(tokens, layout, rotary) if has_queries else keys[:0],
            keys=keys,
            values=self.values(tokens, layout),
            query_layout=layout if has_queries else layout.aligned(0),
            key_layout=layout,
        )

    def _by_head(self, projected: Tensor, norm: nn.Module | None, layout: RowLayout, rotary: Rotary | None) -> Tensor:
        """Apply the norm to each head of [tokens, channels], and rotate the head by the position of its token."""
        if norm is None and rotary is None:
            return projected
        tokens, channels = projected.shape
        heads = projected.view(tokens, self.heads, channels // self.heads)
        heads = heads if norm is None else layout.run(norm, heads)
        if rotary is not None and tokens:
            heads = apply_rotary_emb(heads[None], rotary, sequence_dim=1)[0]
        return heads.flatten(1)


Norm = Callable[[Tensor, RowLayout], Sequence[Tensor]]
"""Returns the normed input of each self-attention of a block, for tokens [tokens, channels] with a layout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockInputs:
    """The picture's tokens at the start of a block, normed and projected for its self-attentions."""

    tokens: Tensor
    """The block's input, [tokens, channels]."""
    normed: Sequence[Tensor]
    """Outputs of the norm for each self-attention."""
    projected: Sequence[ProjectedTokens]
    """Queries, keys and values for each self-attention."""


class PictureTokens(Protocol):
    """The tokens of the picture before a block, which computes all or some of them."""

    @property
    def layout(self) -> RowLayout:
        """The tokens that the block computes."""
        ...

    def start(self, attentions: Mapping[str, ProjectionLayers], norm: Norm) -> BlockInputs:
        """Norm the tokens and project them for the block's self-attentions, whose layers are given by path."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllTokens:
    """Tokens of a picture or prompt before a block that computes all of them."""

    tokens: Tensor
    """[tokens, channels]."""
    layout: RowLayout
    rotary: Rotary | None = None
    """Rotary embedding of their positions; None if the network adds positions to its input."""

    def start(self, attentions: Mapping[str, ProjectionLayers], norm: Norm) -> BlockInputs:
        normed = norm(self.tokens, self.layout)
        projected = [
            layers.project(tokens, self.layout, self.rotary)
            for layers, tokens in zip(attentions.values(), normed, strict=True)
        ]
        return BlockInputs(tokens=self.tokens, normed=normed, projected=projected)


def run_block(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block of Stable Diffusion 3 or Flux.1.

    Args:
        block: A JointTransformerBlock, FluxTransformerBlock or FluxSingleTransformerBlock of Diffusers.
        path: Path of the block's module in the network.
        picture: The tokens of the picture.
        prompt: The tokens of the prompt.
        embedding: Embedding of timesteps and pooled prompts, [rows, features].
        is_last: Whether this is the network's last block. Nothing reads the prompt's tokens after it, so they are
            returned unchanged.

    Returns:
        The computed tokens of the picture, and the tokens of the prompt.
    """
    run = _run_single if isinstance(block, FluxSingleTransformerBlock) else _run_joint
    made = run(block, path, picture, prompt, embedding, is_last=is_last)
    if made[0].dtype == torch.float16 and isinstance(block, FluxSingleTransformerBlock | FluxTransformerBlock):
        # Diffusers clips only in Flux's blocks, and clips the picture's tokens only in single blocks.
        bound = torch.finfo(torch.float16).max
        picture_made = made[0].clip(-bound, bound) if run is _run_single else made[0]
        return picture_made, made[1].clip(-bound, bound)
    return made


def _run_joint(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block with separate layers for the tokens of picture and prompt; see `run_block`."""
    vectors, others = (modulation(norm, embedding) for norm in (block.norm1, block.norm1_context))
    attentions = {f"{path}.attn": block.attn}
    if getattr(block, "use_dual_attention", False):  # Stable Diffusion 3.5; only among the picture's tokens
        attentions[f"{path}.attn2"] = block.attn2
    pairs, gates = (vectors[:2], vectors[6:8]), (vectors[2], *vectors[8:])

    def norm(tokens: Tensor, layout: RowLayout) -> Sequence[Tensor]:
        normed = block.norm1.norm(tokens)
        inputs = [normed, *(normed.clone() for _ in gates[1:])]
        return [layout.modulate(each, *pair) for each, pair in zip(inputs, pairs, strict=False)]

    started = picture.start({name: ProjectionLayers.of_picture(each) for name, each in attentions.items()}, norm)
    # In the last block of Stable Diffusion 3, the prompt's norm returns only two vectors: the scale, then the shift.
    pair = others[1::-1] if len(others) == 2 else others[:2]
    normed = prompt.layout.modulate(block.norm1_context.norm(prompt.tokens), *pair)
    projected = ProjectionLayers.of_prompt(block.attn).project(
        normed, prompt.layout, prompt.rotary, has_queries=not is_last
    )
    attended, of_prompt = attend([started.projected[0], projected], block.attn.heads)
    outputs = [attended, *(attend([each], block.attn2.heads)[0] for each in started.projected[1:])]
    tokens, layout = started.tokens, picture.layout
    for output, attention, gate in zip(outputs, attentions.values(), gates, strict=True):
        tokens = tokens + layout.gate(layout.run(attention.to_out[0], output), gate)
    tokens = _feed_forward(block.norm2, block.ff, layout, tokens, vectors[3:6])
    if is_last:
        return tokens, prompt.tokens
    texts = prompt.tokens + prompt.layout.gate(prompt.layout.run(block.attn.to_add_out, of_prompt), others[2])
    return tokens, _feed_forward(block.norm2_context, block.ff_context, prompt.layout, texts, others[3:6])


def _feed_forward(
    norm: nn.Module, layers: nn.Module, layout: RowLayout, tokens: Tensor, vectors: Sequence[Tensor]
) -> Tensor:
    shift, scale, gate = vectors
    return tokens + layout.gate(layout.run(layers, layout.modulate(norm(tokens), shift, scale)), gate)


def _run_single(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block with shared layers for the tokens of picture and prompt; see `run_block`.

    Each layer is called twice, for the picture and for the prompt, because the tokens of a row must be adjacent.
    """
    shift, scale, gate = modulation(block.norm, embedding)

    def norm(tokens: Tensor, layout: RowLayout) -> Sequence[Tensor]:
        return [layout.modulate(block.norm.norm(tokens), shift, scale)]

    def finish_block(tokens: Tensor, normed: Tensor, attended: Tensor, layout: RowLayout) -> Tensor:
        wide = block.act_mlp(layout.run(block.proj_mlp, normed))
        return tokens + layout.gate(layout.run(block.proj_out, torch.cat([attended, wide], dim=1)), gate)

    layers = ProjectionLayers.of_picture(block.attn)
    started = picture.start({f"{path}.attn": layers}, norm)
    (normed,) = norm(prompt.tokens, prompt.layout)
    projected = layers.project(normed, prompt.layout, prompt.rotary, has_queries=not is_last)
    attended, of_prompt = attend([started.projected[0], projected], layers.heads)
    tokens = finish_block(started.tokens, started.normed[0], attended, picture.layout)
    return tokens, prompt.tokens if is_last else finish_block(prompt.tokens, normed, of_prompt, prompt.layout)


def modulation(norm: Any, embedding: Tensor) -> tuple[Tensor, ...]:
    """Return the modulation vectors of an adaptive norm, [rows, features] each, in the order of Diffusers."""
    made: Tensor = norm.linear(norm.silu(embedding))
    return made.chunk(made.shape[1] // embedding.shape[1], dim=1)
