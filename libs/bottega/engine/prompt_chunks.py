"""The chunks of tokens in which text encoders read a prompt, and the weights of its words.

A plain prompt is one chunk, which is cut at the tokenizer's length as in Diffusers. A weighted prompt has as many
chunks as it needs. Chunks and weights are those of AUTOMATIC1111's web UI with its default settings (sd_hijack_clip.py
and sd_emphasis.py there): a chunk has 75 tokens between its first and its last one, words behind a comma move to the
next chunk together if they have fewer than 20 tokens, and an embedding that does not fit into a chunk begins the next.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from diffusers.loaders import TextualInversionLoaderMixin
from torch import Tensor
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from bottega.prompt_syntax import MAX_PROMPT_CHUNKS, MalformedPrompt, parse_weighted

_WORD_END = "</w>"
_COMMA = f",{_WORD_END}"
# So many tokens behind a comma are divided between two chunks; fewer move to the next one together.
_COMMA_TOKENS = 20
# Texts that are tokenized at once: a prompt may have thousands, of which 1,500 fill all chunks.
_TEXTS_AT_ONCE = 100
_TEXTUAL_INVERSION = TextualInversionLoaderMixin()

Tokenizer: TypeAlias = CLIPTokenizer | T5Tokenizer | Qwen2Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of a prompt that are encoded together, as many as the text encoder reads."""

    ids: tuple[int, ...]
    weights: tuple[float, ...] = ()
    """Weight of each token; empty if all are 1."""
    mask: tuple[int, ...] = ()
    """1 for each token of the prompt, and 0 for padding, whose states are dropped. Empty if padding is used, too."""


def plain_chunk(prompt: str, tokenizer: Tokenizer, tokens: int | None = None) -> tuple[Chunk, str]:
    """Return the only chunk of a plain prompt, and the text that did not fit.

    Args:
        prompt: The prompt.
        tokenizer: Tokenizer of the text encoder.
        tokens: Length of the chunk; None for the most that the tokenizer makes.
    """
    prompt = _with_all_vectors(prompt, tokenizer)
    length = tokens or tokenizer.model_max_length
    ids = tokenizer(prompt, padding="max_length", max_length=length, truncation=True).input_ids
    whole = tokenizer(prompt).input_ids
    lost = tokenizer.decode(whole[length - 1 : -1]) if len(whole) > length else ""
    # Copies of CLIP's tokenizers do not remove the marks of words' ends.
    return Chunk(ids=tuple(ids)), lost.replace(_WORD_END, " ").strip()


def chat_chunk(prompt: str, tokenizer: Tokenizer, tokens: int | None = None) -> tuple[Chunk, str]:
    """Return a plain prompt as a user's message in a chat, and the text that did not fit; see `plain_chunk`.

    Source: encode_prompt of Diffusers' ZImagePipeline.
    """
    message = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True, enable_thinking=True)
    length = tokens or tokenizer.model_max_length
    read = tokenizer(text, padding="max_length", max_length=length, truncation=True)
    lost = tokenizer.decode(tokenizer(text).input_ids[length:])
    # The template adds a few words after the prompt.
    end = text.rpartition(prompt)[2] if prompt else text
    chunk = Chunk(ids=tuple(read.input_ids), mask=tuple(read.attention_mask))
    return chunk, "" if end.endswith(lost) else lost.removesuffix(end).strip()


def weighted_chunks(prompt: str, tokenizer: CLIPTokenizer) -> list[Chunk]:
    """Return the chunks of a weighted prompt. Raise MalformedPrompt if it cannot be read, or has too many."""
    writer = _ChunkWriter(tokenizer)
    embeddings = _tokens_of_embeddings(tokenizer)
    for place, section in enumerate(parse_weighted(prompt)):
        if place:
            writer.end_chunk()
        parts = [part for part in section if not part.text.isspace()]
        for first in range(0, len(parts), _TEXTS_AT_ONCE):
            some = parts[first : first + _TEXTS_AT_ONCE]
            texts = [
                _with_all_vectors(part.text, tokenizer) if any(name in part.text for name in embeddings) else part.text
                for part in some
            ]
            tokens = tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids
            for part, ids in zip(some, tokens, strict=True):
                for inseparable in _inseparable(ids, embeddings.values()):
                    writer.add(inseparable, part.weight)
    return writer.finish()


def empty_chunk(tokenizer: CLIPTokenizer) -> Chunk:
    """Return the chunk that pads a prompt to the number of chunks of another one."""
    return _ChunkWriter(tokenizer).finish()[0]


def emphasise(states: Tensor, chunk: Chunk) -> Tensor:
    """Multiply each token's state by its weight, and scale all of them so that their mean stays as it was.

    Args:
        states: States of the chunk's tokens, [1, tokens, features].
        chunk: The chunk.
    """
    if not chunk.weights:
        return states
    weights = torch.tensor(chunk.weights, device=states.device)[None, :, None]
    plain = states.float()
    weighted = plain * weights
    return (weighted * (plain.mean() / weighted.mean())).to(states.dtype)


class _ChunkWriter:
    """Divides weighted tokens into chunks as the web UI does. Raises MalformedPrompt if there are too many."""

    def __init__(self, tokenizer: CLIPTokenizer) -> None:
        self._begin, self._end, self._pad = _special_tokens(tokenizer)
        comma = tokenizer.convert_tokens_to_ids(_COMMA)
        self._comma = comma if comma != tokenizer.unk_token_id else None
        self._size = tokenizer.model_max_length - 2
        self._chunks: list[Chunk] = []
        self._tokens: list[tuple[int, float]] = []
        self._after_comma: int | None = None
        """Number of tokens of the current chunk up to its last comma; None without one."""

    def add(self, tokens: Sequence[int], weight: float) -> None:
        """Add a token, or the tokens of an embedding, which stay in one chunk unless they are more than fit into it."""
        full = len(self._tokens) == self._size
        if full and tokens[0] != self._comma and self._after_comma is not None:
            kept = self._after_comma
            moved = self._tokens[kept:]
            if len(moved) < _COMMA_TOKENS:
                del self._tokens[kept:]
                self.end_chunk()
                self._tokens = moved
        if self._tokens and len(self._tokens) + len(tokens) > self._size:
            self.end_chunk()
        for token in tokens:
            if len(self._tokens) == self._size:
                self.end_chunk()
            self._tokens.append((token, weight))
        if tokens[0] == self._comma:
            self._after_comma = len(self._tokens)

    def end_chunk(self) -> None:
        """End the current chunk, which may be empty, and begin the next one."""
        if len(self._chunks) == MAX_PROMPT_CHUNKS:
            raise MalformedPrompt(f"has over {MAX_PROMPT_CHUNKS} chunks of {self._size} tokens, which is the maximum")
        missing = self._size - len(self._tokens)
        ids = [self._begin, *(token for token, _ in self._tokens), *[self._end] * (missing + 1)]
        first_end = ids.index(self._end)
        ids[first_end + 1 :] = [self._pad] * (len(ids) - first_end - 1)
        weights = (1.0, *(weight for _, weight in self._tokens), *[1.0] * (missing + 1))
        self._chunks.append(Chunk(ids=tuple(ids), weights=weights if set(weights) != {1.0} else ()))
        self._tokens, self._after_comma = [], None

    def finish(self) -> list[Chunk]:
        if self._tokens or not self._chunks:
            self.end_chunk()
        return self._chunks


def _with_all_vectors(prompt: str, tokenizer: Tokenizer) -> str:
    """Return a prompt in which a word with several embeddings (textual inversion) is as many tokens."""
    converted: str = _TEXTUAL_INVERSION.maybe_convert_prompt(prompt, tokenizer)
    return converted


def _tokens_of_embeddings(tokenizer: CLIPTokenizer) -> Mapping[str, tuple[int, ...]]:
    """Return the tokens of each embedding with several vectors, by the name of the first token."""
    known = tokenizer.added_tokens_encoder
    found = {}
    for name, token in known.items():
        others = itertools.takewhile(known.__contains__, (f"{name}_{index}" for index in itertools.count(1)))
        if len(tokens := (token, *(known[other] for other in others))) > 1:
            found[name] = tokens
    return found


def _inseparable(ids: Sequence[int], embeddings: Iterable[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yield the tokens of a text in order: those of a whole embedding together, and any other token alone."""
    by_first = {tokens[0]: tokens for tokens in embeddings}
    place = 0
    while place < len(ids):
        whole = by_first.get(ids[place], ())
        count = len(whole) if whole and tuple(ids[place : place + len(whole)]) == whole else 1
        yield ids[place : place + count]
        place += count


def _special_tokens(tokenizer: CLIPTokenizer) -> Iterator[int]:
    """Yield the tokens that begin and end a prompt, and the one behind its end."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        assert isinstance(token, int), "CLIP's tokenizers have all three"
        yield token
