"""Textual inversion: tokens of prompts that stand for vectors, as Diffusers' load_textual_inversion adds them.

Diffusers adds tokens to the tokenizers and rows to the text encoders, for all prompts from then on. Here the tokenizers
are copies, and the rows are beside the text encoders' own while the prompts of one job are encoded.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from bottega.errors import LoraUnusable
from bottega.model.model import Model

# Tokenizers that are kept. A copy of CLIP's takes some 20 MB and tens of milliseconds.
_MAX_TOKENIZERS = 8


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
        self._knowing = functools.lru_cache(maxsize=_MAX_TOKENIZERS)(_knowing)

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
            tokenizers.append(self._knowing(tokenizer, tokens))
            first = int(tokenizers[-1].convert_tokens_to_ids(tokens[0]))
            table = encoder.get_input_embeddings()
            joined = torch.cat([rows.to(table.weight.device, table.weight.dtype) for rows in vectors.values()])
            self._tables[encoder] = table
            encoder.set_input_embeddings(EmbeddingTable(table, first, joined))
        return tuple(tokenizers)

    def restore(self) -> None:
        """Remove the added tokens."""
        while self._tables:
            encoder, table = self._tables.popitem()
            encoder.set_input_embeddings(table)


def _knowing(tokenizer: CLIPTokenizer, tokens: tuple[str, ...]) -> CLIPTokenizer:
    """Return a copy of a tokenizer that knows these tokens as well. Raise LoraUnusable if it knows one already."""
    vocabulary = tokenizer.get_vocab()
    for token in tokens:
        if token in vocabulary or tokens.count(token) > 1:
            raise LoraUnusable(f"the token {token} of an embedding is known already: add it with another token")
    copied = copy.deepcopy(tokenizer)
    copied.add_tokens(list(tokens))
    return copied


def _parts(token: str, count: int) -> list[str]:
    """Return the tokens of several vectors, as Diffusers names them."""
    return [token, *(f"{token}_{index}" for index in range(1, count))]


def _check_width(token: str, rows: Tensor, width: int, family: str) -> None:
    if rows.shape[-1] != width:
        raise LoraUnusable(
            f"the embedding of {token} has vectors of {rows.shape[-1]} values, and a text encoder of this {family} "
            f"model reads {width}: it is for another family"
        )
