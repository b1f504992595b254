"""Checks the vocabularies and merges of tokenizers, without torch and without loading a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega.model_files.json_files import DOWNLOAD_AGAIN, is_there, read_json_object, read_model_file
from bottega.plain_text import excerpt

# Tokenizer files of CLIP have 2 MiB.
_MAX_TOKENIZER_BYTES = 32 << 20
_SHOWN_CHARACTERS = 60
# T5's vocabulary starts with the tokens for padding, end and unknown.
_T5_SPECIAL_TOKENS = 3
_T5_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>"}
_CHAT_TEMPLATE = "chat_template.jinja"
_SPECIAL = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def check_tokenizer(
    folder: Path, config: Mapping[str, object], *, vocab_size: int, special: Mapping[str, str] = _SPECIAL
) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each fault of a tokenizer's vocabulary and merges.

    Args:
        folder: Folder of the tokenizer.
        config: Contents of its tokenizer_config.json.
        vocab_size: Number of tokens that the text encoder knows.
        special: Tokens that the vocabulary must have: the default, by the configuration's field that names the token.
    """
    whole = folder / "tokenizer.json"
    try:
        # transformers prefers tokenizer.json.
        if is_there(whole):
            where, (vocab, merges) = f"{folder.name}/{whole.name}", _read_whole(whole)
        else:
            where, (vocab, merges) = f"{folder.name}/vocab.json", _read_pair(folder)
    except ValueError as error:
        yield str(error)
        return
    if any(type(number) is not int or number < 0 for number in vocab.values()):
        yield f"{where}: the numbers of its tokens are no whole numbers from 0; {DOWNLOAD_AGAIN}"
        return
    unknown = [pair for pair in merges if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys()]
    if unknown:
        shown = excerpt(" ".join(unknown[0]), _SHOWN_CHARACTERS)
        yield f"{where}: the merge {shown} is of tokens that the vocabulary lacks; download the tokenizer again"
    largest = max(vocab.values())
    if largest >= vocab_size:
        yield (
            f"{where}: it has a token of number {largest} and the text encoder knows {vocab_size} tokens (vocab_size); "
            "download both from one model"
        )
    for name, default in special.items():
        token = _text(config.get(name, default))
        if token not in vocab:
            yield (
                f"{where}: the vocabulary lacks {excerpt(token, _SHOWN_CHARACTERS)}, the {name} of "
                f"{folder.name}/tokenizer_config.json; download the tokenizer again"
            )
            return


def _check_chat_tokenizer(folder: Path, config: Mapping[str, object], *, vocab_size: int) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each fault of a language model's tokenizer.

    See `check_tokenizer` for the arguments.
    """
    yield from check_tokenizer(folder, config, vocab_size=vocab_size, special={})
    if not (isinstance(config.get("chat_template"), str) or is_there(folder / _CHAT_TEMPLATE)):
        yield (
            f"{folder.name}/{_CHAT_TEMPLATE} is missing, and tokenizer_config.json has no chat_template: prompts are "
            "read with it; download the tokenizer again"
        )


def _check_t5_tokenizer(folder: Path, config: Mapping[str, object], *, vocab_size: int) -> Iterator[str]:
    """Yield a sentence, with the file's name, for each fault of the tokenizer.json of T5's tokenizer.

    Args:
        folder: Folder of the tokenizer.
        config: Contents of its tokenizer_config.json.
        vocab_size: Number of tokens that the text encoder knows.
    """
    where = f"{folder.name}/tokenizer.json"
    try:
        values = read_json_object(folder / "tokenizer.json", max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        yield f"{where}: {error}"
        return
    model, added = values.get("model"), values.get("added_tokens")
    pieces = model.get("vocab") if isinstance(model, dict) and model.get("type") == "Unigram" else None
    if not isinstance(pieces, list) or not pieces or not isinstance(added, list):
        yield f"{where}: it is no Unigram tokenizer with model and added_tokens; download T5's tokenizer"
        return
    if len(pieces) < _T5_SPECIAL_TOKENS or not all(map(_is_piece, pieces)):
        yield f"{where}: its vocabulary is no list of tokens with numbers; {DOWNLOAD_AGAIN}"
        return
    if not all(isinstance(_content(token), str) for token in added):
        yield f"{where}: its added_tokens have no content; {DOWNLOAD_AGAIN}"
        return
    known = {piece[0] for piece in pieces}
    more = {_text(token) for token in added} - known
    known |= more
    if (count := len(pieces) + len(more)) > vocab_size:
        yield (
            f"{where}: it has {count} tokens and the text encoder knows {vocab_size} (vocab_size); download both from "
            "one model"
        )
    for name, default in _T5_SPECIAL.items():
        token = _text(config.get(name, default))
        if token not in known:
            shown = excerpt(token, _SHOWN_CHARACTERS)
            what = f"the {name} of {folder.name}/tokenizer_config.json"
            yield f"{where}: the vocabulary lacks {shown}, {what}; download the tokenizer again"
            return


TOKENIZER_CHECKS = {"T5EncoderModel": _check_t5_tokenizer, "Qwen3Model": _check_chat_tokenizer}
"""The check for each class of text encoder; all other classes use `check_tokenizer`."""


def _is_piece(piece: object) -> bool:
    return isinstance(piece, list) and [*map(type, piece)] in ([str, float], [str, int])


def _read_whole(path: Path) -> tuple[dict[str, Any], Sequence[Sequence[str]]]:
    """Return the vocabulary and the merges of a tokenizer.json. Raises ValueError with a sentence."""
    where = f"{path.parent.name}/{path.name}"
    try:
        values = read_json_object(path, max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(added, list):
        raise ValueError(f"{where}: it is no BPE tokenizer with model and added_tokens; download the tokenizer again")
    vocab, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocab, dict) or not vocab:
        raise ValueError(f"{where}: its vocabulary is empty; {DOWNLOAD_AGAIN}")
    if not isinstance(merges, list) or not merges:
        raise ValueError(f"{where}: it has no merges; {DOWNLOAD_AGAIN}")
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in merges]
    if not all(isinstance(pair, list) and all(isinstance(each, str) for each in pair) for pair in pairs):
        raise ValueError(f"{where}: its merges are no pairs of tokens; {DOWNLOAD_AGAIN}")
    tokens = {
        token["content"]: token["id"]
        for token in added
        if isinstance(token, dict) and isinstance(token.get("content"), str) and "id" in token
    }
    return vocab | tokens, pairs


def _read_pair(folder: Path) -> tuple[dict[str, Any], Sequence[Sequence[str]]]:
    """Return the vocabulary and the merges of vocab.json and merges.txt. Raises ValueError with a sentence."""
    try:
        vocab = read_json_object(folder / "vocab.json", max_bytes=_MAX_TOKENIZER_BYTES)
    except ValueError as error:
        raise ValueError(f"{folder.name}/vocab.json: {error}") from None
    if not vocab:
        raise ValueError(f"{folder.name}/vocab.json: its vocabulary is empty; {DOWNLOAD_AGAIN}")
    try:
        lines = read_model_file(folder / "merges.txt", max_bytes=_MAX_TOKENIZER_BYTES).decode().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{folder.name}/merges.txt: it is no UTF-8 text; {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{folder.name}/merges.txt: {error}") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not merges:
        raise ValueError(f"{folder.name}/merges.txt: it has no merges; {DOWNLOAD_AGAIN}")
    return vocab, merges


def _text(token: object) -> str:
    """Return the text of a special token, which may be a string or an object."""
    return str(_content(token))


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token
