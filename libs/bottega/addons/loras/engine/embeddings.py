"""Textual inversion: tokens of prompts that stand for vectors, as Diffusers' load_textual_inversion adds them.

Diffusers adds tokens to the tokenizers and rows to the text encoders, for all prompts from then on. Here the tokens are
added to other tokenizers, which share the model's vocabulary, and the rows are beside the text encoders' own while the
prompts of one job are encoded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from bottega.errors import LoraUnusable
from bottega.model.model import Model


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenVectors:
    """The vectors of one token."""

    token: str
    vectors: Mapping[str, Tensor]
    """Vectors by text encoder, [vectors, features]. A text encoder without an entry does not know the token."""


class EmbeddingTable(nn.Module):
    """A text encoder's table of token embeddings with rows beside it.

    Args:
        table: The text encoder's own table.
        first: Number of the first added token.
        rows: Embeddings of the added tokens, [tokens, features].
    """

    def __init__(self, table: nn.Module, first: int, rows: Tensor) -> None:
        super().__init__()
        self.table = table
        self._first = first
        self._rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        added = ids >= self._first
        own: Tensor = self.table(ids.masked_fill(added, 0))
        return torch.where(added[..., None], self._rows[(ids - self._first).clamp(min=0)], own)


class PromptEmbeddings:
    """The tokens that a model's tokenizers and text encoders know beside their own, for the prompts of one job.

    Args:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._tables: dict[CLIPTextModel | CLIPTextModelWithProjection, nn.Module] = {}
        """Own tables of the text encoders that have another one now."""

    def put(self, added: Sequence[TokenVectors]) -> tuple[CLIPTokenizer, ...]:
        """Add tokens until `restore`, and return the tokenizers that know them. Raise LoraUnusable for a misfit."""
        self.restore()
        tokenizers = []
        model = self._model
        parts = zip(model.family.text_encoders, model.tokenizers, model.text_encoders, strict=True)
        for name, tokenizer, encoder in parts:
            vectors = {one.token: one.vectors[name] for one in added if name in one.vectors}
            for token, rows in vectors.items():
                _check_width(token, rows, encoder.config.hidden_size, model.family.name)
            tokens = tuple(part for token, rows in vectors.items() for part in _parts(token, len(rows)))
            if not tokens:
                tokenizers.append(tokenizer)
                continue
            tokenizers.append(_extended(tokenizer, tokens))
            first = int(tokenizers[-1].convert_tokens_to_ids(tokens[0]))
            table = encoder.get_input_embeddings()
            # Not on the table's device, which may be the host: see keep_on_host.
            joined = torch.cat([rows.to(model.device, table.weight.dtype) for rows in vectors.values()])
            self._tables[encoder] = table
            encoder.set_input_embeddings(EmbeddingTable(table, first, joined))
        return tuple(tokenizers)

    def restore(self) -> None:
        """Remove the added tokens."""
        while self._tables:
            encoder, table = self._tables.popitem()
            encoder.set_input_embeddings(table)


def _extended(tokenizer: CLIPTokenizer, tokens: tuple[str, ...]) -> CLIPTokenizer:
    """Return a tokenizer that knows these tokens as well. Raise LoraUnusable if the given one knows one already.

    It shares the vocabulary, because copying that of CLIP takes 100 ms.
    """
    own: Tokenizer = tokenizer.backend_tokenizer
    for token in tokens:
        if own.token_to_id(token) is not None or tokens.count(token) > 1:
            raise LoraUnusable(f"the token {token} of an embedding is known already: add it with another token")
    backend = Tokenizer(own.model)
    backend.normalizer, backend.pre_tokenizer = own.normalizer, own.pre_tokenizer
    backend.post_processor, backend.decoder = own.post_processor, own.decoder
    backend.add_tokens([added for _, added in sorted(own.get_added_tokens_decoder().items())])
    if backend.get_added_tokens_decoder() != own.get_added_tokens_decoder():
        backend = copy.deepcopy(own)  # Its added tokens have gaps between their numbers, which only a copy keeps.
    extended = copy.copy(tokenizer)
    extended._tokenizer = backend
    extended.add_tokens(list(tokens))
    return extended


def _parts(token: str, count: int) -> list[str]:
    """Return the tokens of several vectors, as Diffusers names them."""
    return [token, *(f"{token}_{index}" for index in range(1, count))]


def _check_width(token: str, rows: Tensor, width: int, family: str) -> None:
    if rows.shape[-1] != width:
        raise LoraUnusable(
            f"the embedding of {token} has vectors of {rows.shape[-1]} values, and a text encoder of this {family} "
            f"model reads {width}: it is for another family"
        )
