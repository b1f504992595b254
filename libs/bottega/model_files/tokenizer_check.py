"""Checks the files of a CLIP tokenizer.

Where they are missing, transformers makes a tokenizer of two tokens and says nothing: every prompt would look the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bottega.model_files.json_files import DOWNLOAD_AGAIN, is_there, read_json_object, read_model_file
from bottega.plain_text import excerpt

# CLIP's have 2 MiB.
_MAX_BYTES = 32 << 20
_SHOWN_CHARACTERS = 60
_SPECIAL = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}


def check_tokenizer(folder: Path, config: Mapping[str, object], *, vocab_size: int) -> Iterator[str]:
    """Yield a sentence, with the file's name, for what is wrong with a tokenizer's vocabulary and merges.

    Args:
        folder: Of the tokenizer.
        config: Its tokenizer_config.json.
        vocab_size: How many tokens the text encoder knows.
    """
    whole = folder / "tokenizer.json"
    try:
        # transformers takes tokenizer.json where it is there.
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
    for name, default in _SPECIAL.items():
        token = _text(config.get(name, default))
        if token not in vocab:
            yield (
                f"{where}: the vocabulary lacks {excerpt(token, _SHOWN_CHARACTERS)}, the {name} of "
                f"{folder.name}/tokenizer_config.json; download the tokenizer again"
            )
            return


def _read_whole(path: Path) -> tuple[dict[str, Any], Sequence[Sequence[str]]]:
    """Return the vocabulary and the merges of a tokenizer.json. Raises ValueError with a sentence."""
    where = f"{path.parent.name}/{path.name}"
    try:
        values = read_json_object(path, max_bytes=_MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    model, added = values.get("model"), values.get("added_tokens")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(added, list):
        raise ValueError(f"{where}: it is no BPE tokenizer with model and added_tokens; download CLIP's tokenizer")
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
        vocab = read_json_object(folder / "vocab.json", max_bytes=_MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"{folder.name}/vocab.json: {error}") from None
    if not vocab:
        raise ValueError(f"{folder.name}/vocab.json: its vocabulary is empty; {DOWNLOAD_AGAIN}")
    try:
        lines = read_model_file(folder / "merges.txt", max_bytes=_MAX_BYTES).decode().split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{folder.name}/merges.txt: it is no UTF-8 text; {DOWNLOAD_AGAIN}") from None
    except ValueError as error:
        raise ValueError(f"{folder.name}/merges.txt: {error}") from None
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    if not merges:
        raise ValueError(f"{folder.name}/merges.txt: it has no merges; {DOWNLOAD_AGAIN}")
    return vocab, merges


def _text(token: object) -> str:
    """Return a special token's text, which may stand alone or in an object."""
    value = token.get("content") if isinstance(token, dict) else token
    return str(value)
