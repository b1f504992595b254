"""Transformer blocks in which the tokens of picture and prompt attend to each other, for rows of different lengths.

They are the blocks of Stable Diffusion 3 and Flux.1, over the modules of Diffusers. Linear layers, norms and
feed-forward layers compute every token by itself, so they get the tokens of all rows as one tensor, [items, features]:
those of the first row, then those of the second, and so on. Modulation and attention run part by part; a part is
adjacent rows that have equal numbers of tokens. Padding would instead compute as many tokens for each row as the
longest one has.

Their results equal those of Diffusers' blocks up to the last bits of sums.
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
"""Cosines and sines of the positions of items, [items, features of a head] each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """Adjacent rows [first, last) that have `count` items each."""

    first: int
    last: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """The places of each row's items among those of all rows."""

    parts: tuple[StreamPart, ...]
    offsets: tuple[int, ...]
    """Row i has the items [offsets[i], offsets[i + 1])."""
    spans: RowSpans
    """Has the offsets while a layer runs."""

    @classmethod
    def of(cls, counts: Sequence[tuple[int, int]], spans: RowSpans) -> Stream:
        """Return the stream of parts with so many rows, and so many items in each of these rows."""
        ends = accumulate((rows for rows, _ in counts), initial=0)
        return cls(
            parts=tuple(
                StreamPart(first=first, last=last, count=count)
                for (first, last), (_, count) in zip(pairwise(ends), counts, strict=True)
            ),
            offsets=tuple(accumulate((count for rows, count in counts for _ in range(rows)), initial=0)),
            spans=spans,
        )

    def aligned(self, count: int) -> Stream:
        """Return the stream of the same parts with `count` items in each row."""
        return Stream.of([(part.last - part.first, count) for part in self.parts], self.spans)

    def cut(self, items: Tensor) -> list[Tensor]:
        """Return a view for each part, [rows, items of a row, ...]."""
        return [
            items[self.offsets[part.first] : self.offsets[part.last]].view(
                part.last - part.first, part.count, *items.shape[1:]
            )
            for part in self.parts
        ]

    def run(self, layer: nn.Module, items: Tensor) -> Tensor:
        """Apply a layer to the items of all rows."""
        with self.spans.packed(self.offsets):
            made: Tensor = layer(items)
        return made

    def modulate(self, items: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Scale and shift the items of each row in place, and return them. Both vectors are [rows, features]."""
        for part, tokens in zip(self.parts, self.cut(items), strict=True):
            rows = slice(part.first, part.last)
            tokens.mul_(1 + scale[rows, None]).add_(shift[rows, None])
        return items

    def gate(self, items: Tensor, gate: Tensor) -> Tensor:
        """Multiply the items of each row by its vector of `gate`, [rows, features], in place, and return them."""
        for part, tokens in zip(self.parts, self.cut(items), strict=True):
            tokens.mul_(gate[part.first : part.last, None])
        return items


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectedTokens:
    """The tokens of one stream as an attention reads them."""

    queries: Tensor
    """[items of `asking`, channels]."""
    keys: Tensor
    """[items of `read`, channels], like the values."""
    values: Tensor
    asking: Stream
    """The tokens that attend."""
    read: Stream
    """The tokens that are attended to. It has the parts of `asking`."""


def attend(streams: Sequence[ProjectedTokens], heads: int) -> list[Tensor]:
    """Compute the attention of each row's queries to all of its keys, over several streams with the same parts.

    Returns:
        For each stream the outputs for its queries, [items, channels].
    """
    made: list[list[Tensor]] = [[] for _ in streams]
    cut = [
        zip(each.asking.cut(each.queries), each.read.cut(each.keys), each.read.cut(each.values), strict=True)
        for each in streams
    ]
    for of_part in zip(*cut, strict=True):
        queries, keys, values = zip(*of_part, strict=True)
        lengths = [each.shape[1] for each in queries]
        attended = _attend(_side_by_side(queries), _side_by_side(keys), _side_by_side(values), heads)
        for outputs, output in zip(made, torch.split(attended, lengths, dim=1), strict=True):
            outputs.append(output.flatten(0, 1))
    return [outputs[0] if len(outputs) == 1 else torch.cat(outputs) for outputs in made]


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim=1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, heads: int) -> Tensor:
    """Compute the attention of rows, [rows, length, channels] each."""
    if not queries.shape[1]:
        return queries  # No tokens of these rows are computed.
    asked, read, taken = (
        tensor.view(*tensor.shape[:2], heads, -1).transpose(1, 2) for tensor in (queries, keys, values)
    )
    return functional.scaled_dot_product_attention(asked, read, taken).transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProjectionLayers:
    """The layers of an attention that project the tokens of one stream."""

    to_queries: nn.Module
    to_keys: nn.Module
    to_values: nn.Module
    norm_queries: nn.Module | None
    """Norm of each head; None for no norm."""
    norm_keys: nn.Module | None
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
        """Return the layers for the tokens of the prompt, in an attention that has layers of their own for them."""
        return cls(
            to_queries=attention.add_q_proj,
            to_keys=attention.add_k_proj,
            to_values=attention.add_v_proj,
            norm_queries=attention.norm_added_q,
            norm_keys=attention.norm_added_k,
            heads=attention.heads,
        )

    def queries(self, items: Tensor, stream: Stream, rotary: Rotary | None) -> Tensor:
        """Return queries of tokens, [items, channels]."""
        return self._by_head(stream.run(self.to_queries, items), self.norm_queries, stream, rotary)

    def keys(self, items: Tensor, stream: Stream, rotary: Rotary | None) -> Tensor:
        """Return keys of tokens, [items, channels]."""
        return self._by_head(stream.run(self.to_keys, items), self.norm_keys, stream, rotary)

    def values(self, items: Tensor, stream: Stream) -> Tensor:
        """Return values of tokens, [items, channels]."""
        return stream.run(self.to_values, items)

    def project(self, items: Tensor, stream: Stream, rotary: Rotary | None, *, asks: bool = True) -> ProjectedTokens:
        """Project tokens. If not `asks`, nothing reads their attention, and they have no queries."""
        keys = self.keys(items, stream, rotary)
        return ProjectedTokens(
            queries=self.queries(items, stream, rotary) if asks else keys[:0],
            keys=keys,
            values=self.values(items, stream),
            asking=stream if asks else stream.aligned(0),
            read=stream,
        )

    def _by_head(self, projected: Tensor, norm: nn.Module | None, stream: Stream, rotary: Rotary | None) -> Tensor:
        """Apply a norm to each head of [items, channels], and turn the head by the position of its item."""
        if norm is None and rotary is None:
            return projected
        items, channels = projected.shape
        heads = projected.view(items, self.heads, channels // self.heads)
        heads = heads if norm is None else stream.run(norm, heads)
        if rotary is not None and items:
            heads = apply_rotary_emb(heads[None], rotary, sequence_dim=1)[0]
        return heads.flatten(1)


Norm = Callable[[Tensor, Stream], Sequence[Tensor]]
"""Returns the input of each self-attention of a block, for tokens [items, channels] of a stream."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Started:
    """The tokens of the picture after the first part of a block."""

    items: Tensor
    """The block's input, [items, channels]."""
    normed: Sequence[Tensor]
    """What the norm made of the items, for each self-attention."""
    projected: Sequence[ProjectedTokens]
    """The projections, for each self-attention."""


class PictureTokens(Protocol):
    """The tokens of the picture before a block, of which it computes all or some."""

    @property
    def stream(self) -> Stream:
        """The tokens that the block computes."""
        ...

    def start(self, attentions: Mapping[str, ProjectionLayers], norm: Norm) -> Started:
        """Run the block up to its self-attentions, which are given by their paths."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AllTokens:
    """Tokens of a picture or prompt before a block, which computes all of them."""

    items: Tensor
    """[items, channels]."""
    stream: Stream
    rotary: Rotary | None = None
    """Their positions; None if the network adds positions to its input."""

    def start(self, attentions: Mapping[str, ProjectionLayers], norm: Norm) -> Started:
        normed = norm(self.items, self.stream)
        projected = [
            layers.project(items, self.stream, self.rotary)
            for layers, items in zip(attentions.values(), normed, strict=True)
        ]
        return Started(items=self.items, normed=normed, projected=projected)


def run_block(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block of Stable Diffusion 3 or Flux.1.

    Args:
        block: JointTransformerBlock, FluxTransformerBlock or FluxSingleTransformerBlock of Diffusers.
        path: Path of the block's module in the network.
        picture: The tokens of the picture.
        prompt: The tokens of the prompt.
        embedding: Embedding of timesteps and pooled prompts, [rows, features].
        is_last: Whether nothing reads the prompt's tokens after the block; they are then returned unchanged.

    Returns:
        The computed tokens of the picture, and those of the prompt.
    """
    run = _run_single if isinstance(block, FluxSingleTransformerBlock) else _run_joint
    made = run(block, path, picture, prompt, embedding, is_last=is_last)
    if made[0].dtype == torch.float16 and isinstance(block, FluxSingleTransformerBlock | FluxTransformerBlock):
        # As Diffusers does with Flux alone, and with the picture in single blocks alone.
        bound = torch.finfo(torch.float16).max
        picture_made = made[0].clip(-bound, bound) if run is _run_single else made[0]
        return picture_made, made[1].clip(-bound, bound)
    return made


def _run_joint(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block with layers of their own for the tokens of picture and prompt; see `run_block`."""
    vectors, others = (modulation(norm, embedding) for norm in (block.norm1, block.norm1_context))
    attentions = {f"{path}.attn": block.attn}
    if getattr(block, "use_dual_attention", False):  # of Stable Diffusion 3.5, among the picture's tokens
        attentions[f"{path}.attn2"] = block.attn2
    pairs, gates = (vectors[:2], vectors[6:8]), (vectors[2], *vectors[8:])

    def norm(items: Tensor, stream: Stream) -> Sequence[Tensor]:
        normed = block.norm1.norm(items)
        inputs = [normed, *(normed.clone() for _ in gates[1:])]
        return [stream.modulate(each, *pair) for each, pair in zip(inputs, pairs, strict=False)]

    started = picture.start({name: ProjectionLayers.of_picture(each) for name, each in attentions.items()}, norm)
    # The norm of Stable Diffusion 3's last block returns the scale first, and nothing else.
    pair = others[1::-1] if len(others) == 2 else others[:2]
    normed = prompt.stream.modulate(block.norm1_context.norm(prompt.items), *pair)
    projected = ProjectionLayers.of_prompt(block.attn).project(normed, prompt.stream, prompt.rotary, asks=not is_last)
    attended, of_prompt = attend([started.projected[0], projected], block.attn.heads)
    outputs = [attended, *(attend([each], block.attn2.heads)[0] for each in started.projected[1:])]
    items, stream = started.items, picture.stream
    for output, attention, gate in zip(outputs, attentions.values(), gates, strict=True):
        items = items + stream.gate(stream.run(attention.to_out[0], output), gate)
    items = _feed_forward(block.norm2, block.ff, stream, items, vectors[3:6])
    if is_last:
        return items, prompt.items
    texts = prompt.items + prompt.stream.gate(prompt.stream.run(block.attn.to_add_out, of_prompt), others[2])
    return items, _feed_forward(block.norm2_context, block.ff_context, prompt.stream, texts, others[3:6])


def _feed_forward(
    norm: nn.Module, layers: nn.Module, stream: Stream, items: Tensor, vectors: Sequence[Tensor]
) -> Tensor:
    shift, scale, gate = vectors
    return items + stream.gate(stream.run(layers, stream.modulate(norm(items), shift, scale)), gate)


def _run_single(
    block: Any, path: str, picture: PictureTokens, prompt: AllTokens, embedding: Tensor, *, is_last: bool
) -> tuple[Tensor, Tensor]:
    """Run a block with the same layers for the tokens of picture and prompt; see `run_block`.

    The layers are called with each of the two streams, because the items of a row must be adjacent.
    """
    shift, scale, gate = modulation(block.norm, embedding)

    def norm(items: Tensor, stream: Stream) -> Sequence[Tensor]:
        return [stream.modulate(block.norm.norm(items), shift, scale)]

    def rest(items: Tensor, normed: Tensor, attended: Tensor, stream: Stream) -> Tensor:
        wide = block.act_mlp(stream.run(block.proj_mlp, normed))
        return items + stream.gate(stream.run(block.proj_out, torch.cat([attended, wide], dim=1)), gate)

    layers = ProjectionLayers.of_picture(block.attn)
    started = picture.start({f"{path}.attn": layers}, norm)
    (normed,) = norm(prompt.items, prompt.stream)
    projected = layers.project(normed, prompt.stream, prompt.rotary, asks=not is_last)
    attended, of_prompt = attend([started.projected[0], projected], layers.heads)
    items = rest(started.items, started.normed[0], attended, picture.stream)
    return items, prompt.items if is_last else rest(prompt.items, normed, of_prompt, prompt.stream)


def modulation(norm: Any, embedding: Tensor) -> tuple[Tensor, ...]:
    """Return the vectors with which a norm modulates each row, [rows, features] each, in the order of Diffusers."""
    made: Tensor = norm.linear(norm.silu(embedding))
    return made.chunk(made.shape[1] // embedding.shape[1], dim=1)
