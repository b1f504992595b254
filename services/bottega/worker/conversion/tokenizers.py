"""Writes CLIP's tokenizer, which all families share, from its merges.

`clip_merges.txt.gz` has the merges of OpenAI's CLIP that its vocabulary of 49,408 tokens uses, under the licence in
`CLIP_LICENSE.txt`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

_MERGES = Path(__file__).with_name("clip_merges.txt.gz")
_SPECIAL = ("<|startoftext|>", "<|endoftext|>")
_END_OF_WORD = "</w>"
# Bytes that stand for themselves; the others are moved behind the first 256 characters, because BPE splits at spaces.
_PRINTABLE = (*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1))


def write_vocabulary(folder: Path) -> None:
    """Write vocab.json and merges.txt into an existing folder."""
    merges = gzip.decompress(_MERGES.read_bytes()).decode()
    letters = [chr(byte) for byte in _PRINTABLE] + [chr(256 + number) for number in range(256 - len(_PRINTABLE))]
    words = [*letters, *(letter + _END_OF_WORD for letter in letters)]
    words += [line.replace(" ", "") for line in merges.splitlines()]
    vocabulary = {word: number for number, word in enumerate([*words, *_SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}", encoding="utf-8")
